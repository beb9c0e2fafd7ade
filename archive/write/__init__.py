"""Writing: steps come in; shards on the store and rows for the tables go out. Nothing is visible before a
commit names it."""

from __future__ import annotations

from archive.write import cut, imports
from archive.write.blocks import Block, Slab
from archive.write.buffer import Buffer
from archive.write.cut import Column, Cut, column_path, digest, live_table
from archive.write.episodes import EpisodeRecord, Ids
from archive.write.intake import StepsPart, owned
from archive.write.live import OWN, BufferResume, LiveRuns, Resume, Stream, looked_at
from archive.write.pipeline import Changes, Pipeline
from archive.write.slabs import slab_bytes
from archive.write.works import (
    ObjectDraft,
    ObjectKind,
    Seal,
    ShardObjects,
    Upload,
    Work,
    Written,
    encoded,
    rows_alone,
    shard,
)

__all__ = [
    "OWN",
    "Block",
    "Buffer",
    "BufferResume",
    "Changes",
    "Column",
    "Cut",
    "EpisodeRecord",
    "Ids",
    "LiveRuns",
    "ObjectDraft",
    "ObjectKind",
    "Pipeline",
    "Resume",
    "Seal",
    "ShardObjects",
    "Slab",
    "StepsPart",
    "Stream",
    "Upload",
    "Work",
    "Written",
    "column_path",
    "cut",
    "digest",
    "encoded",
    "imports",
    "live_table",
    "looked_at",
    "owned",
    "rows_alone",
    "shard",
    "slab_bytes",
]
