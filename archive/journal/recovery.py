"""Recovery: a checkpoint made of the newest one and of the journals beyond it, on behalf of ranks that died.

It is one commit of their session, as if all of them had made a checkpoint after their last whole tick. It fences nobody
off: as long as no other session of the run is opened, what a rank writes beyond can still be committed.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from logging import DEBUG, INFO
from typing import TYPE_CHECKING, Self

import numpy as np

from archive import tables
from archive.base import ConflictError, SupersededError, at_once, logger, ranks
from archive.checkpoint import Checkpoint, Checkpoints, Joint, commit_recovered
from archive.index import ByWriter, Snapshot, chains
from archive.journal import ends, tails
from archive.journal.tails import RankTail
from archive.ledger import taken_back
from archive.log import Commit, CommitLog, Lineage, Place, Recovered, RunEntry, Tail
from archive.observe import operation
from archive.saved import (
    FOLDED,
    UNCONSUMED,
    Before,
    Delta,
    Part,
    PartIndex,
    Request,
    Saved,
    SessionFold,
    StateRef,
    stage,
)
from archive.store import Storage
from archive.tables import NO_ENV, among
from archive.write import Column, Resume, Stretch, Written

if TYPE_CHECKING:
    import pyarrow as pa

AT_ONCE = 16
_EACH = 16  # of more ranks the log has the sum
MARK = "+tail-"  # in the name of a recovered checkpoint, after the name of its base
_WHERE = ("buffer", "session", "rank", "env_id", "position", "length")
_CHAINED = tuple(dict.fromkeys((*_WHERE, "shard", *chains.COLUMNS, *chains.DETAIL)))


class _MovedError(Exception):
    """A checkpoint of this session was committed meanwhile."""


def recover(log: CommitLog, run: str) -> Commit | None:
    """Commit a checkpoint with all that the newest session of a run has journaled beyond its newest one. If that has no
    buffers, those of the one before count.

    None if there is nothing, or if another session of the run was opened meanwhile, which is logged. The first caller
    does it for all.
    """
    while True:
        head = log.catch_up()
        entry = head.runs.get(run)
        if entry is None:
            return None
        found = tails.read(log.storage, head, run)
        newest, journaled = entry.latest, any(one.objects for one in found.values())
        without = newest is not None and newest.session == entry.session and newest != entry.latest_replay  # buffers
        base = RecoveryBase.of(log.storage, head, entry, found) if journaled or without else None
        if base is None or (base.held is None and not journaled):
            _tell_damage(run, found)
            return None
        with operation("recover", run=run, session=entry.session):
            try:
                return _committed(log, head, run, base, found)
            except _MovedError:
                continue
            except SupersededError as e:
                logger.warning("the journal of run %r was not recovered: %s", run, e)
                return None


def _committed(log: CommitLog, head: Commit, run: str, base: RecoveryBase, found: Mapping[int, RankTail]) -> Commit:
    entry = head.runs[run]
    fold = _folded(Snapshot(log.storage, head), entry, base, found)
    place = Place(0, fold.world_size, run, entry.session)
    name, world = _name(base), range(fold.world_size)
    parts = at_once(partial(_staged, log, place, name, base, fold, found), world, AT_ONCE)
    taken = {r: Tail(one.next, one.objects, one.steps, one.episodes, one.ended) for r, one in found.items()}
    about = Recovered(base.commit, base.name, {rank: base.trained(rank) for rank in world}, taken)
    made = commit_recovered(log, Joint(place, name, base.ordinal), parts, about, partial(_check_same, run, entry))
    _tell(run, made, found, fold)
    return made


def _name(base: RecoveryBase) -> str:
    """A new name: "step-1000+tail-1a2b3c4d", or "tail-1a2b3c4d" without an earlier checkpoint."""
    recovered = base.about is not None and base.about.record.recovered is not None
    stem = base.name.partition(MARK)[0] if recovered else base.name
    stem = "" if recovered and stem.startswith(MARK[1:]) else stem
    return f"{stem}{MARK if stem else MARK[1:]}{secrets.token_hex(4)}"


def _check_same(run: str, entry: RunEntry, parent: Commit) -> None:
    """Refuse a commit if the base of the recovery is no longer the newest checkpoint."""
    now = parent.runs[run]
    if now.journal != entry.journal or _commits(now) != _commits(entry):
        raise _MovedError


def _commits(entry: RunEntry) -> list[int | None]:
    """The commits of its newest checkpoints, whatever tables serve them."""
    return [None if mark is None else mark.commit for mark in (entry.latest, entry.latest_replay)]


def _staged(
    log: CommitLog,
    place: Place,
    name: str,
    base: RecoveryBase,
    fold: SessionFold,
    found: Mapping[int, RankTail],
    rank: int,
) -> Part:
    """Write one rank's part."""
    tail = found.get(rank)
    held = Delta() if tail is None else tail.held
    about = base.about
    index = PartIndex(
        rank=rank, world_size=place.world_size, run=place.run, session=place.session, name=name,
        step=0 if about is None else about.step, ordinal=base.ordinal, nonce=secrets.token_hex(8), replay_saved=True,
        resumed_from=base.resumed_from, sequence=max(base.committed(rank), held.sequence or 0),
        journal=None if tail is None else tail.next, node=None if tail is None else tail.node, seen=log.head.sighting,
        metrics={} if about is None else about.record.metrics,
        lineage=Lineage() if about is None else about.record.lineage,
        progress=base.progress(rank, held),
    )  # fmt: skip
    request = Request(index, base.unconsumed(rank))
    return stage(log.storage, request, fold.cuts(rank), [Written(held.rows)], states=base.states(rank))


