"""Moving steps to new shards: they are read in batches in stored form, and packed close together; rows name their new
place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Steps
from archive.index import Snapshot
from archive.log import FileRef, tablefiles
from archive.read import Reader, Spans, sizes
from archive.shard import SHARD_BYTES, ShardWriter
from archive.store import Storage
from archive.tables import STRETCH
from archive.write import Block, Pipeline, RankRows, ShardObjects, Slab, owned, shard, weighed

if TYPE_CHECKING:
    import pyarrow as pa

READ_BYTES = 64 * 1024 * 1024
WHERE = (*STRETCH, "shard", "start")  # the steps of a row, and their place

Location = dict[str, Any]  # the columns of a row that name the place of its steps


def write(
    storage: Storage, layout: str, session: str, groups: Sequence[tuple[Snapshot, Steps]]
) -> tuple[list[Location], FileRef]:
    """Write groups of ranges of steps, each group to shards of its own: the new place of each range, group by group,
    and the file with the chunk rows of these shards.

    The ranges are of rows of the snapshot's table; the number of a group is in the names of its shards, where a
    writer's have its rank.
    """
    found = [_written(snapshot, layout, session, pieces, n) for n, (snapshot, pieces) in enumerate(groups)]
    chunks = tablefiles.write(storage, session, "chunks", tables.concat("chunks", [table for _, table in found]))
    return [place | tablefiles.chunk_columns(chunks) for places, _ in found for place in places], chunks


def cut(row: Mapping[str, Any], lo: int, hi: int) -> dict[str, Any]:
    """A row of the segments or late table, limited to its steps [lo, hi)."""
    out = dict(row) | {name: row[name] + lo for name in ("position", "start", "episode_start") if name in row}
    if row.get("weights") is not None:
        out["weights"] = tables.weights_of(row, lo, hi)
    return out | {"length": hi - lo}


def _written(
    snapshot: Snapshot, layout: str, session: str, pieces: Steps, group: int
) -> tuple[list[Location], pa.Table]:
    shards = ShardWriter(snapshot.storage, layout)
    pipeline = Pipeline(shards, ShardObjects(shards, session, group))
    places: dict[int, Location] = {}

    def describe(slab: Slab, key: str) -> pa.Table:
        start, extents = slab.columns["start"].tolist(), slab.columns["extents"].to_pylist()
        for i, number in enumerate(slab.segments["episode"].tolist()):
            places[number] = {"shard": key, "start": start[i], "extents": extents[i], "schema": slab.columns["schema"]}
        return tables.schema("segments").empty_table()

    try:
        for blocks in _shards(_blocks(snapshot, pieces)):
            pipeline.hand_in(shard(blocks, None, describe))
        written = pipeline.wait(pipeline.uncommitted())
    finally:
        pipeline.close()
    chunks = RankRows.joined([one.rows for one in written]).chunks
    return [places[number] for number in range(len(pieces))], chunks


def _shards(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Groups of blocks of one schema, as many as a shard takes."""
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
    """The steps of each range, read in batches."""
    reader, spans = Reader(snapshot).as_written(), Spans.of_each(pieces.stream, pieces.lo, pieces.hi)
    view, counts = reader.shown(spans), pieces.length.tolist()
    for start, stop in sizes.runs(reader.sizes(spans), READ_BYTES):
        found = reader.read_stored(spans.pick(np.arange(start, stop)))
        for number, code, data in zip(range(start, stop), view.code[start:stop], found, strict=True):
            one = np.array([number])  # ranges stay in order: each is an env row of its own
            runs = Steps(one, np.zeros_like(one), np.array([counts[number]]), episode=one)
            yield owned(Block(view.schemas[code], data, weighed(runs), whole=True))
