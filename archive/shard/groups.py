"""Storage, no network: the one module that imports zarr. Named arrays to the members of a Zarr v3 group, and back.

zarr encodes into memory and decodes from memory; where the bytes go and come from is the caller's business. A chunk
that was not fetched is an error, never the fill value. Every chunk ends in its own crc32c, so `zarr.open_group` of
somebody else refuses a flipped bit too.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.base import (
    CorruptChunkError,
    FieldError,
    MissingObjectError,
    NotFoundError,
    StorageError,
    UsageError,
    cached_property,
)
from archive.shard import metadata, rawchunks
from archive.shard.packing import Buffer, Member, check_paths, checksum, dimension_names, hulls, rows_per_chunk
from archive.shard.packing import member_name as member_name

if TYPE_CHECKING:
    import numpy as np
    import zarr

    Array = np.ndarray[Any, Any]

Chunks = Mapping[str, Buffer]  # member name -> stored bytes
# map, or one that does several at once
Each = Callable[[Callable[[int], rawchunks.StoredChunk], Iterable[int]], Iterable[rawchunks.StoredChunk]]
Decode = Callable[..., Any]  # (number of a chunk, out=None) -> its rows

_ROOT = "zarr.json"
_NOT_CONSOLIDATED = {"kind": "inline", "must_understand": False, "metadata": {}}


def encode(
    arrays: Mapping[str, Array],
    *,
    attributes: Mapping[str, Any],
    compression: str | None = "zstd:1",
    chunk_bytes: int | None = None,
    runs: int = 1,
    copy: bool = True,
    hold: Callable[[bytes], Buffer] | None = None,
    each: Each = map,
) -> list[Member]:
    """The members of one Zarr v3 group: metadata first, root foremost, then chunks, fields of few bytes first.

    `arrays` maps zarr paths to arrays whose axis 0 is the rows; object arrays hold `str`. `compression` is
    "zstd:LEVEL", "gzip:LEVEL" or None. `runs`: of how many runs of rows parts may be read. The input is copied, so it
    may be changed once this returns, unless `copy` is False: then what is not compressed shares its memory.
    `hold` may move what zstd made to memory of its own; `each` goes over the chunks for zstd, several at once maybe.
    """
    import zarr

    check_paths(arrays)
    prepared = {path: _prepared(path, array) for path, array in arrays.items()}
    encoded: dict[str, Any] = {}  # zarr key -> zarr buffer
    group = zarr.create_group(zarr.storage.MemoryStore(encoded), attributes=_json_safe(attributes), zarr_format=3)
    names = dimension_names(prepared)
    chunk_rows = {p: rows_per_chunk(len(a), _field_bytes(a), chunk_bytes, runs) for p, a in prepared.items()}
    plain = not copy and not (compression or "").startswith("gzip")
    shared = {p for p, a in prepared.items() if plain and rawchunks.storable(a)}
    for path, array in prepared.items():
        created = _create(group, path, array, chunk_rows[path], compression, names[path])
        if path not in shared:
            created[...] = array
    if compression and compression.startswith("gzip"):
        _remove_dates(encoded)
    chunks = {
        path: _shared_chunks(path, array, chunk_rows[path], compression, hold, each)
        if path in shared
        else _encoded_chunks(encoded, path, array, chunk_rows[path])
        for path, array in prepared.items()
    }
    return [*_metadata_members(encoded), *_smallest_first(chunks)]


def decode(zarr_json: bytes, chunks: Chunks, wanted: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, list[Array]]:
    """The rows `wanted` of each array, one array per half-open range; those of one chunk may share its memory.

    `zarr_json` is the plain bytes of the root one, `chunks` maps member names to stored bytes. A chunk that
    is needed and not there is a MissingObjectError, one that does not decode a CorruptChunkError.
    """
    view = ShardView(zarr_json)
    return {path: view.read_many(path, ranges, chunks) for path, ranges in wanted.items()}


def load() -> None:
    """Import what encoding takes, and let it set itself up."""
    import numpy as np

    encode({"x": np.zeros(1)}, attributes={})


class Described(NamedTuple):
    """An array of a shard: no rows of it, in its dtype and shape; how many rows it has, and how many a chunk has."""

    like: Array
    rows: int
    chunk_rows: int


class ShardView:
    """The arrays of one shard, from the bytes of its root `zarr.json`. Frozen; safe for threads and after a fork."""

    def __init__(self, zarr_json: bytes) -> None:
        self._metadata = bytes(zarr_json)
        self._described: dict[str, rawchunks.Plain | None] = {}

    @cached_property
    def _root(self) -> metadata.GroupRoot:
        return metadata.parsed(self._metadata)

    @cached_property
    def _arrays(self) -> dict[str, dict[str, Any]]:
        return self._root.arrays

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the group was encoded with."""
        return dict(self._root.attributes)

    @property
    def paths(self) -> list[str]:
        """The zarr paths of all arrays."""
        return list(self._arrays)

    def read(self, path: str, start: int, stop: int, chunks: Chunks) -> Array:
        """Rows start to stop of one array, from the chunks given."""
        return self.read_many(path, [(start, stop)], chunks)[0]

    def read_many(self, path: str, ranges: Iterable[tuple[int, int]], chunks: Chunks) -> list[Array]:
        """As `read`, for several ranges: each chunk is decoded once."""
        import numpy as np

        ranges = list(ranges)
        self.check_rows(path, ranges)
        like, _, rows = self.describe(path)
        metadata.check_room(path, like, sum(stop - start for start, stop in ranges), chunks)
        decode = self.decoder(path, ranges, chunks)
        decoded: dict[int, Array] = {}
        out = [np.empty((stop - start, *like.shape[1:]), like.dtype) for start, stop in ranges]
        for into, (start, stop) in zip(out, ranges, strict=True):
            for number in range(start // rows, -(-stop // rows)) if start < stop else ():
                if number not in decoded:
                    decoded[number] = decode(number)
                first = number * rows
                lo, hi = max(start, first), min(stop, first + rows)
                into[lo - start : hi - start] = decoded[number][lo - first : hi - first]
        return out

    def check_rows(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """UsageError if an array does not have these rows."""
        length = self.describe(path).rows
        for start, stop in ranges:
            if not 0 <= start <= stop <= length:
                raise UsageError(f"Rows {start} to {stop} of array {path!r} are outside its 0 to {length}.")

    def describe(self, path: str) -> Described:
        """What an array is, by its metadata."""
        import numpy as np

        if (plain := self._plain(path)) is not None:
            return Described(np.empty((0, *plain.shape[1:]), plain.dtype), plain.shape[0], plain.rows)
        array = self._open(path, {})
        dtype = object if array.dtype.kind == "T" else array.dtype
        return Described(np.empty((0, *array.shape[1:]), dtype), array.shape[0], array.chunks[0])

    def is_raw(self, path: str) -> bool:
        """Whether the chunks of an array are its rows as they lie in memory, and their checksum."""
        plain = self._plain(path)
        return plain is not None and not plain.compressed

    def plain_chunk(self, path: str, number: int, chunks: Chunks, out: Array | None = None) -> Array | None:
        """The rows of one chunk as a decoder gives them, which takes no other; None if it is not plain, or damaged."""
        plain = self._plain(path)
        return None if plain is None else rawchunks.one_chunk(plain, number, chunks, out)

    def decoder(self, path: str, ranges: Iterable[tuple[int, int]], chunks: Chunks) -> Decode:
        """What gives the rows of a chunk by its number, of those chunks that hold these ranges of rows.

        The last chunk may come with rows that fill it up, or without. Where `out` is given, contiguous memory for all
        of its rows, they may be put there; then that memory is returned. Else they may share memory with `chunks`.
        It is safe for several threads.
        """
        others: dict[int, Array] = {}
        lock = threading.Lock()

        def decode(number: int, out: Array | None = None) -> Array:
            if (found := self.plain_chunk(path, number, chunks, out)) is not None:
                return found
            with lock:
                if number not in others:
                    others.update(self._by_zarr(path, ranges, chunks))
            return others[number]

        return decode

    def _by_zarr(self, path: str, ranges: Iterable[tuple[int, int]], chunks: Chunks) -> dict[int, Array]:
        """The rows of each chunk that holds some of these; neighbouring chunks are decoded together."""
        array = self._open(path, chunks)
        rows, out = array.chunks[0], {}
        nbytes, fixed = math.prod(array.chunks) * array.dtype.itemsize, array.dtype.kind not in "TO"
        metadata.check_claims(path, nbytes, chunks, fixed=fixed)
        for start, stop in set(hulls([one for one in ranges if one[0] < one[1]], rows)):
            first = start // rows * rows
            block = _rows(array, path, first, -(-stop // rows) * rows)
            out.update(
                {n: block[n * rows - first : (n + 1) * rows - first] for n in range(start // rows, -(-stop // rows))}
            )
        return out

    def _plain(self, path: str) -> rawchunks.Plain | None:
        if path not in self._described:
            self._described[path] = rawchunks.described(path, self._trusted_node(path))
        return self._described[path]

    def _open(self, path: str, chunks: Chunks) -> zarr.Array[Any]:
        import zarr
        from zarr.storage import MemoryStore, StorePath

        node = self._trusted_node(path)
        store = MemoryStore(_ChunkStore(chunks), read_only=True)  # type: ignore[arg-type]
        try:
            return zarr.Array.from_dict(StorePath(store, path), node)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise CorruptChunkError(f"The zarr.json of a shard does not describe array {path!r}: {error!r}") from error

    def _trusted_node(self, path: str) -> dict[str, Any]:
        """Only what `encode` writes: zarr also knows old formats and codecs that unpickle what they read."""
        if path not in self._arrays:
            raise NotFoundError(f"A shard has no array {path!r}, only {self.paths}: read one of these.")
        return metadata.checked(path, self._arrays[path])


def _rows(array: zarr.Array[Any], path: str, start: int, stop: int) -> Array:
    try:
        return _as_numpy(array[start:stop])
    except StorageError:
        raise
    except MemoryError as error:
        if array.dtype.kind not in "TO":  # a chunk of strings says itself how many it has
            raise
        raise CorruptChunkError(_blame(array, path, start, stop, error)) from error
    except Exception as error:  # codecs raise whatever they like
        raise CorruptChunkError(_blame(array, path, start, stop, error)) from error


def _as_numpy(values: Any) -> Array:
    result: Array = values
    return result.astype(object) if result.dtype.kind == "T" else result


def _blame(array: zarr.Array[Any], path: str, start: int, stop: int, error: Exception) -> str:
    """Which chunk it was: zarr's error doesn't say, so each is decoded alone."""
    rows = array.chunks[0]
    for chunk in range(start // rows, math.ceil(stop / rows)):
        try:
            array[max(start, chunk * rows) : min(stop, (chunk + 1) * rows)]
        except Exception as own:
            name = member_name(path, array.ndim, chunk)
            return f"Chunk {chunk} of array {path!r} (member {name!r}) does not decode: {own!r}. The object is damaged."
    return f"Rows {start} to {stop} of array {path!r} do not decode: {error!r}. The object is damaged."


def _json_safe(attributes: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(attributes), allow_nan=False, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Attributes of a shard must be JSON: {error}. Convert them before.") from error
    return plain


def _prepared(path: str, array: Array) -> Array:
    """The array as zarr stores it: native order, variable-length strings for objects."""
    import numpy as np

    if not 1 <= array.ndim <= metadata.MAX_NDIM:
        raise FieldError(f"Field {path!r} has {array.ndim} axes: 1 to {metadata.MAX_NDIM} can be stored.")
    if array.dtype.kind == "O":
        if not all(isinstance(value, str) for value in array.flat):
            raise FieldError(f"Field {path!r} has objects that are not str: convert them to str or numbers before.")
        try:
            return array.astype(np.dtypes.StringDType())
        except UnicodeEncodeError as error:
            raise FieldError(
                f"Field {path!r} has a str that is not Unicode ({error}): replace lone surrogates."
            ) from error
    if array.dtype.kind not in "biufc" or array.dtype.char in "gG":
        raise FieldError(f"Field {path!r} has dtype {array.dtype}, which zarr does not store: view it as another.")
    native = np.dtype(f"{array.dtype.kind}{array.dtype.itemsize}")
    # zarr does not know that a C long long is an int64 as well; astype would leave it as it is.
    return array.view(native) if array.dtype == native else array.astype(native)


def _field_bytes(array: Array) -> int:
    if array.dtype.kind != "T":
        return array.nbytes
    return sum(len(text.encode()) + 4 for text in array.flat)


def _codecs(compression: str | None) -> list[Any]:
    """The compressor, if any, then crc32c: last, so that it covers what is stored."""
    from zarr.codecs import Crc32cCodec, GzipCodec, ZstdCodec

    if compression is None:
        return [Crc32cCodec()]
    name, _, level = compression.partition(":")
    makers: dict[str, Callable[[int], Any]] = {
        "zstd": lambda n: ZstdCodec(level=n),
        "gzip": lambda n: GzipCodec(level=n),
    }
    try:
        return [makers[name](int(level)), Crc32cCodec()]
    except (KeyError, ValueError) as error:
        raise UsageError(
            f'Compression {compression!r} is none of "zstd:LEVEL", "gzip:LEVEL", None ({error}).'
        ) from error


def _create(
    group: zarr.Group,
    path: str,
    array: Array,
    chunk_rows: int,
    compression: str | None,
    dimension_names: list[str],
) -> zarr.Array[Any]:
    from zarr.codecs import BytesCodec, VLenUTF8Codec

    return group.create_array(
        path,
        shape=array.shape,
        dtype=array.dtype,
        chunks=(chunk_rows, *(max(1, size) for size in array.shape[1:])),
        filters=[],
        serializer=VLenUTF8Codec() if array.dtype.kind == "T" else BytesCodec(endian="little"),
        compressors=_codecs(compression),
        dimension_names=dimension_names,
        config={"write_empty_chunks": True, "order": "C"},
    )


def _remove_dates(encoded: Mapping[str, Any]) -> None:
    """gzip puts the time of day into its header, and equal arrays are to give equal bytes."""
    for name, buffer in encoded.items():
        if not name.endswith(_ROOT):
            stored = memoryview(buffer.as_numpy_array()).cast("B")
            stored[4:8] = bytes(4)
            stored[-4:] = checksum(stored[:-4]).to_bytes(4, "little")


def _metadata_members(encoded: Mapping[str, Any]) -> list[Member]:
    """Root first, with everybody's metadata inline. zarr's own consolidate warns, and would read all of it again."""
    nodes = {key: json.loads(encoded[key].to_bytes()) for key in sorted(encoded) if key.endswith("zarr.json")}
    root = nodes.pop(_ROOT)
    inline = {
        key.removesuffix("/zarr.json"): node
        | ({"consolidated_metadata": _NOT_CONSOLIDATED} if node["node_type"] == "group" else {})
        for key, node in nodes.items()
    }
    root["consolidated_metadata"] = _NOT_CONSOLIDATED | {"metadata": inline}
    return [_metadata_member(_ROOT, root), *(_metadata_member(key, node) for key, node in nodes.items())]


def _metadata_member(name: str, node: Mapping[str, Any]) -> Member:
    data = json.dumps(node, separators=(",", ":")).encode()
    return Member(name, data, "", -1, 0, checksum(data))


def _encoded_chunks(encoded: Mapping[str, Any], path: str, array: Array, rows: int) -> list[Member]:
    count = math.ceil(len(array) / rows) if array.size else 0
    names = [member_name(path, array.ndim, chunk) for chunk in range(count)]
    buffers = [memoryview(encoded[name].as_numpy_array()).cast("B") for name in names]
    return [
        Member(name, data, path, chunk, rows, own_checksum(data))
        for chunk, (name, data) in enumerate(zip(names, buffers, strict=True))
    ]


def _shared_chunks(
    path: str, array: Array, rows: int, compression: str | None, hold: Callable[[bytes], Buffer] | None, each: Each
) -> list[Member]:
    chunk_at = partial(rawchunks.plain, array, rows)
    if compression:
        level = int(compression.partition(":")[2])
        chunk_at = partial(rawchunks.compressed, array, rows, zstd_level=level, hold=hold)
    starts = range(0, len(array), rows)
    return [
        Member(member_name(path, array.ndim, chunk), data, path, chunk, rows, own_checksum(tail), tail, crc32)
        for chunk, (data, tail, crc32) in enumerate(each(chunk_at, starts) if compression else map(chunk_at, starts))
    ]


def _smallest_first(chunks: Mapping[str, list[Member]]) -> list[Member]:
    order = sorted(chunks, key=lambda path: (sum(m.size for m in chunks[path]), path))
    return [member for path in order for member in chunks[path]]


def own_checksum(data: bytes | memoryview) -> int:
    """The crc32c that a stored chunk ends in; decoding checks it."""
    return int.from_bytes(data[-4:], "little")


class _ChunkStore(Mapping[str, Any]):
    """Stored bytes as zarr's MemoryStore holds them. A KeyError would be zarr's fill value, so it is another error."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks

    def __getitem__(self, name: str) -> Any:
        from zarr.buffer import cpu

        try:
            return cpu.Buffer.from_bytes(self._chunks[name])
        except KeyError:
            raise MissingObjectError(
                f"Member {name!r} of a shard was not fetched, or is not in the chunk table: it is never read as zeros."
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)
