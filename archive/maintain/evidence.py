"""Does I/O: what no commit names, and what it says of commits that are not there any more. A writer that died has left
it, or the commit that named it was removed.

What a writer puts names the newest commit that it knew, so that a removed newest one is noticed by who goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from archive import tables
from archive.base import (
    AccessDeniedError,
    ArchiveError,
    CorruptCommitError,
    IntegrityError,
    MissingObjectError,
    escape,
    layout,
    size,
)
from archive.journal import tails
from archive.log import Commit, Mark, Sighting, commits, sessions
from archive.maintain.objects import History, StoredObject, forgotten, running, stored
from archive.saved import Part
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_REMEDY = "put it back from a copy or an older version of the object; or `archive repair` goes on without it"
_LOOKED_AT = 2  # sessions that no commit names, at most, when a session is opened
_DIED = "its writer died before it was committed, or the commit that named it was removed"
_MAY = "it may still be committed, or its writer died before it was, or the commit that named it was removed"


class Witness(NamedTuple):
    """An object, and the newest commit that its writer knew."""

    key: str
    seen: Sighting


# -- when a session is opened ------------------------------------------------------------------------------------------


def check_newest(storage: Storage, run: str, head: Commit) -> None:
    """Refuse to open a session where the newest commits were removed; CorruptCommitError says which, and what to do.

    Two listings at once; what they have that `head` does not name is all that is read: the newest claims of other
    sessions, and what the run's newest session staged last. Whoever may not list does not look.
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
        with suppress(MissingObjectError, IntegrityError):  # of what is damaged `archive verify` tells
            if (seen := _seen_by(storage, key)) is not None:
                yield Witness(key, seen)


def _staged_last(storage: Storage, session: str, latest: Mark | None) -> str | None:
    """The object that a session (escaped) staged for its newest checkpoint, as its name goes; None if that is the
    latest."""
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


def _seen_by(storage: Storage, key: str) -> Sighting | None:
    """The newest commit that the writer of a claim or of a staged object knew; None if it says of none."""
    return sessions.read_claim(storage, key).seen if key.startswith("sessions/") else Part(storage, key).index.seen


# -- when all is looked at ---------------------------------------------------------------------------------------------


class Evidence:
    """The evidence that a commit was there: what the writers of objects had seen, and tables that were made for
    a commit after it."""

    def __init__(self) -> None:
        self.seen: list[Witness] = []
        self.made_for: dict[int, str] = {}  # commit -> a table that was made for it

    def add(self, key: str, seen: Sighting | None) -> None:
        """An object says which commit its writer knew, or of none."""
        if seen is not None:
            self.seen.append(Witness(key, seen))

    def newest(self, head: Commit) -> int:
        """The greatest number that a commit of this archive had, by all that is known."""
        return max([head.number, *(one.seen.commit for one in self._mine(head)), *(n - 1 for n in self.made_for)])

    def problems(self, storage: Storage, head: Commit, known: Mapping[int, Commit]) -> Iterator[tuple[int, str]]:
        """Number of a commit that is missing, or is another one than a writer had seen, and what says so.

        known: commits up to `head`; what was put in the place of a damaged or missing one is as good as that.
        """
        for number in range(head.number + 1, self.newest(head) + 1):
            if not storage.exists(layout.commit_key(number)):
                yield number, f"it is missing: {self._who(head, number)} was written by who had seen it; {_REMEDY}"
        for one in self._mine(head):
            there = known.get(one.seen.commit)
            if there is not None and there.kind != "repair" and there.digest != one.seen.digest:
                yield there.number, f"it is another one than the writer of {one.key} had seen: that was removed"

    def _mine(self, head: Commit) -> list[Witness]:
        """The witnesses of this archive, not of one that it was copied from."""
        return [one for one in self.seen if head.archive in ("", one.seen.archive)]

    def _who(self, head: Commit, number: int) -> str:
        """An object of one who had seen this commit or a later one."""
        told = [one.key for one in self._mine(head) if one.seen.commit >= number]
        return min([*told, *(key for made_for, key in self.made_for.items() if made_for > number)])


