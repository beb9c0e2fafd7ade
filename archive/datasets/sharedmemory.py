"""On top of the archive: batches from workers in shared memory that is used again, as fresh memory costs more than
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

from archive.fields import Ragged, mapped

MAX_BLOCK_BYTES = 2**28
_ALIGNMENT = 64


class _Leaf(NamedTuple):
    """Where a tensor lies in a block."""

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
    """Which slots of which worker hold a batch that somebody has; shared with the workers."""
    return _shared(torch.zeros(num_workers, slots, dtype=torch.uint8))


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved


class Sender:
    """A worker's blocks of memory."""

    def __init__(self, worker: int, held: torch.Tensor) -> None:
        self._worker = worker
        self._held = held[worker].numpy()
        self._blocks: dict[int, torch.Tensor] = {}

    def pack(self, batch: Any) -> Any:
        """The batch as Packed; itself where no block is free, or it is no nest of tensors."""
        layout, size = _layout(batch)
        free = np.flatnonzero(self._held == 0)
        if not isinstance(batch, dict) or not 0 < size <= MAX_BLOCK_BYTES or not len(free):
            return batch
        slot = next((s for s in free.tolist() if s in self._blocks), int(free[0]))
        block, new = self._blocks.get(slot), None
        if block is None or len(block) < size:
            block = new = self._blocks[slot] = _shared(torch.empty(size, dtype=torch.uint8))
        _write(batch, layout, block)
        self._held[slot] = 1
        return Packed(self._worker, slot, new, layout)


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


def _write(batch: Any, layout: Any, block: torch.Tensor) -> None:
    if isinstance(batch, dict):
        for key, value in batch.items():
            _write(value, layout[key], block)
    elif isinstance(batch, Ragged):
        for part, place in zip(batch, layout, strict=True):
            _write(part, place, block)
    elif isinstance(layout, _Leaf):
        _view(layout, block).copy_(batch.detach())


def _read(layout: Any, block: torch.Tensor) -> Any:
    if isinstance(layout, Ragged):
        return Ragged(*(_read(part, block) for part in layout))
    return _view(layout, block) if isinstance(layout, _Leaf) else layout


def _view(leaf: _Leaf, block: torch.Tensor) -> torch.Tensor:
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    return block[leaf.offset : leaf.offset + size].view(leaf.dtype).view(leaf.shape)
