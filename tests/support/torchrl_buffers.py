"""Replay buffers of TorchRL for tests: made, filled, compared."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
pytest.importorskip("torchrl", reason="needs TorchRL: pip install torchrl tensordict")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
    from torchrl.data import (
        LazyTensorStorage,
        RandomSampler,
        ReplayBuffer,
        TensorDictReplayBuffer,
    )

    from tests.support.torchrl_trees import ensure_trees

    HAS_OWN_TREES = ensure_trees()

EPISODE = 7  # steps of a trajectory
SLICES: dict[str, Any] = {"slice_len": 2, "strict_length": False}


def steps(lo: int, count: int, *, episode: int = EPISODE, ids: bool = False) -> Any:
    """Steps [lo, lo + count) of one environment, whose trajectories have `episode` steps; all values tell the step."""
    t = torch.arange(lo, lo + count)
    end = (t % episode == episode - 1)[:, None]
    never = torch.zeros_like(end)
    data: dict[str, Any] = {
        "observation": t.float()[:, None].expand(count, 3).clone(),
        "action": (t * 3)[:, None],
        "next": {
            "observation": (t + 1).float()[:, None].expand(count, 3).clone(),
            "reward": t.double()[:, None] / 8,
            "done": end,
            "terminated": end.clone(),
            "truncated": never,
        },
    }
    if ids:
        data["collector"] = {"traj_ids": t // episode}
    return TensorDict(data, batch_size=[count])


def rectangle(lo: int, count: int, envs: int) -> Any:
    """[envs, count] steps of a vector env, as collectors give them."""
    return torch.stack([steps(1000 * env + lo, count) for env in range(envs)])


def buffer(
    capacity: int = 50,
    *,
    sampler: Any = None,
    storage: Any = None,
    writer: Any = None,
    seed: int | None = 0,
    batch_size: int = 8,
    plain: bool = False,
    **options: Any,
) -> Any:
    """A replay buffer with a generator of its own."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    kind = ReplayBuffer if plain else TensorDictReplayBuffer
    given = {"writer": writer} if writer is not None else {}
    return kind(
        storage=LazyTensorStorage(capacity) if storage is None else storage,
        sampler=RandomSampler() if sampler is None else sampler, generator=generator, batch_size=batch_size, **given,
        **options,
    )  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Bit for bit the same samples or items."""
    if isinstance(a, LazyStackedTensorDict):
        return isinstance(b, LazyStackedTensorDict) and same(list(a.tensordicts), list(b.tensordicts))
    if isinstance(a, TensorDictBase):
        keys = set(map(str, a.keys())) == set(map(str, b.keys()))
        return keys and a.batch_size == b.batch_size and all(same(v, b.get(k)) for k, v in a.items())
    if hasattr(a, "tolist") and hasattr(a, "batch_size"):
        return bool(a.tolist() == b.tolist())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


def assert_same_samples(a: Any, b: Any, count: int = 100, *, write: Any = None) -> None:
    """The next `count` samples agree; with `write(buffer, i)` in between, too."""
    for i in range(count):
        assert same(a.sample(), b.sample()), f"sample {i} differs"
        if write is not None and i % 10 == 9:
            write(a, i)
            write(b, i)


def contents(rb: Any) -> list[float]:
    """The reward (it tells the step) in each slot."""
    held = rb._storage._storage[: rb._storage._len_along_dim0]
    return [float(v) * 8 for v in held["next", "reward"].reshape(-1).tolist()]
