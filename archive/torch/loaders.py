"""A DataLoader whose state is the delivered items, and that resumes in a world of any size.

Batches from workers come in reused shared memory, as fresh memory costs more than copying. A worker writes
a batch into one of its blocks of memory and sends the offsets of tensors. The block is the worker's again once no
tensor of that batch is held. If all blocks are held, a batch is sent as torch sends it.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from archive.arrays import fresh
from archive.base import UsageError
from archive.fields import Ragged
from archive.shard import codecs
from archive.torch.batches import Items, Padded, as_kind, check_kind
from archive.torch.batches import collate as collated
from archive.torch.datasets import EpisodeDataset, fetch
from archive.torch.epochs import Epoch, InEpochs
from archive.torch.streams import READ_ITEMS, StreamDataset

_REFUSED = ("sampler", "batch_sampler", "collate_fn", "drop_last", "persistent_workers", "in_order")
MAX_BLOCK_BYTES = 2**28
_ALIGNMENT = 64
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Loader(InEpochs):
    """Batches of a dataset: `for batch in loader` is one epoch, or what is left of it. Made by `loader(...)`."""

    def __init__(
        self, stream: StreamDataset, batch_size: int, num_workers: int, collate: Any, drop_last: bool, options: Any
    ) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.num_workers = num_workers
        collate = Padded() if collate == "padded" else collate  # which workers do
        self._kind = None if callable(collate) else check_kind(collate)
        self._collate: Callable[[Sequence[Any]], Any] = (
            collate if callable(collate) else list if collate == "list" else collated
        )
        self._options = options
        self._epoch = Epoch(
            stream.order, stream.rank, stream.world_size, max(1, num_workers), batch_size, drop_last=drop_last
        )
        self._epoch.load(stream.state_dict())

    def __len__(self) -> int:
        """The number of batches that are left of this epoch on this rank."""
        lanes = (self._epoch.ahead(w)[1] for w in range(self._epoch.split.num_workers))
        return sum(-(-len(left) // self.batch_size) for left in lanes)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch
        held = self._slots()
        if self.num_workers:
            codecs.prepare()  # once here, not in each worker of each epoch
        reader = None if held is None else Receiver(held)
        lane = _Lane(self.stream, epoch, self.batch_size, self._collate, held)
        batches = DataLoader(lane, batch_size=None, num_workers=self.num_workers, collate_fn=_as_it_is, **self._options)
        number, before = epoch.number, epoch.batches
        for seen, (lane, count, sent) in enumerate(batches):
            if (epoch.number, epoch.batches) != (number, before + seen):
                raise UsageError("the loader was iterated again or moved elsewhere; only one pass at a time goes on")
            epoch.deliver(lane, count)
            yield self._finished(sent if reader is None else reader.unpack(sent), count)
        epoch.begin(epoch.number + 1)

    def _slots(self) -> torch.Tensor | None:
        """For each worker as many slabs as batches it reads ahead, one that it writes, and what the caller holds."""
        if not self.num_workers or self._options.get("pin_memory"):
            return None
        return flags(self.num_workers, (self._options.get("prefetch_factor") or 2) + 3)

    def _finished(self, batch: Any, count: int) -> Any:
        return as_kind(batch, count, self._kind) if self._kind is not None else batch


def loader(
    dataset: Any,
    batch_size: int = 1,
    num_workers: int = 0,
    *,
    collate: Any = "dict",
    drop_last: bool = False,
    shuffle: str | bool | None = None,
    seed: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> Loader:
    """A loader of a map-style dataset, or of a stream, with `state_dict()` and `load_state_dict()`.

    collate: "dict" or "tensordict" (see `archive.torch.batches`), "padded" or a Padded, "list", or a function of
    the list of items.
    drop_last: only full batches, and on each rank and worker as many; else each item comes, and ranks may differ by a
    batch.  shuffle, seed, rank, world_size: as of StreamDataset, for map-style datasets; default is their own order.
    options: as of torch's DataLoader (multiprocessing_context, prefetch_factor, pin_memory, timeout, ...).
    """
    refused = [name for name in options if name in _REFUSED]
    if refused:
        raise UsageError(f"loader has no option {refused[0]!r}: the archive decides on items, batches and workers")
    if batch_size < 1 or num_workers < 0:
        raise UsageError(f"batch_size={batch_size} must be at least 1 and num_workers={num_workers} not negative")
    given = {"shuffle": shuffle, "seed": seed, "rank": rank, "world_size": world_size}
    stream = dataset
    if not isinstance(dataset, StreamDataset):
        stream = StreamDataset(dataset, shuffle=shuffle, seed=seed or 0, rank=rank, world_size=world_size)
    elif any(value is not None for value in given.values()):
        raise UsageError(f"the stream has {', '.join(given)} already; give them where it is made")
    return Loader(stream, batch_size, num_workers, collate, drop_last, options)


class _Lane(IterableDataset[Any]):
    """The dataset that workers run: each reads its lane, a batch at a time, and gives the lane and number of items of
    each batch."""

    def __init__(
        self, stream: StreamDataset, epoch: Epoch, batch_size: int, collate: Any, held: torch.Tensor | None
    ) -> None:
        self._dataset = stream.dataset
        self._epoch = epoch
        self._batch_size = batch_size
        self._collate = collate
        self._read_batches = max(1, READ_ITEMS // batch_size)
        self._held = held

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        worker = get_worker_info()
        lane, left = self._epoch.ahead(0 if worker is None else worker.id)
        sender = None if worker is None or self._held is None else Sender(worker.id, self._held)
        pack = _as_it_is if sender is None else sender.pack
        items, size = self._epoch.items(left), self._batch_size
        dataset, at_once = self._dataset, size * self._read_batches
        if getattr(dataset, "keeps_chunks", False):
            at_once = size
        reads_itself = getattr(type(dataset), "__getitems__", None) is EpisodeDataset.__getitems__
        if sender is not None and reads_itself and self._collate is collated:  # so that nobody keeps a part of a batch
            dataset = dataset.placing(sender.empty)
        for start in range(0, len(items), at_once):
            found = fetch(dataset, items[start : start + at_once])
            for first in range(0, len(found), size):
                some = found if len(found) <= size else _part(found, first, first + size)
                yield lane, len(some), pack(self._collate(some))


def _part(items: Sequence[Any], start: int, stop: int) -> Sequence[Any]:
    return items.part(start, stop) if isinstance(items, Items) else items[start:stop]


def _as_it_is(batch: Any) -> Any:
    return batch


# -- shared memory -----------------------------------------------------------------------------------------------------


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
    """A flag for each slot of each worker: it holds a batch that is in use. Shared with the workers."""
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
        layout, moved, size = _laid_out(batch, self._used, block)
        self._slot, self._used = None, 0
        if not isinstance(batch, dict) or not 0 < size <= MAX_BLOCK_BYTES or slot < 0:
            return batch
        if len(block) < size:
            layout, moved, size = _laid_out(batch, 0, _NOTHING)
            block = new = self._blocks[slot] = _shared(torch.empty(size, dtype=torch.uint8))
        for tensor, place in moved:
            _view(place, block).copy_(tensor.detach())
        self._held[slot] = 1
        return Packed(self._worker, slot, new, layout)

    def _next_slot(self) -> int:
        """A free slot, if possible one that has a block; -1 if there is none."""
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
        return _each(sent.nest, lambda leaf: _view(leaf, block) if isinstance(leaf, _Leaf) else leaf)


def _release(held: Any, key: tuple[int, int], pid: int) -> None:
    if os.getpid() == pid:  # a forked process lets go of copies only
        held[key] = 0


def _laid_out(batch: Any, start: int, block: torch.Tensor) -> tuple[Any, list[tuple[torch.Tensor, _Leaf]], int]:
    """The nest with its tensors' places, those that are to be copied there, and where the last place ends. Tensors that
    lie in the block stay where they are, others come from `start` on."""
    moved: list[tuple[torch.Tensor, _Leaf]] = []
    end = start

    def place(leaf: Any) -> Any:
        nonlocal end
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
            return leaf
        within = leaf.data_ptr() - block.data_ptr()
        there = 0 <= within < len(block) and leaf.is_contiguous()
        found = _Leaf(leaf.dtype, tuple(leaf.shape), within if there else _aligned(end))
        if not there:
            moved.append((leaf, found))
        end = max(end, found.offset + leaf.nbytes)
        return found

    return _each(batch, place), moved, end


def _each(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The nest with each leaf, also those of a Ragged, as `change` makes it."""
    if isinstance(nest, dict):
        return {key: _each(value, change) for key, value in nest.items()}
    return Ragged(*(_each(part, change) for part in nest)) if isinstance(nest, Ragged) else change(nest)


def _aligned(start: int) -> int:
    return -(-start // _ALIGNMENT) * _ALIGNMENT


def _view(leaf: _Leaf, block: torch.Tensor) -> torch.Tensor:
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    return block[leaf.offset : leaf.offset + size].view(leaf.dtype).view(leaf.shape)
