"""The late fields of steps that go: which rows of the late table are cut or move, and what it is then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.maintain import Decided, Piece
from archive.maintain.redaction.leavings import with_more
from archive.manifest import Snapshot, tablefiles
from archive.steps import Steps
from archive.tables import STRETCH, overlaps

if TYPE_CHECKING:
    import pyarrow as pa

_WHERE = ("shard", "start", "position", "length")


@dataclass(frozen=True)
class Lates:
    """Rows of the late table whose shards must go, and the steps of theirs that stay, as pieces, in order."""

    table: pa.Table
    shards: frozenset[str]
    rows: frozenset[int]
    pieces: tuple[Piece, ...]

    @property
    def where(self) -> list[Any]:
        """Where the pieces lie."""
        rows = self._rows_of_pieces().select(_WHERE).to_pylist()
        return [(row, one.lo, one.hi) for row, one in zip(rows, self.pieces, strict=True)]

    def _rows_of_pieces(self) -> pa.Table:
        import pyarrow as pa

        return self.table.take(pa.array([one.row for one in self.pieces], pa.int64()))

    def as_segments(self, decided: Decided) -> Snapshot:
        """The table as one of segments, to be read."""
        return _as_segments(self.table, decided)

    def moved(self, places: Sequence[Mapping[str, Any]]) -> pa.Table:
        """The table with the pieces at these places instead of the rows that they are of."""
        rows = self._rows_of_pieces().to_pylist()
        cut = ((one.row, _cut(row, one)) for row, one in zip(rows, self.pieces, strict=True))
        new = [(number, {**row, **place}) for (number, row), place in zip(cut, places, strict=True)]
        return tables.replaced("late", self.table, sorted(self.rows), new)


def _as_segments(table: pa.Table, decided: Decided) -> Snapshot:
    """The late table as if it were the segments table: its rows say by the same columns where steps lie."""
    names = [name for name in tables.schema("segments").names if name in table.column_names]
    rows = tables.from_columns("segments", {name: table[name].to_pylist() for name in names})
    return Snapshot.of(decided.snapshot.storage, decided.parent, rows)


def lates(decided: Decided) -> Lates:
    """What of the late table is of steps that go, or lies in shards with such."""
    table = tablefiles.load(decided.snapshot.storage, "late", decided.parent.files("late"))
    gone = decided.snapshot.take(np.flatnonzero(~decided.rows), STRETCH)
    over = overlaps(table, gone)
    away = Steps(over["late"], over["step"], over["step"] + over.length)
    names = table["shard"].to_pylist()
    shards = frozenset(names[row] for row in over["late"].tolist()) - {None}
    if decided.parent.let_go:
        shards |= with_more(_as_segments(table, decided), np.flatnonzero([name is not None for name in names]))
    rows = np.flatnonzero([name in shards for name in names])
    left = Steps(rows, np.zeros_like(rows), table["length"].to_numpy()[rows]).minus(away)
    where = zip(left.stream.tolist(), left.lo.tolist(), left.hi.tolist(), strict=True)
    pieces = tuple(Piece(*one, True) for one in where)
    return Lates(table, shards, frozenset(rows.tolist()), pieces)


def _cut(row: dict[str, Any], piece: Piece) -> dict[str, Any]:
    return row | {"position": row["position"] + piece.lo, "length": piece.hi - piece.lo}
