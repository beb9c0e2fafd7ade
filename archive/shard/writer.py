"""The one maker of shards: arrays and their schema come in; members of a Zarr v3 group, objects on the store and the
places of their chunks go out.

zarr encodes into memory; what is plain is stored as it lies. Every chunk ends in its own crc32c, so `zarr.open_group`
of somebody else refuses a flipped bit too.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.base import FieldError, UsageError, layout, thread_pool, usable_cores
from archive.shard import packing, rawchunks
from archive.shard.packing import (
    MAX_NDIM,
    Buffer,
    Member,
    Placed,
    check_paths,
    checksum,
    dimension_names,
    member_name,
    rows_per_chunk,
)

if TYPE_CHECKING:
    import numpy as np
    import zarr

    from archive.store import Storage

    Array = np.ndarray[Any, Any]

# map, or one that does several at once
Each = Callable[[Callable[[int], rawchunks.StoredChunk], Iterable[int]], Iterable[rawchunks.StoredChunk]]
_ROOT = "zarr.json"
_NOT_CONSOLIDATED = {"kind": "inline", "must_understand": False, "metadata": {}}
SHARD_BYTES = 48 * 1024 * 1024  # of steps; four of them, compressed or not, are in memory at once
_SHELF_FROM_BYTES = 8 * 1024 * 1024  # of steps that are compressed: for fewer, a shard's memory is too much


class ShardWriter:
    """Encodes shards and writes them, in one layout and compression. Safe for several threads."""

    def __init__(
        self, storage: Storage, archive_layout: str, compression: str | None = "zstd:1", chunk_bytes: int | None = None,
    ) -> None:  # fmt: skip
        from archive.arrays import Memory

        self.storage = storage
        self.archive_layout = archive_layout
        self.memory = Memory(SHARD_BYTES + 64 * 1024, keep=4)  # a piece holds a shard
        self._compression = compression
        self._chunk_bytes = chunk_bytes
        self._encoders = thread_pool(usable_cores(), "archive-encode")  # chunks of one shard, side by side
        self._encoding = threading.Lock()

    def encode(
        self, schema: str, arrays: Mapping[str, Array], *, runs: int = 1, more: Mapping[str, Array] | None = None
    ) -> list[Member]:
        """The members of a shard whose fields, of this schema, have these arrays by path; `runs` as for
        `encode`, `more`: arrays that are no fields."""
        from archive.arrays import Shelf

        attributes = {"trajectory-archive": {"schema": schema, "format": layout.PART_VERSION}}
        with self._encoding if self._compression else nullcontext():
            large = self._compression is not None and sum(a.nbytes for a in arrays.values()) >= _SHELF_FROM_BYTES
            return encode(
                {**arrays, **(more or {})}, attributes=attributes, compression=self._compression,
                chunk_bytes=self._chunk_bytes, runs=runs, copy=False,
                hold=Shelf(self.memory.take()).hold if large else None, each=self._encoders.map,
            )  # fmt: skip

    def write(self, key: str, members: Sequence[Member]) -> list[Placed]:
        """Write one encoded shard; where its members lie."""
        if self.archive_layout == "packed":
            buffers, placed = packing.pack(members)
            self.storage.put(key, buffers)
        else:
            objects, placed = packing.loose(members)
            self.storage.put_many((f"{key}/{name}", data) for name, data in objects)
        return placed

    def close(self) -> None:
        """Give back its threads, once they have done what they are at."""
        self._encoders.shutdown(wait=True)


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


def load() -> None:
    """Import what encoding takes, and let it set itself up."""
    import numpy as np

    encode({"x": np.zeros(1)}, attributes={})


def _json_safe(attributes: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(attributes), allow_nan=False, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Attributes of a shard must be JSON: {error}. Convert them before.") from error
    return plain


def _prepared(path: str, array: Array) -> Array:
    """The array as zarr stores it: native order, variable-length strings for objects."""
    import numpy as np

    if not 1 <= array.ndim <= MAX_NDIM:
        raise FieldError(f"Field {path!r} has {array.ndim} axes: 1 to {MAX_NDIM} can be stored.")
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
