"""Pure, no I/O: rows of fields as Arrow columns, for tools that know neither several axes nor dtypes of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.fields.nests import Array

if TYPE_CHECKING:
    import pyarrow as pa


def own_dtype(array: Array) -> Array:
    """An array of a dtype that numpy itself knows: others are their bits."""
    own = array.dtype.kind != "V" or array.dtype.names is not None
    return array if own else array.view(f"u{array.dtype.itemsize}")


def json_texts(values: Sequence[Any]) -> Array:
    """The JSON texts of values that a field of JSON has."""
    return np.array([json.dumps(value, default=str) for value in values], object)


def plain(array: Array) -> Array:
    """An array of a dtype that Arrow knows: of others their bits, of complex numbers the two parts in an axis more."""
    array = own_dtype(np.ascontiguousarray(array))
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array[..., None].view(array.real.dtype) if array.dtype.kind == "c" else array


def rows_column(array: Array) -> pa.Array:
    """One value for each row; of several axes one flat list of fixed length. ValueError if rows have no elements."""
    import pyarrow as pa

    array = plain(array)
    flat = array.reshape(-1)
    column = pa.array(flat.tolist(), pa.string()) if array.dtype.kind in "OU" else pa.array(flat)
    if array.ndim == 1:
        return column
    width = int(np.prod(array.shape[1:]))
    if not width:
        raise ValueError("its rows have no elements")
    return pa.FixedSizeListArray.from_arrays(column, width)


def lists_column(values: pa.Array, lengths: Array, mask: Array | None = None) -> pa.Array:
    """One list for each of `lengths`, of so many of the values, which lie end to end; null where `mask` says so."""
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, values, mask=None if mask is None else pa.array(mask))
