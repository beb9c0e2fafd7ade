"""Memory that nothing was in yet."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from archive.arrays import fresh, fresh_together, zeros

LARGE = 5_000_000


@pytest.mark.parametrize("count", [0, 3, LARGE])
def test_fresh_memory_is_an_array_of_the_shape_and_dtype_asked_for(count: int) -> None:
    made = fresh((count, 2), np.float32)
    made[...] = 7
    assert made.shape == (count, 2)
    assert made.dtype == np.float32
    assert made.flags.writeable
    assert made.flags.c_contiguous


@pytest.mark.parametrize("count", [0, 3, LARGE])
@pytest.mark.parametrize("dtype", ["uint8", "float64", "<U2", object])
def test_zeros_are_those_of_numpy(count: int, dtype: str) -> None:
    made = zeros((count, 1), dtype)
    assert made.dtype == np.dtype(dtype)
    assert np.array_equal(made, np.zeros((count, 1), dtype))


def test_pieces_made_together_are_apart() -> None:
    pieces = fresh_together([LARGE, 0, 1, 4097], (3,), np.uint8)
    for number, piece in enumerate(pieces):
        piece[...] = number
    assert [piece.shape for piece in pieces] == [(LARGE, 3), (0, 3), (1, 3), (4097, 3)]
    assert all((piece == number).all() for number, piece in enumerate(pieces))


def test_a_piece_that_is_kept_keeps_its_values_when_the_others_are_gone() -> None:
    pieces = fresh_together([LARGE, LARGE, LARGE], (), np.uint8)
    for number, piece in enumerate(pieces):
        piece[...] = number + 1
    gone = weakref.ref(pieces[0])
    kept = pieces[1][10:20].reshape(2, 5)
    del pieces, piece
    gc.collect()
    assert gone() is None
    assert (kept == 2).all()
