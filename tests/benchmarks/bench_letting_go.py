"""What letting go of all but the newest 5 of 2,000 checkpoints takes, and what an open and a plan cost afterwards.

The ring of bench_growth, on memory://. What was forgotten is deleted as a prune would, to see what is left.
`BENCH_CHECKPOINTS=200` makes fewer.
"""

from __future__ import annotations

import os
import time
from typing import Any

import archive
from archive.log import tablefiles
from archive.maintain import retained_reach

try:
    from .bench_growth import checkpoint, looking
    from .common import Row, bounded, child, main
except ImportError:  # run as a script
    from bench_growth import checkpoint, looking  # type: ignore[import-not-found,no-redef]
    from common import Row, bounded, child, main  # type: ignore[import-not-found,no-redef]

MOST = int(os.environ.get("BENCH_CHECKPOINTS", 2_000))
KEPT = 5
FULL = 16 + KEPT  # checkpoints after which the ring is full, and as many as stay were made of it
MOST_TIMES = 1.1


def let_go(url: str, most: str) -> dict[str, Any]:
    """Fill a ring, then keep few of many checkpoints of it; what that takes, and what is left."""
    arc = archive.create(url)
    position = 0
    with arc.writer() as w:
        for _ in range(FULL):
            position = checkpoint(w, position)
        forgotten(arc)
        few = {**looking(url), "bytes": stored(arc)}
        for _ in range(int(most) - FULL):
            position = checkpoint(w, position)
        many = {**looking(url), "bytes": stored(arc)}
        took = forgotten(arc)
        after = {**looking(url), "bytes": stored(arc)}
    return {"few": few, "many": many, "after": after, "took": took}


def forgotten(arc: archive.Archive) -> dict[str, float]:
    """Keep the newest few, delete what that lets go of; the seconds of plan and commit."""
    began = time.perf_counter()
    plan = arc.refresh().forget(archive.Keep(last=KEPT), episodes="unreferenced")
    planned = time.perf_counter()
    plan.commit()
    took = {"plan_s": planned - began, "commit_s": time.perf_counter() - planned}
    head = archive.open(arc.url).head
    keys = set(tablefiles.load(arc.storage, "forgotten", head.files("forgotten"), ["key"])["key"].to_pylist())
    arc.storage.delete(sorted(keys - retained_reach(arc.storage, head).keys))
    return took


def stored(arc: archive.Archive) -> int:
    """Bytes of all objects, but for commits, which stay, and what no commit ever led to any more."""
    return sum(one.bytes for folder in ("shards", "states") for one in arc.storage.scan(folder))


def measure() -> list[Row]:
    found: Any = child(__file__, "let_go", "memory://letting-go", MOST)
    rows = []
    for verb in ("open", "plan"):
        for name in ("requests", "bytes"):
            few, after = found["few"][verb][name], found["after"][verb][name]
            what = f"{verb}: {name} {after:,.4g} where {KEPT} of {MOST:,} stay, to {few:,.4g} where {KEPT} of {FULL} do"
            rows.append(bounded(what, after / few, most=MOST_TIMES))
    few, after = found["few"]["bytes"], found["after"]["bytes"]
    rows.append(
        bounded(f"bytes of shards and states: {after:,} of {found['many']['bytes']:,}", after / few, most=MOST_TIMES)
    )
    rows += [bounded(f"{name} of all but {KEPT} of {MOST:,}", found["took"][name], unit="s") for name in found["took"]]
    return rows


if __name__ == "__main__":
    main("letting go: what stays costs what it costs alone", measure, {"let_go": let_go})
