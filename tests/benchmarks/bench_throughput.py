"""Writing and reading 1 GB of 84x84 uint8 frames on local disk,
against torch.save and torch.load of the same tensors."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "throughput: 1 GB of frames on local disk"
STEPS_PER_EPISODE = 1000
FRAME = (84, 84)
TOTAL_BYTES = int(os.environ.get("BENCH_BYTES", 1_000_000_000))
EPISODES = max(1, TOTAL_BYTES // (STEPS_PER_EPISODE * FRAME[0] * FRAME[1]))


def episodes() -> list[dict[str, Any]]:
    """Random frames, which no codec makes smaller, and small fields."""
    import torch

    generator = torch.Generator().manual_seed(1)
    t = STEPS_PER_EPISODE
    return [
        {
            "obs": torch.randint(0, 256, (t, *FRAME), dtype=torch.uint8, generator=generator),
            "action": torch.randint(0, 18, (t,), generator=generator),
            "reward": torch.rand(t, generator=generator),
            "done": torch.zeros(t, dtype=torch.bool),
        }
        for _ in range(EPISODES)
    ]


def write_archive(folder: str, compression: str | None) -> None:
    import archive

    with archive.create(f"{folder}/archive").writer(compression=compression) as writer:
        for episode in _DATA:
            writer.add_episode(episode)


def write_torch(folder: str, *, sync: bool) -> None:
    import torch

    with Path(folder, "data.pt").open("wb") as file:
        torch.save(_DATA, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


_DATA: list[dict[str, Any]] = []
_WRITERS: dict[str, Callable[[str], None]] = {
    "archive": lambda folder: write_archive(folder, None),
    "archive-zstd": lambda folder: write_archive(folder, "zstd:1"),
    "torch": lambda folder: write_torch(folder, sync=False),
    "torch-fsync": lambda folder: write_torch(folder, sync=True),
}


def load_libraries() -> None:
    """Code that is loaded once a process is neither timed nor counted as memory."""
    import pyarrow
    import pyarrow.parquet
    import torch  # noqa: F401
    import zarr  # noqa: F401

    pyarrow.array([0])  # loads pandas where it is installed: 36 MB, as much as the other libraries together


def child_write(folder: str, kind: str, *, repeats: int = 3) -> dict[str, float]:
    """Median time and peak extra memory of one way to write; leaves the files of the last time."""
    load_libraries()
    _DATA[:] = episodes()

    def clean() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir(parents=True)
        os.sync()  # what the last one left to be written is not this one's

    clean()
    with common.Peak() as peak:
        first = common.timed(lambda: _WRITERS[kind](folder))
    seconds = [first]
    for _ in range(repeats - 1):
        clean()
        seconds.append(common.timed(lambda: _WRITERS[kind](folder)))
    return {"seconds": sorted(seconds)[len(seconds) // 2], "extra_bytes": peak.extra_bytes}


_READERS: dict[str, Callable[[str], Any]] = {
    "archive": common.read_archive, "archive-singly": common.read_archive_singly, "torch": common.read_torch,
}  # fmt: skip


def child_read(folder: str, kind: str) -> dict[str, float]:
    """Median time and peak memory beyond the data of one way to read all of it."""
    load_libraries()
    with common.Peak() as peak:
        data = _READERS[kind](folder)
    size = sum(getattr(v, "nbytes", 0) for episode in data for v in episode.values())
    del data
    seconds = common.median_s(lambda: _READERS[kind](folder))
    return {"seconds": seconds, "extra_bytes": peak.extra_bytes - size, "bytes": size}


def measure() -> Sequence[common.Row]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        written = {kind: common.child(__file__, "write", f"{folder}/{kind}", kind) for kind in _WRITERS}
        sources = {"archive": "archive", "archive-singly": "archive", "torch": "torch"}
        read = {kind: common.child(__file__, "read", f"{folder}/{source}", kind) for kind, source in sources.items()}
    return [*_ratios(written, read), *_memory(written, read)]


def _ratios(written: dict[str, Any], read: dict[str, Any]) -> list[common.Row]:
    save, synced, load = written["torch"]["seconds"], written["torch-fsync"]["seconds"], read["torch"]["seconds"]
    plain, packed = written["archive"]["seconds"], written["archive-zstd"]["seconds"]
    size = read["archive"]["bytes"] / 1e6
    rows = [
        ("write, no compression, against torch.save + fsync", synced / plain, 1.0, plain),
        ("write, no compression, against torch.save, no fsync", save / plain, 1.0, plain),
        ("write, zstd:1, against torch.save + fsync", synced / packed, 0.5, packed),
        ("write, zstd:1, against torch.save, no fsync", save / packed, 0.5, packed),
        ("read all at once, against torch.load", load / read["archive"]["seconds"], 0.8, read["archive"]["seconds"]),
        (
            "read one by one, against torch.load", load / read["archive-singly"]["seconds"], 0.8,
            read["archive-singly"]["seconds"],
        ),
    ]  # fmt: skip
    speeds = [("torch.save", save), ("torch.save + fsync", synced), ("torch.load", load)]
    return [
        *(common.bounded(what, ratio, least=least, seconds=s, mb_per_s=size / s) for what, ratio, least, s in rows),
        *(common.bounded(what, size / s, unit="MB/s", seconds=s) for what, s in speeds),
    ]


def _memory(written: dict[str, Any], read: dict[str, Any]) -> list[common.Row]:
    mib = 2**20
    ways = [("writing", written, kind) for kind in ("archive", "archive-zstd", "torch-fsync")]
    ways += [("reading", read, kind) for kind in ("archive", "archive-singly", "torch")]
    return [
        common.bounded(
            f"peak memory beyond the data, {verb}, {kind}", found[kind]["extra_bytes"] / mib,
            most=256 if kind.startswith("archive") else None, unit="MiB",
        )
        for verb, found, kind in ways
    ]  # fmt: skip


@pytest.mark.bench
def test_throughput() -> None:
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {"write": child_write, "read": child_read})
