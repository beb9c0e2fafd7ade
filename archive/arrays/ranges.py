"""Pure, no I/O: ranges and runs of equal entries as arrays, and rows of an array in several pieces of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from archive.arrays.memory import fresh_together

MAX_GAP_BYTES = 64 * 1024
MIN_GAP_BYTES = 1024  # headers between chunks
MAX_BLOCK_BYTES = 8 * 1024 * 1024
PIECE_BYTES = 256 * 1024

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def coalesce(
    starts: Ints, stops: Ints, *, max_gap: int | Ints = MAX_GAP_BYTES, max_block: int = MAX_BLOCK_BYTES
) -> tuple[Ints, Ints, Ints]:
    """Blocks covering sorted ranges of one object: (block starts, block stops, block of each range).

    Neighbours closer than `max_gap` share a block of at most `max_block` bytes; a longer single range is its own block.
    max_gap: of all neighbours, or of each range and the one after it.
    """
    if len(starts) == 0:
        return starts, stops, np.zeros(0, np.int64)
    reach = np.maximum.accumulate(stops)
    near = np.zeros(len(starts), bool)
    near[1:] = starts[1:] - reach[:-1] <= max_gap
    owner, block, block_start = [0], 0, int(starts[0])
    for start, stop, joined in zip(starts.tolist()[1:], stops.tolist()[1:], near.tolist()[1:], strict=True):
        if not joined or stop - block_start > max_block:
            block, block_start = block + 1, start
        owner.append(block)
    owners = np.array(owner, np.int64)
    heads = run_starts(owners)
    return starts[heads], np.maximum.reduceat(stops, heads), owners


def widest_gap(starts: Ints, stops: Ints, spare_bytes: int) -> int:
    """The widest gap between sorted ranges, 64 KB at most,
    such that all gaps up to it come to no more than `spare_bytes`.

    Headers between neighbours are read over in any case.
    """
    if spare_bytes < 0:
        return MIN_GAP_BYTES
    gaps = np.sort(np.maximum(0, starts[1:] - np.maximum.accumulate(stops)[:-1]))
    gaps = gaps[gaps <= MAX_GAP_BYTES]
    fitting = int(np.searchsorted(np.cumsum(gaps), spare_bytes, side="right"))
    widest = MAX_GAP_BYTES if fitting == len(gaps) else int(gaps[fitting]) - 1
    return max(MIN_GAP_BYTES, widest)


def merge_runs(starts: Ints, stops: Ints, *, touching: bool = True) -> tuple[Ints, Ints]:
    """Row runs joined where they overlap (or `touching`, too); the input need not be sorted, empty runs vanish."""
    keep = stops > starts
    order = np.argsort(starts[keep], kind="stable")
    starts, stops = starts[keep][order], stops[keep][order]
    if len(starts) == 0:
        return starts, stops
    reach = np.maximum.accumulate(stops)
    apart = starts[1:] > reach[:-1] if touching else starts[1:] >= reach[:-1]
    heads = np.append(0, np.flatnonzero(apart) + 1)
    return starts[heads], np.maximum.reduceat(stops, heads)


def spans(starts: Ints, counts: Ints) -> Ints:
    """The numbers of several runs end to end: starts[0], starts[0] + 1, ... of counts[0] numbers,
    then the next run's."""
    ends = np.cumsum(counts)
    out: Ints = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
    return out


def run_heads(*columns: Array) -> Mask:
    """True where a run of equal entries begins: at the first, and where any column differs from the entry before."""
    heads = np.zeros(len(columns[0]), bool)
    heads[:1] = True
    for column in columns:
        heads[1:] |= column[1:] != column[:-1]
    return heads


def ascending(values: Array) -> Array:
    """The distinct values in ascending order; NumPy's `unique` hashes integers, 20 times as slow if they are many."""
    ordered = np.sort(values)
    return ordered[run_heads(ordered)]


def run_starts(*columns: Array) -> Ints:
    """The places at which a run of equal entries begins."""
    return np.flatnonzero(run_heads(*columns))


