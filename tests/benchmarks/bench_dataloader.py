"""Windows of frames through torch's DataLoader with two workers: an archive on local disk, h5py, Parquet by pyarrow."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "dataloader: windows through a DataLoader with 2 workers"
STEPS, FRAME, LENGTH, BATCH, WORKERS = 200, (84, 84), 16, 32, 2
EPISODES = max(4, int(os.environ.get("BENCH_BYTES", 400_000_000)) // (STEPS * 84 * 84))
RANDOM_BATCHES = 1500  # of an epoch of random windows, at most
REPEATS = 5


def episode(number: int) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(number)
    return {
        "obs": rng.integers(0, 256, (STEPS, *FRAME), np.uint8),
        "action": rng.integers(0, 18, STEPS),
        "reward": rng.random(STEPS, np.float32),
    }


def write(folder: Path) -> None:
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq

    import archive

    names = ("obs", "action", "reward")
    steps = EPISODES * STEPS
    with archive.create(folder / "archive").writer() as w, h5py.File(folder / "data.h5", "w") as file:
        first = episode(0)
        for name in names:
            file.create_dataset(name, (steps, *first[name].shape[1:]), first[name].dtype)
        parquet = None
        for number in range(EPISODES):
            data = episode(number)
            w.add_episode(data)
            for name in names:
                file[name][number * STEPS : (number + 1) * STEPS] = data[name]
            frames = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(FRAME[0] * FRAME[1]), STEPS, [None, pa.py_buffer(data["obs"].tobytes())]
            )
            table = pa.table({"obs": frames, "action": data["action"], "reward": data["reward"]})
            parquet = parquet or pq.ParquetWriter(folder / "data.parquet", table.schema, compression="zstd")
            parquet.write_table(table, row_group_size=STEPS)  # a row group an episode
        assert parquet is not None
        parquet.close()


class Windows:
    """Windows within episodes of STEPS steps, as anybody would number them."""

    def __init__(self, path: str, stride: int) -> None:
        self.path, self.stride = path, stride
        self.each = (STEPS - LENGTH) // stride + 1
        self.file: Any = None

    def __len__(self) -> int:
        return EPISODES * self.each

    def place(self, index: int) -> tuple[int, int]:
        return index // self.each, index % self.each * self.stride


class H5Windows(Windows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        import h5py
        import torch

        if self.file is None:
            file = h5py.File(self.path)
            self.file = {name: file[name] for name in ("obs", "action", "reward")}
        number, start = self.place(index)
        at = number * STEPS + start
        return {name: torch.from_numpy(data[at : at + LENGTH]) for name, data in self.file.items()}


class ParquetWindows(Windows):
    """Keeps the row group read last, which is all that sequential windows need."""

    held: tuple[int, dict[str, Any]] = (-1, {})

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np
        import pyarrow.parquet as pq
        import torch

        if self.file is None:
            self.file = pq.ParquetFile(self.path)
        number, start = self.place(index)
        if self.held[0] != number:
            table = self.file.read_row_group(number).combine_chunks()
            frames = np.frombuffer(table["obs"].chunk(0).buffers()[1], np.uint8).reshape(-1, *FRAME)
            self.held = number, {"obs": frames, **{n: table[n].to_numpy() for n in ("action", "reward")}}
        return {name: torch.from_numpy(data[start : start + LENGTH].copy()) for name, data in self.held[1].items()}


def peer(kind: type[Windows], path: Path, *, shuffle: bool) -> Any:
    from torch.utils.data import DataLoader

    data: Any = kind(str(path), 1 if shuffle else LENGTH)
    return DataLoader(data, batch_size=BATCH, num_workers=WORKERS, shuffle=shuffle)


def ours(path: Path, shuffle: str | None) -> Any:
    import archive
    import archive.torch

    data = archive.torch.WindowDataset(archive.open(path).episodes, LENGTH, stride=1 if shuffle else LENGTH)
    return archive.torch.loader(data, BATCH, WORKERS, shuffle=shuffle)


def ours_map_style(path: Path) -> Any:
    from torch.utils.data import DataLoader

    import archive
    import archive.torch

    data = archive.torch.WindowDataset(archive.open(path).episodes, LENGTH)
    return DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=archive.torch.collate)


def ways(folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "sequential, archive": lambda: ours(folder / "archive", None),
        "sequential, h5py": lambda: peer(H5Windows, folder / "data.h5", shuffle=False),
        "sequential, Parquet": lambda: peer(ParquetWindows, folder / "data.parquet", shuffle=False),
        "random, archive, shuffle='blocks'": lambda: ours(folder / "archive", "blocks"),
        "random, archive, shuffle='full'": lambda: ours(folder / "archive", "full"),
        "random, archive, torch's own DataLoader": lambda: ours_map_style(folder / "archive"),
        "random, h5py": lambda: peer(H5Windows, folder / "data.h5", shuffle=True),
        "random, Parquet": lambda: peer(ParquetWindows, folder / "data.parquet", shuffle=True),
    }


def windows_per_s(make: Callable[[], Any], most_batches: int) -> float:
    """From before the workers start to the last batch."""
    start, count = time.perf_counter(), 0
    for number, batch in enumerate(make(), 1):
        count += len(batch["obs"])
        if number == most_batches:
            break
    return count / (time.perf_counter() - start)


def child_run(folder: str) -> dict[str, float]:
    """Median windows per second of each way, taken in turn."""
    import torch

    import archive.torch  # noqa: F401 (imports are not timed)

    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for name, make in ways(Path(folder)).items():
            most = (RANDOM_BATCHES // 50 if "Parquet" in name else RANDOM_BATCHES) if "random" in name else 10**9
            found.setdefault(name, []).append(windows_per_s(make, most))
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def measure() -> Sequence[common.Row]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        write(Path(folder))
        speed = common.child(__file__, "run", folder)
    targets = [("sequential", 1.0), ("random", 3.0)]
    rows = []
    for kind, least in targets:
        base = speed[f"{kind}, h5py"]
        for name in speed:
            if name.startswith(kind) and "archive" in name:
                rows.append(common.bounded(f"{name}, against h5py", speed[name] / base, least=least))
    rows += [common.bounded(name, value, unit="windows/s") for name, value in speed.items()]
    return rows


@pytest.mark.bench
def test_dataloader() -> None:
    pytest.importorskip("h5py", reason="h5py is the peer")
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {"run": child_run})
