"""Redaction: a forgetting after which nothing that is retained holds anything of some episodes.

Shards that hold their steps beside those of others are written anew without them. All is put before the one commit that
names it: killed before that, nothing has changed, and what was put is what a crash leaves behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, numbers
from archive.base import ConflictError, at_once, escape, layout
from archive.index import Snapshot
from archive.log import FileRef, new_session, tablefiles
from archive.maintain import relocation
from archive.maintain.draft import Draft
from archive.maintain.obstacles import journals_naming, obstacles
from archive.maintain.plans import Redacted
from archive.maintain.relocation import WHERE, Place
from archive.maintain.survivors import Decision
from archive.read.chunks import Segments, Shards
from archive.steps import Steps
from archive.store import Storage, split_key
from archive.tables import STRETCH, among, distinct, overlaps

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 16  # shards that are looked into
_COMPANION = "%places"  # of an array: the one with as many rows, where that is not one a step


class Redaction:
    """Takes the steps of episodes out of their shards. layout: of the shards that are written."""

    def __init__(self, storage: Storage, layout: str, ids: Collection[str]) -> None:
        self._storage = storage
        self._layout = layout
        self._ids = frozenset(ids)
        self._written: tuple[list[Any], list[Place], FileRef] | None = None  # where steps were read, and where they are
        self._found: tuple[Snapshot, tuple[_Stored, _Stored]] | None = None

    def applied(self, decision: Decision, *, is_dry: bool) -> Decision:
        """The decision with the steps of others elsewhere, which are written once, however often it is asked for;
        ConflictError if they are no longer those that were written. is_dry: nothing is written."""
        some = [one for one in self._stored(decision) if len(one.rows)]
        if not some:
            return decision
        where = [place for one in some for place in one.where]
        if is_dry:
            chunks = FileRef(layout.manifest_key("planned", "redact", "chunks"), 0, 0, 0)
            place = {"shard": layout.shard_key("planned", "redact", 0, self._layout)}
            written = where, [place | tablefiles.chunk_columns(chunks)] * len(where), chunks
        elif (known := self._written) is not None:
            written = known
        else:
            groups = [(one.source, one.pieces) for one in some if len(one.pieces)]
            self._written = written = where, *relocation.write(self._storage, self._layout, new_session(), groups)
        before, places, chunks = written
        if before != where:
            raise ConflictError(
                f"steps at {self._storage.url} were moved or added while a redaction wrote others anew; nothing was "
                "committed: plan again"
            )
        left = iter(places)
        return replace(decision, moved={one.kind: one.moved(left) for one in some}, chunks=chunks)

    def told(self, decision: Decision, made: Draft | None) -> Redacted:
        """The extent of it, and what stands in its way. made: the commit; None where nothing goes."""
        segments, late = self._stored(decision)
        shards = segments.shards | late.shards
        size = sum(made.gone.get(key, 0) for key in shards) if made is not None else 0
        found = obstacles(self._storage, decision, made, self._ids, shards)
        return Redacted(len(self._ids), len(shards), int(segments.pieces.length.sum()), size, tuple(found))

    def _stored(self, decision: Decision) -> tuple[_Stored, _Stored]:
        if self._found is None or self._found[0] is not decision.snapshot:
            self._found = decision.snapshot, (_segments(decision), _late(decision))
        return self._found[1]


# -- what must go ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """Shards that must go, and what is stored in them of others: rows of a table, and the steps of theirs that stay, as
    pieces, in order.

    source: the rows of the table as segments, to be read from.
    """

    kind: str
    table: pa.Table
    source: Snapshot
    shards: frozenset[str]
    rows: Ints
    pieces: Steps

    @property
    def where(self) -> list[Any]:
        """The place of each piece now."""
        rows = self.table.select(WHERE).take(self.pieces.stream).to_pylist()
        return list(zip(rows, self.pieces.lo.tolist(), self.pieces.hi.tolist(), strict=True))

    def moved(self, places: Iterator[Place]) -> pa.Table:
        """The table with the pieces at the next of these places instead of the rows that they are of."""
        spans = zip(*(getattr(self.pieces, name).tolist() for name in ("stream", "lo", "hi")), strict=True)
        rows = self.table.take(self.pieces.stream).to_pylist()
        new = [(at, relocation.cut(row, lo, hi) | next(places)) for row, (at, lo, hi) in zip(rows, spans, strict=True)]
        return tables.replaced(self.kind, self.table, self.rows, new)


def _segments(decision: Decision) -> _Stored:
    """The shards of rows that go, and those with leavings of such or that name them; rows of others lie there whole."""
    import pyarrow as pa

    table = decision.snapshot.columns(tables.schema("segments").names)
    shard = table["shard"].cast(pa.string()).combine_chunks()
    gone = {*distinct(table["shard"].take(pa.array(decision.gone)))}
    gone |= _leavings(decision) | journals_naming(decision)
    rows = np.flatnonzero(among(shard, {key for key in gone if split_key(key)[0] is None}) & decision.rows)
    pieces = Steps(rows, np.zeros_like(rows), numbers(table["length"])[rows])
    return _Stored("segments", table, decision.snapshot, frozenset(gone), rows, pieces)


# -- late fields -------------------------------------------------------------------------------------------------------


def _late(decision: Decision) -> _Stored:
    """The rows of the late table that are of steps that go, or lie in shards with such."""
    table = tablefiles.load(decision.snapshot.storage, "late", decision.parent.files("late"))
    source = _as_segments(table, decision)
    over = overlaps(table, decision.snapshot.take(decision.gone, STRETCH))
    away = Steps(over["late"], over["step"], over["step"] + over.length)
    names = table["shard"].to_pylist()
    shards = frozenset(names[row] for row in over["late"].tolist()) - {None}
    if decision.parent.let_go:
        there = np.flatnonzero([name is not None for name in names])
        shards |= _with_more(source, there)
    rows = np.flatnonzero([name in shards for name in names])
    left = Steps(rows, np.zeros_like(rows), table["length"].to_numpy()[rows]).minus(away)
    return _Stored("late", table, source, shards, rows, left)


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

    def has_more(shard: str) -> bool:
        view = shards.view(shard, segments.owner)
        named = {path: extents.get((shard, path.removesuffix(_COMPANION)), steps[shard]) for path in view.paths}
        return any(view.describe(path).shape[0] > rows for path, rows in named.items())

    more = at_once(has_more, segments.shards, _AT_ONCE)
    return {shard for shard, found in zip(segments.shards, more, strict=True) if found}
