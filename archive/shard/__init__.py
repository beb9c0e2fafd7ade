"""Shards, the only room that knows Zarr: named arrays come in; members of a Zarr group and their places go
out, and back, or whole shards into a store."""

from __future__ import annotations

from archive.shard import codecs, groups, indexed, packing, writer
from archive.shard.groups import ShardView
from archive.shard.indexed import Members, file_member
from archive.shard.packing import Buffer, Member, Placed, checksum, inflate
from archive.shard.writer import SHARD_BYTES, ShardWriter, encode

__all__ = [
    "SHARD_BYTES",
    "Buffer",
    "Member",
    "Members",
    "Placed",
    "ShardView",
    "ShardWriter",
    "checksum",
    "codecs",
    "encode",
    "file_member",
    "groups",
    "indexed",
    "inflate",
    "packing",
    "writer",
]
