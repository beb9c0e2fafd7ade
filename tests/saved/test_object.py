"""Arrays of a part of a checkpoint: those of no bytes, and those that its index says something else of."""

from __future__ import annotations

import numpy as np
import pytest

import archive
from archive.base import CorruptStateError
from archive.index import ShardIndex
from archive.saved import Part
from archive.testing import steps
from tests.support.journals import die
from tests.support.ticks import NEVER_S


@pytest.mark.parametrize("column", [np.zeros((4, 0)), np.zeros((4, 2, 0, 3), "S3"), np.full((4, 0), "", object)])
def test_arrays_of_no_bytes_are_what_they_are(column: np.ndarray) -> None:
    arc = archive.create(f"memory://no-bytes-{column.ndim}-{column.dtype.kind}")
    w = arc.writer(session="a", journal_s=NEVER_S)
    w.add_episode(steps(4))
    w.checkpoint(step=1, columns={"p": column, "q": np.arange(4.0)}, state={"none": np.zeros((3, 0))}, wait=True)
    w.add_episode(steps(2))
    w.sync()
    die(w)
    made = arc.refresh().checkpoints.latest
    assert made is not None
    made.staged(0).check()
    assert made.state(0)["none"].shape == (3, 0)
    again = arc.recover()
    assert again is not None
    for found, rows in ((made, 4), (again, 6)):
        assert found.column("p", 0).shape == (rows, *column.shape[1:])
        assert found.column("p", 0).dtype == column.dtype
    assert again.column("q", 0)[:4].tolist() == [0, 1, 2, 3]


def test_an_array_without_its_chunks_is_damage() -> None:
    arc = archive.create("memory://no-chunks")
    with arc.writer() as w:
        w.add_episode(steps(4))
        w.checkpoint(step=1, columns={"p": np.arange(4.0), "q": np.zeros((4, 0))}, wait=True)
    made = arc.refresh().checkpoints.latest
    assert made is not None
    part = made.staged(0)
    column = part.index.columns["replay"]["p"].array
    index = part.arrays_index
    rest = {name: chunks for name, chunks in index.arrays.items() if name != column}
    part.arrays_index = ShardIndex(index.shard, index.packed, rest)
    for read in (lambda: part.rows({column: [(0, 4)]}), part.check, lambda: part.rows({"columns/none": [(0, 0)]})):
        with pytest.raises(CorruptStateError, match="it has no array 'columns/"):
            read()
    assert part.rows({column: [(2, 2)]})[column][0].shape == (0,)


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
