"""Pure, no I/O: columns of Arrow tables as numpy arrays, and the other way round.

pyarrow imports pandas, where it is installed, before it makes a scalar or an array of what is not its own, and before
it makes numpy's of its own: half a second for a reader of some episodes. Here memory is shared, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
_NAMES = {"double": "float64", "float": "float32", "halffloat": "float16"}  # where Arrow's name is not numpy's
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBERS = frozenset({"bool", *_NAMES, *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))})
_ARROWS = {np.dtype(_NAMES.get(name, name)): name for name in _NUMBERS}


def numbers(column: Any, null: Any = None) -> Array:
    """A column of numbers or of booleans as an array, which may share its memory; `null` in the place of nulls."""
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    name = str(column.type)
    if name not in _NUMBERS or (null is None and column.null_count):
        out: Array = column.to_numpy() if hasattr(column, "chunks") else column.to_numpy(zero_copy_only=False)
        return out
    dtype = np.dtype(_NAMES.get(name, name))
    found = [_values(chunk, dtype, null) for chunk in chunks]
    return found[0] if len(found) == 1 else np.concatenate([np.zeros(0, dtype), *found])


def _values(chunk: pa.Array, dtype: np.dtype[Any], null: Any) -> Array:
    valid, data = chunk.buffers()
    if not len(chunk) or data is None:
        return np.full(len(chunk), null if len(chunk) else 0, dtype)
    if dtype.kind == "b":
        values = _bits(data, chunk.offset, len(chunk))
    else:
        values = np.frombuffer(data, dtype, len(chunk), chunk.offset * dtype.itemsize)
    if not chunk.null_count:
        return values
    return np.where(_bits(valid, chunk.offset, len(chunk)), values, dtype.type(null))


def _bits(data: Any, offset: int, count: int) -> Array:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=offset + count, bitorder="little")[offset:].astype(bool)


def times(column: Any) -> list[datetime | None]:
    """A column of points in time; None for null."""
    valid = numbers(column.is_valid())
    since = numbers(column.cast("timestamp[us]").cast("int64"), 0).tolist()
    return [_BEGIN + timedelta(microseconds=at) if there else None for at, there in zip(since, valid, strict=True)]


def arrow(values: Array, valid: Array | None = None) -> pa.Array:
    """An array of numbers or of booleans as one of Arrow's, which may share its memory; null where not `valid`."""
    import pyarrow as pa

    values = np.ascontiguousarray(values)
    own = _ARROWS.get(values.dtype) or values.dtype.name
    data = np.packbits(values, bitorder="little") if values.dtype.kind == "b" else values
    mask = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.type_for_alias(own), len(values), [mask, pa.py_buffer(data)])


def texts(values: Sequence[str | None]) -> pa.Array:
    """Texts as an array of Arrow's; None is null."""
    import pyarrow as pa

    stored = [(value or "").encode() for value in values]
    ends = np.array([*accumulate(map(len, stored), initial=0)], np.int32)
    mask = np.packbits(np.array([value is not None for value in values], bool), bitorder="little")
    buffers = [pa.py_buffer(mask), pa.py_buffer(ends), pa.py_buffer(b"".join(stored))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)
