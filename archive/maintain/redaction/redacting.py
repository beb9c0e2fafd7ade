"""A forgetting after which nothing that is retained holds anything of some episodes.

Shards that hold their steps beside those of others are written anew without them. All is put before the one commit that
names it: killed before that, nothing has changed, and what was put is what a crash leaves behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints
from archive.base import ConflictError, layout
from archive.maintain import Decided, Draft, Moved, Piece, Redacted, forgetting, moving
from archive.maintain.redaction.hindrances import hindrances
from archive.maintain.redaction.journals import naming
from archive.maintain.redaction.lates import Lates, lates
from archive.maintain.redaction.leavings import leavings
from archive.manifest import FileRef, Snapshot, new_session, tablefiles
from archive.store import Storage, split_key
from archive.tables import ADDRESS, Address, addresses, among

if TYPE_CHECKING:
    import pyarrow as pa

_PLACE = ("shard", "start", "length", "position")

Place = Mapping[str, Any]  # the columns of a row that say where its steps lie


@dataclass(frozen=True)
class Touched:
    """Shards that must go, and what lies in them of others: rows of the segments table, and late fields."""

    decided: Decided
    shards: frozenset[str]
    rows: Ints
    late: Lates

    @property
    def none(self) -> bool:
        """Whether nothing of others lies in them, and no late field goes."""
        return not len(self.rows) and not self.late.shards

    def where(self) -> tuple[dict[Address, dict[str, Any]], list[Any]]:
        """Where these rows and pieces of others lie: by the address of the row, and in order."""
        found = self.decided.snapshot.take(self.rows, [*ADDRESS, *_PLACE])
        rows = dict(zip(addresses(found), found.select(_PLACE).to_pylist(), strict=True))
        return rows, self.late.where

    def moved(self, places: Sequence[Place], late: Sequence[Place], chunks: FileRef) -> Decided:
        """What was decided, with all of these elsewhere."""
        if self.none:
            return self.decided
        moved = Moved(self.rows, places, chunks)
        return replace(self.decided, moved=moved, late=self.late.moved(late) if self.late.shards else None)


@dataclass(frozen=True)
class _Written:
    """Where steps were put, and where they lay when they were read."""

    before: tuple[dict[Address, dict[str, Any]], list[Any]]
    places: Sequence[Place]
    late: Sequence[Place]
    chunks: FileRef


class Redaction:
    """Takes the steps of episodes out of their shards. layout: of the shards that are written."""

    def __init__(self, storage: Storage, layout: str, ids: Collection[str]) -> None:
        self._storage = storage
        self._layout = layout
        self._ids = frozenset(ids)
        self._written: _Written | None = None
        self._touched: Touched | None = None

    def planned(self, found: forgetting.Found) -> Decided:
        """What was decided, with the steps of others elsewhere; nothing is written."""
        touched = self._touched_by(found.decided)
        chunks = FileRef(layout.manifest_key("planned", "redact", "chunks"), 0, 0, 0)
        place = {"shard": layout.shard_key("planned", "redact", 0, self._layout)} | tablefiles.chunk_columns(chunks)
        return touched.moved([place] * len(touched.rows), [place] * len(touched.late.pieces), chunks)

    def written(self, found: forgetting.Found) -> Decided:
        """As planned, with these steps written; ConflictError if they are no longer those that were written."""
        touched = self._touched_by(found.decided)
        if touched.none:
            return found.decided
        if self._written is None:
            self._written = self._write(touched)
        elif self._written.before != touched.where():
            raise ConflictError(
                f"steps at {self._storage.url} were moved or added while a redaction wrote others anew; nothing was "
                "committed: plan again"
            )
        return touched.moved(self._written.places, self._written.late, self._written.chunks)

    def told(self, found: forgetting.Found, made: Draft | None) -> Redacted:
        """What it takes, and what stands in its way."""
        touched = self._touched_by(found.decided)
        lengths = found.decided.snapshot.take(touched.rows, ["length"])["length"].to_numpy()
        size = sum(made.gone.get(key, 0) for key in touched.shards) if made is not None else 0
        return Redacted(
            len(self._ids), len(touched.shards), int(lengths.sum()), size,
            tuple(hindrances(self._storage, found, made, self._ids, touched.shards)),
        )  # fmt: skip

    def _touched_by(self, decided: Decided) -> Touched:
        if self._touched is None or self._touched.decided is not decided:
            self._touched = touched(decided)
        return self._touched

    def _write(self, touched: Touched) -> _Written:
        """Put these steps of others into shards of their own."""
        session, decided = new_session(), touched.decided
        before = touched.where()
        lengths = (place["length"] for place in before[0].values())
        pieces = [Piece(row, 0, length, True) for row, length in zip(touched.rows.tolist(), lengths, strict=True)]
        late = touched.late.as_segments(decided)
        parts = [self._put(session, decided.snapshot, pieces), self._put(session, late, touched.late.pieces)]
        table = tables.concat("chunks", [part[1] for part in parts])
        chunks = tablefiles.write(self._storage, session, "chunks", table)
        places, late_places = (
            [places[i] | tablefiles.chunk_columns(chunks) for i in range(len(places))] for places, _ in parts
        )
        return _Written(before, places, late_places, chunks)

    def _put(
        self, session: str, snapshot: Snapshot, pieces: Sequence[Piece]
    ) -> tuple[moving.Places, pa.Table]:  # fmt: skip
        if not pieces:
            return {}, tables.schema("chunks").empty_table()
        return moving.write(snapshot, self._layout, session, list(enumerate(pieces)))


def touched(decided: Decided) -> Touched:
    """The shards of rows that go, and those with leavings of such or that name them; what lies in them of others."""
    import pyarrow as pa

    shard = decided.snapshot.columns(["shard"])["shard"].cast(pa.string()).combine_chunks()
    gone = {*shard.filter(pa.array(~decided.rows)).drop_null().unique().to_pylist()}
    gone |= leavings(decided) | naming(decided)
    own = {key for key in gone if split_key(key)[0] is None}
    late = lates(decided)
    return Touched(decided, frozenset(gone) | late.shards, np.flatnonzero(among(shard, own) & decided.rows), late)
