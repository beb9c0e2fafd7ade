"""Memory that is used again: which piece is taken, and which one was written to before."""

from __future__ import annotations

import numpy as np

from archive.arrays import Memory

PIECE = 1024 * 1024


def place(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> int:
    return array.ctypes.data


def test_what_is_free_again_is_taken_in_the_same_order() -> None:
    memory = Memory(PIECE, keep=4)
    first = [memory.empty((PIECE // 2,), np.uint8) for _ in range(3)]
    places = [place(array) for array in first]
    del first
    again = [memory.empty((PIECE // 2,), np.uint8) for _ in range(3)]
    assert [place(array) for array in again] == places, "no page is new"


def test_what_somebody_has_is_not_taken() -> None:
    memory = Memory(PIECE, keep=4)
    held = memory.empty((PIECE // 2,), np.uint8)
    held[:] = 7
    others = [memory.empty((PIECE // 2,), np.uint8) for _ in range(9)]
    for other in others:
        other[:] = 9
    assert (held == 7).all()


def test_a_piece_is_prepared_once_and_only_after_one_was_used() -> None:
    memory = Memory(PIECE, keep=4)
    memory.prepare()
    assert memory._kept == []
    mine = memory.take()
    memory.prepare()
    memory.prepare()
    assert len(memory._kept) == 2
    other = memory.take()
    assert other is memory._kept[0]
    assert other is not mine
