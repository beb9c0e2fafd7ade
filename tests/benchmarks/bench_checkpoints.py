"""The second checkpoint against the first, a hundred of them, and how long the caller is kept waiting."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "checkpoints: of a ring, again and again"
ENVS = 64
FRAME_BYTES = 84 * 84
LENGTH = int(os.environ.get("BENCH_LENGTH", 900))  # 64 x 900 frames are 406 MB
NEW = 0.05
ALLOWED_MORE_BYTES = 64 * 1024


def save(writer: Any, ring: dict[str, Any], position: int, step: int) -> Any:
    """Hand a ring that stands at `position` to a checkpoint; returns before it is uploaded."""
    import torch

    from archive.torch import ring as rings

    length = ring["reward"].shape[1]
    pos = torch.full((ENVS,), position)
    last = (torch.arange(length) % 100 == 99).expand(ENVS, length)
    columns = rings.append(
        writer, ring, pos=pos, size=pos.clamp(max=length), last=last, columns={"priority": ring["reward"]}
    )
    return writer.checkpoint(step, columns=columns, wait=False)


def child_second(folder: str) -> dict[str, Any]:
    """First checkpoint of a full ring, then a second with a few new steps and all priorities anew."""
    import numpy as np

    import archive

    ring = common.ring_of(2, ENVS, LENGTH)
    fresh = int(LENGTH * NEW)
    arc = archive.create(f"{folder}/archive")
    writer = arc.writer(compression=None)
    save(
        writer, {name: value[:, :4] for name, value in ring.items()}, 1, 0
    ).result()  # nothing is imported for the first time
    seconds, stats, blocked = [], [], []
    with common.Peak() as peak:
        for step, position in ((1, LENGTH), (2, LENGTH + fresh)):
            before, pending = arc.io_stats(), []
            os.sync()
            blocked.append(0.0)

            def whole(step: int = step, position: int = position, pending: list[Any] = pending) -> None:
                blocked[-1] = common.timed(lambda: pending.append(save(writer, ring, position, step)))
                pending[0].result()

            seconds.append(common.timed(whole))
            stats.append((arc.io_stats() - before).as_dict())
            ring["reward"] += 1
    copies = [np.empty((ENVS, LENGTH, 84, 84), np.uint8), ring["obs"].numpy()]
    memcpy_s = common.median_s(lambda: np.copyto(*copies))
    fresh_s = common.median_s(lambda: copies[1].copy())
    writer.close()
    new_bytes = ENVS * fresh * (FRAME_BYTES + 8 + 4)
    return {
        "first_s": seconds[0], "second_s": seconds[1], "blocked_s": blocked[0], "blocked_second_s": blocked[1],
        "memcpy_s": memcpy_s, "fresh_copy_s": fresh_s, "puts": stats[1]["put"] + stats[1]["create"],
        "bytes_out": stats[1]["bytes_out"], "bound": 1.05 * (new_bytes + ENVS * LENGTH * 4) + ALLOWED_MORE_BYTES,
        "new_bytes": new_bytes, "extra_bytes": peak.extra_bytes, "first_bytes": ENVS * LENGTH * (FRAME_BYTES + 12),
    }  # fmt: skip


def child_hundred(folder: str, count: str = "100") -> list[int]:
    """Bytes of manifest files and commits that each of many checkpoints of a ring of 200,000 steps adds."""
    import torch

    import archive

    length, new = 200_000 // ENVS, 32
    ring = {"obs": torch.rand(ENVS, length, 4), "reward": torch.rand(ENVS, length)}
    writer = archive.create(f"{folder}/archive").writer(compression=None)
    sizes = [0]
    for i in range(int(count)):
        save(writer, ring, length + i * new, i).result()
        files = [f for part in ("manifest", "commits") for f in Path(folder, "archive", part).rglob("*") if f.is_file()]
        sizes.append(sum(f.stat().st_size for f in files))
    writer.close()
    return [after - before for before, after in pairwise(sizes)]


def in_folder(name: str) -> Any:
    folder = tempfile.mkdtemp(prefix="bench-")
    try:
        return common.child(__file__, name, folder)
    finally:
        shutil.rmtree(folder)


def measure() -> Sequence[common.Row]:
    runs = [in_folder("second") for _ in range(3)]
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    shards = -(-found["new_bytes"] // (64 * 2**20))
    mib, beyond = 2**20, found["extra_bytes"] - found["first_bytes"]
    return [
        common.bounded(
            "second checkpoint, 5 % new: bytes against the bound", found["bytes_out"] / found["bound"], most=1
        ),
        common.bounded(
            "second checkpoint: PUTs (2 per 64 MB and 5 of the commit)", found["puts"], most=2 * shards + 5, unit=""
        ),
        common.bounded(
            "second checkpoint: time against the first", found["second_s"] / found["first_s"], most=0.15, **found
        ),
        common.bounded(
            "caller blocked by the first, against a copy of the new bytes to fresh memory",
            found["blocked_s"] / found["fresh_copy_s"],
            most=1.5,
        ),
        common.bounded("the same, against a copy to memory in use", found["blocked_s"] / found["memcpy_s"]),
        common.bounded("peak memory beyond the new bytes", beyond / mib, most=256, unit="MiB"),
        *_flat(in_folder("hundred")),
    ]  # fmt: skip


def _flat(added: list[int]) -> list[common.Row]:
    """Means of ten checkpoints each: the first one, which holds all, is told apart."""
    tens = [statistics.mean(added[1:][i : i + 10]) for i in range(0, len(added) - 10, 10)]
    mean = statistics.mean(added[1:])
    print("  manifest bytes per checkpoint, means of ten:", *(f"{ten:,.0f}" for ten in tens), file=sys.stderr)
    return [
        common.bounded("manifest bytes per checkpoint, mean of 99", mean, unit="B", first=added[0], tens=tens),
        common.bounded("greatest mean of ten against the mean of all", max(tens) / mean, most=2),
    ]


@pytest.mark.bench
def test_checkpoints() -> None:
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {"second": child_second, "hundred": child_hundred})
