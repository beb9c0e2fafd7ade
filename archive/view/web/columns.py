"""Pure, no I/O: columns of any type as the three that the browser's reader knows."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.compute as pc

LONGEST = 2000  # characters of a text in a table; names are shorter


def plain_columns(table: pa.Table) -> pa.Table:
    """The table with columns of double, bool and utf8 alone; of long texts the beginning."""
    return pa.table({name: _short(_plain(table[name])) for name in table.column_names})


def _short(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if column.type != pa.string() or (pc.max(pc.binary_length(column)).as_py() or 0) <= LONGEST:
        return column
    return pc.utf8_slice_codeunits(column, 0, LONGEST)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_boolean(kind) or kind == pa.string():
        return column
    if pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_timestamp(kind):
        return pc.divide(column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).cast(pa.float64()), 1e6)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.cast(pa.float64(), safe=False)
    return pa.chunked_array([pa.array([_text(value) for value in column.to_pylist()], pa.string())])


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(value, default=str)
