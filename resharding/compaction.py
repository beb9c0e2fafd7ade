"""Compaction: live steps that lie thinly in their shards are written anew, close together.

Steps keep their addresses (stream and position), so checkpoints, live sets and episodes are what they were; only where
the bytes lie changes. What is not live stays in the old shards, for the archive's history. Earlier commits still name
the old shards too; the newest checkpoint is published again, to be read from the new ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import chains, commits, manifest, tables, tree
from archive.blocks import Block, Slab
from archive.commits import Body, Commit, CommitLog
from archive.facade import Archive
from archive.fields import Selection
from archive.intake import owned
from archive.manifest import Snapshot
from archive.pipeline import Pipeline
from archive.ranges import Ints, merge_runs
from archive.schema import Schema, ShardSchema, loads
from archive.segments import Part
from archive.sessions import new_session

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_BYTES = 63 * 1024 * 1024
READ_BYTES = 64 * 1024 * 1024
ADDRESS = ("session", "rank", "sequence")

Address = tuple[str, int, int]


@dataclass(frozen=True)
class Piece:
    """Steps [lo, hi) of one row of the segments table, and whether they are live."""

    row: int
    lo: int
    hi: int
    live: bool


@dataclass(frozen=True)
class Compacted:
    """What a compaction did."""

    shards: int
    steps: int
    commit: int | None


def compact(archive: Archive, *, min_alive: float = 0.5, compression: str | None = "zstd:1") -> Compacted:
    """Write anew the live steps of shards of which less than `min_alive` is live at the newest checkpoints of all runs."""
    archive.refresh()
    live = _live_intervals(archive)
    thin = _thin_shards(archive, live, min_alive)
    pieces = _pieces(archive, live, thin)
    moved = [p for p in pieces if p.live]
    if not moved:
        return Compacted(0, 0, None)
    session = new_session()
    places, chunk_file = _rewrite(archive, moved, session, compression)
    log = CommitLog(archive.storage, archive.id, archive.head)
    replacement = _replacement_rows(archive, pieces, places, chunk_file)

    def build(parent: Commit, attempt: int) -> Body:
        return _body(archive, parent, replacement, session, chunk_file)

    made = log.append(f"compact/{session}", build)
    archive.refresh()
    return Compacted(len(thin), sum(p.hi - p.lo for p in moved), made.number)


def _live_intervals(archive: Archive) -> dict[int, tuple[Ints, Ints]]:
    """Row of the segments table -> live steps of it, over the newest whole checkpoints of all runs."""
    found: dict[int, list[tuple[int, int]]] = {}
    for run in archive.head.runs:
        checkpoint = archive.checkpoints.newest(run=run, replay=True)
        if checkpoint is None:
            continue
        now = _rows_now(archive, checkpoint)
        for row, lo, hi in zip(now.row.tolist(), now.lo.tolist(), now.hi.tolist(), strict=True):
            found.setdefault(row, []).append((lo, hi))
    return {row: merge_runs(*np.array(pairs, np.int64).T) for row, pairs in found.items()}


def _rows_now(archive: Archive, checkpoint: Any) -> Any:
    """The checkpoint's live steps in the rows of the newest segments table."""
    from archive import liveview

    return liveview.locate(checkpoint.live, archive.snapshot.columns(liveview.SEGMENT_COLUMNS))


def _thin_shards(archive: Archive, live: dict[int, tuple[Ints, Ints]], min_alive: float) -> set[str]:
    """Shards with live steps, of which less than `min_alive` of the steps are live."""
    table = archive.snapshot.columns(["shard", "length"])
    shards = table["shard"].cast("string").to_pylist()
    total: dict[str, int] = {}
    alive: dict[str, int] = {}
    for shard, length in zip(shards, table["length"].to_pylist(), strict=True):
        if shard is not None:
            total[shard] = total.get(shard, 0) + length
    for row, (starts, stops) in live.items():
        alive[shards[row]] = alive.get(shards[row], 0) + int((stops - starts).sum())
    return {shard for shard, steps in alive.items() if 0 < steps < min_alive * total[shard]}


