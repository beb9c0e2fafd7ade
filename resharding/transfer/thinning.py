"""What lies thinly: live steps in shards of which little else is live, and the pieces that their rows are cut into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from archive import Archive
from archive.arrays import Ints, merge_runs, run_starts
from archive.base import UsageError
from archive.fields import NODES, loads
from archive.maintain import Piece
from archive.manifest import liveview

Intervals = dict[int, tuple[Ints, Ints]]  # row of the segments table -> live steps of it, as sorted runs


@dataclass(frozen=True)
class Thin:
    """How many shards are thin, and the rows with live steps in them as pieces, live and other ones."""

    shards: int
    pieces: list[Piece]

    @property
    def live(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.live]

    @property
    def steps(self) -> int:
        return sum(piece.hi - piece.lo for piece in self.live)


def thin(archive: Archive, min_alive: float) -> Thin:
    """What is thin now: less than `min_alive` of a shard is live at the newest checkpoints of all runs."""
    if not 0 < min_alive <= 1:
        raise UsageError(f"min_alive={min_alive}: give a part of the steps above 0, at most 1")
    archive.refresh()
    live = _live_intervals(archive)
    shards = _thin_shards(archive, live, min_alive)
    return Thin(len(shards), _pieces(archive, live, shards))


def _live_intervals(archive: Archive) -> Intervals:
    """The live steps of the newest whole checkpoints of all runs, in the rows of the newest segments table."""
    segments = archive.snapshot.columns(liveview.SEGMENT_COLUMNS)
    checkpoints = [archive.checkpoints.newest(run=run, replay=True) for run in archive.head.runs]
    found = [liveview.locate(checkpoint.live, segments) for checkpoint in checkpoints if checkpoint is not None]
    if not found:
        return {}
    row, lo, hi = (np.concatenate(columns) for columns in zip(*((p.row, p.lo, p.hi) for p in found), strict=True))
    order = np.argsort(row, kind="stable")
    groups = np.split(order, run_starts(row[order])[1:]) if len(order) else []
    return {int(row[group[0]]): merge_runs(lo[group], hi[group]) for group in groups}


def _thin_shards(archive: Archive, live: Intervals, min_alive: float) -> set[str]:
    """Shards with live steps, of which less than `min_alive` of the steps are live (or go along with live ones)."""
    table = archive.snapshot.columns(["shard", "length", "schema"])
    shards = table["shard"].cast("string").to_pylist()
    lengths = table["length"].to_pylist()
    total: dict[str, int] = {}
    alive: dict[str, int] = {}
    for shard, length in zip(shards, lengths, strict=True):
        if shard is not None:
            total[shard] = total.get(shard, 0) + length
    for row, (starts, stops) in live.items():
        steps = int((stops - starts).sum())
        if steps and not _divisible(table["schema"][row].as_py()):
            steps = lengths[row]
        alive[shards[row]] = alive.get(shards[row], 0) + steps
    return {shard for shard, steps in alive.items() if 0 < steps < min_alive * total[shard]}


@cache
def _divisible(schema: str) -> bool:
    """Whether segments of this schema can be cut anywhere: no field has other rows than one a step."""
    return all(f.per_step or f.axis in NODES for f in loads(schema).fields)


def _pieces(archive: Archive, live: Intervals, shards: set[str]) -> list[Piece]:
    """The affected rows cut into live and other pieces; rows with fields that are not one row a step stay whole."""
    rows = sorted(row for row, (starts, _) in live.items() if len(starts))
    table = archive.snapshot.take(np.array(rows, np.int64), ["shard", "length", "schema"])
    names, texts = (table[name].cast("string").to_pylist() for name in ("shard", "schema"))
    out: list[Piece] = []
    for row, shard, length, text in zip(rows, names, table["length"].to_pylist(), texts, strict=True):
        if shard in shards:
            edges = (edge.tolist() for edge in live[row])
            out += _cut(row, length, zip(*edges, strict=True) if _divisible(text) else [(0, length)])
    return out


def _cut(row: int, length: int, runs: Iterable[tuple[int, int]]) -> list[Piece]:
    out, at = [], 0
    for lo, hi in runs:
        if lo > at:
            out.append(Piece(row, at, lo, False))
        out.append(Piece(row, lo, hi, True))
        at = hi
    return [*out, Piece(row, at, length, False)] if at < length else out
