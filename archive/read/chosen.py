"""Selected episodes of an archive or a checkpoint: their steps as ranges of segments, and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from archive import tables
from archive.arrays import Ints, arrow, numbers, places
from archive.base import cached_property
from archive.fields import Bools
from archive.index import EpisodeIndex
from archive.read.reader import Reader
from archive.read.spans import Spans

if TYPE_CHECKING:
    import pyarrow as pa


class Attributes(Protocol):
    """Name -> {episode id: value} of a checkpoint, read when asked for; and the number of its commit."""

    @property
    def values(self) -> dict[str, dict[str, Any]]: ...

    @property
    def number(self) -> int: ...


class Chosen:
    """An ordered selection of episodes. For a checkpoint, limited to its live steps."""

    def __init__(
        self,
        reader: Reader,
        index: EpisodeIndex,
        chosen: Ints | None = None,
        live: Spans | None = None,
        attributes: Attributes | None = None,
    ) -> None:
        self.reader = reader
        self.episode_index = index
        self._live = live
        self._attributes = attributes
        self._given = chosen

    @cached_property
    def numbers(self) -> Ints:
        """The episodes' numbers in the index of all episodes."""
        return np.arange(len(self.episode_index)) if self._given is None else self._given

    @property
    def checkpoint(self) -> int | None:
        """The commit of the checkpoint whose live steps they are; None if they are an archive's."""
        return None if self._attributes is None else self._attributes.number

    def __len__(self) -> int:
        return len(self.episode_index) if self._given is None else len(self._given)

    def pick(self, places: Ints) -> Self:
        """The selection of the episodes at these places."""
        live = None if self._live is None else self._live.pick(places)
        return type(self)(self.reader, self.episode_index, self.numbers[places], live, self._attributes)

    def frozen(self) -> Self:
        """The same episodes, which later labels and derived columns do not reach."""
        index = self.episode_index.frozen()
        return type(self)(Reader(index.snapshot), index, self._given, self._live, self._attributes)

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Some columns of the table, one row for each episode; no data is read."""
        table = self.episode_index.table(names)
        if self._given is not None:
            table = table.take(arrow(self._given))
        return table if self._live is None else _cut_to(table, self.episode_index, self.numbers, self._live)

    def lengths(self) -> Ints:
        """The number of steps of each episode (live steps, for a checkpoint)."""
        if self._live is not None:
            return self._live.lengths()
        out: Ints = numbers(self.episode_index.column("length"))[self.numbers]
        return out

    def step_spans(self) -> Spans:
        """The rows of the segments table that hold the steps of each episode, and the range of steps in each."""
        if self._live is not None:
            return self._live
        length = numbers(self.reader.snapshot.columns(["length"])["length"])
        offsets, rows = self._chains()
        return Spans(offsets, rows, np.zeros(len(rows), np.int64), length[rows])

    def spans(self) -> Spans:
        """The steps of each episode to read, and empty spans for its other segments that may hold more than their
        steps."""
        if self._live is None:
            return self.step_spans()
        offsets, rows = self._chains()
        beside = self.episode_index.beyond_steps[rows]
        return _with_others(self._live, offsets, rows, beside) if beside.any() else self._live

    @property
    def schema_texts(self) -> list[str]:
        """The distinct schemas of their steps, with derived columns; no data is read."""
        return self.reader.schema_texts(self.episode_index.chains.rows_of(self.numbers))

    def weights(self) -> pa.Table:
        """One row for each step, episode by episode: the weights that made it, and the update count; null where
        unknown. Reads no data."""
        import pyarrow as pa

        spans, uuids, counts = self.step_spans(), [], []
        rows = self.reader.snapshot.take(spans.rows, tables.WEIGHTS).to_pylist()
        for row, lo, hi in zip(rows, spans.lo.tolist(), spans.hi.tolist(), strict=True):
            for run in tables.weights_of(row, lo, hi):
                uuids += [run["model_weights_uuid"]] * run["steps"]
                counts += [run["update_count"]] * run["steps"]
        columns = {"model_weights_uuid": pa.array(uuids, pa.string()), "update_count": pa.array(counts, pa.int64())}
        return pa.table(columns)

    def _chains(self) -> tuple[Ints, Ints]:
        """The rows of the segments table of each episode, oldest first, end to end, and the start of each episode."""
        chains = self.episode_index.chains
        counts = np.diff(chains.offsets)[self.numbers]
        return np.append(0, np.cumsum(counts)), chains.rows_of(self.numbers)


def _with_others(live: Spans, offsets: Ints, rows: Ints, beside: Bools) -> Spans:
    """Live spans, and empty spans for those `rows` of the same episodes that are `beside` them, in order."""
    span = int(max(rows.max(initial=0), live.rows.max(initial=0))) + 1
    episode = np.repeat(np.arange(len(live)), np.diff(offsets))
    chained, present = episode * span + rows, live.episode * span + live.rows
    other = np.flatnonzero(beside & ~np.isin(chained, present))
    if not len(other):
        return live
    found = places(present, chained)
    place = np.where(found >= 0, found - offsets[live.episode], 0)
    joined = np.append(live.episode, episode[other])
    none = np.zeros(len(other), np.int64)
    lo, hi, at = np.append(live.lo, none), np.append(live.hi, none), np.append(place, other - offsets[episode[other]])
    grown = np.isin(joined, episode[other])  # the spans of other episodes stay in their order
    order = np.lexsort((np.where(grown, lo, 0), np.where(grown, at, 0), joined))
    ends = np.append(0, np.cumsum(np.bincount(joined, minlength=len(live))))
    return Spans(ends, np.append(live.rows, rows[other])[order], lo[order], hi[order])


def _cut_to(table: pa.Table, index: EpisodeIndex, chosen: Ints, live: Spans) -> pa.Table:
    """The table with the number of live steps as length; an episode that lost steps is not complete."""

    lengths = live.lengths()
    if "complete" in table.column_names:
        whole = numbers(index.column("length"))[chosen] == lengths
        complete = arrow(numbers(table["complete"]) & whole)
        table = table.set_column(table.column_names.index("complete"), "complete", complete)
    if "length" in table.column_names:
        table = table.set_column(table.column_names.index("length"), "length", arrow(lengths))
    return table
