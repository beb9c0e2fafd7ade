"""Datasets that stream their items, each once an epoch over all workers of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from archive.arrays import Ints
from archive.base import UsageError
from archive.log import place
from archive.read import Episodes
from archive.torch.datasets import EpisodeDataset, StepDataset, WindowDataset, fetch
from archive.torch.epochs import Epoch, InEpochs, Order, Split

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
        epoch, worker = self._epoch, get_worker_info()
        if worker is None:
            left = epoch.ahead(0)[1]
        else:
            left = Split(epoch.left, self.world_size, worker.num_workers).lane(self.rank, worker.id)
        items = epoch.items(left)
        for start in range(0, len(items), READ_ITEMS):
            for item in fetch(self.dataset, items[start : start + READ_ITEMS]):
                if worker is None:
                    epoch.deliver(0, 1)
                yield item
        if worker is None:
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
