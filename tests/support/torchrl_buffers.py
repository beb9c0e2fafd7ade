"""Replay buffers of TorchRL for tests: made, filled, compared; and segment trees in numpy for its prioritized samplers,
put in place only where its compiled ones don't load."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import numpy as np
import pytest
import torch

NAMES = ("SumSegmentTreeFp32", "SumSegmentTreeFp64", "MinSegmentTreeFp32", "MinSegmentTreeFp64")


class _Tree:
    dtype: Any = np.float32
    join: Any = np.add
    neutral = 0.0

    def __init__(self, size: int) -> None:
        self._size = size
        self._half = 1 << size.bit_length()  # the first power of two above the size, as of the compiled ones
        self._nodes = np.full(2 * self._half, self.neutral, self.dtype)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, torch.Tensor):
            return torch.from_numpy(np.asarray(self._nodes[self._half + index.numpy()]))
        if isinstance(index, np.ndarray):
            return self._nodes[self._half + index]
        return float(self._nodes[self._half + int(index)])

    at = __getitem__

    def __setitem__(self, index: Any, value: Any) -> None:
        places = np.atleast_1d(np.asarray(index, np.int64)).reshape(-1)
        values = np.broadcast_to(np.asarray(value, self.dtype).reshape(-1), places.shape)
        self._nodes[self._half + places] = values
        nodes = np.unique(self._half + places) // 2
        while len(nodes) and nodes[0] > 0:
            self._nodes[nodes] = self.join(self._nodes[2 * nodes], self._nodes[2 * nodes + 1])
            nodes = np.unique(nodes // 2)

    update = __setitem__

    def query(self, left: int, right: int) -> float:
        lo, hi, out = left + self._half, right + self._half, self.dtype(self.neutral)
        while lo < hi:
            if lo & 1:
                out, lo = self.join(out, self._nodes[lo]), lo + 1
            if hi & 1:
                hi -= 1
                out = self.join(out, self._nodes[hi])
            lo, hi = lo // 2, hi // 2
        return float(out)


class _SumTree(_Tree):
    def scan_lower_bound(self, value: Any) -> Any:
        """The first leaf at which the running sum is at least the value."""
        left = np.atleast_1d(np.asarray(value, self.dtype)).copy()
        node = np.ones(len(left), np.int64)
        while len(node) and node[0] < self._half:
            child = self._nodes[2 * node]
            right = left > child
            left = np.where(right, left - child, left)
            node = 2 * node + right
        found = node - self._half
        return torch.from_numpy(found) if isinstance(value, torch.Tensor) else found


class _MinTree(_Tree):
    join = np.minimum
    neutral = np.inf


def _made(name: str) -> type[_Tree]:
    base = _SumTree if name.startswith("Sum") else _MinTree
    return type(name, (base,), {"dtype": np.float64 if name.endswith("64") else np.float32})


def ensure_trees() -> bool:
    """Make prioritized samplers work; whether they work with TorchRL's own trees."""
    module = importlib.import_module("torchrl.data.replay_buffers.samplers.prioritized")
    if getattr(module, NAMES[0]) is not None:
        return not issubclass(getattr(module, NAMES[0]), _Tree)
    for name in NAMES:
        setattr(module, name, _made(name))
    return False


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

    from tests.support.torchrl_buffers import ensure_trees

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
