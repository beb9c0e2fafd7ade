"""Compaction: sparsely used and small shards are rewritten into full ones.

Steps keep their addresses (stream and position), so checkpoints, live sets and episodes are unchanged; only the place
of their bytes changes. Steps that are not live stay in the old shards, for the archive's history. Earlier commits still
name the old shards too; each run's newest checkpoint is published again, to be read from the new ones.

A job that journals, or saves often, leaves many small shards, and each costs its readers requests. Those of one
buffer and schema can be joined; tables alone tell which are small.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import Archive, tables
from archive.arrays import Ints, Mask, Steps, ascending, codes, places, row_codes
from archive.base import ConflictError, ExpiredError, UsageError, escape, layout
from archive.fields import NODES, loads
from archive.index import Snapshot, chains
from archive.jobs import Crew, JobCall, JobRequest
from archive.log import Addition, Attempt, Change, Commit, CommitLog, FileRef, Requirement, commits, tablefiles
from archive.maintain import relocation
from archive.read import Reader, Spans
from archive.shard import SHARD_BYTES
from archive.tables import ADDRESS, among, coded, distinct

if TYPE_CHECKING:
    import pyarrow as pa

MIN_FULL = 0.25  # of a full shard: below it, a request for one is short beside its latency
KIND = "compact"
MANY = 4  # of a buffer: fewer are left for later, or a few bytes more would have as many as a small shard has rewritten


@dataclass(frozen=True)
class Compacted:
    """A summary of a compaction."""

    shards: int
    steps: int
    commit: int | None


def compact(
    archive: Archive,
    *,
    min_alive: float = 0.5,
    min_full: float = MIN_FULL,
    engine: str = "local",
    workers: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    job: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Compacted:
    """Rewrite the live steps of shards of which less than `min_alive` is live at the newest checkpoints of all runs,
    and join those of a buffer that have less than `min_full` of a full shard's bytes, such as objects of a journal.

    engine, workers, num_cpus, num_gpus: of what runs it, as for `Episodes.map`.  job: a name under which finished
    batches are kept: after whatever stopped it, the same call goes on, and all becomes visible by one commit for each
    checkpoint. What is forgotten meanwhile stays forgotten; ConflictError if steps were moved meanwhile: the next call
    begins anew.  progress: called with (batches done, batches).
    """
    crew = Crew(engine, workers, num_cpus, num_gpus)
    terms = _checked_terms(min_alive, min_full)
    archive.refresh()
    crew.check(archive.storage, relocation.Relocation(archive.layout, "", archive.snapshot))
    log = CommitLog(archive.storage, archive.id, archive.head)
    whole = crew.alone and job is None

    def batches() -> list[Ints]:
        return [*relocation.batches(archive.snapshot, "segments", _chosen(archive, min_alive, min_full), whole=whole)]

    call = JobCall.of(log, job, JobRequest(KIND, terms), archive.head, batches)
    if not call.batches:
        call.finish()
        return Compacted(0, 0, None)
    snapshot = call.frozen(archive.snapshot)
    moved, new, chunks = relocation.write(
        call, relocation.Relocation(archive.layout, call.session, snapshot), crew, progress
    )
    rewritten = _Rewritten(archive, call.session, chunks, *_replacement_rows(snapshot, moved, new))
    try:
        made = rewritten.commit(call.log_of(log), [call.not_ended])
    except (ConflictError, ExpiredError):
        call.give_up()
        raise
    call.finish()
    archive.refresh()
    return _summary(snapshot, moved, made.number)


def compactable(archive: Archive, *, min_alive: float = 0.5, min_full: float = MIN_FULL) -> Compacted:
    """A summary of what `compact` would do now: sparse or small shards, and their live steps. Writes nothing."""
    _checked_terms(min_alive, min_full)
    archive.refresh()
    return _summary(archive.snapshot, _chosen(archive, min_alive, min_full), None)


def _checked_terms(min_alive: float, min_full: float) -> dict[str, float]:
    if not 0 < min_alive <= 1:
        raise UsageError(f"min_alive={min_alive}: give a part of the steps above 0, at most 1")
    if not 0 <= min_full <= 1:
        raise UsageError(f"min_full={min_full}: give a part of a full shard, from 0 (none is joined) to 1")
    return {"min_alive": min_alive, "min_full": min_full}


def _summary(snapshot: Snapshot, moved: Steps, commit: int | None) -> Compacted:
    return Compacted(len(distinct(snapshot.take(moved.stream, ["shard"])["shard"])), int(moved.length.sum()), commit)


# -- shards to rewrite ----------------------------------------------------------------------------------------


def _chosen(archive: Archive, min_alive: float, min_full: float) -> Steps:
    """The live steps of shards that are sparse or small now, as ranges of rows of the segments table, each with a
    number for its owner, a buffer of a rank at a checkpoint, as `group`.

    Sparse: less than `min_alive` of a shard is live at the newest checkpoints of all runs. Small: it has less than
    `min_full` of the bytes of a full shard, and there are others that it can be joined to.
    """
    live, rows, owner = _live(archive)
    shards = _sparse(archive.snapshot, live, min_alive) | _small(archive.snapshot, rows, owner, min_full)
    moving = _cut(archive.snapshot, live, shards)
    owners = owner[places(moving.stream, rows)]
    known = {held: number for number, held in enumerate(dict.fromkeys(owners.tolist()))}
    return moving.beside(group=np.array([known[held] for held in owners.tolist()], np.int64))


def _live(archive: Archive) -> tuple[Steps, Ints, Ints]:
    """The live steps of the newest whole checkpoints of all runs, in rows of the newest segments table, each once; the
    rows that buffers hold, also where an episode without steps is live, and the owner of each, of several the first."""
    segments = archive.snapshot.columns(tables.LOCATING)
    checkpoints = [archive.checkpoints.newest(run=run, replay=True) for run in archive.head.runs]
    found, keys = [], []
    for number, one in enumerate(checkpoint for checkpoint in checkpoints if checkpoint is not None):
        located = tables.locate(one.live, segments)
        rank, buffer = one.live["rank"].to_numpy()[located["run"]], coded(one.live["buffer"])[1][located["run"]]
        found.append(located)
        keys.append((np.full(len(located), number), rank, buffer))
    every = Steps.joined(found)
    owner = codes(*map(np.concatenate, zip(*keys, strict=True))) if keys else every.stream
    rows, first = np.unique(every.stream, return_index=True)
    return every.union(), rows, owner[first]


def _sparse(snapshot: Snapshot, live: Steps, min_alive: float) -> set[str]:
    """Shards with live steps, of which less than `min_alive` of the steps are live (or must move with live ones)."""
    table = snapshot.columns(["shard", "length", "schema"])
    lengths = table["length"].to_numpy()
    shards, shard = coded(table["shard"].cast("string").fill_null(""))  # rows without steps have none
    total = np.bincount(shard, lengths, len(shards))
    rows, held = ascending(live.stream), np.bincount(live.stream, live.length)
    steps = np.where(_divisible(table["schema"].take(rows)), held[rows], lengths[rows])
    alive = np.bincount(shard[rows], steps, len(shards))
    return {shards[i] for i in np.flatnonzero((alive > 0) & (alive < min_alive * total)).tolist()}


def _divisible(schemas: pa.ChunkedArray) -> Mask:
    """A mask of the segments that can be cut anywhere, as no field has other rows than one a step."""
    texts, code = coded(schemas)
    every = [all(field.per_step or field.axis in NODES for field in loads(text).fields) for text in texts]
    return np.array(every, bool)[code]


def _cut(snapshot: Snapshot, live: Steps, shards: set[str]) -> Steps:
    """The live steps in these shards, in order; rows with fields that do not have one row a step stay whole."""
    rows = ascending(live.stream)
    table = snapshot.take(rows, ["shard", "length", "schema"])
    affected, cuts = among(table["shard"], shards), _divisible(table["schema"])
    every = Steps(rows, np.zeros_like(rows), table["length"].to_numpy().astype(np.int64))
    return _in_order(live.pick(np.isin(live.stream, rows[affected & cuts])), every.pick(affected & ~cuts))


def _in_order(*some: Steps) -> Steps:
    every = Steps.joined(some)
    return every.pick(np.lexsort((every.lo, every.stream)))


def _small(snapshot: Snapshot, rows: Ints, owner: Ints, min_full: float) -> set[str]:
    """Shards with less than `min_full` of a full shard's bytes, that can be joined to others like them.

    rows: of the segments table, of which buffers hold steps; owner: the buffer of each.
    """
    if not min_full or not len(rows):
        return set()
    table = snapshot.take(rows, ["shard", "schema"])
    sizes = _sizes(snapshot)
    groups: dict[tuple[int, str], set[str]] = {}
    columns = (owner.tolist(), *(table[name].cast("string").to_pylist() for name in ("schema", "shard")))
    for held, schema, shard in zip(*columns, strict=True):
        if sizes[shard] < min_full * SHARD_BYTES:
            groups.setdefault((held, schema), set()).add(shard)
    wrote, out = {escape(name) for name in distinct(snapshot.columns(["session"])["session"])}, set[str]()
    for group in groups.values():
        makers = {shard: _maker(shard, wrote) for shard in group}
        count = Counter(makers.values())
        found = {shard for shard, maker in makers.items() if maker == shard or count[maker] == 1}
        out |= found if len(found) >= MANY else set()
    return out


def _sizes(snapshot: Snapshot) -> dict[str, int]:
    """Shard -> its bytes: as stored, or its rows' bytes in memory if that is more, as full ones are counted so."""
    table, reader = snapshot.columns(["shard", "length"]), Reader(snapshot).as_written()
    rows = np.flatnonzero(table["shard"].is_valid().to_numpy())
    spans = Spans.of_each(rows, np.zeros(len(rows), np.int64), table["length"].to_numpy()[rows])
    segments = reader.segments(rows)
    sizes = np.bincount(segments.shard, reader.sizes(spans), len(segments.shards)).astype(np.int64).tolist()
    stored = reader.shards.sizes(segments)
    return {shard: max(size, stored[shard]) for shard, size in zip(segments.shards, sizes, strict=True)}


