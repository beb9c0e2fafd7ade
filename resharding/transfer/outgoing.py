"""Rows of an archive that go to another, and the same rows as they are to lie there: by reference, or as copies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import Archive
from archive.arrays import Ints
from archive.base import LetGoError, cached_property
from archive.manifest import Pin, commits, tablefiles, tables
from archive.read import latefields
from archive.store import Roots, join_key, split_key
from resharding.transfer.copying import copy_shards
from resharding.transfer.destination import Destination
from resharding.transfer.holdings import COLUMNS, Holdings, Row, rows_of

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Outgoing:
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

    def table(self) -> pa.Table:
        """The rows themselves."""
        taken = self.archive.snapshot.take(self.rows, tables.schema("segments").names)
        return tables.from_columns("segments", _as_columns(taken))


@dataclass(frozen=True)
class Added(Outgoing):
    """Rows of an archive's late table that go to another, with rows of its segments table that they are of."""

    late: pa.Table

    @classmethod
    def to(cls, selection: Outgoing, known: pa.Table) -> Added:
        """What was added to these rows, but for what is known, and what something newer is known of."""
        snapshot = selection.archive.snapshot
        late = snapshot.later.late
        if late.num_rows:
            found = latefields.overlaps(late, snapshot.take(selection.rows, latefields.WHERE))
            late = _newer(late.take(np.unique(found.late)), known)
        return cls(selection.archive, selection.rows, late)

    def table(self) -> pa.Table:
        return tables.from_columns("late", _as_columns(self.late))


def _newer(theirs: pa.Table, ours: pa.Table) -> pa.Table:
    """Rows of a late table that are newer than all that another one has of the same steps and fields."""
    newest: dict[Any, Any] = {}
    for places, at in zip(_places(ours), ours["created_at"].to_pylist(), strict=True):
        newest.update((place, max(at, newest.get(place, at))) for place in places)
    dates = zip(_places(theirs), theirs["created_at"].to_pylist(), strict=True)
    return theirs.filter([any(place not in newest or newest[place] < at for place in of) for of, at in dates])


def _places(late: pa.Table) -> list[list[tuple[Any, ...]]]:
    """The beginning and field of each field of each row."""
    where = zip(*(late[name].to_pylist() for name in (*latefields.STREAM, "position")), strict=True)
    return [[(*at, name) for name in names] for at, names in zip(where, late["fields"].to_pylist(), strict=True)]


def _as_columns(table: pa.Table) -> dict[str, Any]:
    import pyarrow as pa

    texts = {f.name for f in table.schema if pa.types.is_dictionary(f.type)}
    return {n: table[n].cast(pa.string()).to_pylist() if n in texts else table[n] for n in table.column_names}


def referred(selection: Outgoing, archive: Archive, target: Destination) -> pa.Table:
    """The rows with shards and chunk tables named as another archive must name them; pinned where they lie."""
    import pyarrow.compute as pc

    rows = selection.table()
    needed: dict[str, set[str]] = {}
    for name in ("shard", "chunks"):
        values = [None if v is None else join_key(selection.archive.id, v) for v in rows[name].to_pylist()]
        for base, key in (split_key(v) for v in values if v is not None):
            needed.setdefault(str(base), set()).add(key)
        rows = _with(rows, name, values)
    for base, keys in needed.items():
        _pin(selection.roots.storage(None if base == selection.archive.id else base), archive, sorted(keys))
    _check_there(selection.archive, needed.get(selection.archive.id, set()))
    shards = len(pc.unique(rows["shard"].drop_null()))
    target.moved(shards, shards)
    return rows


def _with(rows: pa.Table, name: str, values: list[Any]) -> pa.Table:
    import pyarrow as pa

    field = rows.schema.field(name)
    column = pa.array(values, pa.string()).dictionary_encode().cast(field.type)
    return rows.set_column(rows.schema.get_field_index(name), field, column)


def _pin(source: Any, target: Archive, keys: list[str]) -> None:
    """Tell an archive which of its objects are needed elsewhere, so that collecting garbage there spares them."""
    pin = Pin(target.id, target.url, tuple(keys))
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
    source.put(f"pins/{target.id}-{digest}.json", json.dumps(pin.to_json()).encode())


def _check_there(source: Archive, keys: Collection[str]) -> None:
    """LetGoError if something that is pinned now was pruned before it was, and after the source was opened."""
    for commit in commits.following(source.storage, source.head):
        if commit.pruned is None:
            continue
        gone = set(tablefiles.load(source.storage, "pruned", [commit.pruned], ["key"])["key"].to_pylist()) & set(keys)
        if gone:
            raise LetGoError(
                f"{len(gone)} objects to be referred to, such as {source.storage.full_url(min(gone))}, were pruned by "
                f"commit {commit.number} after that archive was opened; nothing was committed. Open it again, or give "
                "copy=True"
            )


def copied(selection: Outgoing, archive: Archive, target: Destination, session: str) -> pa.Table:
    """The rows after their shards were copied, with one chunk table of their own."""
    rows = selection.table()
    if not rows.num_rows:
        return rows
    shards = {s for s in rows["shard"].to_pylist() if s is not None}
    chunks = _chunk_tables(selection.roots, rows, shards)
    held = [
        table["shard"].cast("string") for table in (archive.snapshot.columns(["shard"]), archive.snapshot.later.late)
    ]
    copy_shards(selection.roots, archive.storage, chunks, {key for of in held for key in of.to_pylist()}, target)
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
