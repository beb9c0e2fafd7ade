"""Reading steps of episodes: their rows are planned as vectors, fetched chunk by chunk and decoded into place, also
into memory of the caller's; nests of episodes are made of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from archive.arrays import Ints, Pieces, ascending, group_of, numbers, reuse_freed_memory
from archive.base import FieldError, IntegrityError, jsontree, show
from archive.fields import Array, FieldSpec, Path, Ragged, axis_of, dtypes, flatten, is_tensor, unflatten_all
from archive.index import Snapshot
from archive.read import sizes
from archive.read.chunks import LastChunks, LateFields, ReadPlan, Segments, Shards, Want, fetch
from archive.read.plan import EpisodeGroup, FieldRead, plan
from archive.read.selection import Selection, path_of
from archive.read.spans import Shown, Spans, shown
from archive.tables import STRETCH

_LARGE_BYTES = 256 * 1024 * 1024
Request = tuple[Spans, Selection]
Build = Callable[[Sequence[EpisodeGroup], Selection], list[Any]]


class Destination:
    """Arrays or tensors by the names of fields, for the rows of all episodes, end to end in the order of the episodes.

    starts, places: row `starts[i]`, and those after it up to starts[i + 1], go to row places[i] and on, instead.
    """

    def __init__(self, out: Any, starts: Ints | None = None, places: Ints | None = None) -> None:
        self.starts = starts
        self._places = places
        self._arrays = {path: _array(leaf, show(path)) for path, leaf in flatten(out)}

    def take(self, groups: Sequence[EpisodeGroup]) -> None:
        """Direct the fields of these episodes here; FieldError for an array that they do not fit."""
        for path, array in self._arrays.items():
            lacking = [group for group in groups if path not in group.fields]
            if lacking or not groups:
                raise FieldError(
                    f"out has an array for field {show(path)!r}, which these episodes do not all have, or which is not "
                    "among those that are read; leave it out of out="
                )
            fields = [group.fields[path] for group in groups]
            rows = [_rows_of(field.spec, array) for field in fields]
            first = self._firsts(groups, fields, path, array)
            for group, field, own in zip(groups, fields, rows, strict=True):
                field.own = Pieces.whole(own)
                episode = field.cuts.episode
                field.at = self._placed(field.at - field.ends[episode] + first[group.episodes][episode])

    def _firsts(self, groups: Sequence[EpisodeGroup], fields: Sequence[FieldRead], path: Path, array: Array) -> Ints:
        """The first row of each episode, end to end."""
        counts = np.zeros(sum(len(group.episodes) for group in groups), np.int64)
        for group, field in zip(groups, fields, strict=True):
            counts[group.episodes] = np.diff(field.ends)
        if self._places is None and len(array) != counts.sum():
            raise FieldError(
                f"out[{show(path)!r}] has {len(array)} rows, the episodes have {int(counts.sum())}; give an array of "
                "as many"
            )
        return np.cumsum(counts) - counts

    def _placed(self, rows: Ints) -> Ints:
        if self.starts is None or self._places is None:
            return rows
        run = group_of(self.starts, rows)
        placed: Ints = self._places[run] + rows - self.starts[run]
        return placed


class Reader:
    """A reader of one snapshot's steps. It keeps small, immutable data: places of chunks, and metadata of shards."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.shards = Shards(snapshot)
        self._added: LateFields | None = None
        reuse_freed_memory()

    def __getstate__(self) -> dict[str, Any]:
        return {"snapshot": self.snapshot}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["snapshot"])  # type: ignore[misc]

    def as_written(self) -> Reader:
        """The same without derived columns."""
        if not self.snapshot.annotations.head.late:
            return self
        return Reader(self.snapshot.as_written())

    def read(
        self, spans: Spans, selection: Selection, tails: LastChunks | None = None, into: Destination | None = None
    ) -> list[dict[str, Any]]:
        """A nested dict for each episode, fetched together.

        tails: see `archive.read.chunks.fetch`.  into: memory of the caller's, which the result shares.
        """
        return self._read([(spans, selection)], _nests, tails, into)[0]

    def read_into(self, spans: Spans, selection: Selection, into: Destination) -> None:
        """Put fields of one row a step into memory of the caller's, at the places that it names."""
        split = spans if into.starts is None else spans.split(into.starts)
        self._read([(split, selection)], _nothing, None, into)

    def read_each(self, requests: Sequence[Request]) -> list[list[dict[str, Any]]]:
        """Read several requests, fetched together: each chunk once."""
        return self._read(requests, _nests)

    def read_stored(self, spans: Spans) -> list[dict[str, Array | Ragged]]:
        """The fields of each episode in their stored form, by name, fetched together: for writing them again.

        Derived columns are left out: they belong to steps, wherever these are stored.
        """
        segments = Segments(self.snapshot, ascending(spans.rows))
        return self._read([(spans, Selection())], _stored, segments=segments)[0]

    def plan(self, spans: Spans) -> ReadPlan:
        """The requests that reading all fields takes, metadata included; the same whatever was read before."""
        segments = self.segments(spans.rows)
        return fetch.plan(self.shards, segments, _wants([plan(spans, Selection(), segments)], segments))

    def sizes(self, spans: Spans, selection: Selection | None = None) -> Ints:
        """Bytes of the steps of each episode, uncompressed, in the selected fields; no data is read. Text counts as 8 a
        value."""
        view = self.shown(spans)
        rows = self.snapshot.take(view.spans.rows, sizes.COLUMNS)
        return sizes.of_spans(view.spans, rows, view.schemas, view.code, selection or Selection())

    def shard_bytes(self, spans: Spans) -> int:
        """Bytes of all members of the shards of these spans."""
        return sum(self.shards.sizes(self.segments(spans.rows)).values())

    def segments(self, rows: Any) -> Segments:
        """Rows of the segments table, each once."""
        return Segments(self.snapshot, ascending(rows), self._late if self.snapshot.annotations.head.late else None)

    @property
    def _late(self) -> LateFields:
        """The derived columns, as of the commit whose ones apply."""
        table = self.snapshot.annotations.late
        if self._added is None or self._added.table is not table:
            self._added = LateFields(table, self.snapshot.columns(STRETCH))
        return self._added

    def schema_texts(self, rows: Ints) -> list[str]:
        """The distinct schemas of rows of the segments table, with derived columns; no data is read."""
        table = self.snapshot.take(rows, ["schema", "length"])
        if not self.snapshot.annotations.head.late:
            found: list[str] = table["schema"].unique().to_pylist()
            return found
        spans = Spans.of_each(rows, np.zeros(len(rows), np.int64), numbers(table["length"]))
        return list(dict.fromkeys(one.dumps() for one in self.shown(spans).schemas))

    def shown(self, spans: Spans) -> Shown:
        """The fields of these steps."""
        return shown(spans, self.segments(spans.rows))

    def _read(
        self,
        requests: Sequence[Request],
        build: Build,
        tails: LastChunks | None = None,
        into: Destination | None = None,
        segments: Segments | None = None,
    ) -> list[list[dict[str, Any]]]:
        if segments is None:
            segments = self.segments(np.concatenate([spans.rows for spans, _ in requests]))
        groups = [plan(spans, selection, segments) for spans, selection in requests]
        if into is not None:
            into.take(groups[0])
        fields = [field for own in groups for group in own for field in group.fields.values()]
        if sum(field.most_bytes for field in fields) > _LARGE_BYTES:  # before memory is made for rows that no chunk has
            fetch.plan(self.shards, segments, _wants(groups, segments))
        for field in fields:
            field.prepare()
        fetch.fill(self.shards, segments, _wants(groups, segments), tails)
        try:
            return [build(own, selection) for own, (_, selection) in zip(groups, requests, strict=True)]
        except IntegrityError as e:
            episodes = sum(len(spans) for spans, _ in requests)
            raise type(e)(f"{e} (reading {episodes} episodes at {self.snapshot.storage.url})") from e


