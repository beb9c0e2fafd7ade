"""Engine: the late fields of steps that go: which rows of the late table are cut or move, and what it is then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.maintain import Decided, Piece
from archive.maintain.redaction.leavings import with_more
from archive.manifest import Snapshot, tablefiles, tables
from archive.read.chunks import latefields

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
        import pyarrow as pa

        rows = self._rows_of_pieces().to_pylist()
        new = [{**_cut(row, one), **place} for row, one, place in zip(rows, self.pieces, places, strict=True)]
        others = np.array([i for i in range(self.table.num_rows) if i not in self.rows], np.int64)
        origin = np.concatenate([others, np.array([one.row for one in self.pieces], np.int64)])
        columns = {name: [row[name] for row in new] for name in self.table.column_names}
        every = tables.concat("late", [self.table.take(pa.array(others)), tables.from_columns("late", columns)])
        return every.take(pa.array(np.argsort(origin, kind="stable")))


def _as_segments(table: pa.Table, decided: Decided) -> Snapshot:
    """The late table as if it were the segments table: its rows say by the same columns where steps lie."""
    names = [name for name in tables.schema("segments").names if name in table.column_names]
    rows = tables.from_columns("segments", {name: table[name].to_pylist() for name in names})
    return Snapshot.of(decided.snapshot.storage, decided.parent, rows)


def lates(decided: Decided) -> Lates:
    """What of the late table is of steps that go, or lies in shards with such."""
    table = tablefiles.load(decided.snapshot.storage, "late", decided.parent.files("late"))
    gone = decided.snapshot.take(np.flatnonzero(~decided.rows), latefields.WHERE)
    over = latefields.overlaps(table.select(latefields.WHERE), gone)
    away: dict[int, list[tuple[int, int]]] = {}
    steps = (column.tolist() for column in (over.late, over.step, over.step + over.hi - over.lo))
    for row, lo, hi in zip(*steps, strict=True):
        away.setdefault(row, []).append((lo, hi))
    names = table["shard"].to_pylist()
    shards = frozenset(names[row] for row in away) - {None}
    if decided.parent.let_go:
        shards |= with_more(_as_segments(table, decided), np.flatnonzero([name is not None for name in names]))
    rows = [row for row, name in enumerate(names) if name in shards]
    lengths = table["length"].to_pylist()
    pieces = [piece for row in rows for piece in _left(row, lengths[row], sorted(away.get(row, ())))]
    return Lates(table, shards, frozenset(rows), tuple(pieces))


def _left(row: int, length: int, away: Sequence[tuple[int, int]]) -> list[Piece]:
    """What is left of the steps of a row."""
    out, at = [], 0
    for lo, hi in [*away, (length, length)]:
        if lo > at:
            out.append(Piece(row, at, lo, True))
        at = max(at, hi)
    return out


def _cut(row: dict[str, Any], piece: Piece) -> dict[str, Any]:
    return row | {"position": row["position"] + piece.lo, "length": piece.hi - piece.lo}
