"""Pure, no I/O: numbers for the keys of rows, where a key is one entry or several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints

if TYPE_CHECKING:
    import pyarrow as pa

_MOST = 2**62


def codes(*columns: Any) -> Ints:
    """A number for each row, the same where all columns have the same; in the order of the keys, without gaps."""
    out, count = _dense(np.asarray(columns[0]))
    for column in columns[1:]:
        code, width = _dense(np.asarray(column))
        if count * width >= _MOST:
            out, count = _dense(out)
        out, count = out * width + code, count * width
    return out if len(columns) == 1 else _dense(out)[0]


def _dense(values: Any) -> tuple[Ints, int]:
    """The place of each among the distinct values, and how many these are."""
    if len(values) and values.dtype.kind in "iu":
        least = int(values.min())
        width = int(values.max()) - least + 1
        if width <= 4 * len(values) + 1024:  # a table is quicker than sorting
            at = (values - least).astype(np.int64, copy=False)
            there = np.zeros(width, bool)
            there[at] = True
            place = np.cumsum(there) - 1
            return place[at], int(place[-1]) + 1
    distinct, code = np.unique(values, return_inverse=True)
    return code.reshape(-1).astype(np.int64, copy=False), len(distinct)


def row_codes(*tables: pa.Table) -> list[Ints]:
    """A number for each row of each table, the same where all columns have the same, whatever they are called."""
    numbered = codes(*(_numbers(columns) for columns in zip(*(table.columns for table in tables), strict=True)))
    ends = np.cumsum([table.num_rows for table in tables])
    return np.split(numbered, ends[:-1])


def _numbers(columns: Sequence[pa.ChunkedArray]) -> Ints:
    """A number for each entry of columns, end to end, the same where they have the same."""
    import pyarrow as pa

    if pa.types.is_integer(columns[0].type):
        return np.concatenate([column.to_numpy() for column in columns])
    plain = [column if pa.types.is_dictionary(column.type) else column.dictionary_encode() for column in columns]
    joined = pa.chunked_array([chunk for column in plain for chunk in column.chunks], plain[0].type)
    chunks = joined.unify_dictionaries().chunks
    return np.concatenate([np.zeros(0, np.int64), *(chunk.indices.fill_null(-1).to_numpy() for chunk in chunks)])


def places(wanted: Ints, among: Ints) -> Ints:
    """The place of each number among others, the first if they have it more than once; -1 where they have it not."""
    both = codes(np.concatenate([among, wanted]))
    first = np.full(int(both.max(initial=-1)) + 1, -1, np.int64)
    first[both[: len(among)][::-1]] = np.arange(len(among))[::-1]
    out: Ints = first[both[len(among) :]]
    return out
