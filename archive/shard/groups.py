"""Pure, no I/O: Zarr v3 groups as they are read: rows of arrays from the bytes of chunks, and what a zarr.json may say.

zarr decodes from memory; where the bytes come from is the caller's business. Only what this library writes is ever
handed to it, and no memory is made for more than chunks can hold. A chunk that was not fetched is an error, never the
fill value.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from archive.base import (
    CorruptChunkError,
    Count,
    MisshapenError,
    MissingObjectError,
    NotFoundError,
    Positive,
    Record,
    StorageError,
    UsageError,
    cached_property,
    records,
)
from archive.shard import rawchunks
from archive.shard.packing import MAX_NDIM, Buffer, hulls, member_name, size_of

if TYPE_CHECKING:
    import numpy as np
    import zarr

    Array = np.ndarray[Any, Any]

Chunks = Mapping[str, Buffer]  # member name -> stored bytes
Decode = Callable[..., Any]  # (number of a chunk, out=None) -> its rows

_MOST_IN_A_CHUNK = 1 << 48  # items: what no machine holds
_FIRST, _BETWEEN = (("bytes",), ("vlen-utf8",)), ((), ("zstd",), ("gzip",))  # codecs, before the checksum
_SMALL_BYTES = 1 << 26  # of what is no bomb in any case


def decode(zarr_json: bytes, chunks: Chunks, wanted: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, list[Array]]:
    """The rows `wanted` of each array, one array per half-open range; those of one chunk may share its memory.

    `zarr_json` is the plain bytes of the root one, `chunks` maps member names to stored bytes. A chunk that
    is needed and not there is a MissingObjectError, one that does not decode a CorruptChunkError.
    """
    view = ShardView(zarr_json)
    return {path: view.read_many(path, ranges, chunks) for path, ranges in wanted.items()}


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
    def _root(self) -> _GroupRoot:
        return _parsed(self._metadata)

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
        """The rows of several ranges, read as `read` does: each chunk is decoded once."""
        import numpy as np

        ranges = list(ranges)
        self.check_rows(path, ranges)
        like, _, rows = self.describe(path)
        _check_room(path, like, sum(stop - start for start, stop in ranges), chunks)
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
        """An array's kind and length, by its metadata."""
        import numpy as np

        if (plain := self._plain(path)) is not None:
            return Described(np.empty((0, *plain.shape[1:]), plain.dtype), plain.shape[0], plain.rows)
        array = self._open(path, {})
        dtype = object if array.dtype.kind == "T" else array.dtype
        return Described(np.empty((0, *array.shape[1:]), dtype), array.shape[0], array.chunks[0])

    def is_raw(self, path: str) -> bool:
        """True if the chunks of an array are its rows as they lie in memory, and their checksum."""
        plain = self._plain(path)
        return plain is not None and not plain.compressed

    def plain_chunk(self, path: str, number: int, chunks: Chunks, out: Array | None = None) -> Array | None:
        """The rows of one chunk as a decoder gives them, which takes no other; None if it is not plain, or damaged."""
        plain = self._plain(path)
        return None if plain is None else rawchunks.one_chunk(plain, number, chunks, out)

    def decoder(self, path: str, ranges: Iterable[tuple[int, int]], chunks: Chunks) -> Decode:
        """A function that gives the rows of a chunk by its number, of those chunks that hold these ranges of rows.

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
        _check_claims(path, nbytes, chunks, fixed=fixed)
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
        store = MemoryStore(_StoredBytes(chunks), read_only=True)  # type: ignore[arg-type]
        try:
            return zarr.Array.from_dict(StorePath(store, path), node)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise CorruptChunkError(f"The zarr.json of a shard does not describe array {path!r}: {error!r}") from error

    def _trusted_node(self, path: str) -> dict[str, Any]:
        """Only what `encode` writes: zarr also knows old formats and codecs that unpickle what they read."""
        if path not in self._arrays:
            raise NotFoundError(f"A shard has no array {path!r}, only {self.paths}: read one of these.")
        return _checked(path, self._arrays[path])


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
    """The chunk that it was: zarr's error doesn't say, so each is decoded alone."""
    rows = array.chunks[0]
    for chunk in range(start // rows, math.ceil(stop / rows)):
        try:
            array[max(start, chunk * rows) : min(stop, (chunk + 1) * rows)]
        except Exception as own:
            name = member_name(path, array.ndim, chunk)
            return f"Chunk {chunk} of array {path!r} (member {name!r}) does not decode: {own!r}. The object is damaged."
    return f"Rows {start} to {stop} of array {path!r} do not decode: {error!r}. The object is damaged."


class _StoredBytes(Mapping[str, Any]):
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


# -- what a zarr.json says ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Codec(Record):
    name: Literal["bytes", "vlen-utf8", "zstd", "gzip", "crc32c"]  # of all that zarr knows


@dataclass(frozen=True, slots=True)
class _Chunks(Record):
    chunk_shape: tuple[Positive, ...]


@dataclass(frozen=True, slots=True)
class _Grid(Record):
    configuration: _Chunks


@dataclass(frozen=True, slots=True)
class _ArrayNode(Record):
    """An array of a zarr.json, as far as it is relied on before zarr sees it."""

    zarr_format: Literal[3]
    shape: tuple[Count, ...]
    chunk_grid: _Grid
    codecs: tuple[_Codec, ...]

    def __post_init__(self) -> None:
        chunk = self.chunk_grid.configuration.chunk_shape
        for shape in (self.shape[1:], chunk):
            if math.prod(max(1, n) for n in shape) > _MOST_IN_A_CHUNK:
                raise MisshapenError(f"its shape {list(shape)} is beyond what can be")
        names = tuple(codec.name for codec in self.codecs)
        if not (names[:1] in _FIRST and names[1:-1] in _BETWEEN and names[-1:] == ("crc32c",)):
            raise MisshapenError(f"its codecs are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
        if not 1 <= len(self.shape) == len(chunk) <= MAX_NDIM:
            raise MisshapenError(f"it has {len(self.shape)} axes, and its chunks {len(chunk)}")


@dataclass(frozen=True, slots=True)
class _AnyNode(Record):
    """An array or a group of a zarr.json, which is looked into when it is asked for."""

    node_type: str

    @property
    def node(self) -> dict[str, Any]:
        return {"node_type": self.node_type, **self.more}


@dataclass(frozen=True, slots=True)
class _Consolidated(Record):
    metadata: Mapping[str, _AnyNode]


@dataclass(frozen=True, slots=True)
class _GroupRoot(Record):
    """The zarr.json of a group that has those of all its members in it."""

    attributes: Mapping[str, Any]
    consolidated_metadata: _Consolidated

    @property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """Path -> what is said of an array."""
        nodes = self.consolidated_metadata.metadata
        return {path: node.node for path, node in nodes.items() if node.node_type == "array"}


def _parsed(data: bytes) -> _GroupRoot:
    """The zarr.json of a group; CorruptChunkError if it is none that has its members in it."""
    what = "The zarr.json of a shard"
    value = records.parse_object(data, what=what, error=CorruptChunkError)
    return _GroupRoot.from_json(value, what=what, error=CorruptChunkError)


def _checked(path: str, node: dict[str, Any]) -> dict[str, Any]:
    """The node of an array, if `groups.encode` could have written it."""
    what = f"A shard's array {path!r} has a format or codec that no archive writes, or no shape: it"
    _ArrayNode.from_json(node, what=what, error=CorruptChunkError)
    return node


def _check_room(path: str, like: np.ndarray[Any, Any], rows: int, chunks: Mapping[str, Buffer]) -> None:
    """CorruptChunkError before memory is made for more rows than all of these chunks could hold."""
    nbytes = rows * math.prod(like.shape[1:]) * like.itemsize
    if nbytes > _SMALL_BYTES and nbytes > rawchunks.MOST_TIMES * sum(map(size_of, chunks.values())):
        raise CorruptChunkError(
            f"The zarr.json of a shard says that {rows} rows of array {path!r} have {nbytes} bytes, which its chunks "
            "cannot hold. It is damaged."
        )


def _check_claims(path: str, nbytes: int, chunks: Mapping[str, Buffer], *, fixed: bool) -> None:
    """CorruptChunkError before zarr makes memory for more than a chunk could hold. nbytes: of the items of one; fixed:
    they take no memory beyond that, as texts do."""
    for name, data in chunks.items():
        if name.startswith(f"{path}/c/"):
            too_large = nbytes > _SMALL_BYTES and nbytes > rawchunks.MOST_TIMES * size_of(data)
            if too_large or rawchunks.claims_too_much(data, nbytes if fixed else None):
                raise CorruptChunkError(f"Member {name!r} of a shard says that it holds more than it could: damaged.")
