"""Rows of stored arrays, by segment and shard, come in; they are in memory when a call returns: fetched with few
requests, each chunk compared with its checksum and decoded once, with or without a cache."""

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
