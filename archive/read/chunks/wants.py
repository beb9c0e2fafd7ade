"""Pure, no I/O: wanted rows of stored arrays, and their places in memory, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Pieces, run_starts, spans
from archive.fields import Array

Decode = Callable[[Array | None], Array]  # memory for all rows of a chunk -> its rows
MANY = 8  # ranges of rows of one chunk, from which on short ones are copied together
SHORT_BYTES = 4096


class Want(NamedTuple):
    """Rows [start, stop) of one stored array of shards (by number), many times, and the rows of memory they go to."""

    array: str
    like: Array  # no rows, of the array's dtype and shape
    shard: Ints
    start: Ints
    stop: Ints
    at: Ints
    into: Pieces

    def by_shard(self) -> Iterator[tuple[int, Want]]:
        """The wanted rows of each shard."""
        shard = self.shard
        if len(shard) == 1 or (shard == shard[0]).all():
            yield int(shard[0]), self
            return
        whole = self
        if (shard[1:] < shard[:-1]).any():
            order = np.argsort(shard, kind="stable")  # once, as the parts are views of it
            whole = self._replace(shard=shard[order], start=self.start[order], stop=self.stop[order], at=self.at[order])
        for number, own in of_each(whole.shard):
            start, stop, at = whole.start[own], whole.stop[own], whole.at[own]
            yield number, whole._replace(shard=whole.shard[own], start=start, stop=stop, at=at)

    def single_rows(self) -> RowsWanted:
        """The same row by row; all go to one array."""
        (out,) = self.into.arrays
        counts = self.stop - self.start
        if (counts == 1).all():
            return RowsWanted(self.array, self.like, self.shard, self.start, out, self.at)
        shard, rows, at = np.repeat(self.shard, counts), spans(self.start, counts), spans(self.at, counts)
        return RowsWanted(self.array, self.like, shard, rows, out, at)


class RowsWanted(NamedTuple):
    """Single rows of one stored array of shards (by number): row rows[i] of shard[i] goes to row at[i] of `out`, to
    row i without `at`."""

    array: str
    like: Array  # as of Want
    shard: Ints
    rows: Ints
    out: Array
    at: Ints | None = None


class ChunkRows(NamedTuple):
    """Rows of one chunk of `rows` rows, and their places: [lo[i], lo[i] + counts[i]) go to arrays[piece[i]] from row
    to[i] on."""

    arrays: Sequence[Array]
    piece: Ints
    lo: Ints
    counts: Ints
    to: Ints
    rows: int
    number: int

    def put(self, decode: Decode) -> None:
        """Put the rows into memory, decoded straight into their place if they can be."""
        target = self._target(0)
        direct = len(self.lo) == 1 and self.counts[0] == self.rows and target.flags.c_contiguous
        direct = direct and target.dtype != object
        values = decode(target if direct else None)
        if direct and values is target:
            return
        if len(self.lo) >= MANY and self.counts.sum() * values[0:1].nbytes < SHORT_BYTES * len(self.lo):
            for array, own in of_each(self.piece):
                to, lo, count = self.to[own], self.lo[own], self.counts[own]
                self.arrays[array][spans(to, count)] = values[spans(lo, count)]
            return
        for i, (lo, count) in enumerate(zip(self.lo.tolist(), self.counts.tolist(), strict=True)):
            self._target(i)[...] = values[lo : lo + count]

    def rooms(self, like: Array) -> list[memoryview] | None:
        """Memory for the bytes of all rows of the chunk, which has rows like `like`, in order: their places, and memory
        of its own for unwanted rows. None if they have too many places, or must be converted."""
        row_bytes = like.dtype.itemsize * math.prod(like.shape[1:])
        if len(self.lo) > 1 and self._is_scattered(row_bytes):
            return None
        out: list[memoryview] = []
        at = 0
        for i, (lo, count) in enumerate(zip(self.lo.tolist(), self.counts.tolist(), strict=True)):
            target = self._target(i)
            if target.dtype != like.dtype or not target.flags.c_contiguous:
                return None
            out += [*unwanted((lo - at) * row_bytes), target.reshape(-1).view(np.uint8).data]
            at = lo + count
        return [*out, *unwanted((self.rows - at) * row_bytes)]

    def _is_scattered(self, row_bytes: int) -> bool:
        """True if there are many short ranges, or overlapping ones."""
        short = bool(self.counts.sum() * row_bytes < SHORT_BYTES * len(self.lo))
        return short or bool((self.lo[1:] < self.lo[:-1] + self.counts[:-1]).any())

    def _target(self, i: int) -> Array:
        first = int(self.to[i])
        rows: Array = self.arrays[int(self.piece[i])][first : first + int(self.counts[i])]
        return rows


def unwanted(nbytes: int) -> list[memoryview]:
    """Memory for unwanted bytes; none of it for none."""
    return [memoryview(bytearray(nbytes))] if nbytes else []


def chunk_rows(want: Want, rows: int) -> Iterator[ChunkRows]:
    """The rows of an array of a shard and their places, chunk by chunk, each chunk of `rows` rows."""
    start, stop, at, piece = _joined(want)
    arrays, first, last = want.into.arrays, start // rows, (stop - 1) // rows
    if len(start) == 1 and first[0] == last[0]:
        number = int(first[0])
        to = at - want.into.first[piece]
        yield ChunkRows(arrays, piece, start - number * rows, stop - start, to, rows, number)
        return
    counts = last + 1 - first
    run, chunk = np.repeat(np.arange(len(start)), counts), spans(first, counts)
    order = np.argsort(chunk, kind="stable")
    run, chunk = run[order], chunk[order]
    lo = np.maximum(start[run], chunk * rows)
    count = np.minimum(stop[run], (chunk + 1) * rows) - lo
    to = at[run] + lo - start[run] - want.into.first[piece[run]]
    for number, own in of_each(chunk):
        yield ChunkRows(arrays, piece[run[own]], lo[own] - number * rows, count[own], to[own], rows, number)


def _joined(want: Want) -> tuple[Ints, Ints, Ints, Ints]:
    """The ranges by their first row; ranges that continue each other in the array and in memory are joined."""
    if len(want.start) == 1:
        return want.start, want.stop, want.at, want.into.of(want.at)
    order = np.argsort(want.start, kind="stable")
    start, stop, at = want.start[order], want.stop[order], want.at[order]
    piece = want.into.of(at)
    follows = (start[1:] == stop[:-1]) & (at[1:] == at[:-1] + (stop - start)[:-1]) & (piece[1:] == piece[:-1])
    heads = np.flatnonzero(np.append(True, ~follows))
    tails = np.append(heads[1:], len(start)) - 1
    return start[heads], stop[tails], at[heads], piece[heads]


def of_each(numbers: Ints) -> Iterator[tuple[int, Any]]:
    """The distinct numbers, and a slice of the places of each, for numbers in groups."""
    heads = run_starts(numbers)
    for a, b in zip(heads.tolist(), [*heads[1:].tolist(), len(numbers)], strict=True):
        yield int(numbers[a]), slice(a, b)
