"""The contents of an archive as of a commit. Tables come in from the log; episodes, chains, live steps, places of
chunks, and the objects that commits lead to go out."""

from __future__ import annotations

from archive.index import chains, chunkindex, expressions, labels
from archive.index.chains import Branches, ByWriter
from archive.index.chunkindex import METADATA, ArrayChunks, ShardIndex, ShardReads
from archive.index.episodes import COLUMNS, METADATA_COLUMN, EpisodeIndex, value_set
from archive.index.expressions import Met, matching
from archive.index.reachable import Reach, Walk, checkpoint_places, held_rows
from archive.index.snapshot import Annotations, Snapshot, run_of_session

__all__ = [
    "COLUMNS",
    "METADATA",
    "METADATA_COLUMN",
    "Annotations",
    "ArrayChunks",
    "Branches",
    "ByWriter",
    "EpisodeIndex",
    "Met",
    "Reach",
    "ShardIndex",
    "ShardReads",
    "Snapshot",
    "Walk",
    "chains",
    "checkpoint_places",
    "chunkindex",
    "expressions",
    "held_rows",
    "labels",
    "matching",
    "run_of_session",
    "value_set",
]
