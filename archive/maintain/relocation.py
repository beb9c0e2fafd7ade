"""Moving steps to new shards, as a job: they are read in batches in stored form, and packed close together; rows name
their new place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, ascending, run_starts
from archive.index import Snapshot
from archive.jobs import Crew, JobCall, Procedure, Result
from archive.log import FileRef, tablefiles
from archive.read import Reader, Spans, sizes
from archive.shard import SHARD_BYTES, ShardWriter
from archive.tables import SHARDED, STRETCH
from archive.write import Block, Pipeline, RankRows, ShardObjects, Slab, owned, shard, weighed

if TYPE_CHECKING:
    import pyarrow as pa

READ_BYTES = 64 * 1024 * 1024
BATCH_SHARDS = 4  # that a batch writes
WHERE = (*STRETCH, "shard", "start")  # the steps of a row, and their place

Location = dict[str, Any]  # the columns of a row that name the place of its steps


class Relocation(Procedure):
    """Ranges of steps that are written to new shards. An item of a batch is a number; five are a range: its table (its
    place in SHARDED), its group, its row of the table, and its first and last step there.

    A batch has ranges of one group. The number of the group is in the names of its shards, where a writer's have its
    rank. tables: as of the commit at which rows are counted, by name; others are read when they are needed.
    """

    def __init__(self, layout: str, session: str, snapshot: Snapshot, **tables: Snapshot) -> None:
        self._layout, self._session = layout, session
        self._snapshot = snapshot
        self._tables = {"segments": snapshot, **tables}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {"segments": self._snapshot}}

    def table(self, number: int) -> Snapshot:
        """The rows of a table, in the form of the segments table."""
        kind = SHARDED[number]
        if kind not in self._tables:
            self._tables[kind] = as_segments(self._snapshot, late_rows(self._snapshot))
        return self._tables[kind]

    def where(self, moved: Steps) -> list[Any]:
        """The place of each range, in order of their tables, before it is moved."""
        each = [moved.pick(moved["table"] == number) for number in ascending(moved["table"]).tolist()]
        return [place for one in each for place in where(self.table(int(one["table"][0])), one)]

    def run(self, items: Sequence[Any], agree: Callable[[str], str]) -> Result:
        pieces = ranges(items)
        source = self.table(int(pieces["table"][0]))
        places, chunks = _written(source, self._layout, self._session, pieces, int(pieces["group"][0]))
        columns = {name: [place[name] for place in places] for name in tables.schema("moved").names}
        moved = tables.from_columns("moved", columns)
        return Result({"moved": moved, "chunks": chunks}, steps=int(pieces.length.sum()))


def late_rows(snapshot: Snapshot) -> pa.Table:
    """The late table as of a snapshot's commit."""
    return tablefiles.load(snapshot.storage, "late", snapshot.commit.files("late"))


def as_segments(snapshot: Snapshot, late: pa.Table) -> Snapshot:
    """The late table in the form of the segments table: the same columns say where steps are stored."""
    names = [name for name in tables.schema("segments").names if name in late.column_names]
    rows = tables.from_columns("segments", {name: late[name].to_pylist() for name in names})
    return Snapshot.of(snapshot.storage, snapshot.commit, rows)


def batches(source: Snapshot, table: str, pieces: Steps, *, whole: bool) -> Iterator[Ints]:
    """The batches of ranges, which have a group: those that fill a few shards together; or all of a group (whole)."""
    of = np.full(len(pieces), SHARDED.index(table))
    items = np.stack([of, pieces["group"], pieces.stream, pieces.lo, pieces.hi], axis=1)
    order = np.argsort(pieces["group"], kind="stable")
    heads = run_starts(pieces["group"][order])
    groups = np.split(order, heads[1:]) if len(order) else []
    if whole:
        yield from (items[group].ravel() for group in groups)
        return
    reader, spans = Reader(source).as_written(), Spans.of_each(pieces.stream, pieces.lo, pieces.hi)
    nbytes, schema = reader.sizes(spans), reader.shown(spans).code
    for group in groups:
        codes = schema[group]
        alike = [group[codes == code] for code in dict.fromkeys(codes.tolist())]
        shards = [one[start:stop] for one in alike for start, stop in sizes.runs(nbytes[one], SHARD_BYTES)]
        for at in range(0, len(shards), BATCH_SHARDS):
            yield items[np.concatenate(shards[at : at + BATCH_SHARDS])].ravel()


def ranges(items: Any) -> Steps:
    """The ranges of these items, with their table and group."""
    table, group, *place = np.asarray(items, np.int64).reshape(-1, 5).T
    return Steps(*place, table=table, group=group)


def where(source: Snapshot, pieces: Steps) -> list[Any]:
    """The place of each range now: the steps and the place of its row, and its first and last step there."""
    rows = source.take(pieces.stream, WHERE).to_pylist()
    return list(zip(rows, pieces.lo.tolist(), pieces.hi.tolist(), strict=True))


def write(
    call: JobCall, relocation: Relocation, crew: Crew, progress: Callable[[int, int], None] | None = None
) -> tuple[Steps, list[Location], FileRef]:
    """Make the results of a call that are missing: all its ranges, in order of their tables and rows; the new place of
    each; and the file with the chunk rows of the new shards."""
    call.carry_out(relocation, crew, progress)
    places: list[Location] = []
    chunks: list[pa.Table] = []
    for receipt in call.read(call.results):
        places += receipt.table("moved").to_pylist()
        chunks.append(receipt.table("chunks"))
    file = tablefiles.write(call.store.storage, call.session, "chunks", tables.concat("chunks", chunks))
    found = ranges(call.plan.items)
    order = np.lexsort((found.lo, found.stream, found["table"]))
    return found.pick(order), [places[i] | tablefiles.chunk_columns(file) for i in order.tolist()], file


def cut(row: Mapping[str, Any], lo: int, hi: int) -> dict[str, Any]:
    """A row of the segments or late table, limited to its steps [lo, hi)."""
    out = dict(row) | {name: row[name] + lo for name in ("position", "start", "episode_start") if name in row}
    if row.get("weights") is not None:
        out["weights"] = tables.weights_of(row, lo, hi)
    return out | {"length": hi - lo}


def _written(
    snapshot: Snapshot, layout: str, session: str, pieces: Steps, group: int
) -> tuple[list[Location], pa.Table]:
    """The new place of each range, and the chunk rows of its shards."""
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
