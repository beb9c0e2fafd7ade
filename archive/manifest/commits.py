"""Commits: small numbered files, created once, never overwritten, never deleted;
the only thing that makes data visible.

Two lines: the body as JSON, and its SHA-256. Each names its parent's. A commit carries a transaction key, so that the
same intent is committed once however often it is tried and by however many processes.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, overload

from archive.base import (
    AlreadyExistsError,
    CommitUnknownError,
    CorruptCommitError,
    MissingObjectError,
    NotFoundError,
    forking,
    layout,
)
from archive.manifest import tablefiles
from archive.manifest.attempts import Attempt, KnownIds
from archive.manifest.commit import EMPTY, MAX_OBJECT_BYTES, Commit, completed, dumps, loads, mark_of, recent
from archive.manifest.crossing import Change, Crossing, Requirement
from archive.manifest.records import About, Sighting
from archive.manifest.runs import served, settled
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "EMPTY", "MAX_OBJECT_BYTES", "CommitLog", "Commits", "completed", "dumps", "empty", "first_numbers",
    "following", "loads", "loads_of", "missing", "newest", "newest_after", "read", "read_all", "read_of",
]  # fmt: skip

X = TypeVar("X")
Build = Callable[[Commit, Attempt], Commit]
_FIRST_FOLDER = "000000"
_AT_ONCE = 256  # commits
_FEW = 8  # commits; more take longer to read one by one than to open the archive again
_NEAR = 2  # commits of others that a writer reads one by one; past more it goes to the newest
_chance = random.SystemRandom()  # the program's own stream of random numbers is not ours to draw from
_MOST_WINDOWS, _MOST_WAIT_S = 24, 10.0
_FOLDER, _FILE = re.compile(r"[0-9]{6}/"), re.compile(r"[0-9]{9}\.json")


def empty(about: About) -> Commit:
    """What an archive without commits is as of: nothing, in its own format."""
    return replace(EMPTY, format=about.format)


def read(storage: Storage, number: int) -> Commit:
    """Commit `number`; MissingObjectError if there is none."""
    if number == 0:
        return EMPTY
    key = layout.commit_key(number)
    return served(storage, loads(storage.get_head(key, MAX_OBJECT_BYTES + 1), number, storage.full_url(key)))


def read_of(storage: Storage, number: int, head: Commit) -> Commit:
    """Commit `number` of the archive that `head` is of; one of another archive is an error."""
    return _checked_of(storage, read(storage, number), number, head)


def loads_of(storage: Storage, data: bytes, number: int, head: Commit) -> Commit:
    """As `read_of`, of bytes that were fetched."""
    found = served(storage, loads(data, number, storage.full_url(layout.commit_key(number))))
    return _checked_of(storage, found, number, head)


def read_all(storage: Storage, numbers: Iterable[int], head: Commit) -> Iterator[Commit]:
    """These commits of the archive that `head` is of, each once, oldest first, many at once; `head` is as it is."""
    wanted = sorted(set(numbers))
    for at in range(0, len(wanted), _AT_ONCE):
        some = [number for number in wanted[at : at + _AT_ONCE] if number != head.number]
        data = storage.get_all([layout.commit_key(number) for number in some])
        yield from (loads_of(storage, one, number, head) for number, one in zip(some, data, strict=True))
    if head.number in wanted:
        yield head


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
        return [head, *following(storage, head)][-1] if goes_on() else head


def newest_after(storage: Storage, known: Commit) -> Commit:
    """The newest commit: one after the other as long as these are few, so that each is seen to follow the one before;
    of many the newest alone, as who opens the archive finds it."""
    head = known
    for head in following(storage, known):
        if head.number > known.number + _FEW:
            found = newest(storage)
            return _checked_of(storage, found, found.number, head) if found.number > head.number else head
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


def following(storage: Storage, base: Commit) -> Iterator[Commit]:
    """The commits after `base`, oldest first; each must name its parent's checksum."""
    while (commit := _next(storage, base)) is not None:
        yield commit
        base = commit


def _next(storage: Storage, base: Commit) -> Commit | None:
    try:
        commit = read(storage, base.number + 1)
    except MissingObjectError:
        return None
    if base.number and commit.parent != base.digest:
        raise CorruptCommitError(
            f"commit {commit.number} does not follow commit {base.number} at {storage.url}: its parent's checksum "
            "differs; run `archive repair`"
        )
    return commit