def run_tails(*columns: Array) -> Mask:
    """True where a run of equal entries ends."""
    return np.append(run_heads(*columns)[1:], True)[: len(columns[0])]


def since_head(values: Ints, heads: Mask) -> Ints:
    """Values minus the value at the start of their run."""
    return values - np.maximum.accumulate(np.where(heads, values, 0)) if len(values) else values


def offsets_of(counts: Ints) -> Ints:
    """The place at which each group begins, and one past the last: group i is [offsets[i], offsets[i + 1])."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def group_of(starts: Ints, numbers: Ints) -> Ints:
    """The group that each number is in: the last one that begins there or before; group i begins at starts[i]."""
    out: Ints = np.searchsorted(starts, numbers, side="right") - 1
    return out


def sums(values: Ints, offsets: Ints) -> Ints:
    """Sum of each group of values; group i is [offsets[i], offsets[i + 1])."""
    total = offsets_of(values)
    out: Ints = total[offsets[1:]] - total[offsets[:-1]]
    return out


def covered(starts: Ints, stops: Ints, length: int) -> Mask:
    """Mask over [0, length) of the entries that any of the ranges covers."""
    edges = np.zeros(length + 1, np.int64)
    np.add.at(edges, starts, 1)
    np.add.at(edges, stops, -1)
    return np.cumsum(edges[:-1]) > 0


class Pieces:
    """Rows numbered from 0, end to end over all pieces. first: number of the first row of each piece."""

    def __init__(self, first: Ints, arrays: Sequence[Array]) -> None:
        self.first = first
        self.arrays = arrays

    @classmethod
    def whole(cls, array: Array) -> Pieces:
        """Pieces of one array that has all rows."""
        return cls(np.zeros(1, np.int64), [array])

    @classmethod
    def new(cls, like: Array, ends: Ints) -> Pieces:
        """Memory for as many rows as `ends[-1]`, of the dtype and shape of those of `like`.

        `ends` is where each group of rows begins, and where the last one stops. Small groups share a piece, so that
        none is smaller than it has to be; no group is cut.
        """
        edges = _edges(ends, max(1, PIECE_BYTES // max(1, like.dtype.itemsize * int(np.prod(like.shape[1:])))))
        first = ends[edges[:-1]]
        sizes = (ends[edges[1:]] - first).tolist()
        return cls(first, fresh_together(sizes, like.shape[1:], like.dtype))

    def converted(self, convert: Callable[[Array], Array]) -> Pieces:
        """The same rows, each piece as `convert` makes it."""
        return Pieces(self.first, [convert(array) for array in self.arrays])

    def of(self, rows: Ints) -> Ints:
        """The number of the piece that has each row."""
        if len(self.first) == 1:
            return np.zeros(len(rows), np.int64)
        return group_of(self.first, rows)

    def put(self, rows: Ints, values: Array) -> None:
        """Put values[i] into row rows[i]."""
        piece = self.of(rows)
        for number in ascending(piece).tolist():
            mine = slice(None) if len(self.arrays) == 1 else np.flatnonzero(piece == number)
            self.arrays[number][rows[mine] - self.first[number]] = values[mine]

    def cut(self, ends: Ints) -> list[Array]:
        """Views of the rows [ends[i], ends[i + 1]); each lies in one piece."""
        piece = self.of(ends[:-1])
        start, stop = ends[:-1] - self.first[piece], ends[1:] - self.first[piece]
        return [self.arrays[p][a:b] for p, a, b in zip(piece.tolist(), start.tolist(), stop.tolist(), strict=True)]

    def joined(self) -> Array:
        """The rows as one array; a copy unless there is one piece."""
        return self.arrays[0] if len(self.arrays) == 1 else np.concatenate(self.arrays)


def _edges(ends: Ints, max_rows: int) -> Ints:
    """The groups that begin a piece, and one past the last."""
    edges = [0]
    last = len(ends) - 1
    while edges[-1] < last:
        at = edges[-1]
        stop = int(group_of(ends, ends[at] + max_rows))
        edges.append(min(last, max(stop, at + 1)))
    return np.array(edges if last else [0, 0])
