"""A ring buffer as training jobs have it, and one rank of a checkpoint as the share that `ring.fill` takes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from archive.base import cached_property
from archive.checkpoint.checkpoints import Checkpoint
from archive.saved.index import PartBuffer


class Ring:
    """Env rows that advance each at its own pace; every step is recognisable by its fields."""

    def __init__(self, num_envs: int, max_length: int, seed: int = 0, offset: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.pos = torch.full((num_envs,), offset)
        self.size = torch.zeros(num_envs, dtype=torch.int64)
        shape = (num_envs, max_length)
        self.buffers: dict[str, Any] = {
            "obs": {"image": torch.zeros(*shape, 3, 2, dtype=torch.uint8), "state": torch.zeros(*shape, 4)},
            "action": torch.zeros(*shape, 2, dtype=torch.bfloat16),
            "reward": torch.zeros(*shape),
            "t": torch.zeros(*shape, dtype=torch.int64),
        }
        self.first = torch.zeros(shape, dtype=torch.bool)
        self.last = torch.zeros(shape, dtype=torch.bool)
        self.priority = torch.zeros(shape)
        self.left = np.zeros(num_envs, np.int64)  # steps until the env's episode ends

    @property
    def max_length(self) -> int:
        return int(self.priority.shape[1])

    def step(self, env: int) -> None:
        slot = int(self.pos[env]) % self.max_length
        self.first[env, slot] = bool(self.left[env] == 0)
        if self.left[env] == 0:
            self.left[env] = self.rng.integers(1, 9)
        self.left[env] -= 1
        self.last[env, slot] = bool(self.left[env] == 0)
        self.buffers["obs"]["image"][env, slot] = torch.from_numpy(self.rng.integers(0, 255, (3, 2)).astype(np.uint8))
        self.buffers["obs"]["state"][env, slot] = torch.from_numpy(self.rng.normal(size=4))
        self.buffers["action"][env, slot] = torch.from_numpy(self.rng.normal(size=2)).to(torch.bfloat16)
        self.buffers["reward"][env, slot] = float(self.rng.normal())
        self.buffers["t"][env, slot] = self.pos[env]
        self.priority[env, slot] = float(self.rng.random())
        self.pos[env] += 1
        self.size[env] = min(int(self.size[env]) + 1, self.max_length)

    def run(self, steps: int | list[int]) -> Ring:
        for env in range(len(self.pos)):
            for _ in range(steps if isinstance(steps, int) else steps[env]):
                self.step(env)
        return self

    def how(self) -> dict[str, Any]:
        """The arguments of ring.append beside the writer and the buffers."""
        masks = {"first": self.first, "last": self.last, "columns": {"priority": self.priority}}
        return {"pos": self.pos, "size": self.size, **masks}

    @property
    def live(self) -> torch.Tensor:
        slots = torch.arange(self.max_length)
        return (self.pos[:, None] - 1 - slots) % self.max_length < self.size[:, None]


@dataclass
class RankShare:
    """One rank's buffer in a checkpoint."""

    ck: Checkpoint
    rank: int = 0
    buffer: str = "replay"

    @cached_property
    def _mine(self) -> Any:
        """Groups of live pieces (one an episode) of this rank and buffer."""
        heads, _ = self.ck.groups
        run = self.ck.located["run"][heads]
        ranks = self.ck.live["rank"].to_numpy()[run]
        names = np.array(self.ck.live["buffer"].cast("string").to_pylist(), object)[run]
        return np.flatnonzero((ranks == self.rank) & (names == self.buffer))

    @cached_property
    def _about(self) -> PartBuffer:
        return self.ck.staged(self.rank).index.buffers[self.buffer]

    @cached_property
    def layout(self) -> Any:
        heads, _ = self.ck.groups
        mine, located = self._mine, self.ck.located
        episodes = self.ck.episodes[mine]
        row = located.stream[heads[mine]]
        segments = self.ck.snapshot.columns(["first", "episode_start"])
        began = segments["first"].to_numpy(zero_copy_only=False)[row] & (located.lo[heads[mine]] == 0)
        opened = set(self._about.open_episodes.values())
        return SimpleNamespace(
            env_id=self.ck.live["env_id"].to_numpy()[located["run"][heads[mine]]],
            position=located["position"][heads[mine]],
            length=episodes.table["length"].to_numpy(),
            open=np.array([name in opened for name in episodes.table["episode_id"].to_pylist()], bool),
            headless=~began,
        )

    def read(self) -> list[dict[str, Any]]:
        return self.ck.episodes[self._mine].read()

    @property
    def columns(self) -> dict[str, Any]:
        names = self.ck.staged(self.rank).index.columns.get(self.buffer, {})
        return {name: self.ck.column(name, self.rank, self.buffer) for name in names}

    @property
    def next_positions(self) -> dict[int, int]:
        return dict(self._about.next_positions)
