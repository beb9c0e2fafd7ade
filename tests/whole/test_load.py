"""Ranks that make many checkpoints beside a reader and prunes: nothing of their processes grows, nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import archive
from archive.testing import assert_whole
from tests.support import load
from tests.support.backends import make_backend
from tests.support.load import Taken
from tests.support.processes import FORKSERVER, end

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="asks Linux what a process has")

RUNS = ["run-0", "run-1"]
WARM = 10  # one in so many rounds, the first ones, are not looked at
FLAT = 1.5  # times as much in the last third as in the first
MORE_BYTES = 8 * 1024 * 1024
MORE_THREADS = 4  # pools have a bound, and grow up to it when they are first that busy
ENDS_S = 60.0


@dataclass(frozen=True)
class Size:
    """Of a load: on which store, ranks a run, checkpoints; whether it has the machine for itself."""

    store: str
    ranks: int
    checkpoints: int
    alone: bool = True


SIZES = [
    pytest.param(Size("local", 2, 30, alone=False), id="local, 30"),
    pytest.param(Size("local", 4, 300), id="local, 300", marks=pytest.mark.soak),
    pytest.param(Size("local", 4, 2000), id="local, 2000", marks=pytest.mark.soak),
    pytest.param(Size("seaweedfs", 2, 150), id="seaweedfs, 150", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("size", SIZES)
def test_nothing_grows_and_nothing_is_lost(request: pytest.FixtureRequest, tmp_path: Path, size: Size) -> None:
    backend = make_backend(request, size.store, tmp_path)
    archive.create(backend.url, storage_options=backend.storage_options)
    where = {"url": backend.url, "options": backend.storage_options, "runs": RUNS, "stop": str(tmp_path / "stop")}
    logs = {(run, rank): tmp_path / f"{run}-{rank}" for run in RUNS for rank in range(size.ranks)}
    run_all(where, size, logs, tmp_path)
    for who, log in logs.items():
        rounds = load.noted(log)
        assert len(rounds) == size.checkpoints
        check_flat(rounds, f"rank {who}", alone=size.alone)
    check_flat(load.noted(tmp_path / "reader"), "the reader", alone=size.alone)
    assert sum(map(int, (tmp_path / "pruner").read_text().split())) > 0
    check_all(load.opened(where), size)


def run_all(where: dict[str, Any], size: Size, logs: dict[tuple[str, int], Path], folder: Path) -> None:
    writers = [
        FORKSERVER.Process(target=load.write, args=(where, run, rank, size.ranks, size.checkpoints, str(log)))
        for (run, rank), log in logs.items()
    ]
    others = [
        FORKSERVER.Process(target=load.read, args=(where, str(folder / "reader"))),
        FORKSERVER.Process(target=load.prune, args=(where, str(folder / "pruner"))),
    ]
    try:
        for child in writers + others:
            child.start()
        for child in writers:
            child.join()
        (folder / "stop").touch()
        for child in others:
            child.join(ENDS_S)
        assert [child.exitcode for child in writers + others] == [0] * (len(writers) + len(others))
    finally:
        for child in writers + others:
            end(child)


def check_flat(rounds: list[Taken], who: str, *, alone: bool) -> None:
    """The last third of the rounds takes no more than the first one."""
    rounds = rounds[len(rounds) // WARM :]
    first, last = rounds[: len(rounds) // 3], rounds[-(len(rounds) // 3) :]

    def grown(of: Callable[[Taken], float]) -> tuple[float, float]:
        return median(map(of, first)), median(map(of, last))

    def check(what: str, of: Callable[[Taken], float], most: Callable[[float], float]) -> None:
        before, after = grown(of)
        assert after <= most(before), f"{who}: {what} went from {before} to {after}"

    check("memory", lambda one: one.memory, lambda before: 1.05 * before + MORE_BYTES)
    check("descriptors", lambda one: one.descriptors, lambda before: before)
    check("threads", lambda one: one.threads, lambda before: before + MORE_THREADS)
    check("requests", lambda one: one.requests, lambda before: FLAT * before)
    check("bytes", lambda one: one.nbytes, lambda before: FLAT * before)
    check("processor time", lambda one: one.cpu_s / one.yardstick_s, lambda before: FLAT * before)
    if alone:
        check("time", lambda one: one.seconds, lambda before: FLAT * before)


def check_all(arc: archive.Archive, size: Size) -> None:
    """Each checkpoint was committed once, the newest one of each run is as it was made, and all is whole."""
    made = Counter((one.run, one.checkpoint.step) for one in arc.commits[:] if one.checkpoint is not None)
    assert made == Counter((run, step) for run in RUNS for step in range(size.checkpoints))
    for run in RUNS:
        latest = arc.checkpoints.of(run).latest
        assert latest is not None
        assert latest.step == size.checkpoints - 1
        load.check(latest)
    assert_whole(arc)
