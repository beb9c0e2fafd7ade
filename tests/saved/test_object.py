"""A part of a checkpoint whose index says something else than what is there."""

from __future__ import annotations

import numpy as np
import pytest

import archive
from archive.base import CorruptStateError
from archive.saved import Part
from archive.testing import steps


def test_rows_that_an_array_does_not_have_are_damage() -> None:
    arc = archive.create("memory://saved-object")
    with arc.writer(rank=0, world_size=1) as w:
        w.add_episode(steps(4))
        w.checkpoint(step=1, columns={"priority": np.arange(4.0)}).result()
    (key,) = (one.key for one in arc.storage.scan("states"))
    part = Part(arc.storage, key)
    (column,) = (ref for buffer in part.index.columns.values() for ref in buffer.values())
    assert part.rows({column.array: [(0, column.rows)]})[column.array][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(CorruptStateError, match="is damaged"):
        part.rows({column.array: [(0, column.rows + 1)]})