def _pieces(archive: Archive, live: dict[int, tuple[Ints, Ints]], thin: set[str]) -> list[Piece]:
    """The affected rows cut into live and other pieces; rows with fields that are not one row a step stay whole."""
    rows = sorted(live)
    table = archive.snapshot.take(np.array(rows, np.int64), ["shard", "length", "schema"])
    columns = (table["shard"].cast("string").to_pylist(), table["length"].to_pylist(), table["schema"].cast("string").to_pylist())
    out: list[Piece] = []
    for row, shard, length, text in zip(rows, *columns, strict=True):
        if shard not in thin:
            continue
        divisible = all(f.per_step or f.axis in ("dict", "none") for f in loads(text).fields)
        runs = zip(*(edge.tolist() for edge in live[row]), strict=True) if divisible else [(0, length)]
        out += _cut(row, length, runs)
    return out


def _cut(row: int, length: int, runs: Iterable[tuple[int, int]]) -> list[Piece]:
    out, at = [], 0
    for lo, hi in runs:
        if lo > at:
            out.append(Piece(row, at, lo, False))
        out.append(Piece(row, lo, hi, True))
        at = hi
    return [*out, Piece(row, at, length, False)] if at < length else out


def _rewrite(archive: Archive, pieces: Sequence[Piece], session: str, compression: str | None) -> tuple[dict[int, dict[str, Any]], Any]:
    """Write the live pieces to new shards: where each came to lie, and the file of their chunk table."""
    pipeline = Pipeline(archive.storage, session, 0, archive.layout, compression)
    places: dict[int, dict[str, Any]] = {}

    def describe(slab: Slab, key: str) -> pa.Table:
        columns = (slab.episode.tolist(), slab.start.tolist(), slab.extents)
        for index, start, extents in zip(*columns, strict=True):
            places[index] = {"shard": key, "start": start, "extents": extents, "schema": slab.schema.dumps()}
        return tables.schema("segments").empty_table()

    try:
        pending: dict[str, list[Block]] = {}
        for block in _blocks(archive, pieces):
            group = pending.setdefault(block.schema.digest, [])
            if group and sum(b.nbytes for b in group) + block.nbytes > SHARD_BYTES:
                pipeline.submit(group, None, describe)
                pending[block.schema.digest] = group = []
            group.append(block)
        for group in pending.values():
            if group:
                pipeline.submit(group, None, describe)
        written = pipeline.take().wait()
    finally:
        pipeline.close()
    chunks = tables.concat("chunks", [w.chunks for w in written if w.chunks is not None])
    return places, manifest.write(archive.storage, session, "chunks", chunks)


def _blocks(archive: Archive, pieces: Sequence[Piece]) -> Iterable[Block]:
    """Each piece's steps, read in batches, in the form that is stored."""
    reader = archive.episodes.reader
    texts = archive.snapshot.columns(["schema"])["schema"]
    batch: list[int] = []
    size = 0
    for i, piece in enumerate(pieces):
        batch.append(i)
        size += (piece.hi - piece.lo) * _step_bytes(loads(texts[piece.row].as_py()))
        if size > READ_BYTES or i == len(pieces) - 1:
            parts = [[Part(pieces[k].row, pieces[k].lo, pieces[k].hi, extra=True)] for k in batch]
            for k, data in zip(batch, reader.read(parts, Selection()), strict=True):
                yield _block(k, pieces[k], data, loads(texts[pieces[k].row].as_py()))
            batch, size = [], 0


def _step_bytes(schema: ShardSchema) -> int:
    from archive.dtypes import to_numpy

    return sum(to_numpy(f.dtype).itemsize * int(np.prod(f.shape, dtype=np.int64)) for f in schema.fields if f.dtype)


def _block(index: int, piece: Piece, data: dict[str, Any], schema: ShardSchema) -> Block:
    fields = tree.normalise(data, _declared(schema))
    count = piece.hi - piece.lo
    order = np.full(count, index, np.int64)  # pieces stay in live order: each is an "env row" of its own
    return owned(Block(schema, fields.data, order, np.arange(count), order, single=index, env_id=index))


