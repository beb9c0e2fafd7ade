"""Pure, no I/O: chunks of arrays in stored form, and back: rows as in memory, or texts, maybe compressed, with the
crc32c of the stored bytes.

They are the bytes that zarr makes of the same rows, without its copies: fresh memory costs more than all else here.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.base import CorruptChunkError, UsageError
from archive.shard.packing import Buffer, checksum, zip_checksum

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CHECKSUM_BYTES = 4
MOST_TIMES = 1 << 15  # of its bytes that a chunk can hold: zstd makes 128 KB of four (RFC 8878), gzip less
SMALL_BYTES = 1 << 26  # of what is no bomb in any case
KEYS = {"name": "default", "configuration": {"separator": "/"}}  # names of chunks, as a zarr.json has them
TEXTS = "string"
DTYPES = {  # by their names in a zarr.json
    "bool",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    TEXTS,
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
}
_importing = threading.Lock()
_LEVELS = {"zstd": range(-(1 << 17), 23), "gzip": range(10)}
_GZIP_WINDOW = zlib.MAX_WBITS | 16
_ZSTD_MAGIC, _GZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"


class StoredArray(NamedTuple):
    """An array of a shard: chunks of `chunk_rows` rows, the last one filled up. dtype: of Python's objects for texts.
    compression: "zstd", "gzip" or ""."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunk_rows: int
    compression: str

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return self.chunk_rows, *self.shape[1:]


class StoredChunk(NamedTuple):
    """A chunk as it is stored: its bytes, the checksum that follows them, and the ZIP's checksum of both."""

    data: Buffer
    tail: bytes
    crc32: int


def member_name(array_path: str, ndim: int, chunk: int) -> str:
    """The zarr key of a chunk that covers all of the trailing axes: "obs/image/c/3/0/0"."""
    return f"{array_path}/c/{chunk}" + "/0" * (ndim - 1)


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of an array in memory by its name in a zarr.json."""
    import numpy as np

    return np.dtype(object) if name == TEXTS else np.dtype(name).newbyteorder("<")


# -- making chunks -----------------------------------------------------------------------------------------------------


def compressor(compression: str | None) -> Any:
    """The codec of "zstd:LEVEL" or "gzip:LEVEL", as numcodecs has it (zarr uses the same); None for None."""
    if compression is None:
        return None
    name, _, level = compression.partition(":")
    try:
        if int(level) in _LEVELS[name]:
            return _codec(name, int(level))
        why = f"levels are {_LEVELS[name][0]} to {_LEVELS[name][-1]}"
    except (KeyError, ValueError) as error:
        why = str(error)
    raise UsageError(f'Compression {compression!r} is none of "zstd:LEVEL", "gzip:LEVEL", None ({why}).')


@cache
def _codec(name: str, level: int) -> Any:
    zstd, gzip, _ = _numcodecs()
    return (zstd if name == "zstd" else gzip)(level=level)


def _numcodecs() -> tuple[Any, Any, Any]:
    """The classes of numcodecs for zstd, gzip and texts. Imported by one thread at a time: two that import two modules
    of it at once get one that is half made."""
    with _importing:
        from numcodecs.gzip import GZip
        from numcodecs.vlen import VLenUTF8
        from numcodecs.zstd import Zstd

    return Zstd, GZip, VLenUTF8


@cache
def _texts_codec() -> Any:
    return _numcodecs()[2]()


def prepare() -> None:
    """Import now what decoding imports when it first needs it: processes that are forked afterwards have it then."""
    _codec("zstd", 0)


def encoded(array: Array, rows: int, codec: Any, hold: Callable[[bytes], Buffer] | None, start: int) -> StoredChunk:
    """The chunk that begins at row `start`: in the array's own memory or, if compressed, where `hold` puts it. Other
    threads run meanwhile."""
    data = _plain_bytes(_padded(array[start : start + rows], rows))
    if codec is not None:
        data = _compressed(codec, data)
        data = data if hold is None else hold(data)
    tail = checksum(data).to_bytes(CHECKSUM_BYTES, "little")
    return StoredChunk(data, tail, zip_checksum(data, tail))  # it finds the bytes in the processor's cache


def _padded(part: Array, rows: int) -> Array:
    """A chunk is always whole: the last one ends in zeros, or in empty texts."""
    import numpy as np

    if len(part) == rows:
        return part
    whole = np.full((rows, *part.shape[1:]), "" if part.dtype == object else 0, part.dtype)
    whole[: len(part)] = part
    return whole


def _plain_bytes(part: Array) -> Buffer:
    if part.dtype != object:
        return memoryview(part.view("u1").data).cast("B")
    return bytes(_texts_codec().encode(part.reshape(-1)))


def _compressed(codec: Any, data: Buffer) -> bytes:
    found: bytes = codec.encode(data)
    if codec.codec_id == "gzip":  # puts the time of day into its header, and equal rows are to give equal bytes
        return found[:4] + bytes(4) + found[8:]
    return found


# -- reading chunks ----------------------------------------------------------------------------------------------------


def decoded(array: StoredArray, data: Buffer, out: Array | None = None) -> Array:
    """The rows of a stored chunk, in its own memory if they are not compressed; CorruptChunkError, with the reason, if
    it is no chunk of this array. It takes no more memory than such rows do.

    out: contiguous memory for all of its rows, which is filled.
    """
    import numpy as np

    body = memoryview(data)[:-CHECKSUM_BYTES]
    if len(body) == 0 or checksum(body) != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
        raise CorruptChunkError("its crc32c checksum is another")
    if array.dtype == object:
        rows = _texts(_inflated(array.compression, body, None), array.chunk_shape)
    else:
        shape = array.chunk_shape
        size = math.prod(shape) * array.dtype.itemsize
        if array.compression == "zstd" and out is not None:
            _inflated("zstd", body, size, out.reshape(-1).view("u1"))
            return out
        plain = _inflated(array.compression, body, size) if array.compression else body
        if len(plain) != size:
            raise CorruptChunkError(f"it holds {len(plain)} bytes, not {size}")
        rows = np.ndarray(shape, array.dtype, plain)
    if out is None:
        return rows
    out[...] = rows
    return out


def check_size(plain: int, stored: int) -> None:
    """CorruptChunkError before memory is made for more bytes than chunks of so many stored ones could hold."""
    if plain > SMALL_BYTES and plain > MOST_TIMES * stored:
        raise CorruptChunkError(f"it is said to hold {plain} bytes, which {stored} stored ones cannot")


def _inflated(compression: str, data: memoryview, size: int | None, out: Array | None = None) -> Buffer:
    """The plain bytes of compressed ones, which are `size`, if that is known; of zstd's in `out`, if it is given."""
    if not compression:
        return data
    check_size(size or 0, len(data))
    try:
        return _unzipped(data, size) if compression == "gzip" else _unpacked(data, size, out)
    except (RuntimeError, ValueError, MemoryError, zlib.error) as error:
        raise CorruptChunkError(f"{compression} cannot undo it: {error}") from error


