"""Pure, no I/O: where the fields lie that came after their steps: which steps of which rows of the segments table,
and in which row of the late table.

Of several rows of the late table that give the same field of the same step the last one counts; one that is dropped
takes it away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints, run_starts, spans
from archive.base import CorruptManifestError, unescape_path
from archive.fields import Path

if TYPE_CHECKING:
    import pyarrow as pa

STREAM = ("session", "buffer", "rank", "env_id")
WHERE = (*STREAM, "position", "length")  # the steps of a row of either table


class Overlaps(NamedTuple):
    """Steps [lo, hi) of row `row` of the segments table, which are those from `step` on of row `late` of the other."""

    late: Ints
    row: Ints
    lo: Ints
    hi: Ints
    step: Ints

    def pick(self, index: Any) -> Overlaps:
        """Those at these places."""
        return Overlaps(*(column[index] for column in self))


def overlaps(late: pa.Table, segments: pa.Table) -> Overlaps:
    """Where the steps of rows of one table are in rows of the other, in order of the first; both have WHERE."""
    stream = _streams(late, segments)
    ours, theirs = stream[: late.num_rows], stream[late.num_rows :]
    position, length = (late[name].to_numpy() for name in ("position", "length"))
    begins, counts = (segments[name].to_numpy() for name in ("position", "length"))
    rows = np.flatnonzero((counts > 0) & np.isin(theirs, ours))
    span = int(max((position + length).max(initial=0), (begins + counts)[rows].max(initial=0))) + 1
    start = theirs[rows] * span + begins[rows]
    order = np.argsort(start, kind="stable")
    rows, start = rows[order], start[order]
    stop = start + counts[rows]
    first = np.searchsorted(stop, ours * span + position, side="right")
    last = np.maximum(first, np.searchsorted(start, ours * span + position + length, side="left"))
    number, row = np.repeat(np.arange(len(first)), last - first), rows[spans(first, last - first)]
    lo = np.maximum(position[number] - begins[row], 0)
    hi = np.minimum((position + length)[number] - begins[row], counts[row])
    return Overlaps(number, row, lo, hi, begins[row] + lo - position[number])


def _streams(late: pa.Table, segments: pa.Table) -> Ints:
    """A number for the stream of each row of two tables."""
    import pyarrow as pa

    both = pa.concat_tables([late.select(STREAM), segments.select(STREAM)]).unify_dictionaries()
    out = np.zeros(both.num_rows, np.int64)
    for name in STREAM:
        column = both[name].combine_chunks()
        codes = (column.indices if pa.types.is_dictionary(column.type) else column).to_numpy().astype(np.int64)
        least = int(codes.min(initial=0))
        width = int(codes.max(initial=0)) - least + 1
        if (int(out.max(initial=0)) + 1) * width >= 2**31:  # with positions beside them, they are to fit into 63 bits
            out = np.unique(out, return_inverse=True)[1].reshape(-1)
            codes, least = np.unique(codes, return_inverse=True)[1].reshape(-1), 0
            width = int(codes.max(initial=0)) + 1
        out = out * width + codes - least
    return np.unique(out, return_inverse=True)[1].reshape(-1)


def painted(given: Overlaps) -> Overlaps:
    """The same without what later ones lie over, in order of rows and their steps."""
    span = int(given.hi.max(initial=0)) + 1
    begin, end = given.row * span + given.lo, given.row * span + given.hi
    order = np.argsort(begin, kind="stable")
    if (end[order][:-1] <= begin[order][1:]).all():
        return given.pick(order)
    edges = np.unique(np.append(begin, end))
    first = np.searchsorted(edges, begin)
    counts = np.searchsorted(edges, end) - first
    top = np.full(len(edges), -1, np.int64)
    np.maximum.at(top, spans(first, counts), np.repeat(np.arange(len(begin)), counts))
    heads = run_starts(top)
    pieces = np.flatnonzero(top[heads] >= 0)
    number, begin, end = top[heads][pieces], edges[heads[pieces]], edges[heads[pieces + 1]]
    found = given.pick(number)
    lo = begin - found.row * span
    return found._replace(lo=lo, hi=end - found.row * span, step=found.step + lo - found.lo)


class LateFields:
    """The late fields of all rows of a segments table: by path, where each lies."""

    def __init__(self, table: pa.Table, segments: pa.Table) -> None:
        """table: the rows of the late table; segments: WHERE of the segments table."""
        _check_places(table)
        self.table = table
        self.where = _found(table, overlaps(table.select(WHERE), segments)) if table.num_rows else {}


def _found(table: pa.Table, every: Overlaps) -> dict[Path, Overlaps]:
    import pyarrow.compute as pc

    listed = table["fields"].combine_chunks()
    names = pc.list_flatten(listed).dictionary_encode()
    owner = pc.list_parent_indices(listed).to_numpy()
    dropped = table["dropped"].to_numpy()
    out = {}
    for code, name in enumerate(names.dictionary.to_pylist()):
        has = np.zeros(table.num_rows, bool)
        has[owner[names.indices.to_numpy() == code]] = True
        top = painted(every.pick(np.flatnonzero(has[every.late])))
        if len(left := np.flatnonzero(~dropped[top.late])):
            out[unescape_path(name)] = top.pick(left)
    return out


def _check_places(table: pa.Table) -> None:
    position, length = (table[name].to_numpy() for name in ("position", "length"))
    bad = np.flatnonzero((position < 0) | (length < 1) | (position > 2**62 - length))
    if len(bad):
        raise CorruptManifestError(
            f"the late table gives fields of {int(length[bad[0]])} steps from position {int(position[bad[0]])} of a "
            "stream, which has no such steps; run `archive verify`"
        )


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
        place = np.searchsorted(self._begin, key, side="right") - 1
        inside = (place >= 0) & (key < self._end[place])
        return np.where(inside, self._other[place], -1), np.where(inside, step + self._shift[place], 0)

    def borders(self, segment: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        """The steps within [lo[i], hi[i]) of segment[i] before which the field begins or ends: (i, step) of each."""
        low, high = (segment * self._span + np.minimum(step, self._span - 1) for step in (lo, hi))
        first = np.searchsorted(self.edges, low, side="right")
        counts = np.maximum(np.searchsorted(self.edges, high, side="left") - first, 0)
        number = np.repeat(np.arange(len(segment)), counts)
        return number, self.edges[spans(first, counts)] - segment[number] * self._span
