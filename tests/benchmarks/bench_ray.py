"""Reading by Ray Data on two cores against a stream in two processes and the same steps in Parquet, in turns."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import archive.ray
import resharding
from tests.support import ray_cluster

ROUNDS, EPISODES, STEPS = 5, int(os.environ.get("BENCH_EPISODES", 400)), 250


def made(folder: Path) -> str:
    """Frames that compress, 700 MB, of two bits a pixel."""
    rng = np.random.default_rng(0)
    with archive.create(str(folder / "a")).writer() as w:
        for _ in range(EPISODES):
            image = rng.integers(0, 4, (STEPS, 84, 84), dtype=np.uint8)
            w.add_episode({"image": image, "reward": rng.random(STEPS, dtype=np.float32)})
    resharding.export(str(folder / "a"), str(folder / "p"), format="parquet")
    return str(folder / "a")


def streamed(url: str, part: int) -> tuple[int, float]:
    """The steps and CPU seconds of a half of an archive, as `stream` has them."""
    began, episodes = time.process_time(), archive.open(url).episodes
    half = len(episodes) // 2
    steps = sum(len(data["reward"]) for _, data in (episodes[half:] if part else episodes[:half]).stream())
    return steps, time.process_time() - began


def by_tasks(url: str, part: int) -> tuple[int, float]:
    """The same, as the tasks of a dataset have them."""
    from archive.ray import source

    began = time.process_time()
    made = source.of(
        url, None, None, None, "step", None, columns=None, missing="error", derive=(), storage_options=None,
        allow_bases=(),
    )  # fmt: skip
    tasks = made.get_read_tasks(16)
    steps = sum(block.num_rows for task in tasks[part::2] for block in task())
    return steps, time.process_time() - began


def consumed(dataset: Any) -> int:
    """The steps of a dataset, each batch of which is dropped in the task that read it."""

    def counted(table: Any) -> Any:
        import pyarrow as pa

        return pa.table({"steps": [table.num_rows]})

    counts = dataset.map_batches(counted, batch_size=None, batch_format="pyarrow", zero_copy_batch=True)
    return sum(row["steps"] for row in counts.take_all())


@pytest.mark.bench
@pytest.mark.filterwarnings("ignore")
def test_reading(tmp_path: Path) -> None:
    url = made(tmp_path)
    with ray_cluster.started(2) as ray, multiprocessing.get_context("spawn").Pool(2) as pool:
        ray.data.DataContext.get_current().enable_progress_bars = False

        def halves(of: Callable[[str, int], tuple[int, float]]) -> Callable[[], float]:
            return lambda: _whole(pool.starmap(of, [(url, 0), (url, 1)]))

        def timed(call: Callable[[], Any]) -> Callable[[], float]:
            def work() -> float:
                began = time.perf_counter()
                assert call() == EPISODES * STEPS
                return time.perf_counter() - began

            return work

        ways: dict[str, Callable[[], float]] = {
            "stream, CPU s": halves(streamed),
            "tasks, CPU s": halves(by_tasks),
            "stream, s": timed(lambda: sum(steps for steps, _ in pool.starmap(streamed, [(url, 0), (url, 1)]))),
            "archive.ray.read, s": timed(lambda: consumed(archive.ray.read(url, unit="step"))),
            "read_parquet, s": timed(lambda: consumed(ray.data.read_parquet(str(tmp_path / "p")))),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, work in ways.items():
                took[name].append(work())
    found = {name: statistics.median(some) for name, some in took.items()}
    for name, some in took.items():
        print(f"{name:20} {found[name]:6.2f} ({min(some):.2f} to {max(some):.2f})")
    print(f"tasks against stream, CPU: {found['stream, CPU s'] / found['tasks, CPU s']:.2f} (>= 0.8)")
    print(f"with Ray's own work, wall: {found['stream, s'] / found['archive.ray.read, s']:.2f}")
    print(f"against read_parquet, wall: {found['read_parquet, s'] / found['archive.ray.read, s']:.1f} (>= 1)")


def _whole(parts: list[tuple[int, float]]) -> float:
    assert sum(steps for steps, _ in parts) == EPISODES * STEPS
    return sum(cpu_s for _, cpu_s in parts)
