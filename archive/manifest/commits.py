"""Commits: small numbered files, created once, never overwritten, never deleted;
the only thing that makes data visible.

Two lines: the body as JSON, and its SHA-256. Each names its parent's. A commit carries a transaction key, so that the
same intent is committed once however often it is tried and by however many processes.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import overload

from archive.base import (
    AlreadyExistsError,
    AmbiguousWriteError,
    CommitUnknownError,
    CorruptCommitError,
    MissingObjectError,
    NotFoundError,
    StorageError,
    SupersededError,
    UsageError,
    forking,
    layout,
)
from archive.manifest.commit import EMPTY, MAX_OBJECT_BYTES, Commit, completed, dumps, loads
from archive.manifest.crossing import Crossing
from archive.manifest.records import About, Sighting
from archive.store import Storage

__all__ = [
    "EMPTY", "MAX_OBJECT_BYTES", "CommitLog", "Commits", "check_can_let_go", "completed", "dumps", "empty", "fence",
    "first_numbers", "following", "loads", "loads_of", "missing", "newest", "newest_after", "read", "read_of",
    "superseded",
]  # fmt: skip

_FIRST_FOLDER = "000000"
_FEW = 8  # commits; more take longer to read one by one than to open the archive again
_FOLDER, _FILE = re.compile(r"[0-9]{6}/"), re.compile(r"[0-9]{9}\.json")


def empty(about: About) -> Commit:
    """What an archive without commits is as of: nothing, in its own format."""
    return replace(EMPTY, format=about.format)


def read(storage: Storage, number: int) -> Commit:
    """Commit `number`; MissingObjectError if there is none."""
    if number == 0:
        return EMPTY
    key = layout.commit_key(number)
    return loads(storage.get_head(key, MAX_OBJECT_BYTES + 1), number, storage.full_url(key))


def read_of(storage: Storage, number: int, head: Commit) -> Commit:
    """Commit `number` of the archive that `head` is of; one of another archive is an error."""
    return _checked_of(storage, read(storage, number), number, head)


def loads_of(storage: Storage, data: bytes, number: int, head: Commit) -> Commit:
    """As `read_of`, of bytes that were fetched."""
    found = loads(data, number, storage.full_url(layout.commit_key(number)))
    return _checked_of(storage, found, number, head)


def _checked_of(storage: Storage, commit: Commit, number: int, head: Commit) -> Commit:
    if number and commit.archive != head.archive:
        raise CorruptCommitError(
            f"commit {number} at {storage.full_url(layout.commit_key(number))} belongs to archive "
            f"{commit.archive!r:.40}, commit {head.number} to {head.archive!r:.40}: it comes from "
            "elsewhere; put the right one back from a copy"
        )
    return commit


def first_numbers(storage: Storage, cancelled: threading.Event | None = None) -> list[int]:
    """The commits of the first folder, by one LIST: all that a young archive has."""
    return _numbers(storage, _FIRST_FOLDER, cancelled)


def newest(storage: Storage, first: Callable[[], list[int]] | None = None) -> Commit:
    """The newest commit: a LIST finds it, three where the first folder is full.

    Where a LIST may come late, a probe of the next number makes sure; elsewhere it would only find what was committed
    since. first: gives what `first_numbers` did, if that was asked for already.
    """
    numbers = first() if first else first_numbers(storage)
    if not numbers or layout.commit_key(numbers[-1] + 1).rpartition("/")[0] != layout.commit_folder(_FIRST_FOLDER):
        numbers = _newest_numbers(storage)
    if not numbers:
        return EMPTY
    if storage.lists_at_once:
        return read(storage, numbers[-1])
    with storage.meanwhile(lambda cancelled: _is_there(storage, numbers[-1] + 1, cancelled)) as goes_on:
        head = read(storage, numbers[-1])
        return _last(storage, head) if goes_on() else head


def newest_after(storage: Storage, known: Commit) -> Commit:
    """The newest commit: one after the other as long as these are few, so that each is seen to follow the one before;
    of many the newest alone, as who opens the archive finds it."""
    head = known
    for head in following(storage, known):
        if head.number > known.number + _FEW:
            found = newest(storage)
            return _checked_of(storage, found, found.number, known) if found.number > head.number else head
    return head


def _newest_numbers(storage: Storage) -> list[int]:
    folders = [name.rstrip("/") for name in storage.list("commits") if _FOLDER.fullmatch(name)]
    for folder in reversed(folders):  # the newest may be empty: a writer died before it had written there
        if numbers := _numbers(storage, folder):
            return numbers
    return []


def _numbers(storage: Storage, folder: str, cancelled: threading.Event | None = None) -> list[int]:
    names = storage.list(layout.commit_folder(folder), cancelled)
    return [int(name.removesuffix(".json")) for name in names if _FILE.fullmatch(name)]


def _is_there(storage: Storage, number: int, cancelled: threading.Event) -> bool:
    try:
        storage.get_head(layout.commit_key(number), 1, cancelled)
    except MissingObjectError:
        return False
    return True


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
        if base.number and commit.parent != base.digest:
            raise CorruptCommitError(
                f"commit {commit.number} does not follow commit {base.number} at {storage.url}: its parent's checksum "
                "differs; run `archive repair`"
            )
        yield commit
        base = commit


def missing(storage: Storage, head: Commit, seen: Sighting | None, where: str) -> str | None:
    """In words, that a commit is not there which the writer of an object had seen; None if it is, or is not newer than
    `head`. Commits are never deleted: one was removed, or did not come along when the archive was copied."""
    if seen is None or seen.commit <= head.number or head.archive not in ("", seen.archive):
        return None
    key = layout.commit_key(seen.commit)
    if storage.exists(key):  # it was made since
        return None
    return (
        f"commit {seen.commit} is missing at {storage.full_url(key)}: {where} was written by who had seen it, but the "
        f"newest commit that is there is {head.number}. It was removed, or not copied with the rest: put it, and those "
        "before it, back from a copy or an older version of the object; or let `archive repair` go on without what "
        "only they made visible (`archive verify` says what that is)"
    )


class CommitLog:
    """The commits of an archive as one process knows them, and adding one."""

    def __init__(self, storage: Storage, archive_id: str, head: Commit) -> None:
        self.storage = storage
        self.archive_id = archive_id
        self.head = head
        self._lock = forking.lock(self)
        self._seen: dict[str, int] = {head.transaction: head.number}
        self._crossing = Crossing(head)

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

    def append(self, transaction: str, build: Callable[[Commit, int], Commit]) -> Commit:
        """Commit once under this key; who committed it first does not matter.

        `build(parent, attempt)` gives a draft, by `parent.after(...)`, and may write manifest files that it
        names; it is asked again after each lost race. What it raises ends the attempt with nothing committed.
        """
        with self._lock: return self._append(transaction, build)  # fmt: skip  # noqa: E701 (see _iostats)

    def _append(self, transaction: str, build: Callable[[Commit, int], Commit]) -> Commit:
        attempt = 0
        while True:
            self.catch_up()
            if found := self.find(transaction):
                return found
            draft = build(self.head, attempt)
            self._crossing.check(self.storage, self.head, draft)
            made = completed(draft, self.head, self.archive_id, transaction)
            data = dumps(made)
            if self._create(made.number, data, made.nonce):
                commit = loads(data, made.number, self.storage.url)
                self._know(commit)
                self._crossing.passed(commit)
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
                    f"no answer within {self.storage.deadline_s:.0f} s whether commit {number} at {self.storage.url} "
                    "was made; call commit() again: it will be committed once"
                ) from cause
            time.sleep(0.05)

    def _holds(self, number: int, nonce: str) -> bool:
        return read(self.storage, number).nonce == nonce

    def _know(self, commit: Commit) -> None:
        self._crossing.note(commit)
        self._seen[commit.transaction] = commit.number
        self.head = commit  # last: who is interrupted in between reads the commit again


def fence(parent: Commit, run: str, session: str) -> None:
    """Refuse to commit for a session that a newer one of its run has replaced."""
    if run not in parent.runs or parent.runs[run].session != session:
        raise superseded(parent, run, session)


def check_can_let_go(parent: Commit) -> None:
    """Refuse what readers and writers of the first format would not understand."""
    if parent.version < layout.WRITE_VERSION:
        raise UsageError(
            f"this archive is of format {parent.version}, which knows no forgetting, tags, labels, late fields and "
            f"ledgers: upgrade it by arc.upgrade() or `archive upgrade URL`, which rewrites nothing. It goes on in "
            f"format {layout.WRITE_VERSION} then, and libraries that know format {parent.version} alone can no longer "
            "open it"
        )


def superseded(parent: Commit, run: str, session: str) -> SupersededError:
    """The error of a session that is not the newest of its run."""
    current = parent.runs[run].session if run in parent.runs else None
    return SupersededError(
        f"session {session!r} of run {run!r} was replaced by session {current!r}; nothing was committed. This "
        "process belongs to an earlier start of the job: stop it, or open a new writer to take over"
    )


class Commits(Sequence[Commit]):
    """All commits of an archive, oldest first, read when asked for; `commits[-1]` is the newest."""

    def __init__(self, storage: Storage, head: Commit) -> None:
        self._storage = storage
        self._head = head

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
