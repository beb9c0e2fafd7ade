"""A TrajectoryReplayBuffer against a list: random calls, and after each the buffer holds what the list does."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass, field
from typing import Any

import pytest

import archive
from archive.buffers import TrajectoryReplayBuffer
from tests.support.trajectories import everything, make


@dataclass
class Model:
    """What the buffer should hold: (id, number) of each trajectory, oldest first."""

    held: list[tuple[int, int]] = field(default_factory=list)
    saved: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # root -> what its newest checkpoint has
    limit: int | None = None
    next_number: int = 0

    def trim(self) -> None:
        if self.limit is not None:
            del self.held[: -self.limit]


class Run:
    """One buffer, the calls on it, and the model."""

    def __init__(self, seed: int, *, auto_save: bool) -> None:
        self.random = random.Random(seed)
        self.auto_save = auto_save
        base = f"memory://{uuid.uuid4().hex[:10]}"
        self.roots = [f"{base}/a", f"{base}/b"]
        self.window = self.random.choice([0, 3, 6])
        self.model = Model(limit=None if auto_save or not self.window else self.window)
        self.buffer = self.fresh()

    def fresh(self) -> TrajectoryReplayBuffer:
        return TrajectoryReplayBuffer(
            sample_window_size=self.window, auto_save=self.auto_save, auto_save_path=f"{self.roots[0]}/rank_0",
            cache_size=self.random.choice([0, 2, 5]), auto_save_interval_s=self.random.choice([0.01, 60.0]),
        )  # fmt: skip

    def add(self) -> None:
        numbers = [self.model.next_number + i for i in range(self.random.randint(1, 4))]
        self.model.next_number += len(numbers)
        shape = {"steps": self.random.randint(1, 5), "envs": self.random.randint(1, 3)}
        ids = self.buffer.add_trajectories([make(n, **shape) for n in numbers])
        assert ids == sorted(ids)
        assert all(i > max((known for known, _ in self.model.held), default=-1) for i in ids)
        self.model.held += zip(ids, numbers, strict=True)
        self.model.trim()

    def save(self) -> None:
        root = self.random.choice(self.roots)
        self.buffer.save_checkpoint(f"{root}/rank_0")
        self.model.saved[root] = list(self.model.held)
        found = archive.open(root).checkpoints.latest
        assert found is not None
        assert sorted(e.metadata["trajectory_id"] for e in found.episodes) == [i for i, _ in self.model.held]

    def load(self) -> None:
        if self.model.saved:
            root = self.random.choice(sorted(self.model.saved))
            self.buffer.load_checkpoint(f"{root}/rank_0")
            self.model.held = list(self.model.saved[root])

    def restart(self) -> None:
        self.buffer.close()
        self.buffer, self.model.held = self.fresh(), []
        self.load()

    def clear(self) -> None:
        self.buffer.clear()
        self.model.held = []

    def flush(self) -> None:
        self.buffer.flush()

    def clear_cache(self) -> None:
        self.buffer.clear_cache()

    def check(self) -> None:
        assert self.buffer.trajectory_ids == [i for i, _ in self.model.held]
        if self.model.held:
            assert everything(self.buffer) == {n for _, n in self.model.held[-self.window :]}


CALLS: list[Any] = [Run.add, Run.add, Run.add, Run.save, Run.load, Run.restart, Run.clear, Run.flush, Run.clear_cache]


@pytest.mark.parametrize("auto_save", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls(seed: int, auto_save: bool) -> None:
    run = Run(seed, auto_save=auto_save)
    for _ in range(30):
        run.random.choice(CALLS)(run)
        run.check()
    run.buffer.close()
