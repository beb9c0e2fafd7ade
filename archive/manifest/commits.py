"""Commits: small numbered files, created once, never overwritten, never deleted; the only thing that makes data visible.

Two lines: the body as JSON, and its SHA-256. Each names its parent's. A commit carries a transaction key, so that the
same intent is committed once however often it is tried and by however many processes.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, overload

from archive.base import (
    AlreadyExistsError,
    AmbiguousWriteError,
    CommitUnknownError,
    CorruptCommitError,
    MissingObjectError,
    NotFoundError,
    StorageError,
    SupersededError,
    __version__,
    forking,
    layout,
    one_line,
    plainjson,
)
from archive.manifest import commitshape
from archive.store import Storage

Body = dict[str, Any]
MAX_COMMIT_BYTES = 1_000_000
MAX_OBJECT_BYTES = MAX_COMMIT_BYTES + 66  # with its checksum, on a line of its own
REMEMBERED_SESSIONS = 100
_FOLDER, _FILE = re.compile(r"[0-9]{6}/"), re.compile(r"[0-9]{9}\.json")


@dataclass(frozen=True)
class Commit:
    """One commit as read from the store."""

    number: int
    body: Body
    digest: str

    @property
    def kind(self) -> str:
        return str(self.body.get("kind", ""))

    @property
    def run(self) -> str:
        return str(self.body.get("run", ""))

    @property
    def session(self) -> str:
        return str(self.body.get("session", ""))

    @property
    def created_at(self) -> datetime:
        return datetime.fromisoformat(self.body["created_at"])

    @property
    def runs(self) -> dict[str, Any]:
        return dict(self.body.get("runs", {}))

    def files(self, kind: str) -> list[dict[str, Any]]:
        """The manifest files of one kind (segments, checkpoints, branches), oldest first."""
        return list(self.body.get(kind, []))

    def __repr__(self) -> str:
        rows = self.body.get("added", {})
        kind = one_line(self.kind)
        return f"<Commit {self.number} {kind} run={self.run!r} session={self.session!r} added={rows}>"


EMPTY = Commit(0, {"kind": "empty", "created_at": "1970-01-01T00:00:00+00:00"}, "")


def dumps(body: Body) -> bytes:
    line = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
    if len(line) > MAX_COMMIT_BYTES:
        raise CorruptCommitError(f"commit {body.get('number')} would be {len(line)} bytes, over {MAX_COMMIT_BYTES}")
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def loads(data: bytes, number: int, where: str) -> Commit:
    """The commit of that number; a damaged one is an error, never passed over."""
    remedy = "nothing was read from it; run `archive repair` to see what can be recovered"
    if len(data) > MAX_OBJECT_BYTES:
        raise CorruptCommitError(
            f"commit {number} at {where} has more than {MAX_OBJECT_BYTES} bytes, which no commit has: it is damaged, or not "
            f"what its name says; {remedy}"
        )
    line, _, digest = data.partition(b"\n")
    if hashlib.sha256(line).hexdigest().encode() != digest.strip():
        raise CorruptCommitError(f"commit {number} at {where} does not match its checksum: it is damaged; {remedy}")
    what = f"commit {number} at {where}"
    body = plainjson.parse(line, what=what, error=CorruptCommitError, shape={}, max_depth=plainjson.MAX_DEPTH)
    layout.check_format(body.get("format"), where=what)
    if body.get("number") != number:
        raise CorruptCommitError(f"the file of {what} holds number {body.get('number')!r:.40}; {remedy}")
    if problem := commitshape.problem(body):
        raise CorruptCommitError(f"{what} is not what a commit should be ({problem}); {remedy}")
    return Commit(number, body, digest.strip().decode())


def read(storage: Storage, number: int) -> Commit:
    """Commit `number`; MissingObjectError if there is none."""
    if number == 0:
        return EMPTY
    key = layout.commit_key(number)
    return loads(storage.get_head(key, MAX_OBJECT_BYTES + 1), number, storage.full_url(key))


def read_of(storage: Storage, number: int, head: Commit) -> Commit:
    """Commit `number` of the archive that `head` is of; one of another archive is an error."""
    commit = read(storage, number)
    if number and commit.body.get("archive") != head.body.get("archive"):
        raise CorruptCommitError(
            f"commit {number} at {storage.full_url(layout.commit_key(number))} belongs to archive "
            f"{commit.body.get('archive')!r:.40}, commit {head.number} to {head.body.get('archive')!r:.40}: it comes from "
            "elsewhere; put the right one back from a copy"
        )
    return commit


def newest(storage: Storage) -> Commit:
    """The newest commit: two LISTs find it, a probe of the next number makes sure."""
    folders = [name for name in storage.list("commits") if _FOLDER.fullmatch(name)]
    for folder in reversed(folders):  # the newest may be empty: a writer died before it had written there
        names = [n for n in storage.list(layout.commit_folder(folder.rstrip("/"))) if _FILE.fullmatch(n)]
        if names:
            head = read(storage, int(names[-1].removesuffix(".json")))
            return _last(storage, head)
    return EMPTY


def _last(storage: Storage, head: Commit) -> Commit:
    for commit in following(storage, head):
        head = commit
    return head


def following(storage: Storage, base: Commit) -> Iterator[Commit]:
    """The commits after `base`, oldest first; each must name its parent's checksum."""
    while True:
        try:
            commit = read(storage, base.number + 1)
        except MissingObjectError:
            return
        if base.number and commit.body.get("parent") != base.digest:
            raise CorruptCommitError(
                f"commit {commit.number} does not follow commit {base.number} at {storage.url}: its parent's checksum "
                "differs; run `archive repair`"
            )
        yield commit
        base = commit


