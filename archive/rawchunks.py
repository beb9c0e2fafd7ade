"""Pure, no I/O: chunks without compression, which are rows as they lie in memory and their crc32c; neither is copied twice.

zarr makes the same bytes and reads them, but copies each chunk three times on the way. Anything that is not plain here
is left to zarr: so are the errors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from archive.packing import Buffer, checksum, member_name

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_CHECKSUM_BYTES = 4
_NATIVE = sys.byteorder == "little"


def storable(array: Array) -> bool:
    """Whether the array's memory is what is stored."""
    return _NATIVE and array.size > 0 and array.dtype.kind in "biufc" and bool(array.flags.c_contiguous)


def cut(array: Array, rows: int) -> Iterator[tuple[Buffer, bytes]]:
    """Each chunk as its values, which share the array's memory, and the checksum that follows them."""
    for start in range(0, len(array), rows):
        part = _padded(array[start : start + rows], rows)
        values = memoryview(part.view("u1")).cast("B")
        yield values, checksum(values).to_bytes(_CHECKSUM_BYTES, "little")


def _padded(part: Array, rows: int) -> Array:
    """A chunk is always whole: the last one ends in zeros."""
    import numpy as np

    if len(part) == rows:
        return part
    whole = np.zeros((rows, *part.shape[1:]), part.dtype)
    whole[: len(part)] = part
    return whole


def readable(node: Mapping[str, Any]) -> bool:
    """Whether the chunks of an array, by its zarr.json, are plain values and a checksum."""
    codecs = node["codecs"]
    return (
        _NATIVE
        and [codec["name"] for codec in codecs] == ["bytes", "crc32c"]
        and codecs[0].get("configuration", {}).get("endian", "little") == "little"
        and node["chunk_key_encoding"]["name"] == "default"
    )


def rows(
    chunks: Mapping[str, Buffer], path: str, dtype: np.dtype[Any], shape: tuple[int, ...], chunk: tuple[int, ...],
    start: int, stop: int,
) -> Array | None:  # fmt: skip
    """Rows [start, stop) of an array; None if a chunk is absent or is not what it should be, for zarr to say why."""
    import numpy as np

    if chunk[1:] != shape[1:] or start >= stop or 0 in shape or dtype.kind not in "biufc":
        return None
    size = math.prod(chunk) * dtype.itemsize
    out = np.empty((stop - start, *shape[1:]), dtype)
    for number in range(start // chunk[0], -(-stop // chunk[0])):
        data = chunks.get(member_name(path, len(shape), number))
        if data is None or len(data) != size + _CHECKSUM_BYTES or not _whole(memoryview(data)):
            return None
        first = number * chunk[0]
        lo, hi = max(start, first), min(stop, first + chunk[0])
        values = np.frombuffer(data, dtype, math.prod(chunk)).reshape(chunk)
        out[lo - start : hi - start] = values[lo - first : hi - first]
    return out


def _whole(data: memoryview) -> bool:
    return checksum(data[:-_CHECKSUM_BYTES]) == int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
