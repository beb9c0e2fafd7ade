"""Forgetting: what goes and what stays as of a commit, and the commit that lets go.

Nothing is deleted: `undo` brings back what was forgotten, until it is pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from archive.base import ConflictError, UsageError, logger
from archive.checkpoint import Keep
from archive.maintain.asking import UNREFERENCED, Asked
from archive.maintain.drafting import Decided, Draft, commits_of, draft, redrafted, unwritten
from archive.maintain.keeping import fates
from archive.maintain.letting import ForgetPlan, Redacted
from archive.maintain.objects import note_forgotten
from archive.maintain.standing import Standing, standing
from archive.manifest import Attempt, Commit, CommitLog, Place, Requirement, Snapshot, new_session, tablefiles
from archive.observe import operation
from archive.store import Storage
from archive.tables import ADDRESS, Address, addresses

CHECKPOINTS = "checkpoints"
MOST_TRIES = 16
Shown = Callable[[Commit], None]


class Redacting(Protocol):
    """What takes the bytes of episodes that go out of the shards that they share with others."""

    def planned(self, found: Found) -> Decided:
        """What was decided, with the steps of others elsewhere; nothing is written."""

    def written(self, found: Found) -> Decided:
        """As planned, with these steps written; once, however often it is asked for."""

    def told(self, found: Found, made: Draft | None) -> Redacted:
        """What it takes, and what stands in its way. made: the commit; None where nothing goes."""


def plan(log: CommitLog, asked: Asked, shown: Shown, redacting: Redacting | None = None) -> ForgetPlan:
    """What a forgetting would do to the newest commit. Writes nothing. shown: called with the commit, once made."""
    parent = log.catch_up()
    found = decide(log.storage, parent, asked)
    decided = found.decided if redacting is None else redacting.planned(found)
    made = None if decided.empty else draft(decided, new_session(), unwritten, found.known)
    redacted = None if redacting is None else redacting.told(found, made)
    gone = {} if made is None else made.gone
    planned = _as_plan(log.storage, asked, found, gone, partial(_commit_planned, log, asked, found, shown, redacting))
    return replace(planned, redacted=redacted)


def commit_now(log: CommitLog, asked: Asked, transaction: str, requires: Sequence[Requirement] = ()) -> Commit | None:
    """Forget, as of whichever commit is the newest then; None if nothing is to go."""
    log.catch_up()
    making = _Making(log.storage, asked)
    with operation("forget") as done:
        try:
            made = log.append(transaction, making.build, requires)
        except NothingToForgetError:
            return None
    logger.info("commit %d let go of what %s does not want, %.1f s", made.number, asked, done.seconds)
    return made


def check_writer(head: Commit, run: str, keep: Keep | None, forget: str) -> None:
    """Refuse a writer that would forget nothing, or what nobody knows."""
    if forget not in (CHECKPOINTS, UNREFERENCED):
        raise UsageError(f"forget={forget!r}: give {CHECKPOINTS!r}, {UNREFERENCED!r} or None")
    known = head.runs.get(run)
    if keep == Keep() or (keep is None and (known is None or known.keep is None)):
        raise UsageError(f"forget={forget!r} lets go of what keep= does not want: give keep=archive.Keep(last=5), say")


def after_checkpoint(storage: Storage, archive_id: str, place: Place, forget: str) -> Callable[[Commit], None]:
    """What lets go, after a checkpoint of a writer, of what the policy of its run does not want."""
    episodes = UNREFERENCED if forget == UNREFERENCED else None

    def let_go(made: Commit) -> None:
        log = CommitLog(storage, archive_id, made)  # of its own: the writer's is not to wait for it
        entry = log.catch_up().runs[place.run]
        asked = Asked(Keep.of(entry.keep), episodes, run=place.run, anyhow=True)
        if entry.keep is not None:
            commit_now(log, asked, f"{place.session}/forget/{made.number}", [place.newest])

    return let_go


@dataclass(frozen=True)
class Found:
    """What was decided as of a commit, how the rows fare, and the commits of the checkpoints that stay."""

    decided: Decided
    standing: Standing
    known: dict[int, Commit] = field(repr=False)


def decide(storage: Storage, parent: Commit, asked: Asked) -> Found:
    """What stays and what goes, as of a commit."""
    every = fates(storage, parent, asked)
    kept = [one for one in every if one.stays]
    known = commits_of(storage, parent, kept)
    snapshot = Snapshot(storage, parent)
    rows = standing(snapshot, asked, list(known.values()))
    return Found(Decided(snapshot, rows.rows, every), rows, known)


def _commit_planned(
    log: CommitLog, asked: Asked, found: Found, shown: Shown, redacting: Redacting | None
) -> Commit:  # fmt: skip
    """The commit of a plan; ConflictError if it would let go of something else by now."""
    commit = log.append(f"forget/{new_session()}", _Making(log.storage, asked, found, redacting=redacting).build)
    shown(commit)
    return commit


class NothingToForgetError(ConflictError):
    """By now nothing is to go."""


class _Making:
    """Makes the commit, again after each lost race; `planned`: what it may let go of, if that was shown before."""

    def __init__(
        self, storage: Storage, asked: Asked, planned: Found | None = None, redacting: Redacting | None = None
    ) -> None:
        self._storage = storage
        self._asked = asked
        self._planned = planned
        self._redacting = redacting
        self._done: tuple[Found, Draft] | None = None  # by an earlier try

    def build(self, parent: Commit, attempt: Attempt) -> Commit:
        if attempt.number == MOST_TRIES:
            raise ConflictError(
                f"others committed {MOST_TRIES} times at {self._storage.url} while {self._asked} was to be committed; "
                "nothing was forgotten: ask again. A writer that forgets does so after its next checkpoint"
            )
        found, made = self._redrafted(parent) or self._drafted(parent)
        removed = {
            "checkpoints": len(found.decided.fates) - len(found.decided.kept), "episodes": found.standing.goes,
            "objects": len(made.gone), "bytes": sum(made.gone.values()), **self._redacted(found, made),
        }  # fmt: skip
        return replace(made.commit, forgotten=note_forgotten(self._storage, parent, made.gone), removed=removed)

    def _drafted(self, parent: Commit) -> tuple[Found, Draft]:
        found = self._decided(parent)
        if found.decided.empty:
            raise NothingToForgetError(f"nothing at {self._storage.url} is to be forgotten any more: plan again")
        decided = found.decided if self._redacting is None else self._redacting.written(found)
        session = new_session()
        self._done = found, draft(decided, session, partial(tablefiles.write, self._storage, session), found.known)
        return self._done

    def _redrafted(self, parent: Commit) -> tuple[Found, Draft] | None:
        """What an earlier try has drafted, as it would follow this commit; None if it must be decided anew."""
        if self._done is None or self._redacting is not None:
            return None
        (found, done), session = self._done, new_session()
        write = partial(tablefiles.write, self._storage, session)
        made = redrafted(done, found.decided, parent, self._asked.run, session, write)
        return None if made is None else (found, made)

    def _redacted(self, found: Found, made: Draft) -> dict[str, int]:
        """Of how many episodes nothing is left; ConflictError if something stands in the way by now."""
        if self._redacting is None:
            return {}
        told = self._redacting.told(found, made)
        if told.obstacles:
            raise ConflictError(
                f"the redaction at {self._storage.url} was not done: {'; '.join(told.obstacles)}. Plan again"
            )
        return {"redacted": told.episodes}

    def _decided(self, parent: Commit) -> Found:
        """What goes as of this commit, if that is what was planned."""
        planned = self._planned
        if planned is not None and parent.digest == planned.decided.parent.digest:
            return planned
        found = decide(self._storage, parent, self._asked)
        if planned is not None and _goes(planned.decided) != _goes(found.decided):
            raise ConflictError(
                f"the archive at {self._storage.url} changed since commit {planned.decided.parent.number}, so that "
                "something else would be forgotten than was planned; nothing was committed: plan again"
            )
        return found


def _goes(decided: Decided) -> tuple[set[int], set[Address]]:
    """The checkpoints and segments that go."""
    table = decided.snapshot.take(np.flatnonzero(~decided.rows), ADDRESS)
    return {one.commit for one in decided.fates if not one.stays}, set(addresses(table))


def _as_plan(
    storage: Storage, asked: Asked, found: Found, gone: dict[str, int], commit: Callable[[], Commit] | None
) -> ForgetPlan:  # fmt: skip
    return ForgetPlan(
        storage.url, found.decided.parent.number, str(asked), tuple(found.decided.fates), found.standing.groups,
        found.standing.goes, len(gone), sum(gone.values()), _commit=commit,
    )  # fmt: skip
