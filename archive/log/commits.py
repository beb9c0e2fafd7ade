"""Reading the commits of an archive: small numbered files, created once, never overwritten, never deleted. They alone
make data visible. A commit has two lines: the body as JSON, and its SHA-256. Each names its parent's."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import overload

from archive.base import (
    CorruptCommitError,
    MissingObjectError,
    NotFoundError,
    layout,
)
from archive.log import tablefiles
from archive.log.commit import EMPTY, MAX_OBJECT_BYTES, Commit, completed, dumps, loads
from archive.log.records import About, Sighting
from archive.log.runs import served
from archive.store import Storage

__all__ = [
    "EMPTY", "MAX_OBJECT_BYTES", "Commits", "completed", "dumps", "empty", "first_numbers", "following", "loads",
    "missing", "newest", "newest_after", "newest_number", "next_after", "pruned_since", "read", "read_all", "read_of",
]  # fmt: skip

_FIRST_FOLDER = "000000"
_AT_ONCE = 256  # commits
_FEW = 8  # commits; more take longer to read one by one than to open the archive again
_FOLDER, _FILE = re.compile(r"[0-9]{6}/"), re.compile(r"[0-9]{9}\.json")


def empty(about: About) -> Commit:
    """The commit that stands for an archive without commits, in the archive's own format."""
    return replace(EMPTY, format=about.format)


def read(storage: Storage, number: int) -> Commit:
    """Commit `number`; MissingObjectError if there is none."""
    if number == 0:
        return EMPTY
    return _loaded(storage, storage.get_head(layout.commit_key(number), MAX_OBJECT_BYTES + 1), number)


def _loaded(storage: Storage, data: bytes, number: int) -> Commit:
    return served(storage, loads(data, number, storage.full_url(layout.commit_key(number))))


def read_of(storage: Storage, number: int, head: Commit) -> Commit:
    """Commit `number` of the archive of `head`, which is not read again; a commit of another archive is an error."""
    if number == head.number:
        return head
    return _checked_of(storage, read(storage, number), number, head)


def read_all(storage: Storage, numbers: Iterable[int], head: Commit) -> Iterator[Commit]:
    """These commits of the archive of `head`, each once, oldest first, read many at once; `head` itself is not read."""
    wanted = sorted(set(numbers))
    for at in range(0, len(wanted), _AT_ONCE):
        some = [number for number in wanted[at : at + _AT_ONCE] if number not in (0, head.number)]
        if 0 in wanted[at : at + _AT_ONCE] and head.number:
            yield EMPTY
        data = storage.get_all([layout.commit_key(number) for number in some])
        for number, one in zip(some, data, strict=True):
            yield _checked_of(storage, _loaded(storage, one, number), number, head)
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

    Where a LIST may be stale, a probe of the next number makes sure; elsewhere it would only find what was committed
    since. first: the result of `first_numbers`, if it was already asked for.
    """
    numbers = first() if first else first_numbers(storage)
    if not numbers or layout.commit_key(numbers[-1] + 1).rpartition("/")[0] != layout.commit_folder(_FIRST_FOLDER):
        numbers = _newest_numbers(storage)
    if storage.driver.lists_at_once:
        return read(storage, numbers[-1] if numbers else 0)
    if not numbers:
        return [EMPTY, *following(storage, EMPTY)][-1]
    with storage.meanwhile(lambda cancelled: _is_there(storage, numbers[-1] + 1, cancelled)) as goes_on:
        head = read(storage, numbers[-1])
        return [head, *following(storage, head)][-1] if goes_on() else head


def newest_after(storage: Storage, known: Commit) -> Commit:
    """The newest commit. Up to a few commits are read one by one, so that each is seen to follow the one before; of
    many only the newest is read, as opening the archive does."""
    head = known
    for head in following(storage, known):
        if head.number > known.number + _FEW:
            found = newest(storage)
            return _checked_of(storage, found, found.number, head) if found.number > head.number else head
    return head


def _newest_numbers(storage: Storage) -> list[int]:
    folders = [name.rstrip("/") for name in storage.list("commits") if _FOLDER.fullmatch(name)]
    for folder in reversed(folders):  # the newest folder may be empty: its writer died first
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
    while (commit := next_after(storage, base)) is not None:
        yield commit
        base = commit


def pruned_since(storage: Storage, base: Commit, head: Commit | None = None) -> dict[str, int]:
    """The objects that prunes after a commit listed, each with the commit of the prune. head: the newest commit to look
    at; None looks for it."""
    head = newest_after(storage, base) if head is None else head
    out: dict[str, int] = {}
    for commit in read_all(storage, range(base.number + 1, head.number + 1), head):
        if commit.pruned is not None:
            keys = tablefiles.load(storage, "pruned", [commit.pruned], ["key"])["key"].to_pylist()
            out |= dict.fromkeys(keys, commit.number)
    return out


def next_after(storage: Storage, base: Commit) -> Commit | None:
    """The commit after `base`, which names its checksum; None if there is none yet."""
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


def newest_number(storage: Storage, known: int) -> int:
    """The number of the newest commit in a listing, if it is newer than `known`."""
    while True:
        folder = layout.commit_key(known + 1).split("/")[1]
        newest = max(_numbers(storage, folder), default=0)
        if newest <= known or layout.commit_key(newest + 1).split("/")[1] == folder:
            return max(newest, known)
        known = newest


def missing(storage: Storage, head: Commit, seen: Sighting | None, where: str) -> str | None:
    """A sentence if the commit that the writer of an object had seen is not there; else None. Commits are never
    deleted, so one was removed, or the copy of the archive lacks it."""
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


class Commits(Sequence[Commit]):
    """The commits of an archive, oldest first, read when asked for; `commits[-1]` is the newest."""

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
        try:
            return read_of(self._storage, number, self._head)
        except MissingObjectError as e:
            raise NotFoundError(f"commit {number} is not in the archive at {self._storage.url}") from e

    def __repr__(self) -> str:
        return f"<{len(self)} commits, newest {self._head!r}>"
