"""A DataLoader whose state is what it delivered, and that resumes in a world of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from archive.base import UsageError
from archive.datasets import sharedmemory
from archive.datasets.batches import Padded, as_kind, check_kind
from archive.datasets.batches import collate as collated
from archive.datasets.datasets import EpisodeDataset
from archive.datasets.epochs import Epoch, InEpochs
from archive.datasets.items import Items
from archive.datasets.streams import READ_ITEMS, StreamDataset, fetch
from archive.shard import rawchunks

_REFUSED = ("sampler", "batch_sampler", "collate_fn", "drop_last", "persistent_workers", "in_order")


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
        """Batches that are left of this epoch on this rank."""
        lanes = (self._epoch.ahead(w)[1] for w in range(self._epoch.split.num_workers))
        return sum(-(-len(left) // self.batch_size) for left in lanes)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch
        held = self._slots()
        if self.num_workers:
            rawchunks.prepare()  # once here, not in each worker of each epoch
        reader = None if held is None else sharedmemory.Receiver(held)
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
        return sharedmemory.flags(self.num_workers, (self._options.get("prefetch_factor") or 2) + 3)

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

    collate: "dict" or "tensordict" (see `archive.datasets.batches`), "padded" or a Padded, "list", or a function of
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
    """The dataset that workers run: each reads its lane, a batch at a time, and says which lane and how many items a
    batch is."""

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
        sender = None if worker is None or self._held is None else sharedmemory.Sender(worker.id, self._held)
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