def _wants(groups: Sequence[Sequence[EpisodeGroup]], segments: Segments) -> list[Want]:
    every = (field for own in groups for group in own for field in group.fields.values())
    return [want for field in every for want in field.wants(segments.shard)]


def _nests(groups: Sequence[EpisodeGroup], selection: Selection) -> list[dict[str, Any]]:
    """The nested dict of each episode of a request; arrays may share memory with those of a few neighbours."""
    out: list[dict[str, Any]] = [{} for _ in range(sum(len(group.episodes) for group in groups))]
    for group in groups:
        columns = {path: _column(path, group, selection) for path in group.paths}
        columns |= {path_of(name): [selection.filled(name, n) for n in group.steps.tolist()] for name in group.absent}
        made = unflatten_all(list(columns), list(columns.values()), len(group.episodes))
        for number, nest in zip(group.episodes.tolist(), made, strict=True):
            out[number] = nest
    return out


def _stored(groups: Sequence[EpisodeGroup], selection: Selection) -> list[dict[str, Array | Ragged]]:
    """The fields of each episode of a request in their stored form, by name."""
    out: list[dict[str, Array | Ragged]] = [{} for _ in range(sum(len(group.episodes) for group in groups))]
    for group in groups:
        for field in group.fields.values():
            values = axis_of(field.spec).build(field.complete(), field.episodes, lambda rows: rows)
            for number, value in zip(group.episodes.tolist(), values, strict=True):
                out[number][field.spec.name] = value
    return out


