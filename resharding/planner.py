"""Making plans of a checkpoint and bounds, with journals beyond it. Reads the manifest and journals alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from logging import WARNING
from typing import Any

from archive.base import PartialCheckpointError, UsageError, level_of, logger
from archive.checkpoint import Checkpoint, Checkpoints
from archive.journal import recover
from archive.log import Commit, CommitLog, Origin, commits, named_session
from archive.log import place as writer_place
from archive.observe import timed
from archive.store import Storage
from resharding.placement import Rules, identity, place, within_bounds
from resharding.plans import Plan
from resharding.source import SourceBuffer, sources_of

LIVE, ARCHIVE, IGNORE = TAILS = ("live", "archive", "ignore")


@timed("plan")
def plan(
    checkpoint: Checkpoint,
    world_size: int | None = None,
    *,
    num_envs: int | None = None,
    max_length: int | None = None,
    capacity: int | Mapping[str, int] | None = None,
    max_episodes: int | None = None,
    incomplete: str = "keep",
    unfinished: str | None = None,
    policy: str = "balanced",
    filter: Any = None,
    weights: str | None = None,
    allow_missing: bool = False,
    tails: str | None = None,
    session: str | None = None,
) -> Plan:
    """Plan the redistribution of a checkpoint over `world_size` ranks (default: this job's). Reads no data.

    policy: "balanced" (contiguous, by running steps or `weights`), "interleaved" (by number within the source rank,
    then rank) or "by_trajectory" (contiguous, by count).  weights: "steps", "bytes" or a column's name.
    num_envs, max_length: env rows of each target and steps each holds.  capacity: steps (by buffer, if a dict),
    max_episodes: episodes a target holds. The oldest are dropped first, counted and listed: steps of env rows one by
    one, as a ring overwrites them (with incomplete="drop", whole episodes); episodes that were added whole, whole.
    Bounds that the same ranks keep already move nothing; env rows with holes between their steps are put end to end
    where num_envs is given.
    incomplete: "keep" or "drop" headless and open episodes.  unfinished: the fate of open episodes: "close"
    (default), "continue" (default where nothing moves; else only the one at the end of each row) or "drop".
    filter: a condition, or the arguments of `Episodes.filter`.
    allow_missing: plan without the ranks that a crash checkpoint lacks.
    tails: the fate of the journals beyond the checkpoint, by the run's newest session (`arc.writer(journal_s=)`).
    "live": it is in the buffers, as after `arc.recover()`; "archive": it stays an episode of the archive, and is in no
    buffer; "ignore": it is left behind. Default: "live" for the newest whole checkpoint of a run that keeps a journal.
    session: the one that will go on from it, as its writers are told; needed if ranks with a journal plan one after the
    other, in no process group, and nothing names the session: objects that a faster rank journals are no tail.
    """
    if checkpoint is None:
        raise UsageError(
            "there is no checkpoint to plan: arc.checkpoints.latest is None until a job has made its first one. At its "
            "first start a job opens arc.writer() without resume="
        )
    if not checkpoint.whole and not allow_missing:
        raise PartialCheckpointError(
            f"checkpoint {checkpoint.name!r} lacks ranks {checkpoint.missing_ranks}; plan with allow_missing=True to "
            f"do without them, or plan the last whole one (arc.checkpoints.of({checkpoint.run!r}).latest)"
        )
    checkpoint, origin, takes_all = _with_tails(checkpoint, tails, session)
    world_size = writer_place(None, None, "main", "-").world_size if world_size is None else world_size
    sources, chosen = sources_of(checkpoint), unfinished or "continue"
    room = _capacities(capacity, sources)
    rules = {
        name: Rules(
            world_size, num_envs, max_length, room[name], max_episodes, incomplete, chosen, policy, source.divisible
        )
        for name, source in sources.items()
    }
    plain = filter is None and weights is None and (incomplete, policy, chosen) == ("keep", "balanced", "continue")
    same = plain and world_size == checkpoint.world_size and checkpoint.whole and _held_already(sources, rules)
    if unfinished is None and not same:
        rules = {name: replace(one, unfinished="close") for name, one in rules.items()}
    placements = {}
    for name, source in sources.items():
        if same:
            placements[name] = identity(source.units, rules[name], source.position)
        else:
            units = source.units.beside(weight=source.weights(weights))
            placements[name] = place(units, rules[name], source.passing(filter))
    conditions = None if filter is None else str(filter)
    return Plan(checkpoint, sources, world_size, placements, same, checkpoint.seen, conditions, origin, takes_all)


def _capacities(capacity: int | Mapping[str, int] | None, buffers: Collection[str]) -> dict[str, int | None]:
    """Steps that a target holds, by buffer; UsageError for a buffer that the checkpoint does not have."""
    if not isinstance(capacity, Mapping):
        return dict.fromkeys(buffers, capacity)
    unknown = [name for name in capacity if name not in buffers]
    if unknown:
        raise UsageError(f"capacity= names {unknown[0]!r}; the checkpoint's buffers are {', '.join(buffers)}")
    return {name: capacity.get(name) for name in buffers}


def _held_already(sources: Mapping[str, SourceBuffer], rules: Mapping[str, Rules]) -> bool:
    """True if the same ranks are within all bounds, so that nothing need move."""
    within = all(within_bounds(source.units, rules[name]) for name, source in sources.items())
    return within and all(rules[name].num_envs is None or source.gapless for name, source in sources.items())


# -- journals beyond the newest checkpoint --------------------------------------------------


def _with_tails(
    checkpoint: Checkpoint, tails: str | None, session: str | None
) -> tuple[Checkpoint, Origin | None, bool]:
    """The checkpoint to plan; what a session that resumes goes on from, if not what the checkpoint says; and whether
    that is all that the run has.

    "live": the checkpoint with the journals of its run beyond it, recovered now unless that was done.
    "archive": the checkpoint itself, but the session sees the steps beyond it, as archived ones.  "ignore": the
    checkpoint as it is; later steps are left behind.  None: "live" if the run keeps a journal and this is its
    newest whole checkpoint, in an archive that is not open as of some commit; else "ignore".
    session: the one that goes on (default: as torchrun or Slurm name it). A faster rank may have begun it; then its
    journal is no tail, and all ranks go on from the same checkpoint as that one.
    """
    if tails not in (None, *TAILS):
        raise UsageError(f"tails={tails!r}: give {', '.join(map(repr, TAILS))}, or None to take in the journal")
    if tails == IGNORE or (tails is None and not _keeps_journal(checkpoint)):
        return checkpoint, None, False
    log = CommitLog(checkpoint.snapshot.storage, checkpoint.archive_id, checkpoint.served_by)
    if not _has_begun(log.catch_up(), checkpoint.run, session):
        recover(log, checkpoint.run)
    newest = _newest(checkpoint, log.catch_up())
    if newest is None:
        if tails is None:
            return checkpoint, None, False
        raise UsageError(
            f"tails={tails!r}: checkpoint {checkpoint.name!r} is not the newest whole one of run {checkpoint.run!r}, "
            "so later steps are no tail; plan arc.checkpoints.latest, or with tails='ignore'"
        )
    return (checkpoint, newest.origin, True) if tails == ARCHIVE else (newest, None, True)


def _keeps_journal(checkpoint: Checkpoint) -> bool:
    entry = checkpoint.commit.runs.get(checkpoint.run)
    return entry is not None and entry.journal is not None and not checkpoint.annotations.read_only


def _has_begun(head: Commit, run: str, session: str | None) -> bool:
    """True if another rank has begun the session that is to go on."""
    entry = head.runs.get(run)
    return entry is not None and entry.session == (named_session(run) if session is None else session)


def is_recovered(number: int, checkpoint: Checkpoint) -> bool:
    """True if the checkpoint of commit `number` is this one, or was recovered from it."""
    return _recovered_from(checkpoint.storage, number, checkpoint.number, checkpoint.commit) == checkpoint.number


def _recovered_from(storage: Storage, number: int, least: int, head: Commit) -> int | None:
    """The commit of the checkpoint that the one of commit `number` was recovered from, itself or over others: the first
    that is not after commit `least`; None if all that are after it were made otherwise."""
    base: int | None = number
    while base is not None and base > least:
        made = commits.read_of(storage, base, head).checkpoint
        base = None if made is None or made.recovered is None else made.recovered.base
    return base


def _newest(checkpoint: Checkpoint, head: Commit) -> Checkpoint | None:
    """The run's newest whole checkpoint, if it is this one or was recovered from it; else None.

    A session that went on from an older checkpoint is the run's newest, too: who asked for the newest before it was
    recovered gets what it journaled.
    """
    storage, run = checkpoint.snapshot.storage, checkpoint.run
    found = Checkpoints(storage, head).newest(run=run, replay=True)
    if found is None or found.number == checkpoint.number:
        return None if found is None else checkpoint
    base = _recovered_from(storage, found.number, checkpoint.number, head)
    if base == checkpoint.number:
        return found
    asked = checkpoint.annotations.head.runs[run]
    was_newest = asked.latest is not None and asked.latest.commit == checkpoint.number
    if base is None or not was_newest or asked.session == checkpoint.session or asked.session != found.session:
        return None
    logger.log(
        level_of(writer_place(None, None, run, "-").rank, WARNING),
        "run %r: its newest session %r had gone on from an older checkpoint than %r; %r, which has what it journaled, "
        "is planned instead. To plan %r, give tails='ignore'",
        run,
        found.session,
        checkpoint.name,
        found.name,
        checkpoint.name,
    )
    return found
