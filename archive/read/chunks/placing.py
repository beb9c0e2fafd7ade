"""Pure, no I/O: rows of stored arrays that are wanted, and putting them into memory out of decoded chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Pieces, spans
from archive.fields import Array

Call = Callable[[], None]
Decode = Callable[[int, Array | None], Array]  # a chunk's number, memory for all of its rows -> its rows
MANY = 8  # runs of rows of one chunk, from which on short ones are copied together
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
        """The rows of each shard."""
        shard = self.shard
        if len(shard) == 1 or (shard == shard[0]).all():
            yield int(shard[0]), self
            return
        if (shard[1:] >= shard[:-1]).all():
            order: Any = slice(None)
        else:
            order = np.argsort(shard, kind="stable")
        for number, own in _of_each(shard[order]):
            start, stop, at = (column[order][own] for column in (self.start, self.stop, self.at))
            yield number, self._replace(shard=shard[order][own], start=start, stop=stop, at=at)


def places(wants: Sequence[Want], rows: int, decode: Decode) -> list[Call]:
    """Calls that put rows of one array of a shard into memory, from chunks of so many rows, in any order or at once.
    Each chunk is decoded once, straight into its place if it can be."""
    if len(wants) == 1:
        return list(_places(wants[0], rows, decode))
    remembered = _remembered(decode)  # a chunk of several wants
    return [partial(_call, [call for want in wants for call in _places(want, rows, remembered)])]


def _call(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _remembered(decode: Decode) -> Decode:
    """Decodes each chunk once, in memory of its own."""
    found: dict[int, Array] = {}

    def decoded(number: int, out: Array | None) -> Array:
        if number not in found:
            found[number] = decode(number, None)
        return found[number]

    return decoded


def _places(want: Want, rows: int, decode: Decode) -> Iterator[Call]:
    """A call for each chunk."""
    start, stop, at, piece = _joined(want)
    first, last = start // rows, (stop - 1) // rows
    if len(start) == 1 and first[0] == last[0]:
        number = int(first[0])
        to = at - want.into.first[piece]
        yield partial(_place, want.into.arrays, piece, start - number * rows, stop - start, to, rows, number, decode)
        return
    counts = last + 1 - first
    run, chunk = np.repeat(np.arange(len(start)), counts), spans(first, counts)
    order = np.argsort(chunk, kind="stable")
    run, chunk = run[order], chunk[order]
    lo = np.maximum(start[run], chunk * rows)
    count = np.minimum(stop[run], (chunk + 1) * rows) - lo
    to = at[run] + lo - start[run] - want.into.first[piece[run]]
    for number, own in _of_each(chunk):
        inside = lo[own] - number * rows
        yield partial(_place, want.into.arrays, piece[run[own]], inside, count[own], to[own], rows, number, decode)


def _place(arrays: Any, piece: Ints, lo: Ints, count: Ints, to: Ints, rows: int, number: int, decode: Decode) -> None:
    """Rows [lo[i], lo[i] + count[i]) of a chunk into rows from to[i] on of arrays[piece[i]]."""
    target = arrays[piece[0]][to[0] : to[0] + count[0]]
    direct = len(lo) == 1 and count[0] == rows and target.flags.c_contiguous and target.dtype != object
    values = decode(number, target if direct else None)
    if direct and values is target:
        return
    if len(lo) >= MANY and count.sum() * values[0:1].nbytes < SHORT_BYTES * len(lo):
        for array, own in _of_each(piece):
            arrays[array][spans(to[own], count[own])] = values[spans(lo[own], count[own])]
        return
    for array, a, b, c in zip(piece.tolist(), lo.tolist(), count.tolist(), to.tolist(), strict=True):
        arrays[array][c : c + b] = values[a : a + b]


def _joined(want: Want) -> tuple[Ints, Ints, Ints, Ints]:
    """The runs by their first row, those joined that follow one another in the array and in a piece of memory."""
    if len(want.start) == 1:
        return want.start, want.stop, want.at, want.into.of(want.at)
    order = np.argsort(want.start, kind="stable")
    start, stop, at = want.start[order], want.stop[order], want.at[order]
    piece = want.into.of(at)
    follows = (start[1:] == stop[:-1]) & (at[1:] == at[:-1] + (stop - start)[:-1]) & (piece[1:] == piece[:-1])
    heads = np.flatnonzero(np.append(True, ~follows))
    tails = np.append(heads[1:], len(start)) - 1
    return start[heads], stop[tails], at[heads], piece[heads]


def _of_each(numbers: Ints) -> Iterator[tuple[int, Any]]:
    """Each number and where it stands, of numbers of which equal ones stand together."""
    heads = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
    ends = np.append(heads[1:], len(numbers))
    for a, b in zip(heads.tolist(), ends.tolist(), strict=True):
        yield int(numbers[a]), slice(a, b)
