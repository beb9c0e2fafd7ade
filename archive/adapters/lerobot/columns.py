"""Pure, no I/O: columns of LeRobot's Parquet files as arrays and back, its table of tasks, and its statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from archive.adapters import Array
from archive.base import FieldError
from archive.fields import Ragged


def array_of(column: Any, feature: Mapping[str, Any]) -> Array | Ragged:
    """(T, ...) of a feature; one number a step where its shape is [1], lists of any length where it is [-1]."""
    kind = np.dtype(object if feature["dtype"] == "string" else feature["dtype"])
    if kind.kind not in "biufO":
        raise FieldError(f"a feature of dtype {feature['dtype']!r:.80} is not read")
    if list(feature["shape"]) == [-1]:
        rows = column.to_pylist()
        return Ragged(
            np.array([value for row in rows for value in row], kind), np.array([len(row) for row in rows], np.int64)
        )
    if feature["dtype"] == "string":
        return np.array(column.to_pylist(), object)
    flat = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    length = len(flat)
    while pa.types.is_nested(flat.type):
        flat = getattr(flat, "storage", flat).flatten()
    shape = tuple(feature["shape"])
    array = np.asarray(flat.to_numpy(zero_copy_only=False)).astype(kind, copy=False)
    return array if shape in ((), (1,)) else array.reshape(length, *shape)


class Stats:
    """Least, greatest, mean and deviation of a feature over all steps."""

    def __init__(self) -> None:
        self.count = 0
        self.low: Any = np.inf
        self.high: Any = -np.inf
        self.total: Any = np.float64(0)
        self.squares: Any = np.float64(0)

    def add(self, array: Array) -> None:
        values = array.astype(np.float64)
        if not len(values):
            return
        self.count += len(values)
        self.low = np.minimum(self.low, values.min(0))
        self.high = np.maximum(self.high, values.max(0))
        self.total = self.total + values.sum(0)
        self.squares = self.squares + (values**2).sum(0)

    def as_json(self) -> dict[str, Any]:
        mean = self.total / max(1, self.count)
        deviation = np.sqrt(np.maximum(self.squares / max(1, self.count) - mean**2, 0))
        found = {"min": self.low, "max": self.high, "mean": mean, "std": deviation}
        return {name: np.asarray(value).tolist() for name, value in found.items()} | {"count": [self.count]}


def column_of(array: Array | Ragged) -> Any:
    """A column of a row a step: numbers, fixed lists of them, text, or lists of any length."""
    if isinstance(array, Ragged):
        offsets = np.concatenate([[0], np.cumsum(array.lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, column_of(array.values))
    if array.dtype == object:
        return pa.array(array.tolist(), pa.string())
    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for width in reversed(array.shape[1:] if array.shape[1:] != (1,) else ()):
        column = pa.FixedSizeListArray.from_arrays(column, width)
    return column


def tasks_table(tasks: Mapping[str, int]) -> pa.Table:
    """As pandas writes a table whose index is the task's text."""
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
    about = {
        "index_columns": ["task"], "column_indexes": [], "pandas_version": "2.0.0",
        "columns": [
            {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64",
             "metadata": None},
            {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None},
        ],
    }  # fmt: skip
    return table.replace_schema_metadata({"pandas": json.dumps(about)})