# -- the base of a recovery --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecoveryBase:
    """The checkpoints that a recovery goes on from: the newest of the session, or the one that it resumed from.

    held: the one with the live steps of its ranks when the tails began: the session's own newest that has its buffers,
    or (own is False) the one that it resumed from.  about: the newest of all these, with or without buffers, which has
    the progress of training. None: there is none.  ordinal: of the session's own newest one; 0 if it has none.
    """

    session: str
    held: Checkpoint | None
    own: bool
    about: Checkpoint | None
    resumed_from: int | None
    ordinal: int

    @classmethod
    def of(cls, storage: Storage, head: Commit, entry: RunEntry, found: Mapping[int, RankTail]) -> Self:
        """The base for a run whose tails were read."""
        every = Checkpoints(storage, head)
        replay, newest = (
            every.at_commit(mark.commit, mark.manifest) if mark is not None and mark.session == entry.session else None
            for mark in (entry.latest_replay, entry.latest)
        )
        if replay is not None and newest is not None and replay.number == newest.number:
            newest = replay  # one object, so that it is read once
        ordinal = 0 if newest is None else newest.record.ordinal
        said = next((n for one in found.values() if (n := one.held.resumed_from) is not None), None)
        resumed = entry.resumed_from.commit if said is None and entry.resumed_from is not None else said
        if replay is not None:
            return cls(entry.session, replay, True, newest or replay, resumed, ordinal)
        origin = None if resumed is None else every.at_commit(resumed)
        held = origin if origin is not None and origin.replay_saved else None
        return cls(entry.session, held, False, newest or origin, resumed, ordinal)

    @property
    def own_newest(self) -> Checkpoint | None:
        """The session's own newest, with or without buffers; None if it has none."""
        return self.about if self.about is not None and self.about.session == self.session else None

    @property
    def name(self) -> str:
        """The name of the newest one; empty if there is none."""
        return "" if self.about is None else self.about.name

    @property
    def commit(self) -> int | None:
        """Its commit."""
        return None if self.about is None else self.about.number

    def progress(self, rank: int, held: Delta) -> str | None:
        """The run's counters, of the newest one or, if they are newer, of the tail."""
        part = _part(self.about, rank)
        saved, since = (None, None) if part is None else (part.index.progress, part.index.journaled)
        own = self.own_newest is not None  # another session's journal has numbers of its own
        is_older = own and saved is not None and since is not None and (held.progress_at or 0) < since
        return saved if held.progress is None or is_older else held.progress

    def unconsumed(self, rank: int) -> str | None:
        """The prompts that a rank had drawn and not trained on."""
        part = _part(self.about, rank)
        return part.files([UNCONSUMED])[0].decode() if part is not None and part.has(UNCONSUMED) else None

    @property
    def sequences(self) -> Mapping[int, int]:
        """Rank -> the session's rows below this number are in `held`."""
        return self.held.record.sequences if self.own and self.held is not None else {}

    def committed(self, rank: int) -> int:
        """The session's rows of a rank below this number are in `held`, or in the newest one without buffers."""
        newest = self.own_newest
        return max(self.sequences.get(rank, 0), 0 if newest is None else newest.record.sequences.get(rank, 0))

    def trained(self, rank: int) -> int:
        """The session's ledger rows "trained" of a rank below this number are known to its weights."""
        about = self.own_newest
        if about is None:
            return 0
        known = about.record.sequences if about.record.recovered is None else about.record.recovered.trained
        return known.get(rank, 0)

    def states(self, rank: int) -> dict[str, StateRef]:
        """The references to a rank's states."""
        out: dict[str, StateRef] = {}
        for part in (_part(self.held, rank), _part(self.about, rank)):
            for buffer, ref in {} if part is None else part.index.states.items():
                own = part is not None and ref.object is None
                out[buffer] = replace(ref, object=part.key, nonce=part.index.nonce) if own and part else ref
        return out

    @property
    def before(self) -> Before:
        """The input of a fold. Steps that the session held beside its own newest checkpoint stay beside the recovered
        one: a session that goes on may save them again."""
        held = self.held
        if held is None:
            return Before()
        parts = held.all_staged()
        left_out = tables.concat("live", [part.left_out() for part in parts.values()]) if self.own else None
        return Before(
            self.own,
            held.world_size,
            held.live,
            left_out,
            {rank: part.index for rank, part in parts.items()},
            self.sequences,
            partial(_values, held),
        )


