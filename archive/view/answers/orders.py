"""Pure, no I/O: the places of a column's values in ascending order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from archive.arrays import Ints


def ascending(column: pa.ChunkedArray) -> tuple[Ints, int]:
    """Places of the values in ascending order, equal ones as they come, those without a value (or NaN) last; and how
    many have one. TypeError for lists, which have no order."""
    whole = column.combine_chunks()
    if pa.types.is_nested(whole.type):
        raise TypeError(f"a column of {whole.type} has no order")
    if pa.types.is_dictionary(whole.type):
        whole = _ranks(whole)
    if pa.types.is_floating(whole.type):
        whole = pc.if_else(pc.is_nan(whole), pa.scalar(None, whole.type), whole)
    if pa.types.is_floating(whole.type) and not whole.null_count:
        return _of_numbers(whole.to_numpy()), len(whole)
    return pc.array_sort_indices(whole).to_numpy().astype(np.int32), len(whole) - whole.null_count


def _ranks(column: pa.DictionaryArray) -> pa.Array:
    """Numbers that compare as the few distinct values do, which are put in order apart."""
    rank = pc.rank(column.dictionary.cast(pa.string()), tiebreaker="dense")
    return rank.cast(pa.int64()).take(column.indices)


def _of_numbers(values: np.ndarray[Any, Any]) -> Ints:
    """As Arrow does it, in a quarter of the time for a million random ones: two sorts that are not stable, the second
    of which puts equal values as they come."""
    order = np.argsort(values)
    ordered = values[order]
    run = np.zeros(len(values), np.int64)
    np.cumsum(ordered[1:] != ordered[:-1], out=run[1:])
    packed = run * max(len(values), 1) + order
    packed.sort()
    return (packed % max(len(values), 1)).astype(np.int32)
