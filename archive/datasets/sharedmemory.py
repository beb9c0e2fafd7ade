"""Batches from workers in shared memory that is used again, as fresh memory costs more than
copying.

A worker writes a batch into one of its blocks of memory and sends where the tensors lie. The block is the worker's
again once nobody holds a tensor of that batch. Where all blocks are held, a batch is sent as torch sends it.
"""

from __future__ import annotations

import math
import os
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from archive.arrays import fresh
from archive.fields import Ragged, mapped

MAX_BLOCK_BYTES = 2**28
_ALIGNMENT = 64
_NOTHING = torch.empty(0, dtype=torch.uint8)


class _Leaf(NamedTuple):
    """The place of a tensor in a block."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Packed(NamedTuple):
    """A batch in a block: which worker's, which slot; the block itself when it is a new one."""

    worker: int
    slot: int
    block: torch.Tensor | None
    nest: Any


def flags(num_workers: int, slots: int) -> torch.Tensor:
    """A flag for each slot of each worker: it holds a batch that somebody has. Shared with the workers."""
    return _shared(torch.zeros(num_workers, slots, dtype=torch.uint8))


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved


class Sender:
    """A worker's blocks of memory. The next batch may be made in one of them, by `empty`, and is packed without a copy
    then; only one batch is made at a time."""

    def __init__(self, worker: int, held: torch.Tensor) -> None:
        self._worker = worker
        self._held = held[worker].numpy()
        self._blocks: dict[int, torch.Tensor] = {}
        self._slot: int | None = None  # where the next batch goes
        self._used = 0  # bytes of its block that the batch has

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array like `np.empty` for the next batch; beside the blocks where there is no room in one."""
        block = self._blocks.get(self._next_slot(), _NOTHING)
        size = math.prod(shape) * np.dtype(dtype).itemsize
        start = _aligned(self._used)
        if not size or start + size > len(block) or np.dtype(dtype).hasobject:
            return fresh(shape, dtype)
        self._used = start + size
        return np.ndarray(shape, dtype, block.numpy().data, start)

    def pack(self, batch: Any) -> Any:
        """The batch as Packed; itself where no block is free, or it is no nest of tensors."""
        slot = self._next_slot()
        block, new = self._blocks.get(slot, _NOTHING), None
        layout, size = _layout(batch, self._used, block)
        self._slot, self._used = None, 0
        if not isinstance(batch, dict) or not 0 < size <= MAX_BLOCK_BYTES or slot < 0:
            return batch
        if len(block) < size:
            layout, size = _layout(batch, 0, _NOTHING)
            block = new = self._blocks[slot] = _shared(torch.empty(size, dtype=torch.uint8))
        _write(batch, layout, block)
        self._held[slot] = 1
        return Packed(self._worker, slot, new, layout)

    def _next_slot(self) -> int:
        """A slot that nobody holds, if possible one that has a block; -1 if there is none."""
        if self._slot is None or self._slot < 0:
            free = np.flatnonzero(self._held == 0).tolist()
            self._slot = next((slot for slot in free if slot in self._blocks), free[0] if free else -1)
        return self._slot


class Receiver:
    """The other end of all workers' blocks."""

    def __init__(self, held: torch.Tensor) -> None:
        self._held = held.numpy()
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}

    def unpack(self, sent: Any) -> Any:
        """The batch that a worker packed."""
        if not isinstance(sent, Packed):
            return sent
        key = sent.worker, sent.slot
        if sent.block is not None:
            self._blocks[key] = sent.block
        memory: Any = np.frombuffer(self._blocks[key].numpy().data, np.uint8)  # lives as long as a tensor over it
        release = weakref.finalize(memory, _release, self._held, key, os.getpid())
        release.atexit = False
        block = torch.from_numpy(memory)
        return mapped(sent.nest, lambda leaf: _read(leaf, block))


def _release(held: Any, key: tuple[int, int], pid: int) -> None:
    if os.getpid() == pid:  # a forked process lets go of copies only
        held[key] = 0


def _layout(batch: Any, start: int, block: torch.Tensor) -> tuple[Any, int]:
    """The nest with its tensors' places, and where the last one ends; those that lie in the block stay where they are,
    others come from `start` on."""
    if isinstance(batch, dict):
        out = {}
        for key, value in batch.items():
            out[key], start = _layout(value, start, block)
        return out, start
    if isinstance(batch, Ragged):
        values, start = _layout(batch.values, start, block)
        lengths, start = _layout(batch.lengths, start, block)
        return Ragged(values, lengths), start
    if type(batch) is not torch.Tensor or batch.layout is not torch.strided or batch.device.type != "cpu":
        return batch, start
    shape = tuple(batch.shape)
    within = batch.data_ptr() - block.data_ptr()
    if 0 <= within < len(block) and batch.is_contiguous():
        return _Leaf(batch.dtype, shape, within), max(start, within + batch.nbytes)
    offset = _aligned(start)
    return _Leaf(batch.dtype, shape, offset), offset + batch.nbytes


def _aligned(start: int) -> int:
    return -(-start // _ALIGNMENT) * _ALIGNMENT


def _write(batch: Any, layout: Any, block: torch.Tensor) -> None:
    if isinstance(batch, dict):
        for key, value in batch.items():
            _write(value, layout[key], block)
    elif isinstance(batch, Ragged):
        for part, place in zip(batch, layout, strict=True):
            _write(part, place, block)
    elif isinstance(layout, _Leaf):
        place = _view(layout, block)
        if place.data_ptr() != batch.data_ptr():
            place.copy_(batch.detach())


def _read(layout: Any, block: torch.Tensor) -> Any:
    if isinstance(layout, Ragged):
        return Ragged(*(_read(part, block) for part in layout))
    return _view(layout, block) if isinstance(layout, _Leaf) else layout


def _view(leaf: _Leaf, block: torch.Tensor) -> torch.Tensor:
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    return block[leaf.offset : leaf.offset + size].view(leaf.dtype).view(leaf.shape)
