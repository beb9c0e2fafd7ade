"""Pure, no I/O: one commit: its record, and the bytes of its file."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from archive.base import CorruptCommitError, Count, Record, __version__, layout, one_line, plainjson, stored, unstored
from archive.manifest.records import TABLES, Base, CheckpointRecord, FileRef, RunEntry, Sighting

MAX_COMMIT_BYTES = 1_000_000
MAX_OBJECT_BYTES = MAX_COMMIT_BYTES + 66  # with its checksum, on a line of its own
REMEDY = "nothing was read from it; run `archive repair` to see what can be recovered"
_NULLS = {"commit": ("chunks", "message"), "checkpoint": ("chunks", "live")}  # by kind: null where others lack the key


@dataclass(frozen=True, slots=True)
class Commit(Record):
    """One commit. What is read from the store has a digest, of its bytes."""

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
    segments: tuple[FileRef, ...] | None = None
    checkpoints: tuple[FileRef, ...] | None = None
    branches: tuple[FileRef, ...] | None = None
    forgotten: tuple[FileRef, ...] | None = None
    labels: tuple[FileRef, ...] | None = None
    late: tuple[FileRef, ...] | None = None
    tags: tuple[FileRef, ...] | None = None
    ledger: tuple[FileRef, ...] | None = None
    let_go: Count | None = None  # the newest commit after which some rows were no longer there
    bases: Mapping[str, Base] = field(default_factory=dict)
    chunks: FileRef | None = stored(None, null=True)
    live: FileRef | None = stored(None, null=True)
    checkpoint: CheckpointRecord | None = None
    added: Mapping[str, Count] = field(default_factory=dict)
    removed: Mapping[str, Count] = field(default_factory=dict)
    pruned: FileRef | None = None  # of kind "prune": the objects that it deletes
    undoes: Count | None = None  # of kind "undo" and "restore": the commit that it undoes, or makes the newest again
    message: str | None = stored(None, null=True)
    damaged: str | None = None  # of kind "repair": where the bytes lie whose place it took
    digest: str = unstored("")

    def files(self, table: str) -> tuple[FileRef, ...]:
        """The manifest files of one of TABLES, oldest first."""
        found: tuple[FileRef, ...] | None = getattr(self, table)
        return found or ()

    @property
    def all_files(self) -> list[FileRef]:
        """Every manifest file that it names."""
        own = [one for one in (self.chunks, self.live, self.pruned) if one is not None]
        return [*(one for table in TABLES for one in self.files(table)), *own]

    @property
    def base_urls(self) -> dict[str, str]:
        """Archive id -> URL of the other archives whose shards are referred to."""
        return {name: base.url for name, base in self.bases.items()}

    def after(self, kind: str, **changes: Any) -> Self:
        """A commit to follow this one: with what every commit repeats of its parent, but for these changes."""
        carried = {name: getattr(self, name) for name in (*TABLES, "runs", "bases", "format", "let_go")}
        return type(self)(kind, **(carried | changes))

    def same_episodes(self, other: Commit) -> bool:
        """Whether another one has the same episodes: labels and late fields aside."""
        tables = (self.files(table) == other.files(table) for table in ("segments", "branches"))
        return self.runs == other.runs and self.bases == other.bases and all(tables)

    @property
    def sighting(self) -> Sighting | None:
        """What an object says that is written by who knows this one as the newest; None before the first."""
        return Sighting(self.archive, self.number, self.digest) if self.number else None

    @property
    def version(self) -> int:
        """The version of the format that a reader must know."""
        return int(self.format["read"])

    def to_json(self) -> dict[str, Any]:
        return dict.fromkeys(_NULLS.get(self.kind, ())) | Record.to_json(self)

    def __repr__(self) -> str:
        kind = one_line(self.kind)
        return f"<Commit {self.number} {kind} run={self.run!r} session={self.session!r} added={dict(self.added)}>"


EMPTY = Commit("empty")


def completed(draft: Commit, parent: Commit, archive_id: str, transaction: str) -> Commit:
    """The draft as the commit after `parent`, with what every commit says of itself."""
    return replace(
        draft, number=parent.number + 1, archive=archive_id, parent=parent.digest or None, transaction=transaction,
        nonce=uuid.uuid4().hex, created_at=datetime.now(UTC),
    )  # fmt: skip


def dumps(commit: Commit) -> bytes:
    """The bytes of a commit's file; CorruptCommitError if there are too many."""
    line = json.dumps(commit.to_json(), separators=(",", ":"), sort_keys=True).encode()
    if len(line) > MAX_COMMIT_BYTES:
        raise CorruptCommitError(f"commit {commit.number} would be {len(line)} bytes, over {MAX_COMMIT_BYTES}")
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def loads(data: bytes, number: int, where: str) -> Commit:
    """The commit of that number; CorruptCommitError for a damaged one: it is never passed over."""
    what = f"commit {number} at {where}"
    if len(data) > MAX_OBJECT_BYTES:
        raise CorruptCommitError(
            f"{what} has more than {MAX_OBJECT_BYTES} bytes, which no commit has: it is damaged, or not what its name "
            f"says; {REMEDY}"
        )
    line, _, digest = data.partition(b"\n")
    if hashlib.sha256(line).hexdigest().encode() != digest.strip():
        raise CorruptCommitError(f"{what} does not match its checksum: it is damaged; {REMEDY}")
    body = plainjson.parse_object(line, what=what, error=CorruptCommitError, max_depth=plainjson.MAX_DEPTH)
    layout.check_format(body.get("format"), where=what)
    if body.get("number") != number:
        raise CorruptCommitError(f"the file of {what} holds number {body.get('number')!r:.40}; {REMEDY}")
    commit = Commit.from_json(body, what=what, error=CorruptCommitError, remedy=REMEDY)
    return replace(commit, digest=digest.strip().decode())