def _part(checkpoint: Checkpoint | None, rank: int) -> Part | None:
    """A rank's part of a checkpoint, if it is in it."""
    return checkpoint.staged(rank) if checkpoint is not None and rank in checkpoint.ranks else None


def _values(held: Checkpoint, rank: int, buffer: str) -> Saved:
    """The columns (in stored form) and attributes that a checkpoint has of a rank's buffer."""
    refs = held.staged(rank).index.columns.get(buffer, {})
    columns = {
        name: Column(held.file(ref).rows({ref.array: [(0, ref.rows)]})[ref.array][0], ref.dtype)
        for name, ref in refs.items()
    }
    return columns, held.attributes(rank, buffer)


# -- live steps --------------------------------------------------------------------------------------------------------


def _folded(snapshot: Snapshot, entry: RunEntry, base: RecoveryBase, found: Mapping[int, RankTail]) -> SessionFold:
    """The buffers of the ranks when their tails ended. Live steps are found by the committed rows of the segments
    table, and those to come."""
    known = [one.world_size for one in (base.held, base.own_newest) if one is not None]
    world_size = max([1 + max(entry.journal or {0: 0}), *known])
    deltas = {rank: tail.held for rank, tail in found.items()}
    segments = _with_fresh(snapshot, entry, found, FOLDED)
    return SessionFold(entry.session, world_size, base.before, deltas, segments, _spared(snapshot, entry, base, found))


def _fresh_rows(kind: str, entry: RunEntry, found: Mapping[int, RankTail]) -> pa.Table:
    """The rows of a table that are in the tails, and in no commit."""
    import pyarrow.compute as pc

    parts = ((rank, tail.held.table(kind)) for rank, tail in found.items())
    return tables.concat(
        kind, [rows.filter(pc.greater_equal(rows["sequence"], entry.sequences.get(rank, 0))) for rank, rows in parts]
    )


def _with_fresh(
    snapshot: Snapshot, entry: RunEntry, found: Mapping[int, RankTail], columns: tuple[str, ...]
) -> pa.Table:
    """The segments table with the rows of the tails at its end, as the next commit adds them."""
    import pyarrow as pa

    fresh = tables.set_column(_fresh_rows("segments", entry, found), "commit", snapshot.commit.number + 1)
    return pa.concat_tables([snapshot.columns(columns), fresh.select(columns)]).unify_dictionaries()


def _spared(
    snapshot: Snapshot, entry: RunEntry, base: RecoveryBase, found: Mapping[int, RankTail]
) -> dict[str, list[Stretch]]:
    """Buffer -> removed steps that a recovery keeps, because their training is undone with the weights: those of the
    newest revision of each such episode, as the session sees it.

    Training after a checkpoint does not count, for its weights do not know of it; so the removal
    of its episodes does not count either. Episodes of env rows stay gone: a ring has used their places again.
    """
    import pyarrow.compute as pc

    if not any(tail.held.gone for tail in found.values()):
        return {}
    known = {rank: base.trained(rank) for rank in found}
    waiting = taken_back(snapshot.storage, snapshot.commit, entry.session, known, _fresh_rows("ledger", entry, found))
    if not waiting:
        return {}
    every = _with_fresh(snapshot, entry, found, _CHAINED)
    rows = every.filter(among(every["episode_id"], waiting))
    sight = snapshot.branches.sight(entry.session)
    chained = chains.resolve(rows, lambda: rows, None, lambda part, _: ByWriter(part).seen(sight))
    out: dict[str, list[Stretch]] = {}
    current = rows.take(np.sort(chained.rows))
    for row in current.filter(pc.is_valid(current["shard"])).select(_WHERE).to_pylist():
        if row["env_id"] == NO_ENV:
            span = row["position"], row["position"] + max(1, row["length"])
            out.setdefault(row["buffer"], []).append((row["session"], row["rank"], NO_ENV, *span))
    return out


