"""Pure, no I/O: one commit: its record, and the bytes of its file."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from archive.base import (
    CorruptCommitError,
    Count,
    MisshapenError,
    Record,
    UsageError,
    __version__,
    layout,
    one_line,
    records,
    stored,
    unstored,
)
from archive.log.records import CheckpointRecord, FileRef, OtherArchive, RunEntry, Sighting
from archive.log.runs import KnownRuns
from archive.tables import LISTED

MAX_COMMIT_BYTES = 1_000_000
RECENT = 64  # a commit has the marks of this many commits before it
MAX_OBJECT_BYTES = MAX_COMMIT_BYTES + 66  # with its checksum, on a line of its own
REMEDY = "nothing was read from it; run `archive repair` to see what can be recovered"
_ADDS = ("session", "commit", "checkpoint", "tag", "label", "late", "merge")  # kinds that delete nothing
_NULLS = {"commit": ("chunks", "message"), "checkpoint": ("chunks", "live")}  # by kind: null where others lack the key


@dataclass(frozen=True, slots=True)
class Commit(Record):
    """One commit. A commit that was read from the store has a digest, of its bytes."""

    kind: str
    run: str = stored("", always=True)
    session: str = stored("", always=True)
    rank: Count | None = None
    number: Count = stored(0, required=True)
    archive: str = stored("", required=True)
    parent: str | None = stored(None, required=True)
    transaction: str = stored("", required=True)
    nonce: str = stored("", required=True)
    created_at: datetime = stored(datetime.fromtimestamp(0, UTC), required=True)
    library: str = stored(__version__, required=True)
    format: Any = stored(layout.format_block(), required=True)  # checked before anything else is looked at
    runs: Mapping[str, RunEntry] = stored({}, always=True)
    run_files: FileRef | None = None  # of the table runfiles: the runs that are not in the commit itself
    segments: tuple[FileRef, ...] | None = None
    checkpoints: tuple[FileRef, ...] | None = None
    branches: tuple[FileRef, ...] | None = None
    forgotten: tuple[FileRef, ...] | None = None
    labels: tuple[FileRef, ...] | None = None
    late: tuple[FileRef, ...] | None = None
    tags: tuple[FileRef, ...] | None = None
    ledger: tuple[FileRef, ...] | None = None
    let_go: Count | None = None  # the newest commit after which some rows were no longer there
    bases: Mapping[str, OtherArchive] = field(default_factory=dict)
    chunks: FileRef | None = stored(None, null=True)
    live: FileRef | None = stored(None, null=True)
    checkpoint: CheckpointRecord | None = None
    added: Mapping[str, Count] = field(default_factory=dict)
    removed: Mapping[str, Count] = field(default_factory=dict)
    pruned: FileRef | None = None  # of kind "prune": the objects that it deletes
    undoes: Count | None = None  # of kind "undo" and "restore": the commit that it undoes, or makes the newest again
    message: str | None = stored(None, null=True)
    recent: tuple[str, ...] | None = None  # marks of the commits before it, the newest first
    damaged: str | None = None  # of kind "repair": where the damaged bytes that it replaces were moved to
    digest: str = unstored("")

    def __post_init__(self) -> None:
        for table in LISTED:
            files = getattr(self, table)
            if files and len({one.path for one in files}) < len(files):
                raise MisshapenError(f"{table} names a file twice")

    def files(self, table: str) -> tuple[FileRef, ...]:
        """The manifest files of one of LISTED, oldest first."""
        found: tuple[FileRef, ...] | None = getattr(self, table)
        return found or ()

    @property
    def tables(self) -> list[tuple[str, FileRef]]:
        """Every manifest file that it names, with its table."""
        own = (("chunks", self.chunks), ("live", self.live), ("pruned", self.pruned), ("runfiles", self.run_files))
        listed = ((table, one) for table in LISTED for one in self.files(table))
        return [*listed, *((table, one) for table, one in own if one is not None)]

    @property
    def tables_led_to(self) -> list[tuple[str, FileRef]]:
        """Every manifest file that it names, or that its index of runs names, and the table of each."""
        stored = self.runs.files if isinstance(self.runs, KnownRuns) else ()
        return [*self.tables, *(("runs", one) for _, one in stored)]

    @property
    def all_files(self) -> list[FileRef]:
        """Every manifest file that it names."""
        return [one for _, one in self.tables]

    @property
    def files_led_to(self) -> list[FileRef]:
        """Every manifest file that it names, or that its index of runs names."""
        return [one for _, one in self.tables_led_to]

    @property
    def own_runs(self) -> Mapping[str, RunEntry]:
        """The runs in the commit itself; no file is read for them."""
        return self.runs.own if isinstance(self.runs, KnownRuns) else self.runs

    def runs_with(self, changed: Mapping[str, RunEntry]) -> Mapping[str, RunEntry]:
        """Its runs, with the changed ones in place of what they were."""
        own = {**self.own_runs, **{run: entry for run, entry in changed.items() if entry != self.runs.get(run)}}
        return self.runs.saying(own) if isinstance(self.runs, KnownRuns) else own

    @property
    def base_urls(self) -> dict[str, str]:
        """Archive id -> URL of the other archives whose shards this one refers to."""
        return {name: base.url for name, base in self.bases.items()}

    def after(self, kind: str, **changes: Any) -> Self:
        """A commit to follow this one. It repeats what every commit repeats of its parent, with these changes."""
        carried = {name: getattr(self, name) for name in (*LISTED, "runs", "run_files", "bases", "format", "let_go")}
        return type(self)(kind, **(carried | changes))

    def same_episodes(self, other: Commit) -> bool:
        """True if `other` has the same episodes; labels and derived columns may differ."""
        tables = (self.files(table) == other.files(table) for table in ("segments", "branches"))
        return self.runs == other.runs and self.bases == other.bases and all(tables)

    @property
    def sighting(self) -> Sighting | None:
        """The reference to this commit as the newest that a writer had seen; None before the first commit."""
        return Sighting(self.archive, self.number, self.digest) if self.number else None

    def to_json(self) -> dict[str, Any]:
        return dict.fromkeys(_NULLS.get(self.kind, ())) | Record.to_json(replace(self, runs=self.own_runs))

    def __repr__(self) -> str:
        kind = one_line(self.kind)
        return f"<Commit {self.number} {kind} run={self.run!r} session={self.session!r} added={dict(self.added)}>"


EMPTY = Commit("empty")


def mark_of(transaction: str) -> str:
    """The mark that later commits have of the commit with this key: a few letters, not unique."""
    return hashlib.sha256(transaction.encode("utf-8", "surrogatepass")).hexdigest()[:6]


def recent(commit: Commit) -> tuple[str, ...]:
    """The marks of a commit and of those before it, newest first; empty if the commit has none and must be read."""
    mark = mark_of(commit.transaction) if commit.kind in _ADDS and commit.let_go != commit.number else ""
    return (mark, *(commit.recent or ()))[:RECENT]


def completed(draft: Commit, parent: Commit, archive_id: str, transaction: str) -> Commit:
    """The draft as the commit after `parent`, with the keys that every commit has."""
    return replace(
        draft,
        number=parent.number + 1,
        archive=archive_id,
        parent=parent.digest or None,
        transaction=transaction,
        nonce=uuid.uuid4().hex,
        created_at=datetime.now(UTC),
        recent=recent(parent) if parent.number else None,
    )


def dumps(commit: Commit) -> bytes:
    """The bytes of a commit's file; UsageError if there are too many."""
    body = commit.to_json()
    line = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
    if len(line) > MAX_COMMIT_BYTES:
        most = max(body, key=lambda key: len(json.dumps(body[key])))
        raise UsageError(
            f"commit {commit.number} would have {len(line)} bytes, over {MAX_COMMIT_BYTES}, most of them in {most!r}; "
            "nothing was committed: give less of that"
        )
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def loads(data: bytes, number: int, where: str) -> Commit:
    """The commit of that number. A damaged one raises CorruptCommitError; it is never skipped."""
    what = f"commit {number} at {where}"
    if len(data) > MAX_OBJECT_BYTES:
        raise CorruptCommitError(
            f"{what} has more than {MAX_OBJECT_BYTES} bytes, which no commit has: it is damaged, or not what its name "
            f"says; {REMEDY}"
        )
    line, _, digest = data.partition(b"\n")
    if hashlib.sha256(line).hexdigest().encode() != digest.strip():
        raise CorruptCommitError(f"{what} does not match its checksum: it is damaged; {REMEDY}")
    body = records.parse_object(line, what=what, error=CorruptCommitError, max_depth=records.MAX_DEPTH)
    layout.check_format(body.get("format"), where=what)
    if body.get("number") != number:
        raise CorruptCommitError(f"the file of {what} holds number {body.get('number')!r:.40}; {REMEDY}")
    commit = Commit.from_json(body, what=what, error=CorruptCommitError, remedy=REMEDY)
    return replace(commit, digest=digest.strip().decode())
