"""Planning a prune, and carrying it out: a commit with the list, then the deletes.

Scan, then the newest commit, so that what a session has put before the scan is known to be its own. The list is
committed before anything is deleted, so that whoever commits after it looks whether that names what is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from archive import tables
from archive.base import UsageError, written
from archive.maintain import read_pins
from archive.maintain.pruning.choosing import LET_GO, Choice, Chooser
from archive.maintain.pruning.plans import Going, Progress, PrunePlan
from archive.maintain.pruning.scanning import scan
from archive.manifest import Addition, Attempt, Change, Commit, CommitLog, FileRef, new_session, tablefiles
from archive.store import Storage
from archive.tables import among

if TYPE_CHECKING:
    import pyarrow as pa

LEAST_S = 3600.0  # less must be forced: a reader goes on with an older commit for about as long

Shown = Callable[[Commit], None]


def plan(log: CommitLog, older_than_s: float, shown: Shown, *, force: bool = False) -> PrunePlan:
    """What a prune would delete now; nothing is written. shown: told of the commit, once it is made."""
    if older_than_s < LEAST_S and not force:
        raise UsageError(
            f"older_than={written(older_than_s)!r} is less than {written(LEAST_S)}: readers and writers that are at "
            "work now may lose what they use. Wait longer, or say force=True if nobody else uses this archive"
        )
    log.catch_up()
    chooser, found = log.beside_prunes(partial(_look, log, timedelta(seconds=older_than_s)))
    versioned = log.storage.versioned()

    def carry(plan: PrunePlan, per_second: float | None, progress: Progress | None) -> PrunePlan:
        return _carry_out(log, chooser, plan, shown, per_second, progress)

    return PrunePlan(
        log.storage.url, found.commit.number, older_than_s, chooser.scan.clock, versioned, found.going, found.groups,
        _carry=carry,
    )  # fmt: skip


def _look(log: CommitLog, wait: timedelta) -> tuple[Chooser, Choice]:
    clock = log.storage.clock("commits")
    chooser = Chooser(log.storage, scan(log.storage, clock, clock - wait))
    return chooser, chooser.choose(log.catch_up())


def _carry_out(
    log: CommitLog, chooser: Chooser, planned: PrunePlan, shown: Shown, per_second: float | None,
    progress: Progress | None,
) -> PrunePlan:  # fmt: skip
    """Commit what of the plan still goes, and delete it."""
    making, made = _Making(log.storage, chooser, planned), None
    with contextlib.suppress(_NothingToListError):
        session = new_session()
        change = Change("prune", partial(making.adds, session), session=session)
        made = log.commit(f"prune/{session}", change)
        shown(made)
    keys = [one.key for one in making.going]
    tell = _telling(progress, len(keys))
    pinned = read_pins(log.storage)  # again: what was pinned before the commit was made and after it was drafted
    errors = log.storage.delete_many(
        _members(log.storage, [key for key in keys if key not in pinned]), per_second=per_second, told=tell
    )
    told = {key: str(error) for key, error in errors.items()}
    return replace(planned, made=made, deleted=len(keys) - len(told), errors=told, _carry=None)


class _NothingToListError(Exception):
    """Internal: nothing goes that is not in the list of an earlier prune."""


class _Making:
    """Makes the commit, again after each lost race; `going`: what goes by then, a part of what was planned."""

    def __init__(self, storage: Storage, chooser: Chooser, planned: PrunePlan) -> None:
        self._storage = storage
        self._chooser = chooser
        self._planned = {one.key for one in planned.going}
        self.going: list[Going] = []

    def adds(self, session: str, parent: Commit, attempt: Attempt) -> Addition:
        found = self._chooser.choose(parent)
        self.going = [one for one in found.going if one.key in self._planned]
        listed = [one for one in self.going if not one.listed]
        if not listed:
            raise _NothingToListError
        removed = {"objects": len(listed), "bytes": sum(one.bytes for one in listed)}
        pruned = tablefiles.write(self._storage, session, "pruned", _list(listed, parent.number + 1))
        forgotten = self._left(parent, session, {one.key for one in listed if one.why == LET_GO})
        return {}, {"pruned": pruned, "forgotten": forgotten, "removed": removed}

    def _left(self, parent: Commit, session: str, gone: Collection[str]) -> tuple[FileRef, ...] | None:
        """The forgotten table without what goes."""
        if not gone:
            return parent.forgotten
        table = tablefiles.load(self._storage, "forgotten", parent.files("forgotten"))
        left = table.filter(~among(table["key"], gone))
        return (tablefiles.write(self._storage, session, "forgotten", left),) if left.num_rows else None


def _list(going: Collection[Going], number: int) -> pa.Table:
    columns = {name: [getattr(one, name) for one in going] for name in ("key", "bytes", "reason")}
    return tables.from_columns("pruned", {**columns, "commit": [number] * len(going)})


def _members(storage: Storage, keys: Collection[str]) -> Iterator[str]:
    """The objects; of a shard that is a directory those in it."""
    for key in keys:
        if key.endswith(".zarr"):
            yield from (one.key for one in storage.scan(key))
        else:
            yield key


def _telling(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done = min(done + more, total)
        progress(done, total)

    return tell
