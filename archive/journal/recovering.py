"""A checkpoint made of the newest one and of what ranks have journaled since, on behalf of ranks that died.

It is one commit of their session, as if all of them had made a checkpoint after their last whole tick. It fences nobody
off: as long as no other session of the run is opened, what a rank writes beyond can still be committed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import partial

from archive import tables
from archive.base import SupersededError, at_once, logger
from archive.checkpoint import (
    Joint,
    commit_recovered,
)
from archive.journal import tails
from archive.journal.bases import Base
from archive.journal.survivors import Survivors
from archive.journal.tails import RankTail
from archive.manifest import Commit, CommitLog, Place, Recovered, RunEntry, Tail
from archive.observe import operation
from archive.saved import Part, RankRows, Request, SavedColumns, stage
from archive.store import Storage
from archive.write import Written

AT_ONCE = 16
PROBED = 4  # ranks at most that are looked at where nothing is recovered
MARK = "+tail-"  # in the name of a recovered checkpoint, after that of the one it was made of


class _MovedError(Exception):
    """Somebody committed a checkpoint of this session meanwhile."""


def recover(log: CommitLog, run: str) -> Commit | None:
    """Commit a checkpoint with all that the newest session of a run has journaled beyond its newest one; of a newest
    one without buffers with those of the one before.

    None if there is nothing, or if another session of the run was opened meanwhile, which is logged. Whoever does it
    first has done it for all.
    """
    while True:
        head = log.catch_up()
        entry = head.runs.get(run)
        if entry is None:
            return None
        found = tails.read(log.storage, head, run)
        base = Base.of(log.storage, head, entry, found) if _has_more(entry, found) else None
        if base is None or (base.held is None and not any(one.objects for one in found.values())):
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


def _has_more(entry: RunEntry, found: Mapping[int, RankTail]) -> bool:
    """Whether a session journaled something, or made its newest checkpoint without its buffers."""
    newest = entry.latest
    light = newest is not None and newest.session == entry.session and newest != entry.latest_replay
    return light or any(one.objects for one in found.values())


def _committed(log: CommitLog, head: Commit, run: str, base: Base, found: Mapping[int, RankTail]) -> Commit:
    entry = head.runs[run]
    left = Survivors(log.storage, head, entry, base, found)
    place = Place(0, left.world_size, run, entry.session)
    name = _name(base)
    ranks = range(left.world_size)
    parts = at_once(partial(_staged, log, place, name, base, left, found), ranks, AT_ONCE)
    made = commit_recovered(
        log,
        Joint(place, name, base.ordinal),
        parts,
        _recovered(base, found, ranks),
        partial(_check_same, run, entry),
    )
    _tell(run, made, found, left)
    return made


def _name(base: Base) -> str:
    """A new one: "step-1000+tail-1a2b3c4d", or "tail-1a2b3c4d" where there was nothing before."""
    stem = base.name.partition(MARK)[0] if base.recovered else base.name
    stem = "" if base.recovered and stem.startswith(MARK[1:]) else stem
    return f"{stem}{MARK if stem else MARK[1:]}{secrets.token_hex(4)}"


def _check_same(run: str, entry: RunEntry, parent: Commit) -> None:
    """What the tails were added to must still be the newest."""
    now = parent.runs[run]
    if now.journal != entry.journal or _commit(now) != _commit(entry):
        raise _MovedError


def _commit(entry: RunEntry) -> tuple[int | None, int | None]:
    """The commits of its newest checkpoints; where they are read has nothing to say."""
    marks = (entry.latest, entry.latest_replay)
    newest, replay = (None if mark is None else mark.commit for mark in marks)
    return newest, replay


def _staged(
    log: CommitLog, place: Place, name: str, base: Base, left: Survivors, found: Mapping[int, RankTail], rank: int
) -> Part:
    """Write the staged object of one rank."""
    tail = found.get(rank)
    held = None if tail is None else tail.held
    request = Request(
        name=name, step=base.step, ordinal=base.ordinal, save_replay=True,
        progress=base.progress(rank) if held is None or held.progress is None else held.progress,
        unconsumed=base.unconsumed(rank), metrics=base.metrics, config=None, folder="", resumed_from=base.resumed_from,
        committed=max(base.committed(rank), 0 if held is None or held.sequence is None else held.sequence),
        journal=None if tail is None else tail.next, lineage=base.lineage,
        seen=log.head.sighting,
    )  # fmt: skip
    rows = _rows(tail)
    written = Written(rows.segments, rows.chunks, 0, rows.ledger if rows.ledger.num_rows else None)
    mine = Place(rank, place.world_size, place.run, place.session)
    return stage(log.storage, mine, request, left.cuts(rank), [written], SavedColumns(), base.states(rank))


def _rows(tail: RankTail | None) -> RankRows:
    """What a tail adds to the tables."""
    if tail is None:
        return RankRows(*(tables.concat(kind, []) for kind in RankRows._fields))
    return RankRows(*(tail.held.table(kind) for kind in RankRows._fields))


def _recovered(base: Base, found: Mapping[int, RankTail], ranks: Iterable[int]) -> Recovered:
    """What the commit says of where it comes from."""
    taken = {r: Tail(one.next, one.objects, one.steps, one.episodes, one.ended) for r, one in found.items()}
    return Recovered(base.commit, base.name, {rank: base.trained(rank) for rank in ranks}, taken)


def _tell(run: str, made: Commit, found: Mapping[int, RankTail], left: Survivors) -> None:
    for one in found.values():
        logger.info(
            "run %r: took %d objects of the journal of rank %d, with %d steps of %d episodes, up to number %d: %s",
            run, one.objects, one.rank, one.steps, one.episodes, one.next, one.why,
        )  # fmt: skip
    _tell_damage(run, found)
    for (rank, buffer, name), count in left.lacking.items():
        logger.warning(
            "column %r of buffer %r, rank %d: %d steps were journaled without a value; they have NaN, or 0, there",
            name, buffer, rank, count,
        )  # fmt: skip
    name = "" if made.checkpoint is None else made.checkpoint.name
    logger.info("run %r: checkpoint %r, commit %d, has what was journaled", run, name, made.number)


def tell_left(storage: Storage, run: str, entry: RunEntry) -> None:
    """Log that a run's newest session has journaled what nothing goes on from; some of its ranks are looked at."""
    ranks = tails.beyond(storage, entry, most_ranks=PROBED)
    if ranks:
        logger.warning(
            "run %r: session %r has journaled beyond its newest checkpoint (rank %s), which the session that begins "
            "now leaves behind; to have it, resume from arc.recover(%r)",
            run, entry.session, ", ".join(map(str, ranks)), run,
        )  # fmt: skip


def _tell_damage(run: str, found: Mapping[int, RankTail]) -> None:
    for one in found.values():
        if one.ended == tails.DAMAGED:
            logger.warning(
                "run %r: the journal of rank %d ends before number %d: %s; what was journaled from there on is lost",
                run, one.rank, one.next, one.why,
            )  # fmt: skip
