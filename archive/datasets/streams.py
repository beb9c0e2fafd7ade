"""Datasets that stream their items, each once an epoch over all workers of all ranks; several datasets as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from archive.arrays import Ints, group_of, offsets_of
from archive.base import FieldError, UsageError, show
from archive.datasets.datasets import EpisodeDataset, StepDataset, WindowDataset, checked
from archive.datasets.epochs import Epoch, InEpochs, Order, Split
from archive.datasets.items import Collation, Items
from archive.fields import Path, Ragged, mapped
from archive.log import place
from archive.read import Episodes

_SHUFFLES: dict[Any, Any] = {True: "full", False: None}  # as torch's DataLoader says it
BLOCK_STEPS, POOL_BLOCKS, READ_ITEMS = 256, 32, 64


class StreamDataset(InEpochs, IterableDataset[Any]):
    """The items of a map-style dataset as a stream: one pass over it is one epoch, or what is left of it.

    dataset: one of this package, or any with a length and items by number. Episodes, an archive, a checkpoint or a
    share are streamed as whole episodes.

    shuffle: "blocks" (default) shuffles within a pool of 32 blocks of about 256 neighbouring steps each, and the blocks
    themselves, so that a reader keeps the chunks of one pool and decodes each once. "full" is any order, None the
    dataset's own. The order follows from (seed, epoch) alone.
    rank, world_size: from torch.distributed, else RANK and WORLD_SIZE, else a world of one. Workers of a DataLoader
    share out what is their rank's. All items come once, so ranks and workers differ by up to one item.

    Read in this process, it has a state of its own. With workers use `archive.torch.loader`, whose state tells what
    they delivered from what they have only read ahead.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        shuffle: str | bool | None = "blocks",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if isinstance(dataset, Episodes) or not hasattr(dataset, "__getitem__"):
            dataset = EpisodeDataset(dataset)
        here = place(rank, world_size, "data", "data")
        self.dataset = dataset
        self.rank = here.rank
        self.world_size = here.world_size
        block_items = max(1, round(BLOCK_STEPS / max(getattr(dataset, "steps_per_item", 1.0), 1e-9)))
        how = _SHUFFLES.get(shuffle, shuffle)
        self.order = Order(len(dataset), how, seed, min(block_items, max(1, len(dataset))), POOL_BLOCKS)
        if how != "full" and hasattr(dataset, "keeping"):
            self.dataset = dataset.keeping(0 if how is None else self.order.pool_items * dataset.steps_per_item)
        self._epoch = Epoch(self.order, self.rank, self.world_size)
        self._items: tuple[Any, Ints] | None = None  # those of the epoch that `take` is in

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None:
            split = Split(self._epoch.left, self.world_size, worker.num_workers)
            for items in self._read(self._epoch.items(split.lane(self.rank, worker.id))):
                yield from items
            return
        epoch = self._epoch
        lane, left = epoch.ahead(0)
        for items in self._read(epoch.items(left)):
            for item in items:
                epoch.deliver(lane, 1)
                yield item
        epoch.begin(epoch.number + 1)

    def take(self, count: int) -> list[Sequence[Any]]:
        """The next items in this process, epoch after epoch: one group from each epoch that they are of."""
        groups = []
        while count:
            some = self._ahead(count)
            groups.append(fetch(self.dataset, some))
            self._epoch.deliver(0, len(some))
            count -= len(some)
        return groups

    def _ahead(self, count: int) -> Ints:
        """Up to `count` items that come next; of the next epoch where this one is at its end."""
        epoch = self._epoch
        for _ in range(2):
            taken, whole = epoch.taken[0], epoch.split.lane(self.rank, 0)
            if taken < len(whole):
                if self._items is None or self._items[0] != (epoch.number, id(epoch.split)):
                    self._items = (epoch.number, id(epoch.split)), epoch.items(whole)
                return self._items[1][taken : taken + count]
            epoch.begin(epoch.number + 1)
        raise UsageError(f"rank {self.rank} of {self.world_size} has no item of a dataset of {len(self.dataset)}")

    def _read(self, items: Ints) -> Iterator[Sequence[Any]]:
        for start in range(0, len(items), READ_ITEMS):
            yield fetch(self.dataset, items[start : start + READ_ITEMS])


def fetch(dataset: Any, items: Ints) -> Sequence[Any]:
    """Some items of a map-style dataset, in one read where it can."""
    if hasattr(dataset, "__getitems__"):
        found: Sequence[Any] = dataset.__getitems__(items.tolist())
        return found
    return [dataset[i] for i in items.tolist()]


_OWN = frozenset({"shuffle", "seed", "rank", "world_size"})


