"""Writing. Steps come in; shards on the store and rows for the tables go out. Nothing is visible before a
commit names it."""

from __future__ import annotations

from archive.write import imports, live
from archive.write.blocks import Block, Slab, weighed
from archive.write.buffer import Buffer
from archive.write.changes import Changes, kept
from archive.write.episodes import EpisodeRecord, Ids
from archive.write.intake import StepsPart, owned
from archive.write.live import (
    OWN,
    BufferResume,
    Column,
    Cut,
    Kind,
    LiveSet,
    Resume,
    Stream,
    Stretch,
    column_path,
    digest,
    live_steps,
    ordered,
)
from archive.write.pipeline import Pipeline
from archive.write.slabs import slab_bytes
from archive.write.staging import Staging, end_to_end
from archive.write.works import (
    ObjectKind,
    RankRows,
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
    "Kind",
    "LiveSet",
    "ObjectKind",
    "Pipeline",
    "RankRows",
    "Resume",
    "Seal",
    "ShardObjects",
    "Slab",
    "Staging",
    "StepsPart",
    "Stream",
    "Stretch",
    "Upload",
    "Work",
    "Written",
    "column_path",
    "digest",
    "encoded",
    "end_to_end",
    "imports",
    "kept",
    "live",
    "live_steps",
    "ordered",
    "owned",
    "rows_alone",
    "shard",
    "slab_bytes",
    "weighed",
]
