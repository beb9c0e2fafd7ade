"""Compaction: live steps that lie thinly in their shards are written anew, close together.

Steps keep their addresses (stream and position), so checkpoints, live sets and episodes are what they were; only where
the bytes lie changes. What is not live stays in the old shards, for the archive's history. Earlier commits still name
the old shards too; each run's newest checkpoint is published again, to be read from the new ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import Archive
from archive.arrays import Ints, merge_runs
from archive.base import ConflictError, UsageError
from archive.fields import NODES, loads
from archive.manifest import (
    Commit,
    CommitLog,
    FileRef,
    Snapshot,
    chains,
    commits,
    liveview,
    new_session,
    tablefiles,
    tables,
)
from resharding.transfer.engines import check_engine
from resharding.transfer.rewriting import Piece, rewrite

if TYPE_CHECKING:
    import pyarrow as pa

ADDRESS = ("session", "rank", "sequence")
WHERE = ("position", "start", "length", "shard")

Address = tuple[str, int, int]


@dataclass(frozen=True)
class Compacted:
    """What a compaction did."""

    shards: int
    steps: int
    commit: int | None


def compact(
    archive: Archive, *, min_alive: float = 0.5, compression: str | None = "zstd:1", engine: str = "local"
) -> Compacted:
    """Write anew the live steps of shards of which less than `min_alive` is live at the newest checkpoints of all runs.

    engine: "local", or "ray" to read and write on a Ray cluster.
    """
    check_engine(engine, archive.url)
    if not 0 < min_alive <= 1:
        raise UsageError(f"min_alive={min_alive}: give a part of the steps above 0, at most 1")
    archive.refresh()
    live = _live_intervals(archive)
    thin = _thin_shards(archive, live, min_alive)
    pieces = _pieces(archive, live, thin)
    moved = [p for p in pieces if p.live]
    if not moved:
        return Compacted(0, 0, None)
    session = new_session()
    places, chunks = rewrite(archive, moved, session, compression, engine)
    chunk_file = tablefiles.write(archive.storage, session, "chunks", chunks)
    replacement = _replacement_rows(archive, pieces, places, chunk_file)
    planned = _planned(archive, pieces)
    log = CommitLog(archive.storage, archive.id, archive.head)

    def build(parent: Commit, attempt: int) -> Commit:
        return _draft(archive, parent, replacement, planned, session, chunk_file)

    made = log.append(f"compact/{session}", build)
    ours = [made.number]
    for mark in [m for m in _marked(made) if m[1] < made.number]:
        made = log.append(f"compact/{session}/{mark[1]}", partial(_again, archive, mark, session, tuple(ours)))
        ours.append(made.number)
    archive.refresh()
    return Compacted(len(thin), sum(p.hi - p.lo for p in moved), made.number)


def compactable(archive: Archive, *, min_alive: float = 0.5) -> Compacted:
    """What `compact` would do now: how many shards are thin, and their live steps. Writes nothing."""
    if not 0 < min_alive <= 1:
        raise UsageError(f"min_alive={min_alive}: give a part of the steps above 0, at most 1")
    archive.refresh()
    live = _live_intervals(archive)
    thin = _thin_shards(archive, live, min_alive)
    steps = sum(p.hi - p.lo for p in _pieces(archive, live, thin) if p.live)
    return Compacted(len(thin) if steps else 0, steps, None)


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
    return liveview.locate(checkpoint.live, archive.snapshot.columns(liveview.SEGMENT_COLUMNS))


def _thin_shards(archive: Archive, live: dict[int, tuple[Ints, Ints]], min_alive: float) -> set[str]:
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
        if steps and not divisible(table["schema"][row].as_py()):
            steps = lengths[row]
        alive[shards[row]] = alive.get(shards[row], 0) + steps
    return {shard for shard, steps in alive.items() if 0 < steps < min_alive * total[shard]}


@cache
def divisible(schema: str) -> bool:
    """Whether segments of this schema can be cut anywhere: no field has other rows than one a step."""
    return all(f.per_step or f.axis in NODES for f in loads(schema).fields)


def _pieces(archive: Archive, live: dict[int, tuple[Ints, Ints]], thin: set[str]) -> list[Piece]:
    """The affected rows cut into live and other pieces; rows with fields that are not one row a step stay whole."""
    rows = sorted(row for row, (starts, _) in live.items() if len(starts))
    table = archive.snapshot.take(np.array(rows, np.int64), ["shard", "length", "schema"])
    columns = (
        table["shard"].cast("string").to_pylist(),
        table["length"].to_pylist(),
        table["schema"].cast("string").to_pylist(),
    )
    out: list[Piece] = []
    for row, shard, length, text in zip(rows, *columns, strict=True):
        if shard in thin:
            edges = (edge.tolist() for edge in live[row])
            out += _cut(row, length, zip(*edges, strict=True) if divisible(text) else [(0, length)])
    return out


def _cut(row: int, length: int, runs: Iterable[tuple[int, int]]) -> list[Piece]:
    out, at = [], 0
    for lo, hi in runs:
        if lo > at:
            out.append(Piece(row, at, lo, False))
        out.append(Piece(row, lo, hi, True))
        at = hi
    return [*out, Piece(row, at, length, False)] if at < length else out


def _replacement_rows(
    archive: Archive, pieces: Sequence[Piece], places: dict[int, dict[str, Any]], chunk_file: FileRef
) -> dict[Address, list[dict[str, Any]]]:
    """Address of an affected row -> its pieces as rows. The last piece keeps the address, for what follows it."""
    rows = archive.snapshot.take(
        np.array([p.row for p in pieces], np.int64), tables.schema("segments").names
    ).to_pylist()
    out: dict[Address, list[dict[str, Any]]] = {}
    live = 0
    for piece, row in zip(pieces, rows, strict=True):
        before = out.setdefault((row["session"], row["rank"], row["sequence"]), [])
        _narrow(row, piece, before[-1] if before else None)
        if piece.live:
            row |= places[live]
            row |= {
                "chunks": chunk_file.path,
                "chunks_bytes": chunk_file.bytes,
                "chunks_crc32c": chunk_file.crc32c,
            }
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


def _planned(archive: Archive, pieces: Sequence[Piece]) -> dict[Address, dict[str, Any]]:
    """Address of an affected row -> where its steps lay when the compaction was planned."""
    rows = archive.snapshot.take(np.unique(np.array([p.row for p in pieces], np.int64)), [*ADDRESS, *WHERE]).to_pylist()
    return {(r["session"], r["rank"], r["sequence"]): {n: r[n] for n in WHERE} for r in rows}


def _check_unmoved(
    table: pa.Table, places: dict[int, Address], planned: dict[Address, dict[str, Any]], url: str
) -> None:
    now = table.select(list(WHERE)).take(np.array(list(places), np.int64)).to_pylist()
    if len(places) != len(planned) or any(row != planned[a] for row, a in zip(now, places.values(), strict=True)):
        raise ConflictError(
            f"steps at {url} were moved by another compaction while this one ran; nothing was committed, run it again"
        )


def _draft(
    archive: Archive, parent: Commit, replacement: dict[Address, list[dict[str, Any]]],
    planned: dict[Address, dict[str, Any]], session: str, chunk_file: FileRef,
) -> Commit:  # fmt: skip
    """All rows of the parent in one file, the affected ones replaced in place."""
    names = tables.schema("segments").names
    table = Snapshot(archive.storage, parent).columns(names)
    addresses = zip(*(table[n].to_pylist() for n in ADDRESS), strict=True)
    places = {i: a for i, a in enumerate(addresses) if a in replacement}
    _check_unmoved(table, places, planned, archive.url)
    parts, at = [], 0
    for i, address in places.items():
        rows = replacement[address]
        parts += [table.slice(at, i - at), tables.from_columns("segments", {n: [r[n] for r in rows] for n in names})]
        at = i + 1
    parts.append(table.slice(at))
    file = tablefiles.write(archive.storage, session, "segments", tables.concat("segments", parts))
    made = parent.after("compact", session=session, segments=(file,), chunks=chunk_file, added={"segments": 0})
    marked = _marked(parent)
    return _republishing(archive, parent, made, marked[0]) if marked else made


def _marked(commit: Commit) -> list[tuple[str, int]]:
    """(run, number) of the checkpoints to be published again, in the order that keeps the newest of all the newest.

    Those with replay data, to be read from the new shards; where there are several runs, the newest without it, too, or
    they would seem to be older than what is published again.
    """
    marked = {run: entry.marks for run, entry in commit.runs.items() if entry.marks}
    if not any("latest_replay" in marks for marks in marked.values()):
        return []
    wanted = ("latest_replay", "latest") if len(marked) > 1 else ("latest_replay",)
    found = {(run, marks[name].commit) for run, marks in marked.items() for name in wanted if name in marks}
    return sorted(found, key=lambda mark: mark[1])


def _again(
    archive: Archive, mark: tuple[str, int], session: str, ours: Sequence[int], parent: Commit, attempt: int
) -> Commit:
    """One more checkpoint published again, unless a newer one came meanwhile: then that is the newest, and stays so."""
    marks = _marked(parent)
    newer = [number for _, number in marks if number > ours[0] and number not in ours]
    made = parent.after("compact", session=session, added={"segments": 0})
    return made if newer or mark not in marks else _republishing(archive, parent, made, mark)


def _republishing(archive: Archive, parent: Commit, made: Commit, mark: tuple[str, int]) -> Commit:
    """The commit with a run's newest checkpoint again, so that resuming from it finds the compacted steps."""
    run, number = mark
    moved = {
        name: replace(known, commit=parent.number + 1)
        for name, known in parent.runs[run].marks.items()
        if known.commit == number
    }
    entry = replace(parent.runs[run], **moved)  # type: ignore[arg-type]
    newest = commits.read(archive.storage, number)
    return replace(
        made, run=newest.run, session=newest.session, live=newest.live, checkpoint=newest.checkpoint,
        runs={**parent.runs, run: entry},
    )  # fmt: skip
