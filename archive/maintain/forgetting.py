"""Engine: forgetting: what goes and what stays as of a commit, and the commit that lets go.

Nothing is deleted: `undo` brings back what was forgotten, until it is pruned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from archive.base import ConflictError
from archive.maintain.asking import Asked
from archive.maintain.drafting import Decided, Draft, commits_of, draft, unwritten
from archive.maintain.keeping import fates
from archive.maintain.letting import ForgetPlan
from archive.maintain.objects import note_forgotten
from archive.maintain.standing import Standing, standing
from archive.manifest import Commit, CommitLog, Snapshot, commits, new_session, tablefiles
from archive.store import Storage

_ADDRESS = ("session", "rank", "sequence")
Shown = Callable[[Commit], None]


def plan(log: CommitLog, asked: Asked, shown: Shown) -> ForgetPlan:
    """What a forgetting would do to the newest commit. Writes nothing. shown: called with the commit, once made."""
    parent = log.catch_up()
    commits.check_can_let_go(parent)
    found = decide(log.storage, parent, asked)
    session = new_session()
    gone = {} if found.decided.empty else draft(found.decided, session, unwritten, found.known).gone
    return _as_plan(log.storage, asked, found, gone, partial(_commit_planned, log, asked, found, shown))


def commit_now(log: CommitLog, asked: Asked, transaction: str, shown: Shown) -> ForgetPlan:
    """Forget, as of whichever commit is the newest then; the plan that was carried out."""
    commits.check_can_let_go(log.catch_up())
    found = decide(log.storage, log.head, asked)
    if found.decided.empty:
        return _as_plan(log.storage, asked, found, {}, None)
    made = _Making(log.storage, asked, None, found)
    commit = log.append(transaction, made.build)
    shown(commit)
    gone = made.draft.gone if made.draft is not None else {}
    return replace(_as_plan(log.storage, asked, made.found, gone, None), made=commit)


@dataclass(frozen=True)
class Found:
    """What was decided as of a commit, how the rows fare, and the commits of the checkpoints that stay."""

    decided: Decided
    standing: Standing
    known: dict[int, Commit] = field(repr=False)


def decide(storage: Storage, parent: Commit, asked: Asked) -> Found:
    """What stays and what goes, as of a commit."""
    every = fates(storage, parent, asked.keep)
    kept = [one for one in every if one.stays]
    known = commits_of(storage, parent, kept)
    snapshot = Snapshot(storage, parent)
    rows = standing(snapshot, asked, list(known.values()))
    return Found(Decided(snapshot, rows.rows, every), rows, known)


def _commit_planned(log: CommitLog, asked: Asked, found: Found, shown: Shown) -> Commit:
    """The commit of a plan; ConflictError if it would let go of something else by now."""
    making = _Making(log.storage, asked, found, found)
    commit = log.append(f"forget/{new_session()}", making.build)
    shown(commit)
    return commit


class _Making:
    """Makes the commit, again after each lost race; `planned`: what it may let go of, if that was shown before."""

    def __init__(self, storage: Storage, asked: Asked, planned: Found | None, found: Found) -> None:
        self._storage = storage
        self._asked = asked
        self._planned = planned
        self.found = found
        self.draft: Draft | None = None

    def build(self, parent: Commit, attempt: int) -> Commit:
        if parent.digest != self.found.decided.parent.digest:
            self.found = decide(self._storage, parent, self._asked)
        if self._planned is not None and _goes(self._planned.decided) != _goes(self.found.decided):
            raise ConflictError(
                f"the archive at {self._storage.url} changed since commit {self._planned.decided.parent.number}, so "
                "that something else would be forgotten than was planned; nothing was committed: plan again"
            )
        if self.found.decided.empty:
            raise ConflictError(f"nothing at {self._storage.url} is to be forgotten any more: plan again")
        session = new_session()
        made = draft(self.found.decided, session, partial(tablefiles.write, self._storage, session), self.found.known)
        self.draft = made
        checkpoints = len(self.found.decided.fates) - len(self.found.decided.kept)
        removed = {
            "checkpoints": checkpoints, "episodes": self.found.standing.goes, "objects": len(made.gone),
            "bytes": sum(made.gone.values()),
        }  # fmt: skip
        return replace(made.commit, forgotten=note_forgotten(self._storage, parent, made.gone), removed=removed)


def _goes(decided: Decided) -> tuple[set[int], set[tuple[Any, ...]]]:
    """The checkpoints and segments that go."""
    table = decided.snapshot.take(np.flatnonzero(~decided.rows), _ADDRESS)
    rows = set(zip(*(table[name].to_pylist() for name in _ADDRESS), strict=True))
    return {one.commit for one in decided.fates if not one.stays}, rows


def _as_plan(
    storage: Storage, asked: Asked, found: Found, gone: dict[str, int], commit: Callable[[], Commit] | None
) -> ForgetPlan:  # fmt: skip
    return ForgetPlan(
        storage.url, found.decided.parent.number, str(asked), tuple(found.decided.fates), found.standing.groups,
        found.standing.goes, len(gone), sum(gone.values()), _commit=commit,
    )  # fmt: skip
