"""Rows of stored arrays that are wanted come in, by segment and shard; they are in memory when it returns: fetched with
few requests, each chunk compared with its checksum and decoded once. A cache may stand in between."""

from __future__ import annotations

from archive.read.chunks import fetching, filling
from archive.read.chunks.chunkcache import DiskCache, as_disk_cache
from archive.read.chunks.chunkreader import Counts
from archive.read.chunks.chunkstore import ChunkStore
from archive.read.chunks.filling import Tails
from archive.read.chunks.latefields import LateFields
from archive.read.chunks.placing import RowsWanted, Want
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import ReadPlan, Shards

__all__ = [
    "ChunkStore",
    "Counts",
    "DiskCache",
    "LateFields",
    "ReadPlan",
    "RowsWanted",
    "Segments",
    "Shards",
    "Tails",
    "Want",
    "as_disk_cache",
    "fetching",
    "filling",
]
