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
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import Archive
from archive.arrays import Ints
from archive.base import AlreadyExistsError, AmbiguousWriteError, UsageError, cached_property, layout
from archive.manifest import (
    Base,
    Branches,
    Claim,
    Commit,
    CommitLog,
    Origin,
    Pin,
    Snapshot,
    new_session,
    run_of_session,
    tablefiles,
    tables,
)
from archive.store import Roots, join_key, split_key
from resharding.transfer.copying import copy_shards
from resharding.transfer.destination import Destination
from resharding.transfer.engines import check_engine
from resharding.transfer.holdings import COLUMNS, Holdings, Row, rows_of

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Chosen:
    """Rows of one archive's segments table that go to another."""

    archive: Archive
    rows: Ints

    @cached_property
    def names(self) -> list[Row]:
        return rows_of(self.archive.snapshot.take(self.rows, COLUMNS))

    @cached_property
    def origin(self) -> Holdings:
        """All that its archive holds."""
        return Holdings(rows_of(self.archive.snapshot.columns(COLUMNS)))

    @cached_property
    def roots(self) -> Roots:
        return Roots(self.archive.storage, self.archive.head.base_urls)

    def segments(self) -> pa.Table:
        taken = self.archive.snapshot.take(self.rows, tables.schema("segments").names)
        return tables.from_columns("segments", _as_columns(taken))


def transfer(selections: Sequence[Chosen], target: Destination) -> Archive:
    """Make rows of some archives visible in another, which is made if it is not there; that archive as it is then."""
    check_engine(target.engine, *(s.archive.url for s in selections))
    present = target.present()
    _check_places(selections, target, present)
    there = present.snapshot if present else None
    fresh = _fresh(selections, there, present.url if present else str(target.to))
    archive = present or target.created()
    if not any(len(s.rows) for s in fresh) and not _branches(selections, there):
        return archive
    session = new_session()
    taken = partial(_copied, session=session) if target.copy else _referring
    segments = [taken(s, archive, target) for s in fresh]
    _claim_sessions(archive, fresh)
    _commit(archive, (selections, fresh), tables.concat("segments", segments), session, target.copy)
    return archive.refresh()


def _check_places(selections: Sequence[Chosen], target: Destination, present: Archive | None) -> None:
    """Refuse what cannot work, before anything is written."""
    for source in (s.archive for s in selections):
        if present and source.id == present.id:
            raise UsageError(f"{present.url} is one of the sources; give another archive as target")
        where = present.url if present else target.url
        if not target.copy and _protocol(source.url) != _protocol(where):
            raise UsageError(
                f"{where} cannot refer to shards at {source.url}, which is another kind of store; give copy=True"
            )
        if target.copy:
            check_engine(target.engine, where)


def _protocol(url: str) -> str:
    return url.partition("://")[0]


def _fresh(selections: Sequence[Chosen], present: Snapshot | None, where: str) -> list[Chosen]:
    """Without the rows that the target, or a source before, has already. An id of something else is refused."""
    known = Holdings(rows_of(present.columns(COLUMNS)) if present else ())
    out = []
    for selection in selections:
        new = [i for i, row in enumerate(selection.names) if not known.has(row)]
        rows = [selection.names[i] for i in new]
        known.check(rows, partial(getattr, selection, "origin"), where)
        known.add(rows)
        out.append(Chosen(selection.archive, selection.rows[np.array(new, np.int64)]))
    return out


def _branches(selections: Sequence[Chosen], present: Snapshot | None) -> Branches:
    """What sessions went on from, as far as it tells how the episodes that are transferred stand, and is not there."""
    known = present.branches if present else Branches({}, {})
    origins: dict[str, Origin] = {}
    runs: dict[str, str] = {}
    for selection in selections:
        new = selection.archive.snapshot.branches.around({row.session for row in selection.names}).beyond(known)
        origins |= {name: origin for name, origin in new.origins.items() if name not in origins}
        runs |= new.runs
    return Branches(origins, runs)


def _commit(
    archive: Archive, selections: tuple[Sequence[Chosen], Sequence[Chosen]], rows: pa.Table, session: str, copy: bool
) -> None:  # fmt: skip
    """selections: what is transferred, and what of it was not there; rows: of the latter, as they are to lie there."""
    log = CommitLog(archive.storage, archive.id, archive.head)
    seen = archive.head.number
    every, fresh = selections
    bases = {} if copy else _bases(fresh)

    def build(parent: Commit, attempt: int) -> Commit:
        new, fold = rows, attempt == 0
        snapshot = Snapshot(archive.storage, parent)
        if parent.number != seen:  # others committed meanwhile: perhaps some of the same
            kept = _fresh(fresh, snapshot, archive.url)
            wanted = {row.address for s in kept for row in s.names}
            new = rows.filter([row.address in wanted for row in rows_of(rows)])
        branches = tables.from_columns("branches", _branches(every, snapshot).columns())
        return parent.after(
            "merge",
            session=session,
            segments=tablefiles.add_rows(archive.storage, session, "segments", parent, new, fold=fold),
            branches=tablefiles.add_rows(archive.storage, session, "branches", parent, branches, fold=fold) or None,
            bases={**parent.bases, **bases},
            added={"segments": new.num_rows},
        )

    log.append(_transaction(fresh, copy, _branches(every, archive.snapshot)), build)


