"""The one maker of shards: arrays and their schema come in; members of a Zarr v3 group, objects on the store and the
places of their chunks go out. zarr describes the group; `codecs` makes the chunks.

Every chunk ends in its own crc32c, so `zarr.open_group` of somebody else refuses a flipped bit too.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from archive.base import FieldError, UsageError, layout, thread_pool, usable_cores
from archive.shard import codecs, packing
from archive.shard.codecs import StoredChunk
from archive.shard.packing import Buffer, Member, Placed, checksum

if TYPE_CHECKING:
    import numpy as np
    import zarr

    from archive.store import Storage

    Array = np.ndarray[Any, Any]

# map, or one that does several at once
Each = Callable[[Callable[[int], StoredChunk], Iterable[int]], Iterable[StoredChunk]]
_ROOT = "zarr.json"
_INLINE: dict[str, Any] = {"kind": "inline", "must_understand": False, "metadata": {}}
_SEGMENT = re.compile(r"[A-Za-z0-9_%-]+")
SHARD_BYTES = 48 * 1024 * 1024  # of steps; four of them, compressed or not, are in memory at once
_SHELF_FROM_BYTES = 8 * 1024 * 1024  # of steps that are compressed: for fewer, a shard's memory is too much
_MIN_CHUNK_BYTES = 16 << 10
_MAX_CHUNK_BYTES = 128 << 10  # who draws a step reads its chunk; many chunks cost bulk reads and writes
_CHUNKS_PER_FIELD = 128
_CHUNKS_PER_RUN = 4


class ShardWriter:
    """Encodes shards and writes them, in one layout and compression. Safe for several threads."""

    def __init__(
        self,
        storage: Storage,
        archive_layout: str,
        compression: str | None = "zstd:1",
        chunk_bytes: int | None = None,
    ) -> None:
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
                {**arrays, **(more or {})},
                attributes=attributes,
                compression=self._compression,
                chunk_bytes=self._chunk_bytes,
                runs=runs,
                copy=False,
                hold=Shelf(self.memory.take()).hold if large else None,
                each=self._encoders.map,
            )

    def write(self, key: str, members: Sequence[Member]) -> list[Placed]:
        """Write one encoded shard; the offsets of its members. AlreadyExistsError if there is one of that name."""
        if self.archive_layout == "packed":
            buffers, placed = packing.pack(members)
            self.storage.put_fresh(key, buffers)
        else:
            objects, placed = packing.loose(members)
            self.storage.put_fresh_many((f"{key}/{name}", data) for name, data in objects)
        return placed

    def close(self) -> None:
        """End its threads, once their work is done."""
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
    `hold` may move what is compressed to memory of its own; `each` goes over those chunks, several at once maybe.
    """
    check_paths(arrays)
    codec = codecs.compressor(compression)
    copy = copy and codec is None
    prepared = {path: _prepared(path, array, copy=copy) for path, array in arrays.items()}
    rows = {p: rows_per_chunk(len(a), _field_bytes(p, a), chunk_bytes, runs) for p, a in prepared.items()}
    chunks: dict[str, list[Member]] = {}
    for path, array in prepared.items():
        chunk_at = partial(codecs.encoded, array, rows[path], codec, hold)
        starts = range(0, len(array), rows[path]) if array.size else range(0)
        chunks[path] = [
            Member(
                codecs.member_name(path, array.ndim, chunk),
                data,
                path,
                chunk,
                rows[path],
                int.from_bytes(tail, "little"),
                tail,
                crc32,
            )
            for chunk, (data, tail, crc32) in enumerate((map if codec is None else each)(chunk_at, starts))
        ]
    smallest_first = sorted(chunks, key=lambda path: (sum(m.size for m in chunks[path]), path))
    return [*_metadata(prepared, rows, compression, attributes), *(m for path in smallest_first for m in chunks[path])]


def load() -> None:
    """Import what encoding takes, and let it set itself up."""
    import numpy as np

    encode({"x": np.zeros(1)}, attributes={})


def check_paths(paths: Iterable[str]) -> None:
    """FieldError for a path that zarr would not take, or that lies inside another."""
    known = set(paths)
    for path in known:
        segments = path.split("/")
        if not all(_SEGMENT.fullmatch(segment) for segment in segments):
            raise FieldError(f"Field {path!r} is no zarr path of segments of A-Z, a-z, 0-9, _, %, -: escape it before.")
        if any("/".join(segments[:depth]) in known for depth in range(1, len(segments))):
            raise FieldError(f"Field {path!r} lies inside another field, which is an array: rename one of them.")


def _prepared(path: str, array: Array, *, copy: bool) -> Array:
    """The array as it is stored: one piece of memory, little-endian; texts stay objects."""
    import numpy as np

    if not 1 <= array.ndim <= layout.MAX_NDIM:
        raise FieldError(f"Field {path!r} has {array.ndim} axes: 1 to {layout.MAX_NDIM} can be stored.")
    if array.dtype == object:
        return array
    if array.dtype.kind not in "biufc" or array.dtype.char in "gG":
        raise FieldError(f"Field {path!r} has dtype {array.dtype}, which zarr does not store: view it as another.")
    little = np.dtype(f"<{array.dtype.kind}{array.dtype.itemsize}")
    return np.array(array, little, order="C") if copy else np.ascontiguousarray(array, little)


