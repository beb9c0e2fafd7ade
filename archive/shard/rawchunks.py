"""Pure, no I/O: chunks that are rows as they lie in memory, maybe compressed with zstd, and their crc32c.

zarr makes the same bytes and reads them, but copies each chunk several times on the way, and fresh memory costs more
than anything else here. Whatever is not plain is left to zarr, and so are the errors.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.shard.packing import Buffer, checksum, member_name, zip_checksum

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CHECKSUM_BYTES = 4
MOST_TIMES = 1 << 15  # of its bytes that a chunk can hold: zstd makes 128 KB of four (RFC 8878), gzip less
_GZIP_WINDOW = zlib.MAX_WBITS | 16
_PIECE_BYTES = 1 << 20
_ZSTD_MAGIC, _GZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_TYPES = frozenset({
    "bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16", "float32", "float64", "complex64", "complex128",
})  # fmt: skip
_CODECS = (("bytes", "crc32c"), ("bytes", "zstd", "crc32c"))
_USUAL_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_NATIVE = sys.byteorder == "little"


def storable(array: Array) -> bool:
    """True if the array's memory is what is stored."""
    return _NATIVE and array.size > 0 and array.dtype.kind in "biufc" and bool(array.flags.c_contiguous)


class StoredChunk(NamedTuple):
    """A chunk as it is stored: its bytes, the checksum that follows them, and the ZIP's checksum of both."""

    data: Buffer
    tail: bytes
    crc32: int


def plain(array: Array, rows: int, start: int) -> StoredChunk:
    """The chunk that begins at row `start`, in the array's memory."""
    return _summed(_values(array, rows, start))


def compressed(
    array: Array, rows: int, start: int, *, zstd_level: int, hold: Callable[[bytes], Buffer] | None
) -> StoredChunk:
    """The same as `plain` gives, but compressed, and put where `hold` puts it. Other threads run meanwhile."""
    data: bytes = _zstd(zstd_level).encode(_values(array, rows, start))
    return _summed(data if hold is None else hold(data))


def _values(array: Array, rows: int, start: int) -> memoryview:
    part = _padded(array[start : start + rows], rows)
    return memoryview(part.view("u1").data).cast("B")


def _summed(data: Buffer) -> StoredChunk:
    """Both sums, one after the other: the second finds the bytes in the processor's cache."""
    tail = checksum(data).to_bytes(CHECKSUM_BYTES, "little")
    return StoredChunk(data, tail, zip_checksum(data, tail))


def _zstd(level: int) -> Any:
    from numcodecs.zstd import Zstd  # the one that zarr uses

    return Zstd(level=level)


def prepare() -> None:
    """Import now what decoding imports when it first needs it: processes that are forked afterwards have it then."""
    _zstd(0)


def _padded(part: Array, rows: int) -> Array:
    """A chunk is always whole: the last one ends in zeros."""
    import numpy as np

    if len(part) == rows:
        return part
    whole = np.zeros((rows, *part.shape[1:]), part.dtype)
    whole[: len(part)] = part
    return whole