class CommitLog:
    """The commits of an archive as one process knows them, and adding one."""

    def __init__(self, storage: Storage, archive_id: str, head: Commit) -> None:
        self.storage = storage
        self.archive_id = archive_id
        self.head = head
        self._lock = forking.lock(self)
        self._seen: dict[str, int] = {str(head.body.get("transaction")): head.number}

    def catch_up(self) -> Commit:
        """Read what others committed since; the newest commit."""
        with self._lock: return self._caught_up()  # fmt: skip  # noqa: E701 (see _iostats)

    def _caught_up(self) -> Commit:
        for commit in following(self.storage, self.head):
            self._know(commit)
        return self.head

    def find(self, transaction: str) -> Commit | None:
        """The commit with this key, if it was made since this log began."""
        number = self._seen.get(transaction)
        return None if number is None else read(self.storage, number)

    def append(self, transaction: str, build: Callable[[Commit, int], Body]) -> Commit:
        """Commit once under this key; who committed it first does not matter.

        `build(parent, attempt)` gives the body for the number after its parent, and may write manifest files that the
        body names; it is asked again after each lost race. What it raises ends the attempt with nothing committed.
        """
        with self._lock: return self._append(transaction, build)  # fmt: skip  # noqa: E701 (see _iostats)

    def _append(self, transaction: str, build: Callable[[Commit, int], Body]) -> Commit:
        attempt = 0
        while True:
            self.catch_up()
            if found := self.find(transaction):
                return found
            body = completed(build(self.head, attempt), self.head, self.archive_id, transaction)
            data = dumps(body)
            if self._create(body["number"], data, body["nonce"]):
                commit = loads(data, body["number"], self.storage.url)
                self._know(commit)
                return commit
            attempt += 1

    def _create(self, number: int, data: bytes, nonce: str) -> bool:
        """Whether commit `number` is ours now; the same number with the same body until an answer is certain."""
        key = layout.commit_key(number)
        stop = time.monotonic() + self.storage.deadline_s
        while True:
            try:
                self.storage.create(key, data)
                return True
            except AlreadyExistsError:
                return self._holds(number, nonce)
            except AmbiguousWriteError as e:
                cause = e
            try:
                return self._holds(number, nonce)
            except MissingObjectError:
                pass  # it did not happen: the same again
            except StorageError as e:
                cause = AmbiguousWriteError(str(e))
            if time.monotonic() > stop:
                raise CommitUnknownError(
                    f"no answer within {self.storage.deadline_s:.0f} s whether commit {number} at {self.storage.url} was made; "
                    "call commit() again: it will be committed once"
                ) from cause
            time.sleep(0.05)

    def _holds(self, number: int, nonce: str) -> bool:
        return bool(read(self.storage, number).body.get("nonce") == nonce)

    def _know(self, commit: Commit) -> None:
        self._seen[str(commit.body.get("transaction"))] = commit.number
        self.head = commit  # last: who is interrupted in between reads the commit again


