"""Pure, no I/O: chunks without compression, which are rows as they lie in memory and their crc32c; neither is copied twice.

zarr makes the same bytes and reads them, but copies each chunk three times on the way. Anything that is not plain here
is left to zarr: so are the errors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.packing import Buffer, checksum, member_name

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_CHECKSUM_BYTES = 4
_TYPES = frozenset({
    "bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16", "float32", "float64", "complex64", "complex128",
})  # fmt: skip
_USUAL_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_NATIVE = sys.byteorder == "little"


def storable(array: Array) -> bool:
    """Whether the array's memory is what is stored."""
    return _NATIVE and array.size > 0 and array.dtype.kind in "biufc" and bool(array.flags.c_contiguous)


def cut(array: Array, rows: int) -> Iterator[tuple[Buffer, bytes]]:
    """Each chunk as its values, which share the array's memory, and the checksum that follows them."""
    for start in range(0, len(array), rows):
        part = _padded(array[start : start + rows], rows)
        values = memoryview(part.view("u1").data).cast("B")
        yield values, checksum(values).to_bytes(_CHECKSUM_BYTES, "little")


def _padded(part: Array, rows: int) -> Array:
    """A chunk is always whole: the last one ends in zeros."""
    import numpy as np

    if len(part) == rows:
        return part
    whole = np.zeros((rows, *part.shape[1:]), part.dtype)
    whole[: len(part)] = part
    return whole


class Plain(NamedTuple):
    """An array whose chunks are plain values and a checksum."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int  # of a chunk


def described(path: str, node: Mapping[str, Any]) -> Plain | None:
    """The array of this zarr.json, if its chunks are plain."""
    import numpy as np

    try:
        shape, chunk = tuple(node["shape"]), tuple(node["chunk_grid"]["configuration"]["chunk_shape"])
        codecs = [codec["name"] for codec in node["codecs"]]
        endian = node["codecs"][0].get("configuration", {}).get("endian", "little")
        usual = node["chunk_grid"]["name"] == "regular" and node["chunk_key_encoding"] == _USUAL_KEYS
        dtype = np.dtype(node["data_type"]) if node["data_type"] in _TYPES else None
        plain = codecs == ["bytes", "crc32c"] and endian == "little" and usual and _NATIVE and chunk[1:] == shape[1:]
        return (
            Plain(path, dtype, shape, int(chunk[0])) if plain and dtype is not None and 0 not in shape + chunk else None
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def rows(array: Plain, ranges: Sequence[tuple[int, int]], chunks: Mapping[str, Buffer]) -> list[Array] | None:
    """Rows of each half-open range, in arrays of their own; None if a chunk is absent or is not what it should be,
    for zarr to say why."""
    import numpy as np

    checked: dict[int, Array | None] = {}
    outs = [np.empty((max(0, stop - start), *array.shape[1:]), array.dtype) for start, stop in ranges]
    for out, (start, stop) in zip(outs, ranges, strict=True):
        if not 0 <= start <= stop <= array.shape[0]:
            return None
        for number in range(start // array.rows, -(-stop // array.rows)):
            if number not in checked:
                checked[number] = _values(array, number, chunks)
            if (values := checked[number]) is None:
                return None
            first = number * array.rows
            lo, hi = max(start, first), min(stop, first + array.rows)
            out[lo - start : hi - start] = values[lo - first : hi - first]
    return outs


def _values(array: Plain, number: int, chunks: Mapping[str, Buffer]) -> Array | None:
    """One chunk, in the memory that it was fetched into, if it matches its checksum."""
    import numpy as np

    count = array.rows * math.prod(array.shape[1:])
    data = chunks.get(member_name(array.path, len(array.shape), number))
    if data is None or len(data) != count * array.dtype.itemsize + _CHECKSUM_BYTES:
        return None
    view = memoryview(data)
    if checksum(view[:-_CHECKSUM_BYTES]) != int.from_bytes(view[-_CHECKSUM_BYTES:], "little"):
        return None
    return np.frombuffer(view, array.dtype, count).reshape(array.rows, *array.shape[1:])
