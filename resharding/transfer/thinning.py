"""What is to be written anew: live steps in shards of which little else is live, or which are small, and the pieces
that their rows are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from archive import Archive
from archive.base import UsageError
from archive.fields import NODES, loads
from archive.maintain import Piece
from archive.manifest import liveview
from archive.steps import Steps
from resharding.transfer.smallness import Owner, small

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Live:
    """The live steps of the newest whole checkpoints of all runs, in rows of the newest segments table.

    steps: by the row's number, each once; owners: of each of these rows whose buffer holds it (of several, the first),
    also where an episode without steps is live.
    """

    steps: Steps
    owners: Mapping[int, Owner]


@dataclass(frozen=True)
class Thin:
    """How many shards are thin or small, and the rows with live steps in them as pieces, live and other ones."""

    shards: int
    pieces: list[Piece]
    owners: Mapping[int, Owner]

    @property
    def live(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.live]

    @property
    def steps(self) -> int:
        return sum(piece.hi - piece.lo for piece in self.live)

    def together(self) -> list[list[tuple[int, Piece]]]:
        """The live pieces, numbered, those of one buffer together: it is who reads them."""
        out: dict[Owner, list[tuple[int, Piece]]] = {}
        for number, piece in enumerate(self.live):
            out.setdefault(self.owners[piece.row], []).append((number, piece))
        return [*out.values()]


def thin(archive: Archive, min_alive: float, min_full: float) -> Thin:
    """What is thin or small now.

    Thin: less than `min_alive` of a shard is live at the newest checkpoints of all runs. Small: it has less than
    `min_full` of the bytes of a full shard, and there are others that it can be joined to.
    """
    if not 0 < min_alive <= 1:
        raise UsageError(f"min_alive={min_alive}: give a part of the steps above 0, at most 1")
    if not 0 <= min_full <= 1:
        raise UsageError(f"min_full={min_full}: give a part of a full shard, from 0 (none is joined) to 1")
    archive.refresh()
    live = _live(archive)
    shards = _thin_shards(archive, live.steps, min_alive) | small(archive.snapshot, live.owners, min_full)
    return Thin(len(shards), _pieces(archive, live.steps, shards), live.owners)


def _live(archive: Archive) -> Live:
    segments = archive.snapshot.columns(liveview.SEGMENT_COLUMNS)
    checkpoints = [archive.checkpoints.newest(run=run, replay=True) for run in archive.head.runs]
    tables = [checkpoint.live for checkpoint in checkpoints if checkpoint is not None]
    found = [liveview.locate(live, segments) for live in tables]
    owners: dict[int, Owner] = {}
    for number, (table, parts) in enumerate(zip(tables, found, strict=True)):
        for held, owner in _owned(number, table, parts):
            owners.setdefault(held, owner)
    return Live(Steps.joined(found).union(), owners)


def _owned(number: int, live: pa.Table, found: Steps) -> Iterator[tuple[int, Owner]]:
    """The rows of the live steps of a checkpoint, and whose buffer holds them."""
    ranks, buffers = live["rank"].to_pylist(), live["buffer"].cast("string").to_pylist()
    for row, run in zip(found.stream.tolist(), found["run"].tolist(), strict=True):
        yield row, Owner(number, ranks[run], buffers[run])


def _thin_shards(archive: Archive, live: Steps, min_alive: float) -> set[str]:
    """Shards with live steps, of which less than `min_alive` of the steps are live (or go along with live ones)."""
    table = archive.snapshot.columns(["shard", "length", "schema"])
    shards = table["shard"].cast("string").to_pylist()
    lengths = table["length"].to_pylist()
    total: dict[str, int] = {}
    alive: dict[str, int] = {}
    for shard, length in zip(shards, lengths, strict=True):
        if shard is not None:
            total[shard] = total.get(shard, 0) + length
    rows, counts = np.unique(live.stream), np.bincount(live.stream, weights=live.length)
    for row in rows.tolist():
        steps = int(counts[row]) if _divisible(table["schema"][row].as_py()) else lengths[row]
        alive[shards[row]] = alive.get(shards[row], 0) + steps
    return {shard for shard, steps in alive.items() if 0 < steps < min_alive * total[shard]}


@cache
def _divisible(schema: str) -> bool:
    """Whether segments of this schema can be cut anywhere: no field has other rows than one a step."""
    return all(f.per_step or f.axis in NODES for f in loads(schema).fields)


def _pieces(archive: Archive, live: Steps, shards: set[str]) -> list[Piece]:
    """The affected rows cut into live and other pieces; rows with fields that are not one row a step stay whole."""
    rows = np.unique(live.stream)
    table = archive.snapshot.take(rows, ["shard", "length", "schema"])
    names, texts = (table[name].cast("string").to_pylist() for name in ("shard", "schema"))
    affected = np.array([name in shards for name in names], bool)
    whole = np.array([not _divisible(text) for text in texts], bool)
    every = Steps(rows, np.zeros_like(rows), table["length"].to_numpy().astype(np.int64))
    alive = Steps.joined([live.pick(np.isin(live.stream, rows[affected & ~whole])), every.pick(affected & whole)])
    out = [Piece(*one, True) for one in _rows(alive)]
    out += [Piece(*one, False) for one in _rows(every.pick(affected).minus(alive))]
    return sorted(out, key=lambda piece: (piece.row, piece.lo))


def _rows(some: Steps) -> Iterator[tuple[int, int, int]]:
    return zip(some.stream.tolist(), some.lo.tolist(), some.hi.tolist(), strict=True)
