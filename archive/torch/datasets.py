"""Torch datasets over episodes: whole ones, windows that never cross an episode's end, single steps.

They pickle, survive fork, and open their own connections in each DataLoader worker. A DataLoader's batch is one read:
chunks that several of its items share are fetched once, and only the fields asked for. `archive.torch.loader` shares
them out over workers and ranks and resumes in the middle of an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import torch
from torch.utils.data import Dataset

from archive.arrays import Ints, fresh, group_of, offsets_of, spans
from archive.base import ColumnError, NotFoundError, UsageError, cached_property
from archive.checkpoint import MAIN_BUFFER, Checkpoint
from archive.fields import FieldSpec, Path, Ragged, ShardSchema, derived, mapped, put, to_tensors
from archive.read import Bounds, Empty, Episodes, Gather, Selection, Windows, derivations, sizes
from archive.torch.batches import Items, concatenated, filled, spread

Transform = Callable[[dict[str, Any]], Any]
CACHE_BYTES, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 2**29, 2**24, 2**30


class Reading(TypedDict, total=False):
    """The arguments of EpisodeDataset that say how the steps of an item are read."""

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
        feed = Feed(episodes)
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
        """The items of a batch, read together; `archive.torch.batches` makes one nest of them."""
        numbers, starts, stops = self.places(checked(indices, len(self)))
        if self._gathers is None or not len(numbers):
            return self._read_each(numbers, starts, stops)
        counts = stops - starts
        found = self._renumbered(self._read_together(numbers, starts, stops), np.repeat(numbers, counts))
        whole = self._whole(to_tensors(found), counts)
        plain = whole if self.transform is None else None
        return Items(len(numbers), lambda i: self._finished(mapped(whole, lambda leaf: _row(leaf, i))), whole=plain)

    def _read_together(self, numbers: Ints, starts: Ints, stops: Ints) -> dict[str, Any]:
        """Steps [starts, stops) of episodes, end to end, in memory that `_empty` makes."""
        assert self._gathers is not None
        out = _rows(self._gathers[None], numbers, starts, stops, self._empty)
        for derivation in self.derive:
            assert self._bounds is not None
            lo, hi = self._bounds.reach(derivation, numbers, starts, stops)
            values = _rows(self._gathers[derivation.fields], numbers, lo, hi) if derivation.fields else {}
            out = put(out, derivation, derivation.of(values, self._bounds.rows(numbers, starts, stops, lo, hi)))
        return out

    def _read_each(self, numbers: Ints, starts: Ints, stops: Ints) -> Items:
        """Items of fields that do not lie end to end in one array."""
        each = derivations.read(self.episodes, numbers, starts, stops, self._selection, self.derive, self._bounds)
        parts = zip(each, numbers, (stops - starts).tolist(), strict=True)
        nests = [self._shaped(to_tensors(self._renumbered(d, np.full(n, number))), n) for d, number, n in parts]
        ragged, opaque = self._odd_fields
        return Items(
            len(nests), lambda i: self._finished(nests[i]), ragged=ragged, opaque=opaque, varying=self._varying
        )

    def keeping(self, steps: float) -> Self:
        """The same items; unless cache_bytes was given, the chunks of about so many steps are kept."""
        if self.cache_bytes is not None:
            return self
        other = copy.copy(self)
        other.__dict__.pop("_gathers", None)
        step_bytes = sizes.step_bytes(self._schemas, *self._wanted)
        other.cache_bytes = int(min(LEAST_CACHE_BYTES + 1.5 * steps * step_bytes, MOST_CACHE_BYTES))
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
        """True if reading on needs no chunk again that was just read."""
        return self._gathers is not None

    def places(self, items: Ints) -> tuple[Ints, Ints, Ints]:
        """The number of the episode of some items, the first step of each, and the step after its last."""
        return items, np.zeros_like(items), self._lengths[items]

    @property
    def steps_per_item(self) -> float:
        """The number of steps by which the next item begins later, on the average."""
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
    def _odd_fields(self) -> tuple[frozenset[Path], frozenset[Path]]:
        """Fields that are ragged in a batch, which in items of varying length all of one row a step are; and JSON."""
        specs = [spec for one in self._schemas for spec in self._selection.specs(one).values()]
        axes = ("step", "offset", "ragged") if self._varying else ("ragged",)
        ragged = {s.path for s in specs if s.axis in axes and s.dtype != "json"}
        ragged |= {d.name for d in self.derive if self._varying}
        return frozenset(ragged), frozenset(s.path for s in specs if s.dtype == "json")

    @property
    def _wanted(self) -> list[Selection]:
        """The fields chosen, and each set of fields that something is derived from."""
        return [self._selection, *(Selection(one) for one in dict.fromkeys(d.fields for d in self.derive if d.fields))]

    @cached_property
    def _gathers(self) -> dict[Hashable, Gather] | None:
        """Readers of many steps into one array a field: of the fields chosen (None), and of each set of fields that
        something is derived from. They keep the chunks that they read.

        None where some field that is read is not numbers of one shape, one row a step, the same in all episodes.
        """
        if not all(_same_fields([one.specs(schema) for schema in self._schemas]) for one in self._wanted):
            return None
        kept = CACHE_BYTES if self.cache_bytes is None else self.cache_bytes
        own = Gather(self.episodes, self._selection.names, missing=self._selection.missing, cache_bytes=kept)
        return {None: own} | {d.fields: own.also(d.fields) for d in self.derive if d.fields}

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
        self,
        episodes: Any,
        length: int,
        stride: int = 1,
        pad: bool = False,
        fields: Any = None,
        **reading: Unpack[Reading],
    ) -> None:
        super().__init__(episodes, fields, **reading)
        self._windows = Windows(self._lengths, length, stride, pad)
        self.length = length
        self.stride = stride
        self.pad = pad

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def steps_per_item(self) -> float:
        return self.stride

    def places(self, items: Ints) -> tuple[Ints, Ints, Ints]:
        return self._windows.places(items)

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
        """A mask of the steps of padded windows that are real."""
        return torch.arange(self.length) < torch.from_numpy(counts)[:, None]


class StepDataset(WindowDataset):
    """Item i is one step: a nested dict of tensors without a step axis."""

    def __init__(self, episodes: Any, fields: Any = None, **reading: Unpack[Reading]) -> None:
        super().__init__(episodes, 1, fields=fields, **reading)

    def _shaped(self, nest: dict[str, Any], steps: int) -> dict[str, Any]:
        out: dict[str, Any] = mapped(nest, _first_row)
        return out

    def _whole(self, nest: dict[str, Any], counts: Ints) -> dict[str, Any]:
        return nest


def fetch(dataset: Any, items: Ints) -> Sequence[Any]:
    """Some items of a map-style dataset, in one read where it can."""
    if hasattr(dataset, "__getitems__"):
        found: Sequence[Any] = dataset.__getitems__(items.tolist())
        return found
    return [dataset[i] for i in items.tolist()]


def checked(indices: Sequence[int], count: int) -> Ints:
    """Items by number, of negative ones those from the end; IndexError for one that is not there."""
    items = np.asarray(indices, np.int64)
    wrong = items[(items < -count) | (items >= count)]
    if len(wrong):
        raise IndexError(f"item {wrong[0]} of a dataset of {count}")
    return np.where(items < 0, items + count, items)


def _rows(gather: Gather, numbers: Ints, starts: Ints, stops: Ints, empty: Empty = fresh) -> dict[str, Any]:
    counts = stops - starts
    return gather.rows(np.repeat(numbers, counts), spans(starts, counts), empty=empty)


def _row(leaf: Any, i: int) -> Any:
    """An array that torch has no dtype for, and lists, are indexed as tensors are."""
    if not isinstance(leaf, Ragged):
        return leaf[i]
    stop = int(leaf.lengths[: i + 1].sum())
    return leaf.values[stop - int(leaf.lengths[i]) : stop]


def _first_row(leaf: Any) -> Any:
    """The first row of a leaf that has rows, else the leaf."""
    rows = isinstance(leaf, list) or (isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim)
    return leaf[0] if rows and len(leaf) else leaf


def _same_fields(found: Sequence[dict[Path, FieldSpec]]) -> bool:
    kinds = {(path, s.axis, s.dtype, s.shape) for specs in found for path, s in specs.items()}
    return bool(found and found[0]) and len(kinds) == len(found[0]) and all(map(_has_plain_rows, found[0].values()))


def _has_plain_rows(spec: FieldSpec) -> bool:
    return spec.axis == "step" and spec.dtype not in ("str", "json") and spec.dtype[1:2] != "U"


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
    own = [part for part in parts if isinstance(part, Items)]
    ragged, opaque = (frozenset[Path]().union(*(getattr(one, name) for one in own)) for name in ("ragged", "opaque"))
    order = [every[i] for i in back.tolist()]
    return Items(
        len(order),
        lambda i: order[i][0][order[i][1]],
        whole=whole,
        ragged=ragged,
        opaque=opaque,
        varying=any(one.varying for one in own),
    )


# -- what they are of --------------------------------------------------------------------------------------------------


class Feed:
    """Episodes that items are drawn from, and what belongs to their steps: from Episodes, an archive, a checkpoint, a
    share of a plan, or one buffer of a share."""

    def __init__(self, given: Any, buffer: str | None = None) -> None:
        self._share: Any = None
        self._checkpoint: Checkpoint | None = None
        # of the type: they are read when asked for
        self.is_share = hasattr(type(given), "layout") and hasattr(type(given), "columns")
        self.seed: int | None = given.seed if self.is_share else None
        if isinstance(given, Checkpoint):
            if buffer is not None and buffer not in given.buffers:
                raise NotFoundError(
                    f"checkpoint {given.name!r} has no buffer {buffer!r}; it has: {', '.join(given.buffers) or 'none'}"
                )
            own = MAIN_BUFFER if MAIN_BUFFER in given.buffers else next(iter(given.buffers), MAIN_BUFFER)
            self._checkpoint, self._buffer = given, buffer or own
            self.episodes: Episodes = given.episodes.filter(buffer=self._buffer)
        elif self.is_share:
            self._share = given if buffer is None else given.buffer(buffer)
            self.episodes = self._share.episodes
        else:
            episodes = given if isinstance(given, Episodes) else getattr(given, "episodes", None)
            if not isinstance(episodes, Episodes):
                raise UsageError(
                    f"batches cannot be drawn from a {type(given).__name__}; give Episodes, an archive, a checkpoint "
                    "or a share"
                )
            self.episodes = episodes if buffer is None else episodes.filter(buffer=buffer)

    def column(self, name: str) -> Any:
        """A column of a checkpoint or a share: one value a step."""
        if self._checkpoint is not None:
            parts = [self._checkpoint.column(name, rank, self._buffer) for rank in self._checkpoint.ranks]
            return np.concatenate(parts) if parts else np.zeros(0)
        if self._share is None:
            raise ColumnError(
                f"column {name!r} belongs to a checkpoint: draw from the checkpoint or a share of it, or give an array "
                "of one value a step"
            )
        columns = self._share.columns
        if name not in columns:
            raise ColumnError(f"there is no column {name!r}; there are: {', '.join(columns) or 'none'}")
        return columns[name]

    def renumbered(self, batch: dict[str, Any], numbers: Ints) -> dict[str, Any]:
        """The batch with the ids that its steps have here; numbers: of the episode of each row."""
        out: dict[str, Any] = batch if self._share is None else self._share.renumber_rows(batch, numbers)
        return out