def completed(body: Body, parent: Commit, archive_id: str, transaction: str) -> Body:
    """The body of the commit after `parent`, with what every commit says of itself."""
    return {
        "format": layout.format_block(),
        "archive": archive_id,
        "number": parent.number + 1,
        "parent": parent.digest or None,
        "nonce": uuid.uuid4().hex,
        "transaction": transaction,
        "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "library": __version__,
        **body,
    }


def carried(parent: Commit) -> Body:
    """What every commit repeats of its parent unless it changes it."""
    return {
        key: parent.body[key] for key in ("runs", "segments", "checkpoints", "branches", "bases") if key in parent.body
    }


def fence(parent: Commit, run: str, session: str) -> None:
    """Refuse to commit for a session that a newer one of its run has replaced."""
    current = parent.runs.get(run, {}).get("session")
    if current != session:
        raise SupersededError(
            f"session {session!r} of run {run!r} was replaced by session {current!r}; nothing was committed. This "
            "process belongs to an earlier start of the job: stop it, or open a new writer to take over"
        )


def opened(
    parent: Commit, run: str, session: str, keep: Body | None = None, forked_from: Mapping[str, Any] | None = None
) -> Body:
    """The body of the commit that opens a session; `keep` is which checkpoints of the run are to be retained.

    forked_from: the checkpoint (run, name, commit) of another run at which this one begins.
    """
    runs = parent.runs
    entry = dict(runs.get(run, {}))
    earlier = [*entry.get("superseded", []), *([entry["session"]] if "session" in entry else [])]
    if session in entry.get("superseded", []):
        fence(parent, run, session)
    entry.pop("resumed_from", None)
    runs[run] = {**entry, "session": session, "superseded": earlier[-REMEMBERED_SESSIONS:], "sequences": {}}
    if keep is not None:
        runs[run]["keep"] = keep
    if forked_from is not None:
        runs[run]["forked_from"] = dict(forked_from)
    return {**carried(parent), "kind": "session", "run": run, "session": session, "runs": runs}


class Commits(Sequence[Commit]):
    """All commits of an archive, oldest first, read when asked for; `commits[-1]` is the newest."""

    def __init__(self, storage: Storage, head: Commit) -> None:
        self._storage, self._head = storage, head

    def __len__(self) -> int:
        return self._head.number

    @overload
    def __getitem__(self, index: int) -> Commit: ...
    @overload
    def __getitem__(self, index: slice) -> list[Commit]: ...
    def __getitem__(self, index: int | slice) -> Commit | list[Commit]:
        numbers = range(1, len(self) + 1)[index]
        if isinstance(numbers, range):
            return [self._read(n) for n in numbers]
        return self._read(numbers)

    def _read(self, number: int) -> Commit:
        if number == self._head.number:
            return self._head
        try:
            return read_of(self._storage, number, self._head)
        except MissingObjectError as e:
            raise NotFoundError(f"commit {number} is not in the archive at {self._storage.url}") from e

    def __repr__(self) -> str:
        return f"<{len(self)} commits, newest {self._head!r}>"
