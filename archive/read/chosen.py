"""Engine: which episodes are meant, of an archive or a checkpoint: their steps as parts of segments, their columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from archive.arrays import Ints
from archive.base import cached_property
from archive.manifest import EpisodeIndex
from archive.read.liveparts import LiveParts
from archive.read.reader import Reader
from archive.read.segments import Part, with_extra

if TYPE_CHECKING:
    import pyarrow as pa


class Attributes(Protocol):
    """Name -> {episode id: value} of a checkpoint, read when asked for."""

    @property
    def values(self) -> dict[str, dict[str, Any]]: ...


class Chosen:
    """Some episodes, in order, by their numbers in the index; what is live of them, where they are a checkpoint's."""

    def __init__(
        self, reader: Reader, index: EpisodeIndex, chosen: Ints | None = None, live: LiveParts | None = None,
        attributes: Attributes | None = None,
    ) -> None:  # fmt: skip
        self._reader, self._index, self._live, self._attributes = reader, index, live, attributes
        self._given = chosen

    @cached_property
    def _chosen(self) -> Ints:
        """Numbers of these episodes in the index."""
        return np.arange(len(self._index)) if self._given is None else self._given

    def __len__(self) -> int:
        return len(self._index) if self._given is None else len(self._given)

    @property
    def numbers(self) -> Ints:
        """Their numbers in the index of all episodes."""
        return self._chosen

    @property
    def episode_index(self) -> EpisodeIndex:
        """The index of all episodes that these are some of."""
        return self._index

    @property
    def reader(self) -> Reader:
        """What reads their steps."""
        return self._reader

    def pick(self, places: Ints) -> Self:
        """Those at these places."""
        live = None if self._live is None else self._live.pick(places)
        return type(self)(self._reader, self._index, self._chosen[places], live, self._attributes)

    def _columns(self, names: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        table = self._index.table(names)
        if self._given is not None:
            table = table.take(pa.array(self._given))
        return table if self._live is None else _cut_to(table, self._index, self._chosen, self._live)

    def lengths(self) -> Ints:
        """Steps of each (live steps, of a checkpoint's)."""
        if self._live is not None:
            return self._live.lengths()
        out: Ints = self._index.column("length").to_numpy()[self._chosen]
        return out

    def step_parts(self) -> LiveParts:
        """The rows of the segments table that hold the steps of each, and which steps of them, as arrays."""
        if self._live is not None:
            return self._live
        length = self._reader.snapshot.columns(["length"])["length"].to_numpy()
        chain = self._index.chains
        rows = chain.rows_of(self._chosen)
        offsets = np.concatenate([[0], np.cumsum(np.diff(chain.offsets)[self._chosen])])
        return LiveParts(offsets, rows, np.zeros(len(rows), np.int64), length[rows])

    def _live_parts(self, i: int) -> list[Part]:
        """The live parts of one, and empty ones for those of its other segments in which more may lie than their steps."""
        assert self._live is not None
        live, chain = self._live.of(i), self._index.chains.of(int(self._chosen[i])).tolist()
        place = {row: k for k, row in enumerate(chain)}
        beside = place.keys() - {p.row for p in live}
        others = [Part(row, 0, 0) for row in beside if self._index.beyond_steps[row]]
        return sorted([*live, *others], key=lambda p: (place.get(p.row, 0), p.lo)) if others else live

    def parts(self) -> list[list[Part]]:
        """The segments of each, whole; what a Reader reads."""
        if self._live is not None:
            return [with_extra(whole, list(whole)) for whole in map(self._live_parts, range(len(self)))]
        lengths = self._reader.snapshot.columns(["length"])["length"].to_numpy()
        chain = self._index.chains
        whole = [[Part(int(r), 0, int(lengths[r])) for r in chain.of(int(n))] for n in self._chosen]
        return [with_extra(parts, list(parts)) for parts in whole]


def _cut_to(table: pa.Table, index: EpisodeIndex, chosen: Ints, live: LiveParts) -> pa.Table:
    """The table with the live steps' number as length; an episode that lost steps is not complete."""
    import pyarrow as pa

    lengths = live.lengths()
    if "complete" in table.column_names:
        whole = index.column("length").to_numpy()[chosen] == lengths
        complete = pa.array(table["complete"].to_numpy() & whole)
        table = table.set_column(table.column_names.index("complete"), "complete", complete)
    if "length" in table.column_names:
        table = table.set_column(table.column_names.index("length"), "length", pa.array(lengths))
    return table
