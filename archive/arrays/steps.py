"""Pure, no I/O: ranges of steps, many at a time: intersections of two tables, and differences; and
numbers for the keys of rows, where a key is one entry or several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays.columns import numbers
from archive.arrays.ranges import Ints, run_starts, spans

if TYPE_CHECKING:
    import pyarrow as pa

_MOST = 2**62


class Meeting(NamedTuple):
    """The intersection of rows of two tables: rows left[i] of one and right[i] of the other share steps [lo[i],
    hi[i])."""

    left: Ints
    right: Ints
    lo: Ints
    hi: Ints


class Steps:
    """An immutable table: row i is steps [lo[i], hi[i]) of stream[i], and has an entry in each column.

    follows: columns that count steps, too: the number of steps cut off in front of a row is added to its entry there.
    """

    __slots__ = ("columns", "follows", "hi", "lo", "stream")

    def __init__(self, stream: Ints, lo: Ints, hi: Ints, *, follows: Sequence[str] = (), **columns: Ints) -> None:
        self.stream, self.lo, self.hi = stream, lo, hi
        self.follows, self.columns = follows, columns

    def __len__(self) -> int:
        return len(self.lo)

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def __repr__(self) -> str:
        named = {"stream": self.stream, "lo": self.lo, "hi": self.hi, **self.columns}
        return f"Steps({', '.join(f'{name}={values}' for name, values in named.items())})"

    @property
    def length(self) -> Ints:
        """The number of steps of each row."""
        return self.hi - self.lo

    @property
    def placed(self) -> Steps:
        """A copy in which a row without steps covers the one place at which it is, so that no other is there."""
        return Steps(self.stream, self.lo, np.maximum(self.hi, self.lo + 1), follows=self.follows, **self.columns)

    def beside(self, *, follows: Sequence[str] = (), **columns: Ints) -> Steps:
        """A copy with further columns."""
        follows, columns = (*self.follows, *follows), self.columns | columns
        return Steps(self.stream, self.lo, self.hi, follows=follows, **columns)

    def each(self) -> Steps:
        """The steps one by one, each a row."""
        rows = np.repeat(np.arange(len(self)), self.length)
        lo = spans(self.lo, self.length)
        return self.cut(rows, lo, lo + 1)

    def pick(self, rows: Any) -> Steps:
        """Some of the rows, by their numbers or by a mask."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Steps(self.stream[rows], self.lo[rows], self.hi[rows], follows=self.follows, **columns)

    def cut(self, rows: Any, lo: Ints, hi: Ints) -> Steps:
        """Steps [lo[i], hi[i]) of each of these rows."""
        out = self.pick(rows)
        ahead = lo - out.lo
        columns = out.columns | {name: out.columns[name] + ahead for name in self.follows}
        return Steps(out.stream, lo, hi, follows=self.follows, **columns)

    @classmethod
    def joined(cls, some: Sequence[Steps]) -> Steps:
        """The rows of all, end to end, with the columns of the first."""
        if len(some) < 2:
            none = np.zeros(0, np.int64)
            return some[0] if some else cls(none, none, none)
        stream, lo, hi = (np.concatenate([getattr(one, name) for one in some]) for name in ("stream", "lo", "hi"))
        columns = {name: np.concatenate([one.columns[name] for one in some]) for name in some[0].columns}
        return cls(stream, lo, hi, follows=some[0].follows, **columns)

    def meet(self, other: Steps) -> Meeting:
        """The steps that rows of both have, in order of the rows of this one and of their steps."""
        rows = np.flatnonzero(np.isin(other.stream, self.stream))
        (begin, end), (start, stop) = _on_one_line(self, Steps(other.stream[rows], other.lo[rows], other.hi[rows]))
        order = np.argsort(start, kind="stable")
        rows, start, reach = rows[order], start[order], np.maximum.accumulate(stop[order])
        first = np.searchsorted(reach, begin, side="right")
        count = np.maximum(np.searchsorted(start, end, side="left") - first, 0)
        left, right = np.repeat(np.arange(len(self)), count), rows[spans(first, count)]
        lo, hi = np.maximum(self.lo[left], other.lo[right]), np.minimum(self.hi[left], other.hi[right])
        found = Meeting(left, right, lo, hi)
        meets = hi > lo
        return found if meets.all() else Meeting(*(column[meets] for column in found))

    def union(self) -> Steps:
        """The steps of all rows, each once: in order, adjacent ones as one row."""
        kept = self.pick(np.flatnonzero(self.hi > self.lo))
        ((start, stop),) = _on_one_line(kept)
        order = np.argsort(start, kind="stable")
        start, reach = start[order], np.maximum.accumulate(stop[order])
        heads = np.flatnonzero(np.append(True, start[1:] > reach[:-1])[: len(start)])
        hi = np.maximum.reduceat(kept.hi[order], heads) if len(heads) else heads
        return Steps(kept.stream[order][heads], kept.lo[order][heads], hi)

    def minus(self, gone: Steps) -> Steps:
        """The rest of each row, in order. A row without steps is removed if its place is."""
        away = gone.union()
        if not len(away):
            return self
        met = self.placed.meet(away)
        counts = np.bincount(met.left, minlength=len(self))
        ends = np.cumsum(counts)
        rows = np.repeat(np.arange(len(self)), counts + 1)
        lo, hi = np.insert(met.hi, ends - counts, self.lo), np.insert(met.lo, ends, self.placed.hi)
        left = np.flatnonzero(hi > lo)
        rows, lo, hi = rows[left], lo[left], hi[left]
        return self.cut(rows, lo, np.where(self.hi[rows] > self.lo[rows], hi, lo))

    def topmost(self) -> Steps:
        """The steps that no later row covers, in order of streams and their steps."""
        ((start, stop),) = _on_one_line(self)
        order = np.argsort(start, kind="stable")
        if (stop[order][:-1] <= start[order][1:]).all():
            return self.pick(order)
        _, edge, code = np.unique(np.append(start, stop), return_index=True, return_inverse=True)
        first, last = code.reshape(2, -1)
        top = np.full(len(edge), -1, np.int64)
        np.maximum.at(top, spans(first, last - first), np.repeat(np.arange(len(self)), last - first))
        heads = run_starts(top)
        pieces = np.flatnonzero(top[heads] >= 0)
        step = np.append(self.lo, self.hi)[edge[heads]]
        return self.cut(top[heads][pieces], step[pieces], step[pieces + 1])

    def merged(self) -> Steps:
        """A copy in which adjacent rows that continue each other, with equal columns, are one row."""
        same = [values for name, values in self.columns.items() if name not in self.follows]
        shifts = [self.columns[name] - self.lo for name in self.follows]
        heads = run_starts(self.stream, np.cumsum(np.append(False, self.lo[1:] != self.hi[:-1])), *same, *shifts)
        if len(heads) == len(self):
            return self
        return self.cut(heads, self.lo[heads], self.hi[np.append(heads[1:], len(self)) - 1])


