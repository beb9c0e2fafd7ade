"""Torch datasets over episodes: whole ones, windows that never cross an episode's end, single steps.

They pickle, survive fork, and open their own connections in each DataLoader worker. A DataLoader's batch is one read:
chunks that several of its items share are fetched once, and only the fields asked for. `archive.torch.loader` shares
them out over workers and ranks and resumes in the middle of an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import torch
from torch.utils.data import Dataset

from archive.arrays import Ints, fresh, group_of, offsets_of
from archive.base import UsageError, cached_property
from archive.datasets.batches import Batches, alike, collation_of, row_bytes
from archive.datasets.feeds import feed_of
from archive.datasets.items import Collation, Items
from archive.datasets.rows import filled, first_row, row_of, spread
from archive.fields import Ragged, ShardSchema, derived, mapped, to_tensors
from archive.read import Bounds, Empty, Episodes, Selection, deriving

Transform = Callable[[dict[str, Any]], Any]
CACHE_BYTES, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 2**29, 2**24, 2**30


class Reading(TypedDict, total=False):
    """How the steps of an item are read; the arguments of EpisodeDataset."""

    derive: Any
    missing: Any
    transform: Transform | None
    cache_bytes: int | None


class EpisodeDataset(Dataset[Any]):
    """Item i is episode i: a nested dict of tensors, axis 0 the step.

    episodes: Episodes, an archive, a checkpoint, or a share of a plan (which has its ids renumbered).
    fields, missing: as in `Episodes.read`.  derive: fields computed on reading, see `archive.fields.derived`.
    transform: what makes an item of a nest of tensors.
    cache_bytes: how much of the chunks last read is kept, in each process; default half a gigabyte, and for streams
    and loaders what their order needs.
    """

    _varying = True  # items differ in their number of steps

    def __init__(
        self,
        episodes: Any,
        fields: Any = None,
        *,
        derive: Any = (),
        missing: Any = "error",
        transform: Transform | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        feed = feed_of(episodes)
        self.episodes: Episodes = feed.episodes
        self.derive = derived.parse(derive)
        self.transform = transform
        self.cache_bytes = cache_bytes
        self._renumbered = feed.renumbered
        self._selection = Selection(fields, missing)
        self._empty: Empty = fresh

    def __len__(self) -> int:
        return len(self.episodes)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The items of a batch, read together; `archive.datasets.collating` makes one nest of them."""
        numbers, starts, stops = self.places(checked(indices, len(self)))
        if self._batches is None or not len(numbers):
            return self._read_each(numbers, starts, stops)
        counts = stops - starts
        found = self._renumbered(self._batches.read(numbers, starts, stops, self._empty), np.repeat(numbers, counts))
        whole = self._whole(to_tensors(found), counts)
        plain = whole if self.transform is None else None
        return Items(len(numbers), lambda i: self._finished(row_of(whole, i)), whole=plain)

    def _read_each(self, numbers: Ints, starts: Ints, stops: Ints) -> Items:
        """Items of fields that do not lie end to end in one array."""
        each = deriving.read(self.episodes, numbers, starts, stops, self._selection, self.derive, self._bounds)
        parts = zip(each, numbers, (stops - starts).tolist(), strict=True)
        nests = [self._shaped(to_tensors(self._renumbered(d, np.full(n, number))), n) for d, number, n in parts]
        return Items(len(nests), lambda i: self._finished(nests[i]), collation=self._collation)

    def keeping(self, steps: float) -> Self:
        """The same items; unless cache_bytes was given, the chunks of about so many steps are kept."""
        if self.cache_bytes is not None:
            return self
        other = copy.copy(self)
        other.__dict__.pop("_batches", None)
        needed = LEAST_CACHE_BYTES + 1.5 * steps * row_bytes(self._schemas, self._selection, self.derive)
        other.cache_bytes = int(min(needed, MOST_CACHE_BYTES))
        return other

    def placing(self, empty: Empty) -> Self:
        """The same items, for whoever is done with a batch before it asks for the next: their arrays lie in memory that
        `empty` makes. What transforms items may keep some, so these lie in memory of their own."""
        if self.transform is not None:
            return self
        other = copy.copy(self)
        other._empty = empty
        return other

    @property
    def keeps_chunks(self) -> bool:
        """Whether reading on needs no chunk again that was just read."""
        return self._batches is not None

    def places(self, items: Ints) -> tuple[Ints, Ints, Ints]:
        """Of some items: the number of the episode, the first step, and the step after the last."""
        return items, np.zeros_like(items), self._lengths[items]

    @property
    def steps_per_item(self) -> float:
        """How many steps further the next item begins, on the average."""
        return float(self._lengths.sum()) / max(1, len(self))

    @cached_property
    def _lengths(self) -> Ints:
        return self.episodes.lengths()

    @cached_property
    def _bounds(self) -> Bounds | None:
        return Bounds(self.episodes) if self.derive else None

    @cached_property
    def _schemas(self) -> list[ShardSchema]:
        return self.episodes.schemas

    @cached_property
    def _collation(self) -> Collation:
        return collation_of(self._schemas, self._selection, self.derive, varying=self._varying)

    @cached_property
    def _batches(self) -> Batches | None:
        """What reads a batch into arrays at once; None where some field is not numbers of one shape, a row a step."""
        if not alike(self._schemas, self._selection, self.derive):
            return None
        kept = CACHE_BYTES if self.cache_bytes is None else self.cache_bytes
        return Batches(self.episodes, self._selection, self.derive, self._bounds, kept)

    def _shaped(self, nest: dict[str, Any], steps: int) -> dict[str, Any]:
        """An item's nest of tensors, from that of the steps read."""
        return nest

    def _whole(self, nest: dict[str, Any], counts: Ints) -> dict[str, Any]:
        """A batch's nest, from the steps of all its items end to end."""
        lengths: Any = torch.from_numpy(counts)
        out: dict[str, Any] = mapped(nest, lambda rows: Ragged(rows, lengths))
        return out

    def _finished(self, nest: dict[str, Any]) -> Any:
        return nest if self.transform is None else self.transform(nest)


