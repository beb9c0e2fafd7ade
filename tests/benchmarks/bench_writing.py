"""Writing 1 GB of 84x84 uint8 frames on local disk against torch.save and DCP: each run a fresh process, in turns."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "writing: 1 GB of frames on local disk, fresh processes"
STEPS = 1000  # of an episode
FRAME = (84, 84)
EPISODES = max(1, int(os.environ.get("BENCH_BYTES", 1_060_000_000)) // (STEPS * FRAME[0] * FRAME[1]))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", 5))

Episodes = list[dict[str, Any]]


def noise() -> Episodes:
    """Random frames, which no codec makes smaller, and small fields."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [
        _episode(torch.randint(0, 256, (STEPS, *FRAME), dtype=torch.uint8, generator=generator), generator)
        for _ in range(EPISODES)
    ]


def game() -> Episodes:
    """Frames as a game draws them: a still background, blocks that move, and a hundredth of the pixels noise."""
    import torch

    generator = torch.Generator().manual_seed(1)
    block = torch.randint(0, 4, FRAME, generator=generator).mul(60).to(torch.uint8).expand(STEPS, *FRAME).clone()
    for thing in range(8):
        row, column = 9 * thing + 2, torch.arange(STEPS).mul(thing + 1).remainder(76)
        for step in range(STEPS):
            block[step, row : row + 6, column[step] : column[step] + 8] = 40 + 20 * thing
    return [_episode(_noisy(block, generator), generator) for _ in range(EPISODES)]


def _noisy(block: Any, generator: Any) -> Any:
    import torch

    frames = block.clone().view(-1)
    places = torch.randint(0, len(frames), (len(frames) // 100,), generator=generator)
    frames[places] = torch.randint(0, 256, places.shape, dtype=torch.uint8, generator=generator)
    return frames.view(block.shape)


def _episode(frames: Any, generator: Any) -> dict[str, Any]:
    import torch

    return {
        "obs": frames,
        "action": torch.randint(0, 18, (STEPS,), generator=generator),
        "reward": torch.rand(STEPS, generator=generator),
        "done": torch.zeros(STEPS, dtype=torch.bool),
    }


def by_archive(data: Episodes, folder: str, compression: str | None) -> None:
    import archive

    with archive.create(f"{folder}/archive").writer(compression=compression) as writer:
        for episode in data:
            writer.add_episode(episode)


def by_torch(data: Episodes, folder: str, *, sync: bool) -> None:
    import torch

    with Path(folder, "data.pt").open("wb") as file:
        torch.save(data, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def by_dcp(data: Episodes, folder: str) -> None:
    from torch.distributed import checkpoint

    flat = {f"{i}.{name}": value for i, episode in enumerate(data) for name, value in episode.items()}
    checkpoint.save(flat, checkpoint_id=f"{folder}/dcp", no_dist=True)


_WAYS: dict[str, tuple[Callable[[], Episodes], Callable[[Episodes, str], None]]] = {
    "archive": (noise, lambda data, folder: by_archive(data, folder, None)),
    "torch.save": (noise, lambda data, folder: by_torch(data, folder, sync=False)),
    "torch.save, fsync": (noise, lambda data, folder: by_torch(data, folder, sync=True)),
    "DCP save": (noise, by_dcp),
    "archive, zstd:1": (game, lambda data, folder: by_archive(data, folder, "zstd:1")),
    "torch.save, game": (game, lambda data, folder: by_torch(data, folder, sync=False)),
}


def load_libraries() -> None:
    """Code that is loaded once a process is not timed, nor counted as memory."""
    import pyarrow
    import pyarrow.parquet
    import torch
    import torch.distributed.checkpoint
    import zarr

    import archive.facade
    import archive.writer  # noqa: F401

    pyarrow.array([0])  # loads pandas where it is installed
    torch.zeros(1), zarr.config


def child_write(folder: str, way: str, cores: str = "") -> dict[str, float]:
    """Seconds, CPU seconds, peak extra memory and stored bytes of one write, the first of this process."""
    common.use_cores(cores)
    load_libraries()
    make, write = _WAYS[way]
    data = make()
    os.sync()
    found = common.used(lambda: write(data, folder))
    stored = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {**found, "stored": stored, "bytes": sum(value.nbytes for episode in data for value in episode.values())}


def once(way: str, cores: str = "") -> dict[str, Any]:
    """One way in a fresh process, in a folder of its own."""
    folder = tempfile.mkdtemp(prefix="bench-", dir=os.environ.get("BENCH_FOLDER"))
    try:
        return common.child(__file__, "write", folder, way, *[cores][: len(cores)])
    finally:
        shutil.rmtree(folder)


def measure() -> Sequence[common.Row]:
    asked = [(way, "") for way in _WAYS] + [("archive, zstd:1", "1"), ("archive", "1")]
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(ROUNDS):
        for way, cores in asked:
            runs.setdefault(way + (f", {cores} core" if cores else ""), []).append(once(way, cores))
    return [*_ratios(runs), *_memory(runs), *(common.seconds_row(way, found) for way, found in runs.items())]


def _ratios(runs: dict[str, list[dict[str, Any]]]) -> list[common.Row]:
    took = {way: statistics.median(run["seconds"] for run in found) for way, found in runs.items()}
    packed = runs["archive, zstd:1"][0]
    compared = [
        ("archive", "torch.save", 1.0), ("archive", "torch.save, fsync", 1.0), ("archive", "DCP save", 1.5),
        ("archive, zstd:1", "torch.save, game", 0.9), ("archive, zstd:1", "archive, zstd:1, 1 core", 1.7),
        ("archive", "archive, 1 core", None),
    ]  # fmt: skip
    return [
        *(
            common.bounded(f"{ours}, against {other}", took[other] / took[ours], least=least)
            for ours, other, least in compared
        ),
        common.bounded("archive, zstd:1: stored of the game's bytes", packed["stored"] / packed["bytes"], most=0.5),
    ]


def _memory(runs: dict[str, list[dict[str, Any]]]) -> list[common.Row]:
    return [common.memory_row(way, found, 256 if way.startswith("archive") else None) for way, found in runs.items()]


@pytest.mark.bench
def test_writing() -> None:
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {"write": child_write})
