"""What is in the archive, as of which commit: commits and tables come in from the store; episodes, chains and
live steps, as rows of tables, go out."""

from __future__ import annotations

from archive.manifest import (
    about,
    chains,
    chunkindex,
    claims,
    commits,
    expressions,
    labels,
    liveview,
    sessions,
    tablefiles,
    tables,
)
from archive.manifest.branches import Branches, Origin, Rows, Sequences
from archive.manifest.chunkindex import METADATA, ArrayChunks, ShardIndex, ShardReads
from archive.manifest.commit import Commit
from archive.manifest.commits import CommitLog, Commits, read_of
from archive.manifest.crossing import FORGOTTEN, LEFT
from archive.manifest.index import COLUMNS, EpisodeIndex, matching
from archive.manifest.live import OWN, LiveSet, Runs
from archive.manifest.liveview import Located
from archive.manifest.reachable import Reach, Walk, checkpoint_places, held_rows, reachable
from archive.manifest.records import (
    About,
    Base,
    BufferTotals,
    CheckpointRecord,
    Claim,
    Discarded,
    FileRef,
    ForkedFrom,
    KeepRule,
    Lineage,
    Mark,
    MissingRank,
    Pin,
    Recovered,
    RunEntry,
    Sighting,
    StagedObject,
    StoredFile,
    Tail,
)
from archive.manifest.resumed import BufferResume, KnownEpisode, Resume, Stream, Unfinished
from archive.manifest.sessions import (
    DEFAULT_RUN,
    Place,
    check_exclusive,
    named_session,
    new_session,
    open_session,
    place,
    run_of_session,
)
from archive.manifest.tablechecks import MOST_SIBLINGS
from archive.manifest.tablefiles import Later, Snapshot
from archive.manifest.tables import NO_ENV

__all__ = [
    "COLUMNS",
    "DEFAULT_RUN",
    "FORGOTTEN",
    "LEFT",
    "METADATA",
    "MOST_SIBLINGS",
    "NO_ENV",
    "OWN",
    "About",
    "ArrayChunks",
    "Base",
    "Branches",
    "BufferResume",
    "BufferTotals",
    "CheckpointRecord",
    "Claim",
    "Commit",
    "CommitLog",
    "Commits",
    "Discarded",
    "EpisodeIndex",
    "FileRef",
    "ForkedFrom",
    "KeepRule",
    "KnownEpisode",
    "Later",
    "Lineage",
    "LiveSet",
    "Located",
    "Mark",
    "MissingRank",
    "Origin",
    "Pin",
    "Place",
    "Reach",
    "Recovered",
    "Resume",
    "Rows",
    "RunEntry",
    "Runs",
    "Sequences",
    "ShardIndex",
    "ShardReads",
    "Sighting",
    "Snapshot",
    "StagedObject",
    "StoredFile",
    "Stream",
    "Tail",
    "Unfinished",
    "Walk",
    "about",
    "chains",
    "check_exclusive",
    "checkpoint_places",
    "chunkindex",
    "claims",
    "commits",
    "expressions",
    "held_rows",
    "labels",
    "liveview",
    "matching",
    "named_session",
    "new_session",
    "open_session",
    "place",
    "reachable",
    "read_of",
    "run_of_session",
    "sessions",
    "tablefiles",
    "tables",
]