# -- logs --------------------------------------------------------------------------------------------------------------


def _tell(run: str, made: Commit, found: Mapping[int, RankTail], fold: SessionFold) -> None:
    level = INFO if len(found) <= _EACH else DEBUG
    for one in found.values():
        logger.log(
            level,
            "run %r: recovered %d journal objects of rank %d, with %d steps of %d episodes, up to number %d: %s",
            run,
            one.objects,
            one.rank,
            one.steps,
            one.episodes,
            one.next,
            one.why,
        )
    if level == DEBUG:
        objects, steps = (sum(getattr(one, name) for one in found.values()) for name in ("objects", "steps"))
        logger.info("run %r: recovered %d journal objects of %d ranks, with %d steps", run, objects, len(found), steps)
    _tell_damage(run, found)
    lacking: dict[tuple[str, str, tuple[int, ...]], int] = Counter()
    together = tuple(found) if level == DEBUG else None
    for (rank, buffer, name), count in fold.lacking.items():
        lacking[name, buffer, together or (rank,)] += count
    for (name, buffer, of), count in lacking.items():
        told = name, buffer, ranks(of), count
        logger.warning(
            "column %r of buffer %r, %s: %d steps were journaled without a value; they have NaN, or 0, now", *told
        )
    name = "" if made.checkpoint is None else made.checkpoint.name
    logger.info("run %r: checkpoint %r, commit %d, has the journaled steps", run, name, made.number)


def leave_behind(storage: Storage, head: Commit, run: str, left: Mapping[int, int], start: Resume) -> None:
    """Log the durable additions of a run's newest session that no session goes on from. left: rank -> number of journal
    objects. ConflictError if that session went on after it was recovered, or after a plan that takes all that it has.
    """
    entry, known = head.runs[run], {start.checkpoint, None if start.origin is None else start.origin.commit}
    takes_all = start.takes_all and start.forked_from is None
    marks = [one for one in (entry.latest_replay, entry.latest if takes_all else None) if one is not None]
    mark = max(marks, key=lambda one: one.commit, default=None)
    later = mark is not None and start.forked_from is None and mark.commit > start.seen and mark.commit not in known
    recovered = None
    if mark is not None and (mark.commit, mark.session) == (start.checkpoint, entry.session):
        recovered = Checkpoints(storage, head).at_commit(mark.commit, mark.manifest).record.recovered
    if left and (recovered is not None or takes_all):  # damaged objects do not count
        left = {rank: one.objects for rank, one in tails.read(storage, head, run).items() if one.objects}
    if left and (recovered is not None or takes_all):
        since = "its journal was recovered" if recovered is not None else "the new session was planned"
        raise ConflictError(
            f"session {entry.session!r} of run {run!r} went on after {since}, and has journaled more "
            f"({ranks(left)}, in {sum(left.values())} objects); no session was opened. It can journal no more: call "
            f"arc.recover({run!r}) again, and begin from its checkpoint"
        )
    if later and takes_all and mark is not None:
        raise ConflictError(
            f"session {entry.session!r} of run {run!r} made the checkpoint of commit {mark.commit} after the new "
            f"session was planned; no session was opened: plan arc.recover({run!r}), and begin from that"
        )
    if later and mark is not None:
        logger.warning(
            "run %r: commit %d has a checkpoint of session %r that is newer than the one the session that "
            "begins now goes on from; it is left behind: to keep it, start again from that checkpoint",
            run,
            mark.commit,
            mark.session,
        )
    if left:
        logger.warning(
            "run %r: session %r has journaled beyond its newest checkpoint (%s); the session that begins now "
            "leaves these %d objects behind; to keep them, begin from arc.recover(%r)",
            run,
            entry.session,
            ranks(left),
            sum(left.values()),
            run,
        )


def _tell_damage(run: str, found: Mapping[int, RankTail]) -> None:
    for one in found.values():
        if one.ended == tails.DAMAGED:
            logger.warning(
                "run %r: the journal of rank %d ends before number %d: %s; objects from there on are lost",
                run,
                one.rank,
                one.next,
                one.why,
            )


def take_over(log: CommitLog, who: Place, start: Resume | None) -> None:
    """End the journal of the session that a new one is to replace, before that is opened. Its tails are recovered or,
    where the new session goes on from a checkpoint, logged if they go beyond that."""
    entry = log.head.runs.get(who.run)
    if entry is None or not entry.journal:
        return
    if start is None:
        recover(log, who.run)
    left = ends.end(log, who, entry.session)
    if left and start is None:
        recover(log, who.run)
    elif start is not None:
        leave_behind(log.storage, log.head, who.run, left, start)