def _maker(shard: str, wrote: set[str]) -> str:
    """The common part of the names of all shards that a compaction made for one buffer; of any other, itself.

    wrote: the sessions (escaped) that wrote steps; all others that made shards moved them. Of the shards that
    one compaction made of a buffer all but the last are full: if several seem small, they hold text, whose length no
    table has, and would be rewritten again and again.
    """
    session = layout.session_of(shard)
    moved = session is not None and session not in wrote and shard.startswith("shards/")
    return shard.partition("-")[2] if moved else shard


# -- rows and commits -----------------------------------------------------------------------------------------


def _replacement_rows(
    snapshot: Snapshot, moved: Steps, new: Sequence[relocation.Location]
) -> tuple[pa.Table, list[tuple[int, Mapping[str, Any]]]]:
    """The affected rows, and their ranges as rows, each with the number of the row that it is of. The last range keeps
    the address, for its successors. new: of the ranges that were moved, in order."""
    affected = ascending(moved.stream)
    table = snapshot.take(affected, tables.schema("segments").names)
    rest = Steps(affected, np.zeros_like(affected), table["length"].to_numpy().astype(np.int64)).minus(moved)
    pieces = _in_order(Steps(moved.stream, moved.lo, moved.hi), rest)
    where = dict(zip(zip(moved.stream.tolist(), moved.lo.tolist(), strict=True), new, strict=True))
    whole, out = table.to_pylist(), list[tuple[int, Mapping[str, Any]]]()
    number = places(pieces.stream, affected)
    for at, row_of, lo, hi in zip(
        number.tolist(), pieces.stream.tolist(), pieces.lo.tolist(), pieces.hi.tolist(), strict=True
    ):
        row = relocation.cut(whole[at], lo, hi)
        if hi < whole[at]["length"]:  # not the last: an address of its own, below 0 where no writer counts
            row["sequence"] = -1 - secrets.randbits(62)
            row |= {"last": False, "terminated": None, "truncated": None, "reason": None, "return": None}
        if out and out[-1][0] == at:
            before = out[-1][1]
            row |= {"first": False, "replaces": False}
            row["predecessor"] = chains.address(before["session"], before["rank"], before["sequence"])
        out.append((at, row | where.get((row_of, lo), {})))
    return table, out