def leftovers(
    storage: Storage, history: History, needed: Iterable[str], evidence: Evidence
) -> list[tuple[str, str]]:  # fmt: skip
    """Objects that no commit names, or one for several of one rank, and what they would have been: but for journals
    that can still be recovered; nothing where the store cannot say what there is, or a later commit what it names (of
    an archive that is open at an earlier one). needed: shards and chunk files that rows are known to name. Adds to
    `evidence` what these objects say. Reads what is small."""
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
    _hear_journals(storage, history, unknown, evidence)
    sessions = set() if history.head is None else running(history.head)
    return [*_single(storage, sessions, unknown, there, evidence), *_piles(history, sessions, unknown, there)]


def _single(
    storage: Storage, running: Set[str], unknown: Iterable[str], there: Mapping[str, StoredObject], evidence: Evidence
) -> Iterator[tuple[str, str]]:
    """Tables and staged objects: each says what it is."""
    tell = {"manifest": _table, "states": _staged}
    for key in sorted(unknown):
        session, kind = layout.session_of(key), key.partition("/")[0]
        if session is not None and kind in tell:
            try:
                what = tell[kind](storage, key, evidence)
            except ArchiveError as e:
                what = f"it cannot be read: {e}"
            yield key, f"{what}, {there[key].modified:%Y-%m-%d %H:%M:%S}Z; {_MAY if session in running else _DIED}"


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
    text = f"{rows.num_rows} rows of the {kind} table{_of_checkpoint(kind, rows)}"
    if rows.num_rows and "commit" in rows.column_names:
        made_for = int(pc.max(rows["commit"]).as_py())
        evidence.made_for[made_for] = key
        text += f", made for commit {made_for}"
    return text


def _of_checkpoint(kind: str, rows: pa.Table) -> str:
    if kind == "segments":
        return f" ({len(rows['episode_id'].unique())} episodes, {sum(rows['length'].to_numpy())} steps)"
    if kind == "checkpoints" and rows.num_rows:
        return f" (the last one is {str(rows['name'][-1].as_py())!r}, step {rows['step'][-1].as_py()})"
    return ""


def _piles(
    history: History, running: Set[str], unknown: Iterable[str], there: Mapping[str, StoredObject]
) -> Iterator[tuple[str, str]]:
    """Shards and objects of journals, together for each rank; none of a journal that is in a checkpoint, or is of a
    session that can still be recovered."""
    piles: dict[tuple[str, str], list[str]] = {}
    for key in sorted(unknown):
        session, kind = layout.session_of(key), key.partition("/")[0]
        recoverable = layout.journal_place(key) is not None and (session in running or history.journaled.passed(key))
        if session is not None and kind in ("shards", "journal") and not recoverable:
            piles.setdefault((kind, session), []).append(key)
    for (kind, session), keys in piles.items():
        noun = "shards" if kind == "shards" else "objects of a journal"
        nbytes, newest = sum(there[key].bytes for key in keys), max(there[key].modified for key in keys)
        what = f"{len(keys)} {noun} of session {session!r}, {size(nbytes)}, the newest of {newest:%Y-%m-%d %H:%M:%S}Z"
        yield keys[0], f"{what}; {_MAY if session in running else _DIED}"


def _hear_journals(storage: Storage, history: History, unknown: Iterable[str], evidence: Evidence) -> None:
    """Add what the newest object of each rank beyond the checkpoints says that it had seen."""
    newest: dict[tuple[str, int], tuple[int, str]] = {}
    for key in unknown:
        place = layout.journal_place(key)
        if place is not None and not history.journaled.passed(key):
            newest[place[:2]] = max(newest.get(place[:2], (-1, "")), (place[2], key))
    for _, key in newest.values():
        with suppress(ArchiveError):  # where it is damaged its tail says so
            evidence.add(key, tails.index_at(storage, key).seen)
