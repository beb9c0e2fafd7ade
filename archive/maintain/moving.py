"""Engine: writing pieces of segments anew: read in batches in the form that is stored, and packed into shards close
together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints
from archive.fields import NODES, ShardSchema, loads, to_numpy
from archive.manifest import FileRef, Snapshot, tables
from archive.read import Reader, Spans
from archive.write import SHARD_BYTES, Block, Pipeline, RowRuns, Slab, owned, shard

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
class Moved:
    """Rows of the segments table, in order, whose steps lie elsewhere from now on: the columns that say where.

    chunks: the file with the chunk rows of these places.
    """

    rows: Ints
    places: Sequence[Mapping[str, Any]]
    chunks: FileRef


def write(
    snapshot: Snapshot, layout: str, session: str, compression: str | None, pieces: Sequence[Numbered], group: int = 0
) -> tuple[Places, pa.Table]:
    """Write some pieces to shards of their own: where each came to lie, and the chunk table of these shards.

    group: a number in the names of the shards, where a writer's have its rank.
    """
    pipeline = Pipeline(snapshot.storage, session, group, layout, compression)
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
    """Each piece's steps, read in batches."""
    texts, codes = _schemas(snapshot, [p for _, p in pieces])
    schemas = [loads(text) for text in texts]
    reader = Reader(snapshot)
    at = 0
    for batch in batches(pieces, sizes(snapshot, [p for _, p in pieces]), READ_BYTES):
        edges = ([edge(p) for _, p in batch] for edge in (attrgetter("row"), attrgetter("lo"), attrgetter("hi")))
        found = reader.read_stored(Spans.of_each(*edges))
        for (number, piece), data in zip(batch, found, strict=True):
            schema = schemas[codes[at]]
            count = piece.hi - piece.lo  # pieces stay in order: each is an env row of its own
            runs = RowRuns(*(np.full(min(1, count), of) for of in (number, 0, count, number)))
            yield owned(Block(schema, data, runs, single=number, env_id=number))
            at += 1


def batches(pieces: Sequence[Numbered], sizes: Sequence[int], max_bytes: int) -> Iterator[list[Numbered]]:
    """Pieces one after the other, as many as come to so many bytes, at least one."""
    batch: list[Numbered] = []
    total = 0
    for piece, size in zip(pieces, sizes, strict=True):
        if batch and total + size > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append(piece)
        total += size
    if batch:
        yield batch


def _schemas(snapshot: Snapshot, pieces: Sequence[Piece]) -> tuple[list[str], list[int]]:
    """The distinct schemas of the pieces, and which of them each has."""
    rows: Ints = np.array([p.row for p in pieces], np.int64)
    names = snapshot.take(rows, ["schema"])["schema"].cast("string").to_pylist()
    texts = list(dict.fromkeys(names))
    place = {text: i for i, text in enumerate(texts)}
    return texts, [place[name] for name in names]


def sizes(snapshot: Snapshot, pieces: Sequence[Piece]) -> list[int]:
    """Bytes of each piece, by its schema (fields of any length count as nothing)."""
    texts, codes = _schemas(snapshot, pieces)
    step = [_step_bytes(loads(text)) for text in texts]
    return [(p.hi - p.lo) * step[code] for p, code in zip(pieces, codes, strict=True)]


def _step_bytes(schema: ShardSchema) -> int:
    """Bytes of one step's row of each field."""
    fields = [f for f in schema.fields if f.axis not in NODES and f.dtype]
    return sum(to_numpy(f.dtype).itemsize * int(np.prod(f.shape, dtype=np.int64)) for f in fields)


def replaced(table: pa.Table, moved: Moved) -> pa.Table:
    """A segments table with rows whose steps lie elsewhere."""
    import pyarrow as pa

    rows = table.take(pa.array(moved.rows)).to_pylist()
    new = [row | place for row, place in zip(rows, moved.places, strict=True)]
    others = np.setdiff1d(np.arange(table.num_rows), moved.rows)
    order = np.argsort(np.concatenate([others, moved.rows]), kind="stable")
    columns = {name: [row[name] for row in new] for name in table.column_names}
    every = tables.concat("segments", [table.take(pa.array(others)), tables.from_columns("segments", columns)])
    return every.take(pa.array(order))
