"""Commits that change nothing: in the place of damaged or missing newest ones, and from which on the archive is of the
newest format. Deletes nothing."""

from __future__ import annotations

import secrets
from contextlib import suppress
from dataclasses import dataclass

from archive.base import (
    AlreadyExistsError,
    CorruptCommitError,
    IntegrityError,
    MissingObjectError,
    NotFoundError,
    UsageError,
    layout,
)
from archive.log import Commit, about, commits, sessions
from archive.maintain.evidence import Evidence, leftovers
from archive.maintain.objects import History
from archive.store import Storage


@dataclass(frozen=True)
class Repaired:
    """The outcome of `repair`. kept_as: where the damaged bytes are; None: there were none."""

    commit: int
    kept_as: str | None


def damaged_commit(storage: Storage) -> int:
    """Number of the newest commit, if it is damaged; UsageError if there is nothing to repair."""
    try:
        newest = commits.newest(storage)
    except CorruptCommitError:
        folder = [n for n in storage.list("commits") if n.endswith("/")][-1].rstrip("/")
        return int(
            [n for n in storage.list(layout.commit_folder(folder)) if n.endswith(".json")][-1].removesuffix(".json")
        )
    if newest.number == 0:
        raise NotFoundError(f"there are no commits at {storage.url}; nothing to repair")
    told = f"the newest commit at {storage.url}, {newest.number}, is sound; nothing to repair"
    if lost := _lost_between(storage, newest):
        told += (
            f". Of those before it {', '.join(map(str, lost[:5]))} cannot be read: put them back from a copy. Without "
            "them the archive works as of the newest, but not as of these, and `archive verify` goes on saying so"
        )
    raise UsageError(told)


def _lost_between(storage: Storage, newest: Commit) -> list[int]:
    """Numbers of commits before the newest that are missing or damaged."""
    out = []
    for number in range(1, newest.number):
        try:
            commits.read(storage, number)
        except (IntegrityError, MissingObjectError):
            out.append(number)
    return out


def missing_commits(storage: Storage) -> range:
    """Numbers of commits beyond a sound newest one that are missing: somebody has seen them. Empty if none are."""
    head, history, evidence = commits.newest(storage), History(storage), Evidence()
    for number in range(1, head.number + 1):
        with suppress(IntegrityError, MissingObjectError):  # of one in the middle `verify` tells
            history.note(commits.read(storage, number))
    for key in sessions.claim_keys(storage):
        with suppress(IntegrityError):  # of what is damaged `verify` tells
            evidence.add(key, sessions.read_claim(storage, key).seen)
    leftovers(storage, history, (), evidence)
    return range(head.number + 1, evidence.newest(head) + 1)


def repair(storage: Storage) -> Repaired:
    """Put a commit without changes in the place of a damaged newest one, or of newest ones that are missing, so that
    the archive opens as of the one before.

    What only they made visible is no longer; nothing is deleted, and damaged bytes are kept beside. Nobody must be
    writing. For any other damage, `verify` says what is affected.
    """
    try:
        number = damaged_commit(storage)
    except (UsageError, NotFoundError):
        if gone := missing_commits(storage):
            return _fill(storage, gone)
        raise
    return _replace(storage, number)


def _archive_id(storage: Storage) -> str:
    found = about.find(storage)
    if found is None:
        raise NotFoundError(f"there is no {layout.ARCHIVE_KEY} at {storage.url}: put it back from a copy first")
    return found[0].id


def _fill(storage: Storage, gone: range) -> Repaired:
    """Create what is missing."""
    parent = commits.read(storage, gone.start - 1)
    for number in gone:
        made = commits.completed(parent.after("repair"), parent, _archive_id(storage), f"repair/missing/{number}")
        with suppress(AlreadyExistsError):  # what there is then is read
            storage.create_once(layout.commit_key(number), commits.dumps(made))
        parent = commits.read(storage, number)
    return Repaired(parent.number, None)


def _replace(storage: Storage, number: int) -> Repaired:
    damaged_commit(storage)  # raises if it is sound after all: one answer that came damaged must cost no commit
    key = layout.commit_key(number)
    parent = commits.read(storage, number - 1)
    kept_as = f"damaged/commit-{number:09d}-{secrets.token_hex(4)}.json"
    archive_id = _archive_id(storage)
    data = storage.get_head(key, commits.MAX_OBJECT_BYTES + 1)
    if len(data) > commits.MAX_OBJECT_BYTES:
        raise UsageError(
            f"{storage.full_url(key)} is larger than any commit, so it is not kept beside: move it away yourself; "
            f"without it the archive opens as of commit {number - 1}"
        )
    storage.put(kept_as, data)  # a name of its own; unlike a create, it can be sent again where the answer is lost
    made = commits.completed(parent.after("repair", damaged=kept_as), parent, archive_id, f"repair/{kept_as}")
    storage.put(key, commits.dumps(made))
    return Repaired(number, kept_as)
