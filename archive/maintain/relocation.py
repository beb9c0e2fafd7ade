"""Writing pieces of segments anew: read in batches in the form that is stored, and packed into shards close
together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints
from archive.index import Snapshot
from archive.log import FileRef
from archive.read import Reader, Spans, sizes
from archive.shard import SHARD_BYTES, ShardWriter
from archive.steps import Steps
from archive.write import Block, Pipeline, ShardObjects, Slab, owned, shard

if TYPE_CHECKING:
    import pyarrow as pa

READ_BYTES = 64 * 1024 * 1024

Places = dict[int, dict[str, Any]]  # number of a piece -> its shard, start, extents and schema


@dataclass(frozen=True)
class Relocation:
    """Rows of the segments table, in order, whose steps lie elsewhere from now on: the columns that say where.

    chunks: the file with the chunk rows of these places.
    """

    rows: Ints
    places: Sequence[Mapping[str, Any]]
    chunks: FileRef


def write(
    snapshot: Snapshot, layout: str, session: str, pieces: Steps, group: int = 0
) -> tuple[Places, pa.Table]:  # fmt: skip
    """Write some pieces to shards of their own: the place of each, and the chunk table of these shards.

    pieces: of rows of the segments table.  group: a number in the names of the shards, where a writer's have its rank.
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


def _blocks(snapshot: Snapshot, pieces: Steps) -> Iterator[Block]:
    """The steps of each piece, read in batches."""
    reader, spans = Reader(snapshot).as_written(), Spans.of_each(pieces.stream, pieces.lo, pieces.hi)
    view, counts = reader.shown(spans), pieces.length.tolist()
    for start, stop in sizes.runs(reader.sizes(spans), READ_BYTES):
        found = reader.read_stored(spans.pick(np.arange(start, stop)))
        for number, code, data in zip(range(start, stop), view.code[start:stop], found, strict=True):
            count = counts[number]  # pieces stay in order: each is an env row of its own
            one = np.full(min(1, count), number)
            runs = Steps(one, np.zeros_like(one), np.full_like(one, count), episode=one)
            yield owned(Block(view.schemas[code], data, runs, single=number, env_id=number))
