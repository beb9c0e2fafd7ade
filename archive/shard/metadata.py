"""Pure, no I/O: what a shard's zarr.json says, as records: only what this library writes is ever handed to zarr, and no
memory is made for more than chunks can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from archive.base import CorruptChunkError, Count, MisshapenError, Positive, Record, records
from archive.shard import rawchunks
from archive.shard.packing import Buffer, size_of

if TYPE_CHECKING:
    import numpy as np

MAX_NDIM = 8
_MOST_IN_A_CHUNK = 1 << 48  # items: what no machine holds
_FIRST, _BETWEEN = (("bytes",), ("vlen-utf8",)), ((), ("zstd",), ("gzip",))  # codecs, before the checksum
_SMALL_BYTES = 1 << 26  # of what is no bomb in any case


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
    """What is relied on before zarr sees what a zarr.json says of an array."""

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
class GroupRoot(Record):
    """The zarr.json of a group that has those of all its members in it."""

    attributes: Mapping[str, Any]
    consolidated_metadata: _Consolidated

    @property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """Path -> what is said of an array."""
        nodes = self.consolidated_metadata.metadata
        return {path: node.node for path, node in nodes.items() if node.node_type == "array"}


def parsed(data: bytes) -> GroupRoot:
    """The zarr.json of a group; CorruptChunkError if it is none that has its members in it."""
    what = "The zarr.json of a shard"
    value = records.parse_object(data, what=what, error=CorruptChunkError)
    return GroupRoot.from_json(value, what=what, error=CorruptChunkError)


def checked(path: str, node: dict[str, Any]) -> dict[str, Any]:
    """What is said of an array, if `groups.encode` could have written it."""
    what = f"A shard's array {path!r} has a format or codec that no archive writes, or no shape: it"
    _ArrayNode.from_json(node, what=what, error=CorruptChunkError)
    return node


def check_room(path: str, like: np.ndarray[Any, Any], rows: int, chunks: Mapping[str, Buffer]) -> None:
    """CorruptChunkError before memory is made for more rows than all of these chunks could hold."""
    nbytes = rows * math.prod(like.shape[1:]) * like.itemsize
    if nbytes > _SMALL_BYTES and nbytes > rawchunks.MOST_TIMES * sum(map(size_of, chunks.values())):
        raise CorruptChunkError(
            f"The zarr.json of a shard says that {rows} rows of array {path!r} have {nbytes} bytes, which its chunks "
            "cannot hold. It is damaged."
        )


def check_claims(path: str, nbytes: int, chunks: Mapping[str, Buffer], *, fixed: bool) -> None:
    """CorruptChunkError before zarr makes memory for more than a chunk could hold. nbytes: of the items of one; fixed:
    they take no memory beyond that, as texts do."""
    for name, data in chunks.items():
        if name.startswith(f"{path}/c/"):
            too_large = nbytes > _SMALL_BYTES and nbytes > rawchunks.MOST_TIMES * size_of(data)
            if too_large or rawchunks.claims_too_much(data, nbytes if fixed else None):
                raise CorruptChunkError(f"Member {name!r} of a shard says that it holds more than it could: damaged.")
