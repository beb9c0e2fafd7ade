"""Trajectories [T, B, ...] whose every value says which trajectory, step and env it is of,
and buffers that hold them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import archive
from archive.adapters.rlinf.trajectory import from_steps
from archive.buffers import TrajectoryReplayBuffer

RLINF = "rlinf is not installed: pip install --no-deps rlinf==0.3.0"


@dataclass
class Trajectory:
    """As RLinf's, so that tests run without it."""

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Any = None
    intervene_flags: Any = None
    rewards: Any = None
    terminations: Any = None
    truncations: Any = None
    dones: Any = None
    prev_logprobs: Any = None
    prev_values: Any = None
    versions: Any = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)


def number(trajectory: int, steps: int, envs: int) -> torch.Tensor:
    """[T, B, 1]: trajectory * 10000 + step * 100 + env."""
    step, env = torch.arange(steps)[:, None], torch.arange(envs)[None]
    return (trajectory * 10000 + step * 100 + env)[..., None].float()


def flags(values: torch.Tensor, extra: int) -> torch.Tensor:
    """Done flags: one a transition (whether its number is even), with a row of True before each of `extra` epochs."""
    done = values % 2 == 0
    if not extra:
        return done
    epochs = done.reshape(extra, -1, *done.shape[1:])
    return torch.cat([torch.ones_like(epochs[:, :1]), epochs], 1).reshape(-1, *done.shape[1:])


def make(trajectory: int, steps: int = 4, envs: int = 2, *, extra: int = 1, kind: Any = Trajectory) -> Any:
    """A trajectory; `kind` may be RLinf's own class."""
    n = number(trajectory, steps, envs)
    done = flags(n, extra)
    return kind(
        max_episode_length=50, model_weights_id=f"weights-{trajectory}_{trajectory * 10}",
        actions=torch.cat([n, -n], -1), intervene_flags=n.repeat(1, 1, 2) % 3 == 0, rewards=n / 2,
        terminations=done.clone(), truncations=~done, dones=done, prev_logprobs=n.clone(), versions=n.clone(),
        forward_inputs={"tokens": n.long().repeat(1, 1, 3)},
        curr_obs={"image": n.to(torch.int32)[..., None].expand(-1, -1, 2, 2).clone(), "half": n.to(torch.bfloat16)},
        next_obs={"image": (n + 100).to(torch.int32)[..., None].expand(-1, -1, 2, 2).clone()},
    )  # fmt: skip


def check_batch(batch: dict[str, Any], size: int) -> list[int]:
    """All rows of a batch are whole transitions; their numbers."""
    n = batch["prev_logprobs"]
    assert n.shape == (size, 1)
    assert torch.equal(batch["rewards"], n / 2)
    assert torch.equal(batch["actions"], torch.cat([n, -n], -1))
    assert torch.equal(batch["versions"], n)
    assert torch.equal(batch["dones"], n % 2 == 0)
    assert torch.equal(batch["terminations"], n % 2 == 0)
    assert torch.equal(batch["truncations"], n % 2 != 0)
    assert torch.equal(batch["intervene_flags"], n.repeat(1, 2) % 3 == 0)
    assert torch.equal(batch["forward_inputs"]["tokens"], n.long().repeat(1, 3))
    assert torch.equal(batch["curr_obs"]["image"], n.to(torch.int32)[..., None].expand(-1, 2, 2))
    assert torch.equal(batch["curr_obs"]["half"], n.to(torch.bfloat16))
    assert torch.equal(batch["next_obs"]["image"], (n + 100).to(torch.int32)[..., None].expand(-1, 2, 2))
    return [int(x) for x in n[:, 0]]


def trajectories_of(batch: dict[str, Any], size: int) -> set[int]:
    """Which trajectories the rows of a batch are of."""
    return {n // 10000 for n in check_batch(batch, size)}


def everything(buffer: TrajectoryReplayBuffer) -> set[int]:
    """Trajectories that draws come from."""
    return trajectories_of(buffer.sample(2000, replace=True), 2000)


def rlinf() -> Any:
    """RLinf's Trajectory and TrajectoryReplayBuffer, or a skip."""
    structs = pytest.importorskip("rlinf.data.embodied_io_struct", reason=RLINF)
    buffers = pytest.importorskip("rlinf.data.replay_buffer", reason=RLINF)
    return structs.Trajectory, buffers.TrajectoryReplayBuffer


def saving(url: Any, **options: Any) -> TrajectoryReplayBuffer:
    options = {"cache_size": 2, "world_size": 1, "auto_save": True} | options
    return TrajectoryReplayBuffer(auto_save_path=f"{url}/rank_0", **options)


def loaded(url: Any, **options: Any) -> TrajectoryReplayBuffer:
    buffer = saving(url, **options)
    buffer.load_checkpoint(f"{url}/rank_0")
    return buffer


def world(url: str, size: int, session: str, **options: Any) -> list[TrajectoryReplayBuffer]:
    """A buffer for each rank."""
    options = {"auto_save": True, "sample_window_size": 0, "cache_size": 2} | options
    return [
        TrajectoryReplayBuffer(auto_save_path=f"{url}/rank_{r}", world_size=size, session=session, **options)
        for r in range(size)
    ]


def add(buffers: Sequence[TrajectoryReplayBuffer], count: int, first: int = 0) -> None:
    """Trajectory i goes to rank i % M: so its number is its id."""
    for i in range(first, first + count):
        assert buffers[i % len(buffers)].add_trajectories([make(i)]) == [i]


def save(buffers: Sequence[TrajectoryReplayBuffer], url: str) -> archive.Checkpoint:
    """Rank after rank; visible when the last has returned."""
    pending = [b.save_checkpoint(f"{url}/rank_{r}") for r, b in enumerate(buffers)]
    assert pending[-1].done()
    return pending[-1].result()


def close(buffers: Sequence[TrajectoryReplayBuffer]) -> None:
    for buffer in buffers:
        buffer.close()


def saved_trees(root: Path) -> list[dict[str, Any]]:
    found = archive.open(root).checkpoints.latest
    assert found is not None
    return [from_steps(e.read(), e.metadata) for e in found.episodes]


def same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def sample_for_a_while(buffer: TrajectoryReplayBuffer) -> None:
    for _ in range(2000):
        buffer.sample(4)
        time.sleep(0.005)