def _on_one_line(*some: Steps) -> list[tuple[Ints, Ints]]:
    """The starts and ends of the rows of tables on one line, on which streams do not overlap.

    Numbers too large for that are replaced by their ranks.
    """
    streams, edges = [one.stream for one in some], [edge for one in some for edge in (one.lo, one.hi)]
    first, count = _range(streams)
    least, width = _range(edges)
    if count * width >= _MOST:
        streams, edges = _ranked(streams), _ranked(edges)
        (first, _), (least, width) = _range(streams), _range(edges)
    shifts = [(stream - first) * width - least for stream in streams]
    return [(edges[2 * at] + shift, edges[2 * at + 1] + shift) for at, shift in enumerate(shifts)]


def _range(many: Sequence[Ints]) -> tuple[int, int]:
    """The least of the numbers, and the width of their range."""
    some = [numbers for numbers in many if len(numbers)]
    least = min((int(numbers.min()) for numbers in some), default=0)
    return least, max((int(numbers.max()) for numbers in some), default=0) - least + 1


def _ranked(many: Sequence[Ints]) -> list[Ints]:
    """The rank of each number among all distinct ones."""
    code = np.unique(np.concatenate(many), return_inverse=True)[1].reshape(-1)
    return np.split(code, np.cumsum([len(numbers) for numbers in many])[:-1])


# -- keys --------------------------------------------------------------------------------------------------------------


def codes(*columns: Any) -> Ints:
    """A number for each row, equal where all columns are equal; in the order of the keys, without gaps."""
    out, count = _dense(np.asarray(columns[0]))
    for column in columns[1:]:
        code, width = _dense(np.asarray(column))
        if count * width >= _MOST:
            out, count = _dense(out)
        out, count = out * width + code, count * width
    return out if len(columns) == 1 else _dense(out)[0]


def _dense(values: Any) -> tuple[Ints, int]:
    """The rank of each value among the distinct ones, and the number of these."""
    if len(values) and values.dtype.kind in "iu":
        least = int(values.min())
        width = int(values.max()) - least + 1
        if width <= 4 * len(values) + 1024:  # a table is quicker than sorting
            at = (values - least).astype(np.int64, copy=False)
            there = np.zeros(width, bool)
            there[at] = True
            place = np.cumsum(there) - 1
            return place[at], int(place[-1]) + 1
    distinct, code = np.unique(values, return_inverse=True)
    return code.reshape(-1).astype(np.int64, copy=False), len(distinct)


def row_codes(*tables: pa.Table) -> list[Ints]:
    """A number for each row of each table, equal where all columns are equal, whatever their names."""
    numbered = codes(*(_numbers(columns) for columns in zip(*(table.columns for table in tables), strict=True)))
    ends = np.cumsum([table.num_rows for table in tables])
    return np.split(numbered, ends[:-1])


def _numbers(columns: Sequence[pa.ChunkedArray]) -> Ints:
    """A number for each entry of columns, end to end, equal where the entries are."""
    import pyarrow as pa

    if pa.types.is_integer(columns[0].type):
        return np.concatenate([numbers(column) for column in columns])
    plain = [column if pa.types.is_dictionary(column.type) else column.dictionary_encode() for column in columns]
    joined = pa.chunked_array([chunk for column in plain for chunk in column.chunks], plain[0].type)
    chunks = joined.unify_dictionaries().chunks
    return np.concatenate([np.zeros(0, np.int64), *(numbers(chunk.indices, -1) for chunk in chunks)])


def places(wanted: Ints, among: Ints) -> Ints:
    """The place of each number among others, the first one if there are several; -1 if it is not there."""
    both = codes(np.concatenate([among, wanted]))
    first = np.full(int(both.max(initial=-1)) + 1, -1, np.int64)
    first[both[: len(among)][::-1]] = np.arange(len(among))[::-1]
    out: Ints = first[both[len(among) :]]
    return out
