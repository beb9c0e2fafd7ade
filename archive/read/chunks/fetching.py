"""Fetching members of packed objects: requests out, members back, each checked against what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from archive import tables
from archive.base import CorruptChunkError
from archive.manifest import METADATA, ShardIndex, ShardReads, StoredFile, chunkindex, tablefiles
from archive.shard import inflate
from archive.store import Buffer, Roots, join_key, split_key

Owner = Callable[[], str]  # names what lies in a shard


def members(shard: str, reads: ShardReads, blocks: Sequence[Buffer], owner: Owner) -> dict[str, bytes | memoryview]:
    """Member -> its bytes. `owner` names what lies there, for the error."""
    views = [memoryview(b) for b in blocks]
    out: dict[str, bytes | memoryview] = {}
    for piece in reads.pieces:
        data = views[piece.request][piece.start : piece.start + piece.size]
        out[piece.member] = checked(shard, piece, data, owner)
    return out


def checked(shard: str, piece: chunkindex.Piece, data: memoryview, owner: Owner) -> bytes | memoryview:
    """The bytes of a member, if they are those that the chunk table means, else CorruptChunkError."""
    if chunkindex.stored_checksum(data, piece) != piece.crc32c:
        raise CorruptChunkError(
            f"{shard} is damaged: {piece.member!r} (array {piece.array!r}, chunk {piece.chunk}), where {owner()} "
            "lies, does not match its checksum; run `archive verify`"
        )
    return _plain(data) if piece.array == METADATA else data


def indexes(roots: Roots, refs: Sequence[StoredFile]) -> Iterator[tuple[str, dict[str, ShardIndex]]]:
    """Each chunk table's path, and the shards in it, named as the archive's own tables name them."""
    for data, ref in zip(tablefiles.fetch(roots, refs), refs, strict=True):
        table = tables.loads(data, "chunks", where=roots.full_url(ref.path))
        base = split_key(ref.path)[0]
        named = {join_key(base, shard): index for shard, index in chunkindex.from_table(table).items()}
        yield ref.path, {shard: replace(index, shard=shard) for shard, index in named.items()}


def _plain(data: memoryview) -> bytes:
    """A zarr.json, deflated in a packed shard and plain in a directory."""
    return bytes(data) if data[0] == ord("{") else inflate(bytes(data))
