"""Rows of some archives become visible in another, by reference or as copies.

Ids are never renumbered. Everything is written before one commit makes it visible, so a run that fails leaves the
target as it was; run again, it finds the copies that are there and goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import Archive, tables
from archive.base import AlreadyExistsError, UsageError, layout
from archive.manifest import (
    Addition,
    Attempt,
    Base,
    Branches,
    Change,
    Claim,
    Commit,
    CommitLog,
    Origin,
    Snapshot,
    new_session,
    run_of_session,
)
from archive.tables import CHUNK_FILE
from resharding.transfer.destination import Destination
from resharding.transfer.holdings import COLUMNS, Holdings, rows_of
from resharding.transfer.outgoing import Added, Outgoing, copied, referred

if TYPE_CHECKING:
    import pyarrow as pa


def transfer(selections: Sequence[Outgoing], target: Destination) -> Archive:
    """Make rows of some archives visible in another, which is made if it is not there; that archive as it is then."""
    present = target.present()
    _check_places(selections, target, present)
    there = present.snapshot if present else None
    fresh = _fresh(selections, there, present.url if present else str(target.to))
    said, added = _said(selections, there), _added(selections, there)
    archive = present or target.created()
    if not any(len(s.rows) for s in fresh) and not _branches(selections, there) and not said.num_rows and not added:
        return archive
    session = new_session()
    taken = partial(copied, session=session) if target.copy else referred
    segments = [taken(s, archive, target) for s in fresh]
    late = tables.concat("late", [taken(one, archive, target) for one in added])
    _claim_sessions(archive, fresh)
    _commit(archive, (selections, fresh), tables.concat("segments", segments), late, session, target.copy)
    return archive.refresh()


def _check_places(selections: Sequence[Outgoing], target: Destination, present: Archive | None) -> None:
    """Refuse what cannot work, before anything is written."""
    for source in (s.archive for s in selections):
        if present and source.id == present.id:
            raise UsageError(f"{present.url} is one of the sources; give another archive as target")
        where = present.url if present else target.url
        if not target.copy and _protocol(source.url) != _protocol(where):
            raise UsageError(
                f"{where} cannot refer to shards at {source.url}, which is another kind of store; give copy=True"
            )


def _protocol(url: str) -> str:
    return url.partition("://")[0]


def _fresh(selections: Sequence[Outgoing], present: Snapshot | None, where: str) -> list[Outgoing]:
    """Without the rows that the target, or a source before, has already. An id of something else is refused."""
    known = Holdings(rows_of(present.columns(COLUMNS)) if present else ())
    out = []
    for selection in selections:
        new = [i for i, row in enumerate(selection.names) if not known.has(row)]
        rows = [selection.names[i] for i in new]
        known.check(rows, partial(getattr, selection, "origin"), where)
        known.add(rows)
        out.append(Outgoing(selection.archive, selection.rows[np.array(new, np.int64)]))
    return out


def _branches(selections: Sequence[Outgoing], present: Snapshot | None) -> Branches:
    """What sessions went on from, as far as it tells how the episodes that are transferred stand, and is not there."""
    known = present.branches if present else Branches({}, {})
    origins: dict[str, Origin] = {}
    runs: dict[str, str] = {}
    for selection in selections:
        new = selection.archive.snapshot.branches.around({row.session for row in selection.names}).beyond(known)
        origins |= {name: origin for name, origin in new.origins.items() if name not in origins}
        runs |= new.runs
    return Branches(origins, runs)


def _beside(kind: str, selections: Sequence[Outgoing], present: Snapshot | None) -> list[pa.Table]:
    """Of each the rows of a table that are of what is transferred, as far as they came after what is known there."""
    out = [getattr(present.later, kind) if present else tables.schema(kind).empty_table()]
    for selection in selections:
        out.append(selection.beside(kind, tables.concat(kind, out)))
    return out[1:]


def _said(selections: Sequence[Outgoing], present: Snapshot | None) -> pa.Table:
    """The labels of what is transferred."""
    return tables.concat("labels", _beside("labels", selections, present))


def _added(selections: Sequence[Outgoing], present: Snapshot | None) -> list[Added]:
    """The late fields of what is transferred."""
    found = zip(selections, _beside("late", selections, present), strict=True)
    return [Added(one.archive, one.rows, late) for one, late in found if late.num_rows]


def _commit(
    archive: Archive, selections: tuple[Sequence[Outgoing], Sequence[Outgoing]], rows: pa.Table, late: pa.Table,
    session: str, copy: bool,
) -> None:  # fmt: skip
    """selections: what is transferred, and what of it was not there; rows: of the latter, as they are to lie there;
    late: what was added to steps of the former."""
    log = CommitLog(archive.storage, archive.id, archive.head)
    seen = archive.head.number
    every, fresh = selections
    bases = {} if copy else _bases(every if late.num_rows else fresh)

    def adds(parent: Commit, attempt: Attempt) -> Addition:
        new = rows
        snapshot = Snapshot(archive.storage, parent)
        if parent.number != seen:  # others committed meanwhile: perhaps some of the same
            kept = _fresh(fresh, snapshot, archive.url)
            wanted = {row.address for s in kept for row in s.names}
            new = rows.filter([row.address in wanted for row in rows_of(rows)])
        branches = tables.from_columns("branches", _branches(every, snapshot).columns())
        beside = {"branches": branches, "labels": _said(every, snapshot), "late": late}
        return {"segments": new, **beside}, {"bases": {**parent.bases, **bases}}

    late_rows = late.drop_columns(list(CHUNK_FILE))  # which each process writes for itself
    key = _transaction(fresh, copy, _branches(every, archive.snapshot), [_said(every, archive.snapshot), late_rows])
    log.commit(key, Change("merge", adds, session=session))


def _transaction(selections: Sequence[Outgoing], copy: bool, branches: Branches, beside: Sequence[pa.Table]) -> str:
    """The same for the same rows, so that two processes that do the same commit once."""
    what: list[Any] = [[s.archive.id, [row.address for row in s.names]] for s in selections]
    what += [list(branches.origins)] if branches else []
    what += [hashlib.sha256(tables.dumps(table)).hexdigest() for table in beside if table.num_rows]
    return f"merge/{hashlib.sha256(json.dumps([what, copy]).encode()).hexdigest()}"


def _claim_sessions(archive: Archive, selections: Sequence[Outgoing]) -> None:
    """Take the names of the sessions that come along, so that no later writer numbers its rows like theirs."""

    runs = {session: run for s in selections for session, run in run_of_session(s.archive.snapshot).items()}

    def claim(place: tuple[str, int]) -> None:
        session, rank = place
        made = Claim(runs.get(session) or "", session, rank, "merge")
        with suppress(AlreadyExistsError):
            archive.storage.create_once(layout.rank_key(session, rank), json.dumps(made.to_json()).encode())

    places = dict.fromkeys((row.session, row.rank) for s in selections for row in s.names)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(claim, places))


def _bases(selections: Sequence[Outgoing]) -> dict[str, Base]:
    out: dict[str, Base] = {}
    for selection in selections:
        out |= selection.archive.head.bases
        out[selection.archive.id] = Base(selection.archive.url)
    return out
