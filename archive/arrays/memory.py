"""Pure, no I/O: memory that is used again, for what is copied and thrown away all the time.

Fresh memory costs more than the copy itself: a page fault every 4 KB.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _unused(pieces: Sequence[Any], references: int) -> Any:
    """A piece that so many refer to and no more, the list and this function included; None if there is none."""
    for piece in pieces:
        if sys.getrefcount(piece) <= references:
            return piece
    return None


# What counts as a reference differs between versions of Python.
_REFERENCES_WHEN_FREE = next(n for n in range(1, 10) if _unused([object()], n) is not None)


class Memory:
    """Pieces of one size. A piece is free when nothing refers to it any more, so nobody has to give it back. Safe for
    several threads."""

    def __init__(self, piece_bytes: int, *, keep: int) -> None:
        self.piece_bytes, self._keep = piece_bytes, keep
        self._kept: list[Array] = []
        self._lock = threading.Lock()

    def take(self) -> Array:
        """A piece that nobody else uses; what it holds is not defined."""
        with self._lock: return self._take()  # fmt: skip  # noqa: E701 (see _iostats)

    def _take(self) -> Array:
        piece: Array | None = _unused(self._kept, _REFERENCES_WHEN_FREE)
        if piece is None:
            piece = np.empty(self.piece_bytes, np.uint8)
            if len(self._kept) < self._keep:
                self._kept.append(piece)
        return piece

    def release(self) -> None:
        """Keep no piece that is free."""
        self._kept.clear()


class Shelf:
    """One piece of memory for bytes of any length, end to end."""

    def __init__(self, piece: Array) -> None:
        self._rest = piece.data

    def hold(self, data: bytes) -> bytes | memoryview:
        """The same bytes in this memory; as they are given if there is no room left."""
        if len(data) > len(self._rest):
            return data
        held, self._rest = self._rest[: len(data)], self._rest[len(data) :]
        held[:] = data
        return held