class _Made(StreamDataset):
    """The stream of a dataset that it makes; arguments as of that, and by keyword those of StreamDataset."""

    made: type[EpisodeDataset]

    def __init__(self, episodes: Any, *args: Any, **options: Any) -> None:
        own = {name: options.pop(name) for name in _OWN & options.keys()}
        super().__init__(self.made(episodes, *args, **options), **own)


class EpisodeStream(_Made):
    """Whole episodes as a stream; arguments as of EpisodeDataset, and by keyword those of StreamDataset."""

    made = EpisodeDataset


class WindowStream(_Made):
    """Windows as a stream; arguments as of WindowDataset, and by keyword those of StreamDataset."""

    made = WindowDataset


class StepStream(_Made):
    """Single steps as a stream; arguments as of StepDataset, and by keyword those of StreamDataset."""

    made = StepDataset


# -- several datasets as one -------------------------------------------------------------------------------------------


class JoinedDataset(Dataset[Any]):
    """Several map-style datasets as one: the items of the first, then those of the next. Made by `join(...)`."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = list(datasets)
        self._offsets = offsets_of(np.array([len(d) for d in self.datasets], np.int64))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    @property
    def steps_per_item(self) -> float:
        steps = sum(len(d) * float(getattr(d, "steps_per_item", 1)) for d in self.datasets)
        return steps / max(1, len(self))

    def keeping(self, steps: float) -> JoinedDataset:
        """The same items; each dataset keeps the chunks of about so many steps."""
        return JoinedDataset([d.keeping(steps) if hasattr(d, "keeping") else d for d in self.datasets])

    @property
    def keeps_chunks(self) -> bool:
        return all(getattr(d, "keeps_chunks", False) for d in self.datasets)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The items of a batch: one read for each dataset that has some of them."""
        items = checked(indices, len(self))
        owner = group_of(self._offsets, items)
        places = [np.flatnonzero(owner == i) for i in range(len(self.datasets))]
        some = [(i, where) for i, where in enumerate(places) if len(where)]
        parts = [fetch(self.datasets[i], items[where] - self._offsets[i]) for i, where in some]
        back = np.argsort(np.concatenate([where for _, where in some]), kind="stable") if some else items
        return _joined(parts, back)


def join(*datasets: Any) -> JoinedDataset:
    """Several datasets, of several archives say, as one: for a DataLoader, `archive.torch.loader` or a stream."""
    if not datasets:
        raise UsageError("join needs at least one dataset")
    return JoinedDataset(datasets)


def _joined(parts: Sequence[Sequence[Any]], back: Ints) -> Sequence[Any]:
    """The items of several reads, in the order asked for."""
    every = [(part, i) for part in parts for i in range(len(part))]
    wholes = [getattr(part, "whole", None) for part in parts]
    whole = None
    if wholes and all(w is not None for w in wholes):
        index = torch.from_numpy(back)
        whole = mapped(concatenated(wholes), lambda rows: rows[index])
    collations = [part.collation for part in parts if isinstance(part, Items)]
    ragged = frozenset[Path]().union(*(one.ragged for one in collations))
    opaque = frozenset[Path]().union(*(one.opaque for one in collations))
    joined = Collation(ragged, opaque, any(one.varying for one in collations))
    order = [every[i] for i in back.tolist()]
    return Items(len(order), lambda i: order[i][0][order[i][1]], whole=whole, collation=joined)


def concatenated(parts: Sequence[Any], names: Sequence[str] = (), path: Path = ()) -> Any:
    """Nests of tensors end to end; they must have the same fields, dtypes and shapes."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        for i, other in enumerate(parts):
            if not isinstance(other, dict) or other.keys() != first.keys():
                raise _unlike(names, i, path, set(first) ^ set(other) if isinstance(other, dict) else {"a nest"})
        return {k: concatenated([p[k] for p in parts], names, (*path, k)) for k in first}
    if isinstance(first, Ragged):
        values, lengths = (concatenated([p[j] for p in parts], names, path) for j in (0, 1))
        return Ragged(values, lengths)
    if isinstance(first, torch.Tensor):
        for i, other in enumerate(parts):
            if not isinstance(other, torch.Tensor) or (other.dtype, other.shape[1:]) != (first.dtype, first.shape[1:]):
                raise _unlike(names, i, path, {f"{_kind(first)} and {_kind(other)}"})
        return torch.cat(list(parts))
    return [value for part in parts for value in part]


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape[1:])}" if isinstance(value, torch.Tensor) else type(value).__name__


def _unlike(names: Sequence[str], i: int, path: Path, what: set[str]) -> FieldError:
    who = f"sources {names[0]!r} and {names[i]!r}" if names else "the parts"
    return FieldError(
        f"{who} differ{f' in {show(path)!r}' if path else ''}: {', '.join(sorted(map(str, what)))}; choose the fields "
        "that all have (fields=), fill in what is missing (missing=), or convert with transform="
    )
