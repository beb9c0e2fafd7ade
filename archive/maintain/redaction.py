"""Redaction: a forgetting after which nothing that is retained holds anything of some episodes.

Shards that hold their steps beside those of others are written anew without them. All is put before the one commit that
names it: killed before that, nothing has changed, and what was put is what a crash leaves behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints
from archive.base import ConflictError, escape, layout
from archive.index import Snapshot
from archive.log import FileRef, new_session, tablefiles
from archive.maintain import relocation
from archive.maintain.draft import Decision, Draft
from archive.maintain.obstacles import journals_naming, obstacles
from archive.maintain.plans import Redacted
from archive.maintain.relocation import Places, Relocation
from archive.read.chunks import Segments, Shards
from archive.shard import ShardView
from archive.steps import Steps
from archive.store import Storage, split_key
from archive.tables import ADDRESS, STRETCH, Address, addresses, among, overlaps

if TYPE_CHECKING:
    import pyarrow as pa

_PLACE = ("shard", "start", "length", "position")
_COMPANION = "%places"  # of an array: the one with as many rows, where that is not one a step

Place = Mapping[str, Any]  # the columns of a row that say where its steps lie
Where = tuple[dict[Address, dict[str, Any]], list[Any]]


class Redaction:
    """Takes the steps of episodes out of their shards. layout: of the shards that are written."""

    def __init__(self, storage: Storage, layout: str, ids: Collection[str]) -> None:
        self._storage = storage
        self._layout = layout
        self._ids = frozenset(ids)
        self._written: _Copied | None = None
        self._touched: _Touched | None = None

    def applied(self, decision: Decision, *, is_dry: bool) -> Decision:
        """The decision with the steps of others elsewhere, which are written once, however often it is asked for;
        ConflictError if they are no longer those that were written. is_dry: nothing is written."""
        touched = self._touched_by(decision)
        if is_dry:
            chunks = FileRef(layout.manifest_key("planned", "redact", "chunks"), 0, 0, 0)
            place = {"shard": layout.shard_key("planned", "redact", 0, self._layout)}
            place |= tablefiles.chunk_columns(chunks)
            return touched.moved([place] * len(touched.rows), [place] * len(touched.late.pieces), chunks)
        if touched.none:
            return decision
        if self._written is None:
            self._written = self._write(touched)
        elif self._written.before != touched.where():
            raise ConflictError(
                f"steps at {self._storage.url} were moved or added while a redaction wrote others anew; nothing was "
                "committed: plan again"
            )
        return touched.moved(self._written.places, self._written.late, self._written.chunks)

    def told(self, decision: Decision, made: Draft | None) -> Redacted:
        """The extent of it, and what stands in its way. made: the commit; None where nothing goes."""
        touched = self._touched_by(decision)
        lengths = decision.snapshot.take(touched.rows, ["length"])["length"].to_numpy()
        size = sum(made.gone.get(key, 0) for key in touched.shards) if made is not None else 0
        found = obstacles(self._storage, decision, made, self._ids, touched.shards)
        return Redacted(len(self._ids), len(touched.shards), int(lengths.sum()), size, tuple(found))

    def _touched_by(self, decision: Decision) -> _Touched:
        if self._touched is None or self._touched.decision is not decision:
            self._touched = _touched(decision)
        return self._touched

    def _write(self, touched: _Touched) -> _Copied:
        """Put these steps of others into shards of their own."""
        session, decision = new_session(), touched.decision
        before = touched.where()
        lengths = np.array([place["length"] for place in before[0].values()], np.int64)
        pieces = Steps(touched.rows, 0 * touched.rows, lengths)
        late = _as_segments(touched.late.table, decision)
        parts = [self._put(session, decision.snapshot, pieces), self._put(session, late, touched.late.pieces)]
        table = tables.concat("chunks", [part[1] for part in parts])
        chunks = tablefiles.write(self._storage, session, "chunks", table)
        places, late_places = (
            [places[i] | tablefiles.chunk_columns(chunks) for i in range(len(places))] for places, _ in parts
        )
        return _Copied(before, places, late_places, chunks)

    def _put(self, session: str, snapshot: Snapshot, pieces: Steps) -> tuple[Places, pa.Table]:
        if not len(pieces):
            return {}, tables.schema("chunks").empty_table()
        return relocation.write(snapshot, self._layout, session, pieces)


@dataclass(frozen=True)
class _Copied:
    """The places where steps were put, and those where they lay when they were read."""

    before: Where
    places: Sequence[Place]
    late: Sequence[Place]
    chunks: FileRef


# -- what must go ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Touched:
    """Shards that must go, and what lies in them of others: rows of the segments table, and late fields."""

    decision: Decision
    shards: frozenset[str]
    rows: Ints
    late: _Late

    @property
    def none(self) -> bool:
        """True if nothing of others lies in them, and no late field goes."""
        return not len(self.rows) and not self.late.shards

    def where(self) -> Where:
        """The places of these rows and pieces of others: by the address of the row, and in order."""
        found = self.decision.snapshot.take(self.rows, [*ADDRESS, *_PLACE])
        rows = dict(zip(addresses(found), found.select(_PLACE).to_pylist(), strict=True))
        pieces = self.late.pieces
        late = zip(self.late.taken().select(_PLACE).to_pylist(), pieces.lo.tolist(), pieces.hi.tolist(), strict=True)
        return rows, list(late)

    def moved(self, places: Sequence[Place], late: Sequence[Place], chunks: FileRef) -> Decision:
        """The decision with all of these elsewhere."""
        if self.none:
            return self.decision
        moved = Relocation(self.rows, places, chunks)
        return replace(self.decision, moved=moved, late=self.late.moved(late) if self.late.shards else None)


def _touched(decision: Decision) -> _Touched:
    """The shards of rows that go, and those with leavings of such or that name them; what lies in them of others."""
    import pyarrow as pa

    shard = decision.snapshot.columns(["shard"])["shard"].cast(pa.string()).combine_chunks()
    gone = {*shard.take(pa.array(decision.gone)).drop_null().unique().to_pylist()}
    gone |= _leavings(decision) | journals_naming(decision)
    own = {key for key in gone if split_key(key)[0] is None}
    late = _late(decision)
    return _Touched(decision, frozenset(gone) | late.shards, np.flatnonzero(among(shard, own) & decision.rows), late)


# -- late fields -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Late:
    """Rows of the late table whose shards must go, and the steps of theirs that stay, as pieces, in order."""

    table: pa.Table
    shards: frozenset[str]
    rows: Ints
    pieces: Steps

    def taken(self) -> pa.Table:
        """The row that each piece is of."""
        import pyarrow as pa

        return self.table.take(pa.array(self.pieces.stream))

    def moved(self, places: Sequence[Place]) -> pa.Table:
        """The table with the pieces at these places instead of the rows that they are of."""
        pieces = zip(*(getattr(self.pieces, name).tolist() for name in ("stream", "lo", "length")), strict=True)
        new = [
            (number, row | {"position": row["position"] + lo, "length": length} | dict(place))
            for (number, lo, length), row, place in zip(pieces, self.taken().to_pylist(), places, strict=True)
        ]
        return tables.replaced("late", self.table, self.rows, new)


def _late(decision: Decision) -> _Late:
    """The rows of the late table that are of steps that go, or lie in shards with such."""
    table = tablefiles.load(decision.snapshot.storage, "late", decision.parent.files("late"))
    over = overlaps(table, decision.snapshot.take(decision.gone, STRETCH))
    away = Steps(over["late"], over["step"], over["step"] + over.length)
    names = table["shard"].to_pylist()
    shards = frozenset(names[row] for row in over["late"].tolist()) - {None}
    if decision.parent.let_go:
        there = np.flatnonzero([name is not None for name in names])
        shards |= _with_more(_as_segments(table, decision), there)
    rows = np.flatnonzero([name in shards for name in names])
    left = Steps(rows, np.zeros_like(rows), table["length"].to_numpy()[rows]).minus(away)
    return _Late(table, shards, rows, left)


def _as_segments(late: pa.Table, decision: Decision) -> Snapshot:
    """The late table as if it were the segments table: its rows say by the same columns where steps lie."""
    names = [name for name in tables.schema("segments").names if name in late.column_names]
    rows = tables.from_columns("segments", {name: late[name].to_pylist() for name in names})
    return Snapshot.of(decision.snapshot.storage, decision.parent, rows)


# -- shards with rows that no segment names: of what was forgotten, or what a compaction moved elsewhere ---------------


def _leavings(decision: Decision) -> set[str]:
    """Shards of kept rows, written by the sessions of rows that go or by compactions, that hold more than rows say:
    maybe steps of an episode of which no row says so any more."""
    import pyarrow as pa

    table = decision.snapshot.columns(["shard", "session"])
    shards, sessions = (table[name].cast("string").combine_chunks() for name in ("shard", "session"))
    wrote = {escape(name) for name in sessions.unique().to_pylist()}
    gone = {escape(name) for name in sessions.take(pa.array(decision.gone)).unique().to_pylist()}
    made = {key: layout.session_of(key) for key in shards.unique().drop_null().to_pylist()}
    moved = {key for key, session in made.items() if session is not None and session not in wrote}
    if not decision.parent.let_go and not moved:
        return set()
    wanted = moved | {key for key, session in made.items() if session in gone}
    return _with_more(decision.snapshot, np.flatnonzero(among(shards, wanted)))


def _with_more(snapshot: Snapshot, rows: Ints) -> set[str]:
    """The shards of these rows, which are all that there are of them, with an array of more rows than they say."""
    segments, shards = Segments(snapshot, rows), Shards(snapshot)
    shards.load_indexes(segments, list(range(len(segments.shards))))
    steps: Counter[str] = Counter()
    extents: Counter[tuple[str, str]] = Counter()
    for row in snapshot.take(rows, ["shard", "length", "extents"]).to_pylist():
        steps[row["shard"]] += row["length"]
        for one in row["extents"] or ():
            extents[row["shard"], one["field"]] += one["rows"]
    out = set()
    metadata = shards.plan({shard: {} for shard in segments.shards}, {}, {})
    for shard, _, chunks in shards.fetched(metadata, segments.owners):
        view = ShardView(bytes(chunks["zarr.json"]))
        for path in view.paths:
            named = extents.get((shard, path.removesuffix(_COMPANION)), steps[shard])
            if view.describe(path).shape[0] > named:
                out.add(shard)
    return out
