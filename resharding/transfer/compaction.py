"""Compaction: live steps that lie thinly in their shards, or in many small ones, are written anew, close together.

Steps keep their addresses (stream and position), so checkpoints, live sets and episodes are what they were; only where
the bytes lie changes. What is not live stays in the old shards, for the archive's history. Earlier commits still name
the old shards too; each run's newest checkpoint is published again, to be read from the new ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import Archive, tables
from archive.base import ConflictError
from archive.maintain import Piece, moving
from archive.manifest import (
    Addition,
    Attempt,
    Change,
    Commit,
    CommitLog,
    FileRef,
    Snapshot,
    chains,
    commits,
    new_session,
    tablefiles,
)
from archive.tables import ADDRESS, Address, addresses
from resharding.transfer.thinning import thin

if TYPE_CHECKING:
    import pyarrow as pa

WHERE = ("position", "start", "length", "shard")
MIN_FULL = 0.25  # of a full shard: below it, a request for one is short beside its latency


@dataclass(frozen=True)
class Compacted:
    """What a compaction did."""

    shards: int
    steps: int
    commit: int | None


def compact(
    archive: Archive,
    *,
    min_alive: float = 0.5,
    min_full: float = MIN_FULL,
) -> Compacted:
    """Write anew the live steps of shards of which less than `min_alive` is live at the newest checkpoints of all runs,
    and join those of a buffer that have less than `min_full` of a full shard's bytes, as objects of a journal do.
    """
    found = thin(archive, min_alive, min_full)
    if not found.live:
        return Compacted(0, 0, None)
    session = new_session()
    places: moving.Places = {}
    parts = []
    for number, group in enumerate(found.together()):  # the number is in their names, as that of a rank is elsewhere
        placed, table = moving.write(archive.snapshot, archive.layout, session, group, number)
        places |= placed
        parts.append(table)
    chunks = tablefiles.write(archive.storage, session, "chunks", tables.concat("chunks", parts))
    rows = _replacement_rows(archive, found.pieces, places, chunks)
    moved = _Moved(archive, session, chunks, rows, _planned(archive, found.pieces))
    made = moved.commit()
    archive.refresh()
    return Compacted(found.shards, found.steps, made.number)


def compactable(archive: Archive, *, min_alive: float = 0.5, min_full: float = MIN_FULL) -> Compacted:
    """What `compact` would do now: how many shards are thin or small, and their live steps. Writes nothing."""
    found = thin(archive, min_alive, min_full)
    return Compacted(found.shards if found.steps else 0, found.steps, None)


def _replacement_rows(
    archive: Archive, pieces: Sequence[Piece], places: dict[int, dict[str, Any]], chunks: FileRef
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
            row |= places[live] | tablefiles.chunk_columns(chunks)
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
    if row["weights"] is not None:
        row["weights"] = tables.cut_weights(row["weights"], piece.lo, piece.hi)
    if before is not None:
        row |= {"first": False, "replaces": False}
        row["predecessor"] = chains.address(before["session"], before["rank"], before["sequence"])


def _planned(archive: Archive, pieces: Sequence[Piece]) -> dict[Address, dict[str, Any]]:
    """Address of an affected row -> where its steps lay when the compaction was planned."""
    rows = archive.snapshot.take(np.unique(np.array([p.row for p in pieces], np.int64)), [*ADDRESS, *WHERE])
    return dict(zip(addresses(rows), rows.select(WHERE).to_pylist(), strict=True))


@dataclass(frozen=True)
class _Moved:
    """Steps that were written anew, ready to be committed.

    rows: address of an affected row -> its pieces as rows.  planned: where its steps lay when they were read.
    """

    archive: Archive
    session: str
    chunks: FileRef
    rows: dict[Address, list[dict[str, Any]]]
    planned: dict[Address, dict[str, Any]]

    def commit(self) -> Commit:
        """The last of the commits: one with the new rows, and one for each checkpoint that is published again."""
        log = CommitLog(self.archive.storage, self.archive.id, self.archive.head)
        made = log.commit(f"compact/{self.session}", Change("compact", self._replaced, session=self.session))
        ours = [made.number]
        for mark in [m for m in _marked(made) if m[1] < made.number]:
            again = Change("compact", partial(self._again, mark, tuple(ours)), session=self.session)
            made = log.commit(f"compact/{self.session}/{mark[1]}", again)
            ours.append(made.number)
        return made

    def _replaced(self, parent: Commit, attempt: Attempt) -> Addition:
        """All rows of the parent in one file, the affected ones replaced in place."""
        names = tables.schema("segments").names
        table = Snapshot(self.archive.storage, parent).columns(names)
        places = {i: address for i, address in enumerate(addresses(table)) if address in self.rows}
        self._check_unmoved(table, places)
        new = [(i, row) for i, address in places.items() for row in self.rows[address]]
        every = tables.replaced("segments", table, list(places), new)
        file = tablefiles.write(self.archive.storage, self.session, "segments", every)
        marked = _marked(parent)
        again = _republished(self.archive, parent, marked[0]) if marked else {}
        return {}, {"segments": (file,), "chunks": self.chunks, "added": {"segments": 0}, **again}

    def _check_unmoved(self, table: pa.Table, places: dict[int, Address]) -> None:
        """ConflictError if the rows are not all there, or their steps no longer lie where they were read."""
        now = table.select(list(WHERE)).take(np.array(list(places), np.int64)).to_pylist()
        before = [self.planned[address] for address in places.values()]
        if len(places) != len(self.planned) or now != before:
            raise ConflictError(
                f"steps at {self.archive.url} were moved by another compaction while this one ran; nothing was "
                "committed, run it again"
            )

    def _again(self, mark: tuple[str, int], ours: Sequence[int], parent: Commit, attempt: Attempt) -> Addition:
        """One more checkpoint published again, unless a newer one came meanwhile: then that is the newest, and stays
        so."""
        marks = _marked(parent)
        newer = [number for _, number in marks if number > ours[0] and number not in ours]
        again = {} if newer or mark not in marks else _republished(self.archive, parent, mark)
        return {}, {"added": {"segments": 0}, **again}


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


def _republished(archive: Archive, parent: Commit, mark: tuple[str, int]) -> dict[str, Any]:
    """A commit's words for a run's newest checkpoint again, so that resuming from it finds the compacted steps."""
    run, number = mark
    moved = {
        name: replace(known, commit=parent.number + 1)
        for name, known in parent.runs[run].marks.items()
        if known.commit == number
    }
    entry = replace(parent.runs[run], **moved)  # type: ignore[arg-type]
    newest = commits.read(archive.storage, number)
    says = {name: getattr(newest, name) for name in ("run", "session", "live", "checkpoint")}
    return {**says, "runs": parent.runs_with({run: entry})}
