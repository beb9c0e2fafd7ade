"""What is in the archive, as of which commit: commits and tables come in from the store; episodes, chains and
live steps, as rows of tables, go out."""

from __future__ import annotations

from archive.manifest import (
    about,
    attempts,
    chains,
    chunkindex,
    commits,
    expressions,
    labels,
    sessions,
    tablefiles,
)
from archive.manifest.attempts import Attempt
from archive.manifest.chains import Branches, ByWriter, Origin, Sequences
from archive.manifest.chunkindex import METADATA, ArrayChunks, ShardIndex, ShardReads
from archive.manifest.commit import Commit
from archive.manifest.commits import Commits, read_of
from archive.manifest.conflicts import FORGOTTEN, LEFT
from archive.manifest.expressions import Met, matching
from archive.manifest.index import COLUMNS, METADATA_COLUMN, EpisodeIndex, value_set
from archive.manifest.live import OWN, BufferResume, KnownEpisode, LiveRuns, Resume, Stream, Unfinished
from archive.manifest.log import Addition, Change, CommitLog, Requirement, new_session
from archive.manifest.reachable import Reach, Walk, checkpoint_places, held_rows
from archive.manifest.records import (
    About,
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
    OtherArchive,
    Pin,
    Recovered,
    RunEntry,
    Sighting,
    StagedObject,
    StoredFile,
    Tail,
)
from archive.manifest.runs import files_there
from archive.manifest.sessions import (
    DEFAULT_RUN,
    Place,
    check_exclusive,
    named_session,
    open_session,
    place,
)
from archive.manifest.snapshot import Later, Snapshot, run_of_session

__all__ = [
    "COLUMNS",
    "DEFAULT_RUN",
    "FORGOTTEN",
    "LEFT",
    "METADATA",
    "METADATA_COLUMN",
    "OWN",
    "About",
    "Addition",
    "ArrayChunks",
    "Attempt",
    "Branches",
    "BufferResume",
    "BufferTotals",
    "ByWriter",
    "Change",
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
    "LiveRuns",
    "Mark",
    "Met",
    "MissingRank",
    "Origin",
    "OtherArchive",
    "Pin",
    "Place",
    "Reach",
    "Recovered",
    "Requirement",
    "Resume",
    "RunEntry",
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
    "attempts",
    "chains",
    "check_exclusive",
    "checkpoint_places",
    "chunkindex",
    "commits",
    "expressions",
    "files_there",
    "held_rows",
    "labels",
    "matching",
    "named_session",
    "new_session",
    "open_session",
    "place",
    "read_of",
    "run_of_session",
    "sessions",
    "tablefiles",
    "value_set",
]
