"""Rows of stored arrays that are wanted come in, by segment and shard; they are in memory when it returns: fetched with
few requests, each chunk compared with its checksum and decoded once. A cache may stand in between."""

from __future__ import annotations

from archive.read.chunks import fetch
from archive.read.chunks.chunkstore import ChunkStore, Counts
from archive.read.chunks.diskcache import DiskCache, as_disk_cache
from archive.read.chunks.fetch import LastChunks
from archive.read.chunks.segments import LateFields, Segments
from archive.read.chunks.shards import ReadPlan, Shards, indexes_of, members_of
from archive.read.chunks.wants import RowsWanted, Want

__all__ = [
    "ChunkStore",
    "Counts",
    "DiskCache",
    "LastChunks",
    "LateFields",
    "ReadPlan",
    "RowsWanted",
    "Segments",
    "Shards",
    "Want",
    "as_disk_cache",
    "fetch",
    "indexes_of",
    "members_of",
]
