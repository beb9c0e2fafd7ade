"""Segment trees in numpy for TorchRL's prioritized samplers, put in place only where its compiled ones don't load."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
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
