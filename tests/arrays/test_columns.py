"""Columns as arrays and back: the same as pyarrow's own way, nulls, slices and pieces among them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from archive.arrays import arrow, numbers, texts, times

TYPES = [pa.bool_(), pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()]


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("values", [[], [1], [0, 1, 1], [1, None, 0, None, 1, 1, 0, 1, 1], [None, None]])
def test_numbers_are_those_of_the_column(kind: Any, values: list[int | None]) -> None:
    whole = pa.array([None if value is None else bool(value) for value in values], pa.bool_()).cast(kind)
    pieces = pa.chunked_array([whole, whole[1:], whole[2:4]], kind)
    for column in (whole, whole[1:], pieces, pieces[1:4]):
        found = numbers(column, 1)
        assert found.tolist() == column.fill_null(pa.scalar(1).cast(kind)).to_pylist()
        assert found.dtype == kind.to_pandas_dtype()
        if not column.null_count:
            assert numbers(column).tolist() == column.to_pylist()


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_arrays_become_columns(kind: Any) -> None:
    values = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], kind.to_pandas_dtype())
    valid = np.arange(9) % 3 > 0
    for given in (values, values[::2], values[:0]):
        assert arrow(given).equals(pa.array(given, kind))
    assert arrow(values, valid).equals(pa.array(values, kind, mask=~valid))
    arrow(values, valid).validate(full=True)


def test_texts_and_times() -> None:
    for some in ([], ["a", None, "öé", ""], [None]):
        assert texts(some).equals(pa.array(some, pa.string()))
        texts(some).validate(full=True)
    points = [datetime(2024, 2, 29, 1, 2, 3, 4, tzinfo=UTC), None, datetime(1969, 1, 1, tzinfo=UTC)]
    for unit in ("us", "ns"):
        assert times(pa.chunked_array([pa.array(points, pa.timestamp(unit, tz="UTC"))])) == points
