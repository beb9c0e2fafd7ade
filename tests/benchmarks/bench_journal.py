"""Journaling trajectories of 2,000 tokens with log probabilities: what it costs whoever adds them, and what a process
that is killed loses."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "journal: added cost of a trajectory, and what a kill loses"
TOKENS, JOURNAL_S, DELAY_S = 2000, 0.5, 0.02
COUNT = int(os.environ.get("BENCH_LENGTH", 400))
PAUSE_S = 0.005  # between trajectories: 3 MB/s
MANY = 15  # times as many back to back, for some ticks to come in between
ROUNDS, KILLS = 3, 6
LIVE, CHANGED = 200_000, 256  # values of a column, and those that change between two ticks


def _trajectory(i: int) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(i)
    return {
        "token": rng.integers(0, 150_000, TOKENS, dtype=np.int32),
        "logprob": rng.standard_normal(TOKENS, dtype=np.float32),
    }


def child_add(where: str, journal_s: str, pause_s: str, count: str) -> dict[str, float]:
    """Add trajectories; milliseconds that the calls took, but for the first ones."""
    arc = common.opened(where)
    given = [_trajectory(i) for i in range(64)]
    took = []
    with arc.writer(run=uuid.uuid4().hex, journal_s=float(journal_s) or None) as w:
        w.add_episode(given[0])
        w.flush()
        for i in range(int(count)):
            began = time.perf_counter()
            w.add_episode(given[i % 64])
            took.append(1000 * (time.perf_counter() - began))
            if float(pause_s):
                time.sleep(float(pause_s))
    took.sort()
    return {"mean_ms": statistics.fmean(took), "median_ms": took[len(took) // 2], "p99_ms": took[len(took) * 99 // 100]}


def child_until_killed(where: str, session: str) -> dict[str, float]:
    """Add trajectories, and print when each was added, until somebody kills this process."""
    arc = common.opened(where)
    given = [_trajectory(i) for i in range(64)]
    w = arc.writer(run=session, session=session, journal_s=JOURNAL_S)
    for i in range(10**9):
        w.add_episode(given[i % 64])
        print(i, time.monotonic(), flush=True)
        time.sleep(PAUSE_S)
    return {}


def child_column(where: str, way: str) -> dict[str, float]:
    """Journal a column of many live steps of which few change between ticks; milliseconds of a call, bytes of a tick
    beyond those of the values."""
    import numpy as np

    arc, rng = common.opened(where), np.random.default_rng(0)
    with arc.writer(run=uuid.uuid4().hex, journal_s=3600.0) as w:
        w.append({"x": np.zeros(LIVE, np.uint8)}, env_ids=0, last=np.arange(LIVE) % 200 == 199)
        values, took, more = rng.random(LIVE), [], 0.0
        for _ in range(20):
            w.journal(columns={"priority": values})
            w.sync()
            at = rng.choice(LIVE, CHANGED, replace=False)
            values[at] = rng.random(CHANGED)
            began = time.perf_counter()
            if way == "whole":
                w.journal(columns={"priority": values})
            else:
                w.journal(changes={"priority": (0, at, values[at])})
            took.append(1000 * (time.perf_counter() - began))
            before = arc.io_stats()
            w.sync()
            more = max(more, (arc.io_stats() - before).bytes_out - 8.0 * CHANGED)
    return {"median_ms": statistics.median(took), "more_bytes": more}


def _column(name: str, where: str, way: str) -> list[common.Row]:
    found = common.child(__file__, "column", where, way)
    what = f"{name}: {CHANGED} of {LIVE} values change, given as {way}"
    return [
        common.bounded(f"{what}: a call", found["median_ms"], most=5.0, unit="ms"),
        common.bounded(
            f"{what}: bytes beyond the values", found["more_bytes"], most=0.2 * 8 * CHANGED + 4096, unit="B"
        ),
    ]


def _lost_s(where: str) -> float:
    """How long before the kill the oldest trajectory was added that is in no object of the journal."""
    from archive.saved import TickObject

    session = uuid.uuid4().hex
    command = [sys.executable, __file__, "--child", "until_killed", where, session]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=common.environment()) as child:
        assert child.stdout is not None
        added = [child.stdout.readline()]
        stop = time.monotonic() + 3 * JOURNAL_S + random.random() * JOURNAL_S
        while time.monotonic() < stop:
            added.append(child.stdout.readline())
        killed = time.monotonic()
        child.kill()
        added += [line for line in child.stdout.readlines() if line.endswith("\n")]
    storage = common.opened(where).storage
    durable = number = 0
    while storage.exists(key := f"journal/{session}/rank-00000/{number:09d}.zip"):
        durable += TickObject(storage.get_all([key])[0], key, key).index.rows.get("segments", 0)
        number += 1
    lost = added[durable:]
    return killed - float(lost[0].split()[1]) if lost else 0.0


@contextlib.contextmanager
def _places() -> Iterator[dict[str, str]]:
    """Name -> what `_open` takes: the local disk, and SeaweedFS 20 ms away."""
    from tests.support import servers
    from tests.support.backends import BUCKET
    from tests.support.proxy import FaultProxy

    servers.set_environment()
    with tempfile.TemporaryDirectory() as folder, servers.seaweedfs() as endpoint, FaultProxy(endpoint) as proxy:
        servers.make_bucket(endpoint, BUCKET)
        proxy.add("delay", times=-1, seconds=DELAY_S)
        options = servers.s3fs_options(proxy.endpoint)
        yield {
            "local disk": json.dumps({"url": f"{folder}/archive", "options": {}}),
            "SeaweedFS, 20 ms": json.dumps({"url": f"s3://{BUCKET}/journal", "options": options}),
        }


def _cost(name: str, where: str, pause_s: float) -> common.Row:
    ways: dict[float, list[dict[str, float]]] = {0.0: [], JOURNAL_S: []}
    count = COUNT if pause_s else MANY * COUNT
    for _ in range(ROUNDS):
        for journal_s, found in ways.items():
            found.append(common.child(__file__, "add", where, journal_s, pause_s, count))
    medians = {way: {of: statistics.median(one[of] for one in found) for of in found[0]} for way, found in ways.items()}
    plain, kept = medians[0.0], medians[JOURNAL_S]
    pace = f"one each {1000 * pause_s:.0f} ms" if pause_s else "back to back"
    return common.bounded(
        f"{name}, {pace}: {kept['mean_ms']:.3f} ms a call instead of {plain['mean_ms']:.3f} "
        f"(median {kept['median_ms']:.3f}, {plain['median_ms']:.3f}; p99 {kept['p99_ms']:.2f}, {plain['p99_ms']:.2f})",
        kept["mean_ms"] - plain["mean_ms"], most=0.3, unit="ms", plain=plain, kept=kept,
    )  # fmt: skip


def measure() -> Sequence[common.Row]:
    rows = []
    with _places() as places:
        for name, where in places.items():
            rows += [_cost(name, where, pause_s) for pause_s in (PAUSE_S, 0.0)]
            rows += [row for way in ("whole", "changes") for row in _column(name, where, way)]
        for name, where in places.items():
            lost = sorted(_lost_s(where) for _ in range(KILLS))
            what = f"{name}: lost by a kill, journal_s={JOURNAL_S}, most of {KILLS}"
            rows.append(common.bounded(what, lost[-1], most=JOURNAL_S + 0.1, unit="s", lost_s=lost))
    return rows


@pytest.mark.bench
def test_journal() -> None:
    common.report(TITLE, measure())


def test_a_column_of_few_changes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = child_column(json.dumps({"url": f"{folder}/archive", "options": {}}), "changes")
    assert found["more_bytes"] <= 0.2 * 8 * CHANGED + 4096


def test_a_kill_of_few() -> None:
    """What is measured is what it says."""
    with tempfile.TemporaryDirectory() as folder:
        lost = _lost_s(json.dumps({"url": f"{folder}/archive", "options": {}}))
    assert 0 <= lost < 10


if __name__ == "__main__":
    common.main(TITLE, measure, {"add": child_add, "until_killed": child_until_killed, "column": child_column})
