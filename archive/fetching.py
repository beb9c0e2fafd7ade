"""Fetching members of packed objects: requests out, members back, each checked against what was written."""

from __future__ import annotations

from collections.abc import Sequence

from archive import chunkindex
from archive.chunkindex import METADATA, ShardReads
from archive.errors import CorruptChunkError
from archive.packing import inflate


def members(shard: str, reads: ShardReads, blocks: Sequence[bytes], owner: str) -> dict[str, bytes | memoryview]:
    """Member -> its bytes. `owner` names what lies there, for the error."""
    views = [memoryview(b) for b in blocks]
    out: dict[str, bytes | memoryview] = {}
    for piece in reads.pieces:
        data = views[piece.request][piece.start : piece.start + piece.size]
        if chunkindex.stored_checksum(data, piece) != piece.crc32c:
            raise CorruptChunkError(
                f"{shard} is damaged: {piece.member!r} (array {piece.array!r}, chunk {piece.chunk}), where {owner} lies, "
                "does not match its checksum; run `archive verify`"
            )
        out[piece.member] = _plain(data) if piece.array == METADATA else data
    return out


def _plain(data: memoryview) -> bytes:
    """A zarr.json, deflated in a packed shard and plain in a directory."""
    return bytes(data) if data[0] == ord("{") else inflate(bytes(data))
