"""Writing pieces of segments anew: read in batches in the form that is stored, and packed into shards close
together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints
from archive.manifest import FileRef, Snapshot
from archive.read import Reader, Spans, sizes
from archive.shard import SHARD_BYTES, ShardWriter
from archive.write import Block, Pipeline, RowRuns, ShardObjects, Slab, owned, shard

if TYPE_CHECKING:
    import pyarrow as pa

READ_BYTES = 64 * 1024 * 1024

Places = dict[int, dict[str, Any]]  # number of a piece -> its shard, start, extents and schema


@dataclass(frozen=True)
class Piece:
    """Steps [lo, hi) of one row of the segments table, and whether they are live."""

    row: int
    lo: int
    hi: int
    live: bool


Numbered = tuple[int, Piece]


@dataclass(frozen=True)
class Relocation:
    """Rows of the segments table, in order, whose steps lie elsewhere from now on: the columns that say where.

    chunks: the file with the chunk rows of these places.
    """

    rows: Ints
    places: Sequence[Mapping[str, Any]]
    chunks: FileRef


def write(
    snapshot: Snapshot, layout: str, session: str, pieces: Sequence[Numbered], group: int = 0
) -> tuple[Places, pa.Table]:
    """Write some pieces to shards of their own: where each came to lie, and the chunk table of these shards.

    group: a number in the names of the shards, where a writer's have its rank.
    """
    shards = ShardWriter(snapshot.storage, layout)
    pipeline = Pipeline(shards, ShardObjects(shards, session, group))
    places: Places = {}

    def describe(slab: Slab, key: str) -> pa.Table:
        extents = tables.extents(slab.extents, len(slab.start)).to_pylist()
        for i, number in enumerate(slab.episode.tolist()):
            place = {"shard": key, "start": int(slab.start[i]), "extents": extents[i]}
            places[number] = {**place, "schema": slab.schema.dumps()}
        return tables.schema("segments").empty_table()

    try:
        for blocks in _shards(_blocks(snapshot, pieces)):
            pipeline.hand_in(shard(blocks, None, describe))
        written = pipeline.wait(pipeline.uncommitted())
    finally:
        pipeline.close()
    return places, tables.concat("chunks", [w.chunks for w in written if w.chunks is not None])


def _shards(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Blocks of one schema together, as many as a shard takes."""
    pending: dict[str, list[Block]] = {}
    size: dict[str, int] = {}
    for block in blocks:
        digest = block.schema.digest
        if digest in pending and size[digest] + block.nbytes > SHARD_BYTES:
            yield pending.pop(digest)
        if digest not in pending:
            pending[digest], size[digest] = [], 0
        pending[digest].append(block)
        size[digest] += block.nbytes
    yield from pending.values()


def _blocks(snapshot: Snapshot, pieces: Sequence[Numbered]) -> Iterator[Block]:
    """The steps of each piece, read in batches."""
    reader, spans = Reader(snapshot).as_written(), spans_of(pieces)
    view = reader.shown(spans)
    for start, stop in sizes.runs(reader.sizes(spans), READ_BYTES):
        found = reader.read_stored(spans.pick(np.arange(start, stop)))
        for (number, piece), code, data in zip(pieces[start:stop], view.code[start:stop], found, strict=True):
            count = piece.hi - piece.lo  # pieces stay in order: each is an env row of its own
            runs = RowRuns(*(np.full(min(1, count), of) for of in (number, 0, count, number)))
            yield owned(Block(view.schemas[code], data, runs, single=number, env_id=number))


def spans_of(pieces: Sequence[Numbered]) -> Spans:
    """The steps of each piece, as those of an episode."""
    return Spans.of_each(*zip(*((p.row, p.lo, p.hi) for _, p in pieces), strict=True))
