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


def test_a_piece_is_prepared_once_and_only_after_something_was_cut_from_one() -> None:
    memory = Memory(PIECE, keep=4)
    held = memory.take()
    memory.prepare()
    assert len(memory._kept) == 1
    cut = memory.empty((PIECE,), np.uint8)
    memory.prepare()
    memory.prepare()
    assert len(memory._kept) == 3
    other = memory.take()
    assert other is memory._kept[0]
    assert not np.shares_memory(other, cut)
    assert other is not held


def test_no_more_is_prepared_than_is_kept() -> None:
    memory = Memory(PIECE, keep=1)
    cut = memory.empty((PIECE,), np.uint8)
    memory.prepare()
    assert len(memory._kept) == 1
    assert cut.base is memory._kept[0]