def _transaction(selections: Sequence[Chosen], copy: bool, branches: Branches) -> str:
    """The same for the same rows, so that two processes that do the same commit once."""
    what: list[Any] = [[s.archive.id, [row.address for row in s.names]] for s in selections]
    what += [list(branches.origins)] if branches else []
    return f"merge/{hashlib.sha256(json.dumps([what, copy]).encode()).hexdigest()}"


def _claim_sessions(archive: Archive, selections: Sequence[Chosen]) -> None:
    """Take the names of the sessions that come along, so that no later writer numbers its rows like theirs."""

    runs = {session: run for s in selections for session, run in run_of_session(s.archive.snapshot).items()}

    def claim(place: tuple[str, int]) -> None:
        session, rank = place
        made = Claim(runs.get(session) or "", session, rank, "merge")
        with suppress(AlreadyExistsError, AmbiguousWriteError):
            archive.storage.create(layout.rank_key(session, rank), json.dumps(made.to_json()).encode())

    places = dict.fromkeys((row.session, row.rank) for s in selections for row in s.names)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(claim, places))


def _as_columns(table: pa.Table) -> dict[str, Any]:
    import pyarrow as pa

    texts = {f.name for f in table.schema if pa.types.is_dictionary(f.type)}
    return {n: table[n].cast(pa.string()).to_pylist() if n in texts else table[n] for n in table.column_names}


def _referring(selection: Chosen, archive: Archive, target: Destination) -> pa.Table:
    """The rows with shards and chunk tables named as another archive must name them; pinned where they lie."""
    import pyarrow.compute as pc

    rows = selection.segments()
    needed: dict[str, set[str]] = {}
    for name in ("shard", "chunks"):
        values = [None if v is None else join_key(selection.archive.id, v) for v in rows[name].to_pylist()]
        for base, key in (split_key(v) for v in values if v is not None):
            needed.setdefault(str(base), set()).add(key)
        rows = _with(rows, name, values)
    for base, keys in needed.items():
        _pin(selection.roots.storage(None if base == selection.archive.id else base), archive, sorted(keys))
    shards = len(pc.unique(rows["shard"].drop_null()))
    target.moved(shards, shards)
    return rows


def _with(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    import pyarrow as pa

    field = rows.schema.field(name)
    column = pa.array(values, pa.string()).dictionary_encode().cast(field.type)
    return rows.set_column(rows.schema.get_field_index(name), field, column)


def _bases(selections: Sequence[Chosen]) -> dict[str, Base]:
    out: dict[str, Base] = {}
    for selection in selections:
        out |= selection.archive.head.bases
        out[selection.archive.id] = Base(selection.archive.url)
    return out


def _pin(source: Any, target: Archive, keys: list[str]) -> None:
    """Tell an archive which of its objects are needed elsewhere, so that collecting garbage there spares them."""
    pin = Pin(target.id, target.url, tuple(keys))
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
    source.put(f"pins/{target.id}-{digest}.json", json.dumps(pin.to_json()).encode())


def _copied(selection: Chosen, archive: Archive, target: Destination, session: str) -> pa.Table:
    """The rows after their shards were copied, with one chunk table of their own."""
    rows = selection.segments()
    if not rows.num_rows:
        return rows
    shards = {s for s in rows["shard"].to_pylist() if s is not None}
    chunks = _chunk_tables(selection.roots, rows, shards)
    held = archive.snapshot.columns(["shard"])["shard"].cast("string").unique().to_pylist()
    copy_shards(selection.roots, archive.storage, chunks, set(held), target)
    file = None
    if chunks.num_rows:
        plain = _with(chunks, "shard", [split_key(s)[1] for s in chunks["shard"].to_pylist()])
        file = tablefiles.write(archive.storage, session, "chunks", plain)
    rows = tablefiles.with_chunks(rows, file)
    return _with(rows, "shard", [None if s is None else split_key(s)[1] for s in rows["shard"].to_pylist()])


def _chunk_tables(roots: Roots, rows: pa.Table, wanted: set[str]) -> pa.Table:
    """The chunk rows of the wanted shards, each shard once; shards named as the source names them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    refs = tablefiles.chunk_files(rows)
    left = {split_key(shard)[1] for shard in wanted}
    parts = []
    for data, path in zip(tablefiles.fetch(roots, list(refs.values())), refs, strict=True):
        table = tables.loads(data, "chunks", where=roots.full_url(path))
        base = split_key(path)[0]
        table = _with(table, "shard", [join_key(base, s) for s in table["shard"].to_pylist()])
        names = table["shard"].cast(pa.string())
        mine = {s for s in pc.unique(names).to_pylist() if s in wanted and split_key(s)[1] in left}
        left -= {split_key(s)[1] for s in mine}
        parts.append(table.filter(pc.is_in(names, value_set=pa.array(sorted(mine), pa.string()))))
    return tables.concat("chunks", parts)