class WindowDataset(EpisodeDataset):
    """Item i is a window of `length` steps of one episode, every `stride` steps; it never crosses an episode's end. Of
    a checkpoint, it is of the steps that were live then, one after the other.

    pad=False: only full windows. pad=True: windows begin up to the last step, and shorter ones are filled with zeros
    (strings with ""); the tensor "mask" says which steps are real.
    """

    _varying = False

    def __init__(
        self, episodes: Any, length: int, stride: int = 1, pad: bool = False, fields: Any = None,
        **reading: Unpack[Reading],
    ) -> None:  # fmt: skip
        if length < 1 or stride < 1:
            raise UsageError(f"length={length} and stride={stride} must both be at least 1")
        super().__init__(episodes, fields, **reading)
        self.length = length
        self.stride = stride
        self.pad = pad
        full = self._lengths if pad else self._lengths - length + 1
        self._offsets = offsets_of(np.maximum(-(-full // stride), 0))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @property
    def steps_per_item(self) -> float:
        return self.stride

    def place(self, index: int) -> tuple[int, int]:
        """(number of the episode, first step) of a window."""
        numbers, starts, _ = self.places(checked([index], len(self)))
        return int(numbers[0]), int(starts[0])

    def places(self, items: Ints) -> tuple[Ints, Ints, Ints]:
        numbers = group_of(self._offsets, items)
        starts = (items - self._offsets[numbers]) * self.stride
        return numbers, starts, np.minimum(starts + self.length, self._lengths[numbers])

    def _shaped(self, nest: dict[str, Any], steps: int) -> dict[str, Any]:
        if not self.pad:
            return nest
        return {
            **mapped(nest, partial(filled, steps=steps, length=self.length)),
            "mask": torch.arange(self.length) < steps,
        }

    def _whole(self, nest: dict[str, Any], counts: Ints) -> dict[str, Any]:
        if len(counts) * self.length == int(counts.sum()):
            out = mapped(nest, lambda rows: rows.reshape(len(counts), self.length, *rows.shape[1:]))
        else:
            out = mapped(nest, lambda rows: spread(rows, self._mask(counts)))
        return {**out, "mask": self._mask(counts)} if self.pad else out

    def _mask(self, counts: Ints) -> torch.Tensor:
        """Which steps of padded windows are real."""
        return torch.arange(self.length) < torch.from_numpy(counts)[:, None]


class StepDataset(WindowDataset):
    """Item i is one step: a nested dict of tensors without a step axis."""

    def __init__(self, episodes: Any, fields: Any = None, **reading: Unpack[Reading]) -> None:
        super().__init__(episodes, 1, fields=fields, **reading)

    def _shaped(self, nest: dict[str, Any], steps: int) -> dict[str, Any]:
        out: dict[str, Any] = mapped(nest, first_row)
        return out

    def _whole(self, nest: dict[str, Any], counts: Ints) -> dict[str, Any]:
        return nest


def checked(indices: Sequence[int], count: int) -> Ints:
    """Items by number, of negative ones those from the end; IndexError for one that is not there."""
    items = np.asarray(indices, np.int64)
    wrong = items[(items < -count) | (items >= count)]
    if len(wrong):
        raise IndexError(f"item {wrong[0]} of a dataset of {count}")
    return np.where(items < 0, items + count, items)
