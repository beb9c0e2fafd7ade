"""Does I/O: objects that no commit names, what they tell of commits that are gone, and empty commits that replace such.
A dead writer has left these objects, or the commit that named them was removed.

Each object names the newest commit that its writer knew, so that the next writer notices if the newest one was removed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from archive import tables
from archive.base import (
    AccessDeniedError,
    AlreadyExistsError,
    ArchiveError,
    CorruptCommitError,
    IntegrityError,
    MissingObjectError,
    NotFoundError,
    UsageError,
    escape,
    layout,
    size,
)
from archive.jobs import Jobs
from archive.journal import index_at
from archive.log import Commit, Mark, Sighting, about, commits, sessions
from archive.maintain.objects import History, StoredObject, forgotten, running, stored
from archive.saved import Part
from archive.store import Storage

_REMEDY = "put it back from a copy or an older version of the object; or `archive repair` goes on without it"
_LOOKED_AT = 2  # at most this many sessions that no commit names, when a session is opened
_DIED = "its writer died before it was committed, or the commit that named it was removed"
_MAY = "it may still be committed, or its writer died before it was, or the commit that named it was removed"


class Witness(NamedTuple):
    """An object, and the newest commit that its writer knew."""

    key: str
    seen: Sighting


# -- when a session is opened ------------------------------------------------------------------------------------------


def check_newest(storage: Storage, run: str, head: Commit) -> None:
    """Refuse to open a session where the newest commits were removed. CorruptCommitError says which, and what to do.

    Two listings run at once; only what they have and `head` does not name is read: the newest claims of other
    sessions, and what the run's newest session staged last. Without the right to list, nothing is checked.
    """
    with suppress(AccessDeniedError):
        for one in _newest(storage, run, head):
            why = commits.missing(storage, head, one.seen, storage.full_url(one.key))
            if why is not None:
                raise CorruptCommitError(why)


def _newest(storage: Storage, run: str, head: Commit) -> Iterator[Witness]:
    entry = head.runs.get(run)
    with storage.meanwhile(lambda cancelled: storage.list("sessions", cancelled)) as claimed:
        staged = None if entry is None else _staged_last(storage, escape(entry.session), entry.latest)
        named = {escape(name) for one in head.own_runs.values() for name in one.sessions}
        unknown = {name.rstrip("/") for name in claimed()} - named
    last = sorted(unknown, key=_natural)[-_LOOKED_AT:]
    keys = [f"sessions/{name}/rank-00000.json" for name in last]
    for key in (*keys, staged, *(_staged_last(storage, name, None) for name in last)):
        if key is None:
            continue
        with suppress(MissingObjectError, IntegrityError):  # `archive verify` reports damaged objects
            is_claim = key.startswith("sessions/")
            seen = sessions.read_claim(storage, key).seen if is_claim else Part(storage, key).index.seen
            if seen is not None:
                yield Witness(key, seen)


def _staged_last(storage: Storage, session: str, latest: Mark | None) -> str | None:
    """The name of the object that a session (escaped) staged for its newest checkpoint; None if that is the latest."""
    folder = f"states/{session}"
    names = [name.rstrip("/") for name in storage.list(folder)]
    newest = max(names, key=_natural, default=None)
    if newest is None or (latest and (escape(latest.session), escape(latest.name)) == (session, newest)):
        return None
    ranks = storage.list(f"{folder}/{newest}")
    return f"{folder}/{newest}/{ranks[0]}" if ranks else None


def _natural(name: str) -> list[str | int]:
    """A key that sorts "step-9" before "step-10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


# -- when all is looked at ---------------------------------------------------------------------------------------------