@dataclass(frozen=True)
class _Rewritten:
    """Rewritten steps, ready to be committed.

    before: the affected rows as they were when their steps were read.  rows: the new rows, each with the
    number of the row that it is a range of.
    """

    archive: Archive
    session: str
    chunks: FileRef
    before: pa.Table
    rows: Sequence[tuple[int, Mapping[str, Any]]]

    def commit(self, log: CommitLog, requires: Sequence[Requirement]) -> Commit:
        """The last of the commits: one with the new rows, and one for each checkpoint that is published again. log:
        from the commit on as of which the rows were; what a driver that died has committed is not committed again."""
        made = log.commit(f"compact/{self.session}", Change("compact", self._replaced, requires, session=self.session))
        ours = [made.number]
        for mark in [m for m in _marked(made) if m[1] < made.number]:
            again = Change("compact", partial(self._again, mark, tuple(ours)), requires, session=self.session)
            made = log.commit(f"compact/{self.session}/{mark[1]}", again)
            ours.append(made.number)
        return made

    def _replaced(self, parent: Commit, attempt: Attempt) -> Addition:
        """The rows of the parent, all in one file, the affected ones replaced in place."""
        table = Snapshot(self.archive.storage, parent).columns(tables.schema("segments").names)
        at = places(*row_codes(self.before.select(ADDRESS), table.select(ADDRESS)))  # -1: forgotten meanwhile
        there, where = at >= 0, relocation.WHERE
        if table.select(where).take(at[there]).to_pylist() != self.before.select(where).filter(there).to_pylist():
            raise ConflictError(
                f"steps at {self.archive.url} were moved by another compaction while this one ran; nothing was "
                "committed, run it again"
            )
        new = [(at[number], row) for number, row in self.rows if there[number]]
        every = tables.replaced("segments", table, at[there], new)
        file = tablefiles.write(self.archive.storage, self.session, "segments", every)
        marked = _marked(parent)
        again = _republished(self.archive, parent, marked[0]) if marked else {}
        return {}, {"segments": (file,), "chunks": self.chunks, "added": {"segments": 0}, **again}

    def _again(self, mark: tuple[str, int], ours: Sequence[int], parent: Commit, attempt: Attempt) -> Addition:
        """One more checkpoint published again; a newer one that came meanwhile stays the newest."""
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
    """The keys of a commit that publishes a run's newest checkpoint again, for resumes to find the compacted steps."""
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
