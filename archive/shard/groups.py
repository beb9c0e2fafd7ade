"""Pure, no I/O: reading Zarr v3 groups: rows of arrays from the bytes of chunks, and the checks of a zarr.json.

Only groups of this library are ever read, and no memory is made for more than chunks can hold. A chunk that was not
fetched is an error, never the fill value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from archive.base import (
    CorruptChunkError,
    Count,
    MisshapenError,
    MissingObjectError,
    NotFoundError,
    Positive,
    Record,
    UsageError,
    cached_property,
    layout,
    records,
    stored,
)
from archive.shard.codecs import DTYPES, KEYS, TEXTS, StoredArray, check_size, decoded, dtype_of, member_name
from archive.shard.packing import Buffer, size_of

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Chunks = Mapping[str, Buffer]  # member name -> stored bytes

_MOST_ITEMS = 1 << 48  # of an array or a chunk: more than any machine holds
_BETWEEN = ((), ("zstd",), ("gzip",))  # codecs after the first, before the checksum


class ShardView:
    """The arrays of one shard, from the bytes of its root `zarr.json`. Frozen; safe for threads and after a fork."""

    def __init__(self, zarr_json: bytes) -> None:
        self._metadata = bytes(zarr_json)
        self._described: dict[str, StoredArray] = {}

    @cached_property
    def _root(self) -> _GroupRoot:
        """The zarr.json of a group; CorruptChunkError if it is none that has its members in it."""
        what = "The zarr.json of a shard"
        value = records.parse_object(self._metadata, what=what, error=CorruptChunkError)
        return _GroupRoot.from_json(value, what=what, error=CorruptChunkError)

    @cached_property
    def _arrays(self) -> dict[str, dict[str, Any]]:
        nodes = self._root.consolidated_metadata.metadata
        return {path: dict(node.more) for path, node in nodes.items() if node.node_type == "array"}

    @property
    def paths(self) -> list[str]:
        """The zarr paths of all arrays."""
        return list(self._arrays)

    def read_many(self, path: str, ranges: Iterable[tuple[int, int]], chunks: Chunks) -> list[Array]:
        """The rows of each half-open range, from the chunks given, by member name; each is decoded once. One that is
        needed and not there is a MissingObjectError, one that does not decode a CorruptChunkError."""
        import numpy as np

        ranges = list(ranges)
        self.check_rows(path, ranges)
        array = self.describe(path)
        rows, trailing = array.chunk_rows, array.shape[1:]
        nbytes = sum(stop - start for start, stop in ranges) * math.prod(trailing) * array.dtype.itemsize
        try:
            check_size(nbytes, sum(map(size_of, chunks.values())))
        except CorruptChunkError as error:
            raise CorruptChunkError(f"The zarr.json of a shard is damaged: of array {path!r}, {error}.") from error
        out = [np.empty((stop - start, *trailing), array.dtype) for start, stop in ranges]
        found: dict[int, Array] = {}
        for into, (start, stop) in zip(out, ranges, strict=True):
            for number in range(start // rows, -(-stop // rows)) if into.size else ():
                if number not in found:
                    found[number] = self._fetched(array, number, chunks)
                first = number * rows
                lo, hi = max(start, first), min(stop, first + rows)
                into[lo - start : hi - start] = found[number][lo - first : hi - first]
        return out

    def check_rows(self, path: str, ranges: Iterable[tuple[int, int]]) -> None:
        """UsageError if an array does not have these rows."""
        length = self.describe(path).shape[0]
        for start, stop in ranges:
            if not 0 <= start <= stop <= length:
                raise UsageError(f"Rows {start} to {stop} of array {path!r} are outside its 0 to {length}.")

    def describe(self, path: str) -> StoredArray:
        """An array by its metadata; CorruptChunkError if `encode` could not have written that: zarr also knows old
        formats, and codecs that unpickle."""
        if path not in self._described:
            if path not in self._arrays:
                raise NotFoundError(f"A shard has no array {path!r}, only {self.paths}: read one of these.")
            what = f"A shard's array {path!r} has a format or codec that no archive writes, or no shape: it"
            node = _ArrayNode.from_json(self._arrays[path], what=what, error=CorruptChunkError)
            self._described[path] = StoredArray(
                path,
                dtype_of(node.data_type),
                node.shape,
                node.chunk_grid.configuration.chunk_shape[0],
                "".join(node.compression),
            )
        return self._described[path]

    def is_raw(self, path: str) -> bool:
        """True if the chunks of an array are its rows as in memory, with their checksum."""
        array = self.describe(path)
        return not array.compression and array.dtype != object

    def chunk(self, path: str, number: int, data: Buffer, out: Array | None = None) -> Array:
        """The rows of a stored chunk, the last one with rows that fill it up; CorruptChunkError if they are damaged.

        Where `out` is given, contiguous memory for all of its rows, they are put there, and that memory is returned.
        Else they may share memory with `data`.
        """
        array = self.describe(path)
        try:
            return decoded(array, data, out)
        except CorruptChunkError as error:
            member = member_name(path, len(array.shape), number)
            raise CorruptChunkError(
                f"Chunk {number} of array {path!r} (member {member!r}) does not decode: {error}. The object is damaged."
            ) from error

    def _fetched(self, array: StoredArray, number: int, chunks: Chunks) -> Array:
        member = member_name(array.path, len(array.shape), number)
        if member not in chunks:
            raise MissingObjectError(
                f"Member {member!r} of a shard was not fetched, or is not in the chunk table: it is never read as "
                "zeros."
            )
        return self.chunk(array.path, number, chunks[member])


# -- the zarr.json ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Codec(Record):
    name: Literal["bytes", "vlen-utf8", "zstd", "gzip", "crc32c"]  # of all that zarr knows
    configuration: Any = stored(None, null=True)


@dataclass(frozen=True, slots=True)
class _Chunks(Record):
    chunk_shape: tuple[Positive, ...]


@dataclass(frozen=True, slots=True)
class _Grid(Record):
    name: Literal["regular"]
    configuration: _Chunks


@dataclass(frozen=True, slots=True)
class _ArrayNode(Record):
    """An array of a zarr.json."""

    zarr_format: Literal[3]
    shape: tuple[Count, ...]
    data_type: str
    chunk_grid: _Grid
    chunk_key_encoding: Any
    fill_value: Any
    codecs: tuple[_Codec, ...]
    storage_transformers: tuple[Any, ...] = ()

    @property
    def compression(self) -> tuple[str, ...]:
        """The names of the codecs between the first and the checksum."""
        return tuple(codec.name for codec in self.codecs[1:-1])

    def __post_init__(self) -> None:
        chunk = self.chunk_grid.configuration.chunk_shape
        for shape in (self.shape, chunk):
            if math.prod(max(1, n) for n in shape) > _MOST_ITEMS:
                raise MisshapenError(f"its shape {list(shape)} is beyond what can be")
        names = [codec.name for codec in self.codecs]
        first = "vlen-utf8" if self.data_type == TEXTS else "bytes"
        if not (names[:1] == [first] and self.compression in _BETWEEN and names[-1:] == ["crc32c"]):
            raise MisshapenError(f"its codecs are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
        if not 1 <= len(self.shape) == len(chunk) <= layout.MAX_NDIM:
            raise MisshapenError(f"it has {len(self.shape)} axes, and its chunks {len(chunk)}")
        if chunk[1:] != tuple(max(1, n) for n in self.shape[1:]):
            raise MisshapenError("its chunks are not whole rows")
        if self.data_type not in DTYPES or type(self.fill_value) not in (bool, int, float, str, list):
            raise MisshapenError(f"its dtype is {self.data_type!r:.40}, its fill value {self.fill_value!r:.40}")
        if self.codecs[0].configuration not in (None, {}, {"endian": "little"}) or self.storage_transformers:
            raise MisshapenError("its rows are not stored as they lie in memory")
        if self.chunk_key_encoding not in ({"name": "default"}, KEYS):
            raise MisshapenError("its chunks have other names")


@dataclass(frozen=True, slots=True)
class _AnyNode(Record):
    """An array or a group of a zarr.json; `more` is read on demand."""

    node_type: str


@dataclass(frozen=True, slots=True)
class _Consolidated(Record):
    metadata: Mapping[str, _AnyNode]


@dataclass(frozen=True, slots=True)
class _GroupRoot(Record):
    """The zarr.json of a group that has those of all its members in it."""

    attributes: Mapping[str, Any]
    consolidated_metadata: _Consolidated