def _declared(schema: ShardSchema) -> Schema:
    """What the user declared, so that reading and writing again gives the same fields."""
    axes = {f.path: f"offset:{f.extra}" if f.axis == "offset" else f.axis for f in schema.fields if f.axis in ("offset", "ragged", "free")}
    return Schema(
        next_of={f.path: schema.by_name[f.next_of].path for f in schema.fields if f.next_of}, axes=axes,
        json=[f.path for f in schema.fields if f.dtype == "json"], unit=schema.unit,
    )  # fmt: skip


def _replacement_rows(
    archive: Archive, pieces: Sequence[Piece], places: dict[int, dict[str, Any]], chunk_file: manifest.FileRef
) -> dict[Address, list[dict[str, Any]]]:
    """Address of an affected row -> its pieces as rows. The last piece keeps the address, for what follows it."""
    rows = archive.snapshot.take(np.array([p.row for p in pieces], np.int64), tables.schema("segments").names).to_pylist()
    out: dict[Address, list[dict[str, Any]]] = {}
    live = 0
    for piece, row in zip(pieces, rows, strict=True):
        before = out.setdefault((row["session"], row["rank"], row["sequence"]), [])
        _narrow(row, piece, before[-1] if before else None)
        if piece.live:
            row |= places[live]
            row |= {"chunks": chunk_file["path"], "chunks_bytes": chunk_file["bytes"], "chunks_crc32c": chunk_file["crc32c"]}
            live += 1
        before.append(row)
    return out


def _narrow(row: dict[str, Any], piece: Piece, before: dict[str, Any] | None) -> None:
    """Cut a row to the steps of one of its pieces."""
    if piece.hi < row["length"]:  # not the last: an address of its own, below 0 where no writer counts
        row["sequence"] = -1 - secrets.randbits(62)
        row |= {"last": False, "terminated": None, "truncated": None, "reason": None, "return": None}
    for name in ("position", "start", "episode_start"):
        row[name] += piece.lo
    row["length"] = piece.hi - piece.lo
    if before is not None:
        row |= {"first": False, "replaces": False}
        row["predecessor"] = chains.address(before["session"], before["rank"], before["sequence"])


def _body(
    archive: Archive, parent: Commit, replacement: dict[Address, list[dict[str, Any]]], session: str, chunk_file: manifest.FileRef
) -> Body:
    """All rows of the parent in one file, the affected ones replaced in place."""
    names = tables.schema("segments").names
    table = Snapshot(archive.storage, parent).columns(names)
    addresses = zip(*(table[n].to_pylist() for n in ADDRESS), strict=True)
    places = {i: a for i, a in enumerate(addresses) if a in replacement}
    parts, at = [], 0
    for i, address in places.items():
        rows = replacement[address]
        parts += [table.slice(at, i - at), tables.from_columns("segments", {n: [r[n] for r in rows] for n in names})]
        at = i + 1
    parts.append(table.slice(at))
    file = manifest.write(archive.storage, session, "segments", tables.concat("segments", parts))
    return {
        **commits.carried(parent), "kind": "compact", "run": "", "session": session, "segments": [file], "chunks": chunk_file,
        "added": {"segments": 0}, **_republished(archive, parent),
    }  # fmt: skip


def _republished(archive: Archive, parent: Commit) -> Body:
    """The newest checkpoint again, of an archive of one run, so that resuming from it finds the compacted steps."""
    runs = parent.runs
    marked = [run for run, entry in runs.items() if "latest_replay" in entry]
    if len(marked) != 1:
        return {}
    (run,) = marked
    entry = dict(runs[run])
    newest = commits.read(archive.storage, entry["latest_replay"]["commit"])
    if entry["latest"]["commit"] == newest.number:
        entry["latest"] = {**entry["latest"], "commit": parent.number + 1}
    entry["latest_replay"] = {**entry["latest_replay"], "commit": parent.number + 1}
    runs[run] = entry
    kept = {key: newest.body[key] for key in ("run", "session", "live", "checkpoint")}
    return {**kept, "runs": runs}