def _nothing(groups: Sequence[EpisodeGroup], selection: Selection) -> list[Any]:
    """Put all rows of a request into their place; there are no nests."""
    for group in groups:
        for field in group.fields.values():
            field.complete()
    return []


def _column(path: Path, group: EpisodeGroup, selection: Selection) -> list[Any]:
    """The value at a path of the nest of each episode."""
    if path in group.fields:
        return _values(group.fields[path], selection)
    return [{} if group.nodes[path] == "dict" else None for _ in group.episodes]


def _values(field: FieldRead, selection: Selection) -> list[Any]:
    """A field of each episode, as it was given when it was written."""
    spec, fetched = field.spec, field.complete()
    convert = partial(dtypes.from_stored, logical=spec.dtype)
    values = axis_of(spec).build(fetched, field.episodes, convert)
    if spec.axis == "ragged":
        return values if selection.ragged == "flat" else [value.split() for value in values]
    if spec.dtype == "json":
        return [[jsontree.loads(text) for text in value] for value in values]
    return [value[-1:].reshape(spec.shape) for value in values] if spec.scalar else values


def _array(leaf: Any, name: str) -> Array:
    if is_tensor(leaf):
        if leaf.device.type != "cpu" or not leaf.is_contiguous():
            raise FieldError(
                f"out[{name!r}] is not contiguous in the memory of the CPU; give such a tensor, and move it after"
            )
        leaf = dtypes.from_torch(leaf, where=f"out[{name!r}]")
    if not isinstance(leaf, np.ndarray) or leaf.ndim == 0 or not leaf.flags.writeable:
        raise FieldError(f"out[{name!r}] is no array that can be written to (or no tensor); give one of a row a step")
    return leaf


def _rows_of(spec: FieldSpec, array: Array) -> Array:
    """The array as rows in stored form; FieldError if it does not fit the field's rows."""
    name, dtype = show(spec.path), dtypes.to_numpy(spec.dtype)
    if spec.axis == "ragged" or spec.scalar or dtype.kind in "OU":
        raise FieldError(
            f"out has an array for field {name!r}, which is not rows of numbers ({spec.dtype} on axis {spec.axis!r}); "
            "leave it out of out=, and take it from the result"
        )
    if array.dtype != dtype or array.shape[1:] != spec.shape:
        raise FieldError(
            f"out[{name!r}] is {array.dtype}{list(array.shape[1:])}, the field {dtype}{list(spec.shape)}; give an "
            "array of that dtype and shape"
        )
    rows = dtypes.as_stored(array, spec.dtype)
    if rows is None:
        raise FieldError(
            f"field {name!r} of dtype {dtype} is stored in another order of bytes than it has in memory, or out is not "
            "contiguous; leave it out of out="
        )
    return rows