def _unzipped(data: memoryview, size: int | None) -> bytes:
    stream = zlib.decompressobj(_GZIP_WINDOW)
    plain = stream.decompress(data, 0 if size is None else size + 1)
    if not stream.eof or stream.unused_data:
        raise ValueError("it is cut short, or holds more than it could")
    return plain


def _unpacked(data: memoryview, size: int | None, out: Array | None) -> Buffer:
    import numpy as np

    said = _content_size(data)
    if said is not None and (said > MOST_TIMES * len(data) or size not in (None, said)):
        raise ValueError(f"it says that it holds {said} bytes, which is more than it could or not what it should be")
    if size is not None and out is None:
        out = np.empty(size, np.uint8)
    found = _codec("zstd", 0).decode(data, out)
    return bytes(found) if out is None else out.data


def _content_size(data: memoryview) -> int | None:
    """The size of a zstd frame's content by its header; None if that has none (RFC 8878, 3.1.1.1)."""
    kind = data[4] if len(data) > 4 else 0
    width, single = kind >> 6, kind >> 5 & 1
    at = 5 + (not single) + (0, 1, 2, 4)[kind & 3]
    count = 1 << width if width or single else 0
    if not count or len(data) < at + count:
        return None
    return int.from_bytes(data[at : at + count], "little") + 256 * (width == 1)


def _texts(data: Buffer, shape: tuple[int, ...]) -> Array:
    count = math.prod(shape)
    if int.from_bytes(data[:4], "little") != count or len(data) < 4 * (count + 1):
        raise CorruptChunkError(f"it does not hold {count} texts")
    try:
        found: Array = _texts_codec().decode(bytes(data))
    except ValueError as error:
        raise CorruptChunkError(f"its texts are none: {error}") from error
    return found.reshape(shape)


# -- chunks without a zarr.json ----------------------------------------------------------------------------------------


def by_itself(path: str, dtype: np.dtype[Any], trailing: tuple[int, ...], rows: int, data: Buffer) -> Array | None:
    """The rows of a stored chunk, decoded by its length and first bytes, without a zarr.json; None if these leave a
    doubt, or it is damaged. `dtype` and `trailing` shape are the schema's, `rows` the chunk table's."""
    begins = bytes(data[: len(_ZSTD_MAGIC)])
    zstd, raw = begins == _ZSTD_MAGIC, len(data) == raw_bytes(dtype, trailing, rows)
    if begins.startswith(_GZIP_MAGIC) or raw == zstd or not _is_plain(dtype):
        return None
    try:
        return decoded(StoredArray(path, dtype, (rows, *trailing), rows, "zstd" if zstd else ""), data)
    except CorruptChunkError:
        return None


def raw_bytes(dtype: np.dtype[Any], trailing: tuple[int, ...], rows: int) -> int:
    """Bytes of a chunk of such rows that is stored as in memory, with its checksum; 0 if none is."""
    return rows * math.prod(trailing) * dtype.itemsize + CHECKSUM_BYTES if _is_plain(dtype) else 0


@lru_cache(maxsize=256)  # numpy makes a dtype's name anew each time
def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.name in DTYPES and dtype.byteorder != ">"
