"""Pure, no I/O: rows of one array in several pieces of memory, so that who keeps a few of them does not keep all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from archive.arrays.fresh import fresh_together
from archive.arrays.ranges import Ints, group_of

Array = np.ndarray[Any, Any]
PIECE_BYTES = 256 * 1024


class Pieces:
    """Rows numbered from 0, end to end over all pieces. first: number of the first row of each piece."""

    def __init__(self, first: Ints, arrays: Sequence[Array]) -> None:
        self.first = first
        self.arrays = arrays

    @classmethod
    def whole(cls, array: Array) -> Pieces:
        """All rows in one piece."""
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
        """Which piece each row lies in."""
        if len(self.first) == 1:
            return np.zeros(len(rows), np.int64)
        return group_of(self.first, rows)

    def put(self, rows: Ints, values: Array) -> None:
        """Put values[i] into row rows[i]."""
        piece = self.of(rows)
        for number in np.unique(piece).tolist():
            mine = slice(None) if len(self.arrays) == 1 else np.flatnonzero(piece == number)
            self.arrays[number][rows[mine] - self.first[number]] = values[mine]

    def cut(self, ends: Ints) -> list[Array]:
        """Views of the rows [ends[i], ends[i + 1]); each lies in one piece."""
        piece = self.of(ends[:-1])
        start, stop = ends[:-1] - self.first[piece], ends[1:] - self.first[piece]
        return [self.arrays[p][a:b] for p, a, b in zip(piece.tolist(), start.tolist(), stop.tolist(), strict=True)]

    def joined(self) -> Array:
        """All rows as one array; a copy unless there is one piece."""
        return self.arrays[0] if len(self.arrays) == 1 else np.concatenate(self.arrays)


def _edges(ends: Ints, max_rows: int) -> Ints:
    """Which groups begin a piece, and one past the last."""
    edges = [0]
    last = len(ends) - 1
    while edges[-1] < last:
        at = edges[-1]
        stop = int(group_of(ends, ends[at] + max_rows))
        edges.append(min(last, max(stop, at + 1)))
    return np.array(edges if last else [0, 0])
