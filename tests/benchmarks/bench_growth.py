"""What a checkpoint, an open and a plan cost after 1, 10, ... 10,000 checkpoints of one run: requests, bytes, time.

The ring holds the same number of steps all the time, so that all that can grow is what the archive keeps of its past.
`BENCH_CHECKPOINTS=1000` ends earlier. On memory://, where a request costs nothing and is counted.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import archive
import resharding

try:
    from .common import Row, bounded, child, main
except ImportError:  # run as a script
    from common import Row, bounded, child, main  # type: ignore[import-not-found,no-redef]

MOST = int(os.environ.get("BENCH_CHECKPOINTS", 10_000))
LIVE_STEPS, NEW_STEPS, ENVS = 64, 4, 4
LATEST = 256  # checkpoints whose mean is told
AROUND = 9  # opens and plans whose median is told
MOST_TIMES = 1.5


def grow(url: str, most: str) -> list[dict[str, Any]]:
    """Make checkpoints; what they, an open and a plan cost at each power of ten."""
    arc = archive.create(url)
    marks = [10**k for k in range(6) if 10**k <= int(most)]
    found = []
    with arc.writer() as w:
        position = 0
        for mark in marks:
            costs: list[dict[str, float]] = []
            while not costs or position < mark * NEW_STEPS:
                costs.append(cost(arc.io_stats, lambda at=position: checkpoint(w, at)))  # type: ignore[misc]
                position += NEW_STEPS
            found.append({"checkpoints": mark, "checkpoint": mean(costs[-LATEST:]), **looking(url)})
            print(found[-1], file=sys.stderr)
    return found


def checkpoint(w: Any, position: int) -> int:
    """Add a few steps, let go of as many, save; the next position."""
    for i in range(position, position + NEW_STEPS):
        first = np.full(ENVS, i % 16 == 0)
        last = np.full(ENVS, i % 16 == 15)
        steps = {"obs": np.full((ENVS, 8), i, np.float32), "reward": np.ones(ENVS)}
        w.append(steps, env_ids=np.arange(ENVS), first=first, last=last)
    for env in range(ENVS):
        w.evict(env_id=env, before=position + NEW_STEPS - LIVE_STEPS)
    live = ENVS * min(position + NEW_STEPS, LIVE_STEPS)
    w.checkpoint(position, state={"cursor": position}, columns={"priority": np.ones(live)}).result()
    return position + NEW_STEPS


def looking(url: str) -> dict[str, Any]:
    """What somebody who opens it then, and plans a resume, has to pay."""
    opens, plans = [], []
    made: list[Any] = []
    for _ in range(AROUND):
        made.clear()
        opens.append(cost(lambda: made[0].io_stats() if made else None, lambda: made.append(archive.open(url))))
        plans.append(cost(made[0].io_stats, lambda: resharding.plan(made[0].checkpoints.latest, 2).share(0)))
    return {"open": middle(opens), "plan": middle(plans)}


def cost(stats: Callable[[], Any], work: Callable[[], Any]) -> dict[str, float]:
    """Requests, bytes and seconds of one call."""
    before, began = stats(), time.process_time()
    work()
    seconds, after = time.process_time() - began, stats()
    spent = after - before if before is not None else after
    return {"requests": spent.requests, "bytes": spent.bytes_in + spent.bytes_out, "cpu_s": seconds}


def mean(costs: list[dict[str, float]]) -> dict[str, float]:
    """Of many, as now and then one folds files together."""
    return {name: statistics.fmean(one[name] for one in costs) for name in costs[0]}


def middle(costs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in costs) for name in costs[0]}


def measure() -> list[Row]:
    found: Any = child(__file__, "grow", "memory://growth", MOST)
    rows = []
    for verb in ("checkpoint", "open", "plan"):
        settled = found[min(2, len(found) - 1)][verb]  # a ring is full after 16 checkpoints
        for one in found:
            for name in ("requests", "bytes", "cpu_s"):
                value, base = one[verb][name], settled[name]
                what = f"{verb} after {one['checkpoints']:,}: {name} {value:,.4g}, to that after 100"
                rows.append(bounded(what, value / base, most=MOST_TIMES))
    return rows


if __name__ == "__main__":
    main("growth: a checkpoint, an open and a plan after ever more checkpoints", measure, {"grow": grow})
