"""On top of the archive: batches from workers in shared memory that is used again, as fresh memory costs more than copying.

A worker writes a batch into one of its slabs and sends where the tensors lie. The slab is the worker's again once
nobody holds a tensor of that batch. Where all slabs are held, a batch is sent as torch sends it.
"""

from __future__ import annotations

import math
import os
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from archive.fields import Ragged

MAX_SLAB_BYTES = 2**28
_ALIGNMENT = 64


class _Leaf(NamedTuple):
    """Where a tensor lies in a slab."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Packed(NamedTuple):
    """A batch in a slab: which worker's, which slot; the slab itself when it is a new one."""

    worker: int
    slot: int
    slab: torch.Tensor | None
    nest: Any


def flags(num_workers: int, slots: int) -> torch.Tensor:
    """Which slots of which worker hold a batch that somebody has; shared with the workers."""
    return _shared(torch.zeros(num_workers, slots, dtype=torch.uint8))


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved


class Writer:
    """A worker's slabs."""

    def __init__(self, worker: int, held: torch.Tensor) -> None:
        self._worker, self._held = worker, held[worker].numpy()
        self._slabs: dict[int, torch.Tensor] = {}

    def pack(self, batch: Any) -> Any:
        """The batch as Packed; itself where no slab is free, or it is no nest of tensors."""
        layout, size = _layout(batch)
        free = np.flatnonzero(self._held == 0)
        if not isinstance(batch, dict) or not 0 < size <= MAX_SLAB_BYTES or not len(free):
            return batch
        slot = next((s for s in free.tolist() if s in self._slabs), int(free[0]))
        slab, new = self._slabs.get(slot), None
        if slab is None or len(slab) < size:
            slab = new = self._slabs[slot] = _shared(torch.empty(size, dtype=torch.uint8))
        _write(batch, layout, slab)
        self._held[slot] = 1
        return Packed(self._worker, slot, new, layout)


class Reader:
    """The other end of all workers' slabs."""

    def __init__(self, held: torch.Tensor) -> None:
        self._held = held.numpy()
        self._slabs: dict[tuple[int, int], torch.Tensor] = {}

    def unpack(self, sent: Any) -> Any:
        """The batch that a worker packed."""
        if not isinstance(sent, Packed):
            return sent
        key = sent.worker, sent.slot
        if sent.slab is not None:
            self._slabs[key] = sent.slab
        memory: Any = np.frombuffer(self._slabs[key].numpy().data, np.uint8)  # lives as long as a tensor over it
        release = weakref.finalize(memory, _release, self._held, key, os.getpid())
        release.atexit = False
        return _read(sent.nest, torch.from_numpy(memory))


def _release(held: Any, key: tuple[int, int], pid: int) -> None:
    if os.getpid() == pid:  # a forked process lets go of copies only
        held[key] = 0


def _layout(batch: Any, start: int = 0) -> tuple[Any, int]:
    """The nest with its tensors' places, and where the last one ends."""
    if isinstance(batch, dict):
        out = {}
        for key, value in batch.items():
            out[key], start = _layout(value, start)
        return out, start
    if isinstance(batch, Ragged):
        values, start = _layout(batch.values, start)
        lengths, start = _layout(batch.lengths, start)
        return Ragged(values, lengths), start
    if type(batch) is not torch.Tensor or batch.layout is not torch.strided or batch.device.type != "cpu":
        return batch, start
    offset = -(-start // _ALIGNMENT) * _ALIGNMENT
    return _Leaf(batch.dtype, tuple(batch.shape), offset), offset + batch.nbytes


def _write(batch: Any, layout: Any, slab: torch.Tensor) -> None:
    if isinstance(batch, dict):
        for key, value in batch.items():
            _write(value, layout[key], slab)
    elif isinstance(batch, Ragged):
        for part, place in zip(batch, layout, strict=True):
            _write(part, place, slab)
    elif isinstance(layout, _Leaf):
        _view(layout, slab).copy_(batch.detach())


def _read(layout: Any, slab: torch.Tensor) -> Any:
    if isinstance(layout, dict):
        return {key: _read(value, slab) for key, value in layout.items()}
    if isinstance(layout, Ragged):
        return Ragged(*(_read(part, slab) for part in layout))
    return _view(layout, slab) if isinstance(layout, _Leaf) else layout


def _view(leaf: _Leaf, slab: torch.Tensor) -> torch.Tensor:
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    return slab[leaf.offset : leaf.offset + size].view(leaf.dtype).view(leaf.shape)