class Evidence:
    """Evidence of commits: the newest ones that writers of objects had seen, and tables that were made for a later
    commit."""

    def __init__(self) -> None:
        self.seen: list[Witness] = []
        self.made_for: dict[int, str] = {}  # commit -> a table that was made for it

    def add(self, key: str, seen: Sighting | None) -> None:
        """Record the commit that the writer of an object knew; None: the object names none."""
        if seen is not None:
            self.seen.append(Witness(key, seen))

    def newest(self, head: Commit) -> int:
        """The greatest number that a commit of this archive had, by all evidence."""
        return max([head.number, *(one.seen.commit for one in self._mine(head)), *(n - 1 for n in self.made_for)])

    def problems(self, storage: Storage, head: Commit, known: Mapping[int, Commit]) -> Iterator[tuple[int, str]]:
        """Number of a commit that is missing, or differs from the one that a writer had seen, and the evidence.

        known: commits up to `head`; a commit that replaced a damaged or missing one counts as that one.
        """
        for number in range(head.number + 1, self.newest(head) + 1):
            if not storage.exists(layout.commit_key(number)):
                told = [one.key for one in self._mine(head) if one.seen.commit >= number]
                told += [key for made_for, key in self.made_for.items() if made_for > number]
                yield number, f"it is missing: {min(told)} was written by who had seen it; {_REMEDY}"
        for one in self._mine(head):
            there = known.get(one.seen.commit)
            if there is not None and there.kind != "repair" and there.digest != one.seen.digest:
                yield there.number, f"it is another one than the writer of {one.key} had seen: that was removed"

    def _mine(self, head: Commit) -> list[Witness]:
        """The witnesses of this archive, without those of an archive that it was copied from."""
        return [one for one in self.seen if head.archive in ("", one.seen.archive)]


def leftovers(storage: Storage, history: History, needed: Iterable[str], evidence: Evidence) -> list[tuple[str, str]]:
    """Objects that no commit names, or one for several of one rank, and what they would have been. Journals that can
    still be recovered are left out. The answer is empty where the store cannot list, or the archive is open at an
    earlier commit. needed: shards and chunk files that rows are known to name. Adds what these objects tell to
    `evidence`. Reads small objects only."""
    if not storage.driver.can("scan"):
        return []
    there = stored(storage)
    try:
        meanwhile = [] if history.head is None else list(commits.following(storage, history.head))
    except CorruptCommitError:
        return []
    for commit in meanwhile:
        history.note(commit)
    unknown = there.keys() - history.named.keys() - {*needed} - history.pruned
    if history.head is not None:
        unknown -= forgotten(storage, history.head).keys()
    if any(key.startswith(("shards/", "journal/")) for key in unknown):
        unknown -= history.shards(there)
    return list(_told(storage, history, unknown, there, evidence))


def _told(
    storage: Storage, history: History, unknown: Iterable[str], there: Mapping[str, StoredObject], evidence: Evidence
) -> Iterator[tuple[str, str]]:
    """Tables and staged objects, each with what it says of itself; shards and journal objects, summed up for each rank.
    Journals in a checkpoint, or of a session that can still be recovered, are left out. The newest object of each
    rank beyond the checkpoints tells what its writer had seen."""
    tell = {"manifest": _table, "states": _staged}
    keys = sorted(unknown)
    rounds = Jobs(storage).unfinished() if any(key.startswith("shards/") for key in keys) else ()
    sessions = set() if history.head is None else running(history.head, rounds)
    piles: dict[tuple[str, str], list[str]] = {}
    newest: dict[tuple[str, str], tuple[int, str]] = {}
    for key in keys:
        session, kind, place = layout.session_of(key), key.partition("/")[0], layout.journal_place(key)
        passed = history.journaled.passed(key)
        if place is not None and not passed:
            newest[place[:2]] = max(newest.get(place[:2], (-1, "")), (place[2], key))
        if session is not None and kind in tell:
            try:
                what = tell[kind](storage, key, evidence)
            except ArchiveError as e:
                what = f"it cannot be read: {e}"
            yield key, f"{what}, {there[key].modified:%Y-%m-%d %H:%M:%S}Z; {_MAY if session in sessions else _DIED}"
        elif session is not None and (place is None or not (passed or session in sessions)):
            piles.setdefault((kind, session), []).append(key)
    for (kind, session), keys in piles.items():
        noun = {"shards": "shards", "plans": "objects of a shared plan"}.get(kind, "objects of a journal")
        nbytes, last = sum(there[key].bytes for key in keys), max(there[key].modified for key in keys)
        what = f"{len(keys)} {noun} of session {session!r}, {size(nbytes)}, the newest of {last:%Y-%m-%d %H:%M:%S}Z"
        yield keys[0], f"{what}; {_MAY if session in sessions else _DIED}"
    for _, key in newest.values():
        with suppress(ArchiveError):  # its tail reports damage
            evidence.add(key, index_at(storage, key).seen)


