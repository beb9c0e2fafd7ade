"""Reading 1 GB of 84x84 uint8 frames on local disk against torch.load and DCP: each run a fresh process, in turns."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

sys.path.insert(0, str(Path(__file__).parent))
import bench_writing

TITLE = "reading: 1 GB of frames on local disk, fresh processes"
ROUNDS = int(os.environ.get("BENCH_ROUNDS", 5))


def by_dcp(folder: str) -> Any:
    import torch
    from torch.distributed import checkpoint

    described = checkpoint.FileSystemReader(f"{folder}/dcp").read_metadata().state_dict_metadata
    state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in described.items()}
    checkpoint.load(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
    return [state]


_WAYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "all at once": ("noise", common.read_archive),
    "one by one": ("noise", common.read_archive_singly),
    "torch.load": ("noise", common.read_torch),
    "DCP load": ("noise", by_dcp),
    "all at once, zstd:1": ("game", common.read_archive),
    "one by one, zstd:1": ("game", common.read_archive_singly),
    "torch.load, game": ("game", common.read_torch),
}


def child_fill(folder: str, kind: str) -> dict[str, Any]:
    """What is read afterwards, in all its forms."""
    data = {"noise": bench_writing.noise, "game": bench_writing.game}[kind]()
    bench_writing.by_archive(data, folder, "zstd:1" if kind == "game" else None)
    bench_writing.by_torch(data, folder, sync=True)
    if kind == "noise":
        bench_writing.by_dcp(data, folder)
    return {}


def child_read(folder: str, way: str, cores: str = "") -> dict[str, float]:
    """Seconds, CPU seconds and peak memory beyond the data of one read, the first of this process."""
    common.use_cores(cores)
    bench_writing.load_libraries()
    found: list[Any] = []
    took = common.used(lambda: found.extend(_WAYS[way][1](folder)))
    size = sum(value.nbytes for episode in found for value in episode.values())
    return {**took, "extra_bytes": took["extra_bytes"] - size, "bytes": size}


def measure() -> Sequence[common.Row]:
    asked = [(way, "") for way in _WAYS] + [("all at once, zstd:1", "1"), ("all at once", "1")]
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=os.environ.get("BENCH_FOLDER")) as folder:
        for kind in ("noise", "game"):
            Path(folder, kind).mkdir()
            common.child(__file__, "fill", f"{folder}/{kind}", kind)
        for _ in range(ROUNDS):
            for way, cores in asked:
                found = common.child(__file__, "read", f"{folder}/{_WAYS[way][0]}", way, *[cores][: len(cores)])
                runs.setdefault(way + (f", {cores} core" if cores else ""), []).append(found)
    return [*_ratios(runs), *_memory(runs), *(common.seconds_row(way, found) for way, found in runs.items())]


def _ratios(runs: dict[str, list[dict[str, Any]]]) -> list[common.Row]:
    took = {way: statistics.median(run["seconds"] for run in found) for way, found in runs.items()}
    compared = [
        ("all at once", "torch.load", 0.9), ("one by one", "torch.load", 0.9), ("all at once", "DCP load", 2.5),
        ("one by one", "DCP load", 2.5), ("all at once, zstd:1", "torch.load, game", 0.7),
        ("one by one, zstd:1", "torch.load, game", 0.7), ("all at once, zstd:1", "all at once, zstd:1, 1 core", 1.7),
        ("all at once", "all at once, 1 core", None),
    ]  # fmt: skip
    return [
        common.bounded(f"{ours}, against {other}", took[other] / took[ours], least=least)
        for ours, other, least in compared
    ]


def _memory(runs: dict[str, list[dict[str, Any]]]) -> list[common.Row]:
    return [common.memory_row(way, found, 256 if "one" in way or "all" in way else None) for way, found in runs.items()]


@pytest.mark.bench
def test_reading() -> None:
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {"fill": child_fill, "read": child_read})
