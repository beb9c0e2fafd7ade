"""Pure, no I/O: where the fields lie that came after their steps: which steps of which rows of the segments table,
and in which row of the late table.

Of several rows of the late table that give the same field of the same step the last one counts; one that is dropped
takes it away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from archive.arrays import Ints, group_of, spans
from archive.base import unescape_path
from archive.fields import Path
from archive.steps import Steps
from archive.tables import overlaps

if TYPE_CHECKING:
    import pyarrow as pa


class LateFields:
    """The late fields of all rows of a segments table: by path, where each lies."""

    def __init__(self, table: pa.Table, segments: pa.Table) -> None:
        """table: the rows of the late table; segments: STRETCH of the segments table."""
        self.table = table
        self.where = _found(table, overlaps(table, segments)) if table.num_rows else {}


def _found(table: pa.Table, every: Steps) -> dict[Path, Steps]:
    import pyarrow.compute as pc

    listed = table["fields"].combine_chunks()
    names = pc.list_flatten(listed).dictionary_encode()
    owner = pc.list_parent_indices(listed).to_numpy()
    dropped = table["dropped"].to_numpy()
    out = {}
    for code, name in enumerate(names.dictionary.to_pylist()):
        has = np.zeros(table.num_rows, bool)
        has[owner[names.indices.to_numpy() == code]] = True
        top = every.pick(has[every["late"]]).topmost()
        if len(left := np.flatnonzero(~dropped[top["late"]])):
            out[unescape_path(name)] = top.pick(left)
    return out


class Cover:
    """Where one late field lies in some segments: steps [lo, hi) of each are those of another one from `step` on.

    segment: numbers of segments, in order, with their steps in order; other: the segment that has the field.
    """

    def __init__(self, segment: Ints, lo: Ints, hi: Ints, other: Ints, step: Ints) -> None:
        self._span = int(hi.max(initial=0)) + 2  # so that a step beyond all has a place
        self._begin = segment * self._span + lo
        self._end = segment * self._span + hi
        self._other = other
        self._shift = step - lo
        self.edges = np.unique(np.append(self._begin, self._end))

    def find(self, segment: Ints, step: Ints) -> tuple[Ints, Ints]:
        """The segment that has the field of these steps, -1 where none has; and which step of it each is."""
        key = segment * self._span + np.minimum(step, self._span - 1)
        place = group_of(self._begin, key)
        inside = (place >= 0) & (key < self._end[place])
        return np.where(inside, self._other[place], -1), np.where(inside, step + self._shift[place], 0)

    def borders(self, segment: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        """The steps within [lo[i], hi[i]) of segment[i] before which the field begins or ends: (i, step) of each."""
        low, high = (segment * self._span + np.minimum(step, self._span - 1) for step in (lo, hi))
        first = group_of(self.edges, low) + 1
        counts = np.maximum(group_of(self.edges, high - 1) + 1 - first, 0)
        number = np.repeat(np.arange(len(segment)), counts)
        return number, self.edges[spans(first, counts)] - segment[number] * self._span