def _staged(storage: Storage, key: str, evidence: Evidence) -> str:
    index = Part(storage, key).index
    evidence.add(key, index.seen)
    steps = sum(one.steps for one in index.buffers.values())
    rows = 0 if index.rows is None else index.rows.segments
    return (
        f"rank {index.rank} of {index.world_size} of checkpoint {index.name!r}, step {index.step}, of run "
        f"{index.run!r}, session {index.session!r}: {steps} live steps, {rows} new segments"
    )


def _table(storage: Storage, key: str, evidence: Evidence) -> str:
    import pyarrow.compute as pc

    kind = key.split(".")[-2]
    rows = tables.loads(storage.get(key), kind, where=storage.full_url(key))
    text = f"{rows.num_rows} rows of the {kind} table"
    if kind == "segments":
        text += f" ({len(rows['episode_id'].unique())} episodes, {sum(rows['length'].to_numpy())} steps)"
    elif kind == "checkpoints" and rows.num_rows:
        text += f" (the last one is {str(rows['name'][-1].as_py())!r}, step {rows['step'][-1].as_py()})"
    if rows.num_rows and "commit" in rows.column_names:
        made_for = int(pc.max(rows["commit"]).as_py())
        evidence.made_for[made_for] = key
        text += f", made for commit {made_for}"
    return text


# -- commits that replace others ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repaired:
    """The outcome of `repair`. kept_as: key of the damaged bytes; None: there were none."""

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
    if lost := sorted({*range(1, newest.number)} - _readable(storage, newest.number - 1).keys()):
        told += (
            f". Of those before it {', '.join(map(str, lost[:5]))} cannot be read: put them back from a copy. Without "
            "them the archive works as of the newest, but not as of these, and `archive verify` goes on saying so"
        )
    raise UsageError(told)


def _readable(storage: Storage, newest: int) -> dict[int, Commit]:
    """The commits up to this one that are neither missing nor damaged, by number."""
    out = {}
    for number in range(1, newest + 1):
        with suppress(IntegrityError, MissingObjectError):
            out[number] = commits.read(storage, number)
    return out


def missing_commits(storage: Storage) -> range:
    """Numbers of missing commits beyond a sound newest one: some writer has seen them. Empty if none are."""
    head, history, evidence = commits.newest(storage), History(storage), Evidence()
    for commit in _readable(storage, head.number).values():  # `verify` reports the others
        history.note(commit)
    for key in sessions.claim_keys(storage):
        with suppress(IntegrityError):  # `verify` reports what is damaged
            evidence.add(key, sessions.read_claim(storage, key).seen)
    leftovers(storage, history, (), evidence)
    return range(head.number + 1, evidence.newest(head) + 1)


def repair(storage: Storage) -> Repaired:
    """Replace a damaged newest commit, or missing newest ones, by commits without changes, so that the archive opens as
    of the one before.

    Data that only they made visible is lost; nothing is deleted, and damaged bytes are moved aside. Nobody may be
    writing. For any other damage, `verify` reports what is affected.
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
    """Create the missing commits."""
    parent = commits.read(storage, gone.start - 1)
    for number in gone:
        made = commits.completed(parent.after("repair"), parent, _archive_id(storage), f"repair/missing/{number}")
        with suppress(AlreadyExistsError):  # then that one is read
            storage.create_once(layout.commit_key(number), commits.dumps(made))
        parent = commits.read(storage, number)
    return Repaired(parent.number, None)


def _replace(storage: Storage, number: int) -> Repaired:
    damaged_commit(storage)  # raises if it is sound after all: one damaged answer must not cost a commit
    key = layout.commit_key(number)
    parent = commits.read(storage, number - 1)
    kept_as = f"damaged/commit-{number:09d}-{secrets.token_hex(4)}.json"
    archive_id = _archive_id(storage)
    data = storage.get_head(key, commits.MAX_OBJECT_BYTES + 1)
    if len(data) > commits.MAX_OBJECT_BYTES:
        raise UsageError(
            f"{storage.full_url(key)} is larger than any commit, so it is not moved aside: move it away yourself; "
            f"without it the archive opens as of commit {number - 1}"
        )
    storage.put_fresh(kept_as, data)
    made = commits.completed(parent.after("repair", damaged=kept_as), parent, archive_id, f"repair/{kept_as}")
    storage.put(key, commits.dumps(made))
    return Repaired(number, kept_as)
