"""Garbage collection: deleting the objects that an archive no longer needs.

The store is scanned, then the newest commit is read, so that what a session had put before the scan is known to be its
own. The list of what goes is committed before anything is deleted, so that later writers check whether they name what
is gone. Data decides nothing: only commits, tables and names are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import replace
from datetime import datetime, timedelta

from archive import tables
from archive.base import UsageError, escape, layout, written
from archive.index import Reach, Walk
from archive.jobs import JobRound, Jobs, is_record, is_result, job_of
from archive.log import (
    FORGOTTEN,
    LEFT,
    Addition,
    Attempt,
    Change,
    Commit,
    CommitLog,
    new_session,
    read_of,
    tablefiles,
)
from archive.maintain.objects import (
    History,
    Watermarks,
    check_made,
    copied,
    forgotten,
    read_pins,
    retained_reach,
    running,
    stored,
    without,
)
from archive.maintain.plans import ObjectFate, Progress, PrunePlan, grouped
from archive.store import Storage

LEAST_S = 3600.0  # less must be forced: a reader may use an older commit for about as long
LET_GO = "forgotten, longer ago than the wait"
SUPERSEDED = "needed by no commit that can still be opened"
CRASHED = "never committed, and older than the wait"
UNFINISHED = "listed by an earlier prune, which did not come to its end"
PINNED = "another archive refers to it"
WAITING = "forgotten, but not for as long as the wait"
EARLIER = "needed by commits that can still be opened"
RUNNING = "of a session that may still commit"
AWAITED = "journaled, and not in a checkpoint yet"
YOUNG = "not committed yet, and younger than the wait"
OF_JOB = "of a job that has not ended: finish it, or cancel it (`archive jobs`)"
ENDED = "of a job that has ended, and older than the wait"
RECORD = "the record of a job"
STRANGE = "of no session: not made by this library"
LIST = "the list of an earlier prune"
_OF_STEPS = ("shards/", "journal/")  # the folders of shards

Shown = Callable[[Commit], None]


def plan(log: CommitLog, older_than_s: float, shown: Shown, *, force: bool = False) -> PrunePlan:
    """A plan of what a prune would delete now; nothing is written. shown: called with the commit, once it is made."""
    if older_than_s < LEAST_S and not force:
        raise UsageError(
            f"older_than={written(older_than_s)!r} is less than {written(LEAST_S)}: readers and writers that are at "
            "work now may lose what they use. Wait longer, or give force=True if nobody else uses this archive"
        )
    log.catch_up()

    def look() -> tuple[Garbage, Commit, list[ObjectFate]]:
        garbage = Garbage(log.storage, timedelta(seconds=older_than_s))
        head = log.catch_up()
        return garbage, head, garbage.fates(head)

    garbage, head, fates = log.beside_prunes(look)

    def carry(plan: PrunePlan, per_second: float | None, progress: Progress | None) -> PrunePlan:
        return _carry_out(log, garbage, plan, shown, per_second, progress)

    return PrunePlan(
        url=log.storage.url,
        as_of=head.number,
        older_than_s=older_than_s,
        clock=garbage.clock,
        versioned=log.storage.versioned(),
        going=tuple(one for one in fates if one.reason is not None),
        groups=grouped(fates),
        _carry=carry,
    )


# -- garbage -----------------------------------------------------------------------------------------------------------


class Garbage:
    """The objects that were stored at one time, and those that go as of one commit after the other. Each commit and
    table is read once."""

    def __init__(self, storage: Storage, wait: timedelta) -> None:
        self._storage = storage
        self.clock = storage.clock("commits")  # before anything is read
        self._cutoff = self.clock - wait
        self._stored = stored(storage)
        self._settled = _newest_commit(storage, self._cutoff)
        self._walk = Walk(storage)
        self._history = History(storage)
        self._rows: dict[int, Reach] = {}  # commit -> the objects that its tables name

    def fates(self, head: Commit) -> list[ObjectFate]:
        """The fates of the objects that retained commits do not lead to, as of a commit, which must not be older than
        the scan."""
        rounds = Jobs(self._storage).unfinished()  # after the scan: what it saw of others is of jobs that had ended
        needed = retained_reach(self._storage, head, self._walk, rounds).keys
        pins = {*read_pins(self._storage)}
        let_go = forgotten(self._storage, head)
        check_made(self._storage, let_go)
        journaled = Watermarks.of(head)
        out = []
        for key, number in let_go.items():
            if key in needed:
                continue
            if journaled.awaited(key):  # an object of a node: what one of its ranks had there was forgotten
                out.append(self._fate(key, AWAITED))
            elif key in pins or key.endswith(layout.PRUNED):
                out.append(self._fate(key, PINNED if key in pins else LIST))
            else:
                out.append(self._fate(key, LET_GO, FORGOTTEN) if number <= self._settled else self._fate(key, WAITING))
        return [
            *out,
            *self._unknown(head, [k for k in self._stored if k not in needed and k not in let_go], pins, rounds),
        ]

    def _fate(self, key: str, why: str, reason: str | None = None) -> ObjectFate:
        nbytes = self._stored[key].bytes if key in self._stored else 0  # else it is gone already
        return ObjectFate(key, nbytes, why, reason)

    def _unknown(
        self, head: Commit, keys: list[str], pins: Set[str], rounds: Sequence[JobRound]
    ) -> Iterator[ObjectFate]:
        """The fates of objects that no table identifies."""
        if not keys:
            return
        history = self._history
        history.follow(head)
        is_of_rows = history.lost_rows and any(key.startswith(_OF_STEPS) for key in keys)
        named = history.shards(self._there()) if is_of_rows else ()
        sessions, journaled = running(head, rounds) | copied(self._storage, rounds), Watermarks.of(head)
        going = {escape(one.job) for one in rounds}
        for key in keys:
            if journaled.awaited(key):
                yield self._fate(key, AWAITED)
            elif key in pins:
                yield self._fate(key, PINNED)
            elif job_of(key) in going:  # maybe under a name that an earlier list has
                yield self._fate(key, OF_JOB)
            elif key.endswith(layout.PRUNED):
                yield self._fate(key, LIST)
            elif key in history.pruned:
                yield self._fate(key, UNFINISHED, FORGOTTEN)
            elif is_result(key) or is_record(key):
                yield self._of_ended(key)
            elif key in history.named or key in named:
                yield self._superseded(head, key)
            else:
                yield self._left(key, sessions - ({layout.session_of(key)} if journaled.passed(key) else set()))

    def _superseded(self, head: Commit, key: str) -> ObjectFate:
        """The fate of an object that only unretained commits named. It stays while one of these can still be opened,
        which those from the last forgetting on can; and that must be older than the wait."""
        since = self._history.let_go(self._settled)
        if not since or self._history.named.get(key, 0) >= since or key in self._later(head, since):
            return self._fate(key, EARLIER)
        return self._fate(key, SUPERSEDED, FORGOTTEN)

    def _later(self, head: Commit, since: int) -> set[str]:
        """The objects that tables of commits from `since` on name, for those commits after which there were fewer
        rows."""
        numbers = {since, *(number - 1 for number in self._history.lost_rows if number > since)}
        out: set[str] = set()
        for number in sorted(numbers):
            if number not in self._rows:
                self._rows[number] = self._walk.tables(read_of(self._storage, number, head), self._there())
            out |= self._rows[number].keys
        return out

    def _there(self) -> Set[str]:
        """The objects that readers may still read."""
        return self._stored.keys() - self._history.pruned

    def _of_ended(self, key: str) -> ObjectFate:
        """The fate of an object of a job that has ended."""
        if not is_result(key):
            return self._fate(key, RECORD)
        is_old = self._stored[key].modified <= self._cutoff
        return self._fate(key, ENDED, LEFT) if is_old else self._fate(key, YOUNG)

    def _left(self, key: str, sessions: Set[str | None]) -> ObjectFate:
        """The fate of an object that no commit named. sessions: those that may still commit it."""
        session = layout.session_of(key)
        if session is None and not layout.is_temporary(key):
            return self._fate(key, STRANGE)
        if session in sessions:
            return self._fate(key, RUNNING)
        is_old = self._stored[key].modified <= self._cutoff
        return self._fate(key, CRASHED, LEFT) if is_old else self._fate(key, YOUNG)


def _newest_commit(storage: Storage, cutoff: datetime) -> int:
    """The newest commit older than `cutoff`; 0: none is."""
    newest = 0
    for one in storage.scan("commits"):
        number = one.key.rpartition("/")[2].removesuffix(".json")
        if number.isdecimal() and one.key == layout.commit_key(int(number)) and one.modified <= cutoff:
            newest = max(newest, int(number))
    return newest


# -- carrying it out ---------------------------------------------------------------------------------------------------


class _NothingToListError(Exception):
    """Internal: nothing goes that is not in the list of an earlier prune."""


def _carry_out(
    log: CommitLog,
    garbage: Garbage,
    planned: PrunePlan,
    shown: Shown,
    per_second: float | None,
    progress: Progress | None,
) -> PrunePlan:
    """Commit the list of what of the plan still goes, and delete it."""
    storage, session, wanted = log.storage, new_session(), {one.key for one in planned.going}
    going: list[ObjectFate] = []

    def adds(parent: Commit, attempt: Attempt) -> Addition:
        """The list of what goes by now, a part of what was planned; made again after each lost race."""
        going[:] = [one for one in garbage.fates(parent) if one.reason is not None and one.key in wanted]
        listed = [one for one in going if one.why != UNFINISHED]
        if not listed:
            raise _NothingToListError
        columns = {name: [getattr(one, name) for one in listed] for name in ("key", "bytes", "reason")}
        table = tables.from_columns("pruned", {**columns, "commit": [parent.number + 1] * len(listed)})
        left, gone = parent.forgotten, {one.key for one in listed if one.why == LET_GO}
        if gone:
            kept = without(tablefiles.load(storage, "forgotten", parent.files("forgotten")), gone)
            left = (tablefiles.write(storage, session, "forgotten", kept),) if kept.num_rows else None
        removed = {"objects": len(listed), "bytes": sum(one.bytes for one in listed)}
        return {}, {
            "pruned": tablefiles.write(storage, session, "pruned", table),
            "forgotten": left,
            "removed": removed,
        }

    made = None
    with contextlib.suppress(_NothingToListError):
        made = log.commit(f"prune/{session}", Change("prune", adds, session=session))
        shown(made)
    keys = [one.key for one in going]
    errors = storage.delete_many(
        _members(storage, _not_needed(storage, keys, made or log.head)),
        per_second=per_second,
        told=None if progress is None else _telling(progress, len(keys)),
    )
    told = {key: str(error) for key, error in errors.items()}
    return replace(planned, made=made, deleted=len(keys) - len(told), errors=told)


def _not_needed(storage: Storage, keys: Sequence[str], head: Commit) -> list[str]:
    """These objects without those that came to be needed after the draft and before the commit: by other archives, or
    by jobs that froze an older commit."""
    rounds = Jobs(storage).unfinished() if keys else []
    needed = {*read_pins(storage)} | retained_reach(storage, head, rounds=rounds).keys if keys else set()
    sessions, going = {escape(one.session) for one in rounds}, {escape(one.job) for one in rounds}
    return [k for k in keys if k not in needed and job_of(k) not in going and layout.session_of(k) not in sessions]


def _members(storage: Storage, keys: Collection[str]) -> Iterator[str]:
    """The objects to delete: for a shard that is a directory, the objects in it."""
    for key in keys:
        if key.endswith(".zarr"):
            yield from (one.key for one in storage.scan(key))
        else:
            yield key


def _telling(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done = min(done + more, total)
        progress(done, total)

    return tell
