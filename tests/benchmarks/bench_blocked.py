"""How long an asynchronous checkpoint keeps its caller, against one copy of the new bytes into memory in use."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import pytest

try:
    from . import bench_checkpoints, common
except ImportError:  # run as a script
    import bench_checkpoints  # type: ignore[import-not-found,no-redef]
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "blocked: how long a checkpoint's caller waits"
SHAPES = {"7068": (84, 84), "264": (252,)}  # bytes a step, with an action and a reward -> an observation's shape
CASES = [("7068", 100_000_000), ("7068", 20_000_000), ("264", 34_000_000)]  # bytes a step, new bytes
RINGS, ROUNDS = 3, int(os.environ.get("BENCH_ROUNDS", 5))  # a ring of so many times what is new


def ring_of(shape: tuple[int, ...], length: int) -> dict[str, Any]:
    import torch

    envs, generator = bench_checkpoints.ENVS, torch.Generator().manual_seed(2)
    return {
        "obs": torch.randint(0, 256, (envs, length, *shape), dtype=torch.uint8, generator=generator),
        "action": torch.randint(0, 18, (envs, length), generator=generator),
        "reward": torch.rand(envs, length, generator=generator),
    }


def child_blocked(folder: str, step_bytes: str, new_bytes: str) -> dict[str, Any]:
    """Seconds that callers of three checkpoints wait and work, each with as much new, and that a copy takes."""
    import numpy as np

    import archive

    new = int(new_bytes) // (bench_checkpoints.ENVS * int(step_bytes))
    ring = ring_of(SHAPES[step_bytes], RINGS * new)
    writer = archive.create(f"{folder}/archive").writer(compression=None)
    imported = {name: value[:, :4] for name, value in ring.items()}
    bench_checkpoints.save(writer, imported, 1, 0).result()  # nothing is imported for the first time
    blocked, cpu = [], []
    for step in range(1, RINGS + 1):
        start, worked = time.perf_counter(), time.thread_time()
        pending = bench_checkpoints.save(writer, ring, new * step, step)
        blocked.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - worked)
        pending.result()
    writer.close()
    source = ring["obs"].numpy()
    room, copies = np.zeros_like(source[:, :new]), []
    for at in range(0, RINGS * new, new):
        worked = time.thread_time()
        np.copyto(room, source[:, at : at + new])
        copies.append(time.thread_time() - worked)
    return {"blocked_s": blocked, "cpu_s": cpu, "copy_s": statistics.median(copies), "new_bytes": int(new_bytes)}


def once(step_bytes: str, new_bytes: int) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="bench-")
    try:
        return common.child(__file__, "blocked", folder, step_bytes, new_bytes)
    finally:
        shutil.rmtree(folder)


def measure() -> Sequence[common.Row]:
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(ROUNDS):
        for case, found in runs.items():
            found.append(once(*case))
    return [
        row
        for (size, new), found in runs.items()
        for row in _rows(f"{new // 1_000_000} MB new, {size} bytes a step", found)
    ]


def _rows(what: str, found: list[dict[str, Any]]) -> list[common.Row]:
    copy = statistics.median(run["copy_s"] for run in found)
    first, second = (statistics.median(run["blocked_s"][at] for run in found) for at in (0, 1))
    ratios = sorted(run["blocked_s"][1] / run["blocked_s"][0] for run in found)
    work = [statistics.median(run["cpu_s"][at] for run in found) for at in (0, 1)]
    return [
        common.bounded(f"{what}: the first caller, against a copy", first / copy, most=1.2, seconds=first),
        common.bounded(f"{what}: the second caller, against a copy", second / copy, most=1.2, seconds=second),
        common.bounded(f"{what}: the first caller's processor time, against a copy's", work[0] / copy),
        common.bounded(f"{what}: the second caller's", work[1] / copy),
        common.bounded(
            f"{what}: the second caller, against the first", statistics.median(ratios), most=1.0, least_to_most=ratios
        ),
        common.bounded(f"{what}: a copy", copy * 1e3, unit="ms"),
    ]


@pytest.mark.bench
def test_blocked() -> None:
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {"blocked": child_blocked})
