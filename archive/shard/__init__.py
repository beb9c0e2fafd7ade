"""Shards, the only room that knows zarr: named arrays come in; members of a Zarr group and their places go out,
and back. No network."""

from __future__ import annotations

from archive.shard import groups, indexed, packing, rawchunks
from archive.shard.groups import ShardView
from archive.shard.indexed import Members, file_member
from archive.shard.packing import Buffer, Member, Placed, checksum, inflate

__all__ = [
    "Buffer",
    "Member",
    "Members",
    "Placed",
    "ShardView",
    "checksum",
    "file_member",
    "groups",
    "indexed",
    "inflate",
    "packing",
    "rawchunks",
]
