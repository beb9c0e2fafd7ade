"""Pure, no I/O: from steps of episodes to rows of shards, many at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import UsageError
from archive.read.liveparts import LiveParts

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("shard", "start", "length", "schema")


class Places(NamedTuple):
    """Where some steps lie: row of the segments table, step in that segment, number of its shard, of its schema."""

    segment: Ints
    step: Ints
    shard: Ints
    schema: Ints

    def pick(self, index: Any) -> Places:
        return Places(*(column[index] for column in self))


class Segments:
    """Columns of the segments table as numbers: shards and schemas by their place in `shards` and `schemas`."""

    def __init__(self, table: pa.Table) -> None:
        self.shards, self.shard = _coded(table["shard"])
        self.schemas, self.schema = _coded(table["schema"])
        self.start = table["start"].fill_null(0).to_numpy().astype(np.int64, copy=False)
        self.length = table["length"].to_numpy().astype(np.int64, copy=False)


class StepMap:
    """The steps of some episodes, numbered end to end."""

    def __init__(self, parts: LiveParts, segments: Segments) -> None:
        counts = parts.hi - parts.lo
        ends = np.cumsum(counts)
        total = np.concatenate([[0], ends])
        self.first = total[parts.offsets[:-1]]
        self.lengths = total[parts.offsets[1:]] - self.first
        self._stops = total[parts.offsets[1:]]
        self.steps = int(total[-1])
        self._ends, self._rows = ends, parts.rows
        self._shift = parts.lo - (ends - counts)
        self._segments = segments
        self._single = bool((np.diff(parts.offsets) == 1).all())

    def check(self, numbers: Ints, starts: Ints, length: int) -> None:
        """Whether each episode has the steps [start, start + length)."""
        if numbers.shape != starts.shape or numbers.ndim != 1:
            raise UsageError(
                f"give one step for each episode's number, not {starts.shape} for {numbers.shape}, both of one axis"
            )
        if not len(numbers):
            return
        if int(numbers.min()) < 0 or int(numbers.max()) >= len(self.first):
            raise UsageError(
                f"episodes are numbered from 0 to {len(self.first)}; {int(numbers.min())} to {int(numbers.max())} were asked for"
            )
        bad = np.flatnonzero((starts < 0) | (starts + length > self.lengths[numbers]))
        if len(bad):
            number, start = int(numbers[bad[0]]), int(starts[bad[0]])
            raise UsageError(
                f"episode number {number} has {int(self.lengths[number])} steps, so none from {start} to {start + length}"
            )

    def place(self, index: Ints) -> tuple[Ints, Ints]:
        """(number of the episode, step of it) of steps numbered end to end."""
        number = np.searchsorted(self._stops, index, side="right")
        return number, index - self.first[number]

    def locate(self, numbers: Ints, steps: Ints) -> Places:
        """Where step `steps[i]` of episode `numbers[i]` lies; they were checked."""
        at = self.first[numbers] + steps
        part = numbers if self._single else np.searchsorted(self._ends, at, side="right")
        segment, known = self._rows[part], self._segments
        return Places(segment, at + self._shift[part], known.shard[segment], known.schema[segment])


def _coded(column: Any) -> tuple[list[str], Ints]:
    """The distinct values of a column of text, and each row's place among them; -1 for none."""
    import pyarrow as pa

    joined = column.combine_chunks()
    joined = joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined
    if not pa.types.is_dictionary(joined.type):
        joined = joined.dictionary_encode()
    return joined.dictionary.to_pylist(), joined.indices.fill_null(-1).to_numpy().astype(np.int64)