class Plain(NamedTuple):
    """An array whose chunks are values, maybe compressed, and a checksum."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows: int  # of a chunk
    compressed: bool


def described(path: str, node: Mapping[str, Any]) -> Plain | None:
    """The array of this zarr.json, if its chunks are plain."""
    import numpy as np

    try:
        shape, chunk = _sizes(node["shape"]), _sizes(node["chunk_grid"]["configuration"]["chunk_shape"])
        codecs = tuple(codec["name"] for codec in node["codecs"])
        endian = node["codecs"][0].get("configuration", {}).get("endian", "little")
        usual = node["chunk_grid"]["name"] == "regular" and node["chunk_key_encoding"] == _USUAL_KEYS
        if codecs not in _CODECS or endian != "little" or not usual or not _NATIVE or node["data_type"] not in _TYPES:
            return None
        if chunk[1:] != shape[1:] or node.get("storage_transformers") or isinstance(node["fill_value"], dict):
            return None
        return Plain(path, np.dtype(node["data_type"]), shape, int(chunk[0]), "zstd" in codecs)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def recognised(path: str, dtype: np.dtype[Any], trailing: tuple[int, ...], rows: int, data: Buffer) -> Plain | None:
    """The array that a stored chunk is of, told by the chunk's length and first bytes, so that no zarr.json is needed;
    None where they leave a doubt. `dtype` and `trailing` shape are the schema's, `rows` the chunk table's."""
    begins = bytes(data[: len(_ZSTD_MAGIC)])
    zstd, gzip = begins == _ZSTD_MAGIC, begins.startswith(_GZIP_MAGIC)
    plain, compressed, size = _forms(path, dtype, trailing, rows)
    raw = len(data) - CHECKSUM_BYTES == size
    if gzip or raw == zstd or not _is_plain(dtype):
        return None
    return compressed if zstd else plain


def by_itself(path: str, dtype: np.dtype[Any], trailing: tuple[int, ...], rows: int, data: Buffer) -> Array | None:
    """The rows of a stored chunk that says itself how it is stored; None if it leaves a doubt, or is damaged."""
    plain = recognised(path, dtype, trailing, rows, data)
    return None if plain is None else decoded(plain, memoryview(data))


@lru_cache(maxsize=1024)
def _forms(path: str, dtype: np.dtype[Any], trailing: tuple[int, ...], rows: int) -> tuple[Plain, Plain, int]:
    """An array as it is stored plain and compressed, and bytes of the rows of a chunk."""
    plain = Plain(path, dtype, (rows, *trailing), rows, False)
    return plain, plain._replace(compressed=True), rows * math.prod(trailing) * dtype.itemsize


def raw_bytes(dtype: np.dtype[Any], trailing: tuple[int, ...], rows: int) -> int:
    """Bytes of a chunk of such rows that is stored as they lie in memory, with its checksum; 0 where none is."""
    return rows * math.prod(trailing) * dtype.itemsize + CHECKSUM_BYTES if _is_plain(dtype) else 0


@lru_cache(maxsize=256)
def _is_plain(dtype: np.dtype[Any]) -> bool:
    return _NATIVE and dtype.name in _TYPES


def _sizes(values: Any) -> tuple[int, ...]:
    """Lengths of one axis or more, none of them 0; ValueError for anything else."""
    if not isinstance(values, list) or not values or not all(type(v) is int and v > 0 for v in values):
        raise ValueError("not the shape of an array that has elements")
    return tuple(values)


def one_chunk(array: Plain, number: int, chunks: Mapping[str, Buffer], out: Array | None = None) -> Array | None:
    """One chunk, in the memory that it was fetched into if it is not compressed; None if it is absent, or is not what
    it should be, for zarr to say why.

    out: contiguous memory for all of its rows, which it is put into.
    """
    try:
        data = chunks[member_name(array.path, len(array.shape), number)]
    except KeyError:
        return None
    return decoded(array, memoryview(data), out)


def decoded(array: Plain, data: memoryview, out: Array | None = None) -> Array | None:
    """The same as `one_chunk` gives, from a chunk's bytes."""
    import numpy as np

    body = data[:-CHECKSUM_BYTES]
    if len(body) == 0 or checksum(body) != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
        return None
    shape = (array.rows, *array.shape[1:])
    size = math.prod(shape) * array.dtype.itemsize
    if array.compressed and _plain_size(body) not in (None, size):
        return None
    if array.compressed and out is not None and _plain_size(body) == size:
        return None if _inflated(body, out.reshape(-1).view("u1")) is None else out
    values = _inflated(body) if array.compressed else body
    if values is None or len(values) != size:
        return None
    rows: Array = np.ndarray(shape, array.dtype, values)
    if out is None:
        return rows
    out[...] = rows
    return out


def _inflated(data: memoryview, out: Array | None = None) -> Buffer | None:
    """The bytes that zstd compressed, in `out` if that is given; None if it cannot be undone."""
    try:
        found = _zstd(0).decode(data, out)
        return bytes(found) if out is None else out.data
    except (RuntimeError, ValueError):
        return None


def claims_too_much(data: Buffer, most: int | None) -> bool:
    """True if a zstd frame says that it holds more than so many bytes, or than any could; or a gzip stream does."""
    if bytes(data[:2]) == _GZIP_MAGIC:
        return most is not None and _inflates_beyond(data, most)
    if bytes(data[:4]) != _ZSTD_MAGIC:
        return False
    size = _plain_size(memoryview(data)) or 0
    return size > MOST_TIMES * len(data) or (most is not None and size > most)


def _inflates_beyond(data: Buffer, most: int) -> bool:
    """True if a gzip stream holds more: it is inflated piece by piece, as it does not say so itself."""
    stream, left, size = zlib.decompressobj(_GZIP_WINDOW), bytes(data), 0
    with suppress(zlib.error):  # who decodes it says so
        while left and not stream.eof and size <= most:
            size += len(stream.decompress(left, _PIECE_BYTES))
            left = stream.unconsumed_tail
    return size > most


def _plain_size(data: memoryview) -> int | None:
    """The size of a zstd frame's content by its header; None where that does not say (RFC 8878, 3.1.1.1)."""
    kind = data[4] if len(data) > 4 else 0
    width, single = kind >> 6, kind >> 5 & 1
    at = 5 + (not single) + (0, 1, 2, 4)[kind & 3]
    count = 1 << width if width or single else 0
    if not count or len(data) < at + count:
        return None
    return int.from_bytes(data[at : at + count], "little") + 256 * (width == 1)
