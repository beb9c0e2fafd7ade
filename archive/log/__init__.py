"""The log of commits: a change comes in as a value and becomes a commit, once, whoever commits beside; commits, the
tables' files that they name, and who may write go out."""

from __future__ import annotations

from archive.log import about, commits, sessions, tablefiles
from archive.log.commit import Commit
from archive.log.commits import Commits, read_of
from archive.log.conflicts import FORGOTTEN, LEFT
from archive.log.log import Addition, Attempt, Change, CommitLog, Requirement, new_session
from archive.log.records import (
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
from archive.log.runs import files_there
from archive.log.sessions import (
    DEFAULT_RUN,
    Origin,
    Place,
    Sequences,
    branch_rows,
    named_session,
    open_session,
    place,
)

__all__ = [
    "DEFAULT_RUN",
    "FORGOTTEN",
    "LEFT",
    "About",
    "Addition",
    "Attempt",
    "BufferTotals",
    "Change",
    "CheckpointRecord",
    "Claim",
    "Commit",
    "CommitLog",
    "Commits",
    "Discarded",
    "FileRef",
    "ForkedFrom",
    "KeepRule",
    "Lineage",
    "Mark",
    "MissingRank",
    "Origin",
    "OtherArchive",
    "Pin",
    "Place",
    "Recovered",
    "Requirement",
    "RunEntry",
    "Sequences",
    "Sighting",
    "StagedObject",
    "StoredFile",
    "Tail",
    "about",
    "branch_rows",
    "commits",
    "files_there",
    "named_session",
    "new_session",
    "open_session",
    "place",
    "read_of",
    "sessions",
    "tablefiles",
]
