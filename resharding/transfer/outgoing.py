"""Rows of an archive that go to another, and the same rows as they are to lie there: by reference, or as copies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archive import Archive, tables
from archive.arrays import Ints
from archive.base import LetGoError, cached_property
from archive.manifest import Pin, commits, tablefiles
from archive.store import Roots, join_key, split_key
from archive.tables import KEYS, among, distinct, news, of_segments
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
        return tables.only_used(self.archive.snapshot.take(self.rows, tables.schema("segments").names))

    def beside(self, kind: str, known: pa.Table) -> pa.Table:
        """The rows of a table that are of these, but for what is known, and what something newer is known of."""
        snapshot = self.archive.snapshot
        rows: pa.Table = getattr(snapshot.later, kind)
        if rows.num_rows:
            rows = news(kind, rows.filter(of_segments(kind, rows, snapshot.take(self.rows, KEYS))), known)
        return rows


@dataclass(frozen=True)
class Added(Outgoing):
    """Rows of an archive's late table that go to another, with rows of its segments table that they are of."""

    late: pa.Table

    def table(self) -> pa.Table:
        return tables.only_used(self.late)


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
    known = {key for of in held for key in of.to_pylist()}
    keys = copy_shards(selection.roots, archive.storage, chunks, known, target)
    file = None
    if chunks.num_rows:
        plain = _with(chunks, "shard", [keys[s] for s in chunks["shard"].to_pylist()])
        file = tablefiles.write(archive.storage, session, "chunks", plain)
    by_name = {split_key(shard)[1]: key for shard, key in keys.items()}  # one copy, from whichever archive it came
    names = [None if s is None else split_key(s)[1] for s in rows["shard"].to_pylist()]
    return _with(tablefiles.with_chunks(rows, file), "shard", [name and by_name.get(name, name) for name in names])


def _chunk_tables(roots: Roots, rows: pa.Table, wanted: set[str]) -> pa.Table:
    """The chunk rows of the wanted shards, each shard once; shards named as the source names them."""
    refs = tablefiles.chunk_files(rows)
    left = {split_key(shard)[1] for shard in wanted}
    parts = []
    for data, path in zip(tablefiles.fetch(roots, list(refs.values())), refs, strict=True):
        table = tables.loads(data, "chunks", where=roots.full_url(path))
        base = split_key(path)[0]
        table = _with(table, "shard", [join_key(base, s) for s in table["shard"].to_pylist()])
        mine = {s for s in distinct(table["shard"]) if s in wanted and split_key(s)[1] in left}
        left -= {split_key(s)[1] for s in mine}
        parts.append(table.filter(among(table["shard"], mine)))
    return tables.concat("chunks", parts)