def _newest_number(storage: Storage, known: int) -> int:
    """The number of the newest commit that a listing has, if it is newer than the one that is known."""
    while True:
        folder = layout.commit_key(known + 1).split("/")[1]
        newest = max(_numbers(storage, folder), default=0)
        if newest <= known or layout.commit_key(newest + 1).split("/")[1] == folder:
            return max(newest, known)
        known = newest


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
        self.began = head.number
        self.ids = KnownIds()
        self._lock = forking.lock(self)
        self._seen: dict[str, list[int]] = {mark_of(head.transaction): [head.number]}
        self._crossing = Crossing(head)
        self._windows = 1  # over so many times as long as a try takes tries are spread: 1 where nobody else commits
        self._window_s = self._lost_at = 0.0  # as long as the last try took that was lost; when that was

    def catch_up(self) -> Commit:
        """Read what others committed since; the newest commit."""
        with self._lock: return self._caught_up()  # fmt: skip  # noqa: E701 (see IOStats.add)

    def learn_ids(self) -> Commit:
        """Learn the ids of all episodes that there are, in `ids`; the newest commit."""
        with self._lock: return self._learnt_ids()  # fmt: skip  # noqa: E701 (see IOStats.add)

    def _learnt_ids(self) -> Commit:
        self.ids.learn(self._caught_up(), partial(tablefiles.load, self.storage))
        return self.head

    def _caught_up(self, near: int = _NEAR) -> Commit:
        """Read what others committed since: the next so many one by one, then the newest."""
        while True:
            if near == 0:
                self._leap(_newest_number(self.storage, self.head.number))
                if self.storage.lists_at_once:
                    return self.head
            commit = _next(self.storage, self.head)
            if commit is None:
                return self.head
            self._know(commit)
            near -= 1

    def _leap(self, number: int) -> None:
        """Go on to this commit. Those between are read only where later ones do not say by marks what they were."""
        if number == self.head.number:
            return
        own = replace(self.head, archive=self.archive_id)
        newest = read_of(self.storage, number, own)
        marks = list(newest.recent or ())
        while len(marks) < number - 1 - own.number:
            marks += recent(read_of(self.storage, number - 1 - len(marks), own))
        for between in range(own.number + 1, number):
            if mark := marks[number - 1 - between]:
                self._seen.setdefault(mark, []).append(between)
            else:
                self._note(read_of(self.storage, between, own))
        self._know(newest)

    def find(self, transaction: str) -> Commit | None:
        """The commit with this key, if it was made since this log began."""
        for number in self._seen.get(mark_of(transaction), ()):
            found = read(self.storage, number)
            if found.transaction == transaction:
                return found
        return None

    def commit(self, transaction: str, change: Change) -> Commit:
        """Commit a change once under this key; who committed it first does not matter."""
        return self.append(transaction, change.draft, change.requires)

    def append(self, transaction: str, build: Build, requires: Sequence[Requirement] = ()) -> Commit:
        """As `commit`, of a commit that is drafted as a whole.

        `build(parent, attempt)` gives a draft, by `parent.after(...)`, and may write manifest files that it
        names, by `attempt`; it is asked again after each lost race, and where a prune has deleted meanwhile what it
        read. What else it raises ends it with nothing committed.
        """
        with self._lock: return self._append(transaction, build, requires)  # fmt: skip  # noqa: E701 (see IOStats.add)

    def _append(self, transaction: str, build: Build, requires: Sequence[Requirement]) -> Commit:
        attempt = Attempt(self.storage, self.ids, crowded=self._windows > 1)
        while True:
            self._catch_up_in_turn(attempt.number)
            began = time.monotonic()
            if found := self.find(transaction):
                return found
            parent = self.head
            try:
                for required in requires:
                    required(parent)
                draft = build(parent, attempt)
                self._crossing.check(self.storage, parent, draft)
                draft = settled(self.storage, parent, draft, attempt.number)
            except MissingObjectError:
                if not self._pruned_since(parent):
                    raise
                continue
            made = completed(draft, self.head, self.archive_id, transaction)
            data = dumps(made)
            if self._create(made.number, data):
                commit = served(self.storage, loads(data, made.number, self.storage.url))
                self._know(commit, attempt.fresh)
                self._crossing.passed(commit)
                if attempt.number == 0:
                    self._windows = max(1, self._windows // 2)
                return commit
            attempt.number += 1
            self._lost_at = time.monotonic()
            self._window_s = self._lost_at - began
            if attempt.number <= 2:
                self._windows = min(2 * self._windows, _MOST_WINDOWS)

    def _catch_up_in_turn(self, lost: int) -> None:
        """Catch up, where writers meet after a wait by chance: over the longer the more of them there seem to be. Who
        has just won lets others go first; who has lost waits half as long after each further loss, but never less
        than over two tries, so that those who lost most do not only meet one another."""
        most_s = min(self._windows * self._window_s, _MOST_WAIT_S)
        if lost == 0 and time.monotonic() - self._lost_at > 4 * most_s:  # that was long ago
            self._windows = 1
        if self._windows == 1:
            self._caught_up()
            return
        least_s, longest_s = (most_s / 2, most_s) if lost == 0 else (0, max(2 * self._window_s, most_s / 2**lost))
        time.sleep(_chance.uniform(least_s, min(longest_s, _MOST_WAIT_S)))
        self._caught_up(near=0 if self._windows > _NEAR else _NEAR)

    def gone(self, keys: Collection[str], since: int) -> Collection[str]:
        """Which of these objects, all of which commit `since` led to, were forgotten or pruned after it by now."""
        return self.beside_prunes(lambda: self._crossing.gone(self.storage, self.catch_up(), keys, since))

    def beside_prunes(self, call: Callable[[], X]) -> X:
        """What the call gives; once more where it missed what a prune has deleted meanwhile."""
        while True:
            known = self.head
            try:
                return call()
            except MissingObjectError:
                if not self._pruned_since(known):
                    raise

    def _pruned_since(self, known: Commit) -> bool:
        """Whether a prune was committed after this one."""
        self.catch_up()
        return self._crossing.newest_prune > known.number

    def _create(self, number: int, data: bytes) -> bool:
        """Whether commit `number` is ours now; the same number with the same body until an answer is certain."""
        unclear = CommitUnknownError(
            f"no answer within {self.storage.deadline_s:.0f} s whether commit {number} at {self.storage.url} was made; "
            "call commit() again: it will be committed once"
        )
        try:
            self.storage.create_once(layout.commit_key(number), data, unclear=unclear, look=False)
        except AlreadyExistsError:  # were it ours after all, the next try would find it by its transaction
            return False
        return True

    def _know(self, commit: Commit, fresh: pa.Table | None = None) -> None:
        self._note(commit, fresh)
        self.head = commit  # last: who is interrupted in between reads the commit again

    def _note(self, commit: Commit, fresh: pa.Table | None = None) -> None:
        self._crossing.note(commit)
        self.ids.note(commit, fresh)
        self._seen.setdefault(mark_of(commit.transaction), []).append(commit.number)


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