def _field_bytes(path: str, array: Array) -> int:
    if array.dtype != object:
        return array.nbytes
    try:
        return sum(len(str.encode(text)) + 4 for text in array.flat)
    except TypeError as error:
        message = f"Field {path!r} has objects that are not str: convert them to str or numbers before."
        raise FieldError(message) from error
    except UnicodeEncodeError as error:
        raise FieldError(f"Field {path!r} has a str that is not Unicode ({error}): replace lone surrogates.") from error


def rows_per_chunk(rows: int, field_bytes: int, chunk_bytes: int | None = None, runs: int = 1) -> int:
    """Rows per chunk, at least 1, such that chunks are near the target and the last one lacks as little as possible.

    The target is `chunk_bytes`, or 1/128 of the field within 16 and 128 KB; less if the rows are `runs` equal runs, of
    each of which a part may be read: 1/4 of one, where that is 16 KB. Only a single row may exceed it.
    """
    if rows == 0:
        return 1
    target = chunk_bytes or min(max(_share(field_bytes, runs), _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    fitting = max(1, target * rows // max(1, field_bytes))
    return _even_part(rows, runs, fitting) or math.ceil(rows / math.ceil(rows / fitting))


def _share(field_bytes: int, runs: int) -> int:
    usual, part = field_bytes // _CHUNKS_PER_FIELD, field_bytes // (_CHUNKS_PER_RUN * max(1, runs))
    return min(usual, part) if part * _CHUNKS_PER_RUN >= 2 * _MIN_CHUNK_BYTES else usual


def _even_part(rows: int, runs: int, fitting: int) -> int | None:
    """Rows of a chunk of which several make up a run, so that no chunk has rows of two runs; None without such."""
    if runs < 2 or rows % runs or rows < runs * fitting:
        return None
    run = rows // runs
    least = math.ceil(run / fitting)
    return next((run // parts for parts in range(least, 2 * least) if run % parts == 0), None)


# -- the zarr.json ---------------------------------------------------------------------------------------------


def _metadata(
    arrays: Mapping[str, Array], rows: Mapping[str, int], compression: str | None, attributes: Mapping[str, Any]
) -> list[Member]:
    """The zarr.json of each node as zarr makes it, the root foremost, which has all others in it: zarr's own
    consolidation warns."""
    codecs.prepare()  # zarr imports numcodecs, too
    import zarr

    try:
        own = json.loads(json.dumps(dict(attributes), allow_nan=False, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Attributes of a shard must be JSON: {error}. Convert them before.") from error
    made: dict[str, Any] = {}
    group = zarr.create_group(zarr.storage.MemoryStore(made), attributes=own, zarr_format=3)
    names = dimension_names(arrays)
    for path, array in arrays.items():
        _describe(group, path, array, rows[path], compression, names[path])
    nodes = {key: json.loads(made[key].to_bytes()) for key in sorted(made)}
    root = nodes.pop(_ROOT)
    inline = {
        key.removesuffix(f"/{_ROOT}"): node
        | ({"consolidated_metadata": _INLINE} if node["node_type"] == "group" else {})
        for key, node in nodes.items()
    }
    root["consolidated_metadata"] = _INLINE | {"metadata": inline}
    return [_json(_ROOT, root), *(_json(key, node) for key, node in nodes.items())]


def _describe(group: zarr.Group, path: str, array: Array, rows: int, compression: str | None, names: list[str]) -> None:
    import numpy as np
    from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, VLenUTF8Codec, ZstdCodec

    name, _, level = (compression or "").partition(":")
    between = [] if not name else [ZstdCodec(level=int(level)) if name == "zstd" else GzipCodec(level=int(level))]
    texts = array.dtype == object
    dtype = np.dtypes.StringDType() if texts else np.dtype(array.dtype.name)  # zarr knows C's long long by no other
    group.create_array(
        path,
        shape=array.shape,
        dtype=dtype,
        chunks=(rows, *(max(1, size) for size in array.shape[1:])),
        filters=[],
        serializer=VLenUTF8Codec() if texts else BytesCodec(endian="little"),
        compressors=[*between, Crc32cCodec()],  # the checksum last, so that it covers what is stored
        dimension_names=names,
        config={"write_empty_chunks": True, "order": "C"},
    )


def _json(name: str, node: Mapping[str, Any]) -> Member:
    data = json.dumps(node, separators=(",", ":")).encode()
    return Member(name, data, "", -1, 0, checksum(data))


def dimension_names(arrays: Mapping[str, Array]) -> dict[str, list[str]]:
    """Names for xarray, which wants one length per name: "step" where rows are as many as in most arrays.

    The others have a dot, which no path segment has, so that no name is an array's and makes it an index.
    """
    lengths = Counter(len(array) for array in arrays.values())
    common = max(lengths, key=lambda length: (lengths[length], length), default=0)
    step = "step." if any(path.rpartition("/")[2] == "step" for path in arrays) else "step"
    names = {}
    for path, array in arrays.items():
        dotted = path.replace("/", ".")
        first = step if len(array) == common else f"{dotted}.row"
        names[path] = [first, *(f"{dotted}.dim_{axis}" for axis in range(1, array.ndim))]
    return names
