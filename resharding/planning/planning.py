"""Making plans: of a checkpoint and bounds, who gets which steps. Reads the manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from archive.base import PartialCheckpointError, UsageError
from archive.checkpoint import Checkpoint
from archive.manifest import place as writer_place
from archive.observe import timed
from resharding.placing import Rules, Source, filtered, identity, place, within_bounds
from resharding.planning.plans import Plan
from resharding.planning.tails import with_tails


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
    incomplete: "keep" or "drop" headless and open episodes.  unfinished: what becomes of open episodes: "close"
    (default), "continue" (default where nothing moves; else only the one at the end of each row) or "drop".
    filter: a condition, or what `Episodes.filter` takes.
    allow_missing: plan without the ranks that a crash checkpoint lacks.
    tails: what becomes of what the run's newest session journaled beyond the checkpoint (`arc.writer(journal_s=)`).
    "live": it is in the buffers, as `arc.recover()` has it; "archive": it stays an episode of the archive, and is in no
    buffer; "ignore": it is left behind. Default: "live" for the newest whole checkpoint of a run that keeps a journal.
    session: that will go on from it, as its writers are told; needed where ranks that keep a journal plan one after the
    other, in no process group, and nothing names the session: what a faster rank journals already is no tail.
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
    checkpoint, origin = with_tails(checkpoint, tails, session)
    world_size = writer_place(None, None, "main", "-").world_size if world_size is None else world_size
    source, chosen = Source(checkpoint), unfinished or "continue"
    room = _capacities(capacity, source)
    rules = {
        name: Rules(
            world_size, num_envs, max_length, room[name], max_episodes, incomplete, chosen, policy,
            source.divisible(buffer),
        )
        for name, buffer in source.buffers.items()
    }  # fmt: skip
    plain = filter is None and weights is None and (incomplete, policy, chosen) == ("keep", "balanced", "continue")
    same = plain and world_size == checkpoint.world_size and checkpoint.whole and _held_already(source, rules, num_envs)
    if unfinished is None and not same:
        rules = {name: replace(one, unfinished="close") for name, one in rules.items()}
    placements = {}
    for name, buffer in source.buffers.items():
        units = source.units(buffer, weights)
        placements[name] = (
            identity(units, buffer.position) if same else place(units, rules[name], filtered(source, buffer, filter))
        )
    conditions = None if filter is None else str(filter)
    return Plan(source, world_size, rules, placements, same, checkpoint.seen, conditions, origin)


def _capacities(capacity: int | Mapping[str, int] | None, source: Source) -> dict[str, int | None]:
    """Steps that a target holds, by buffer; UsageError for a buffer that the checkpoint does not have."""
    if not isinstance(capacity, Mapping):
        return dict.fromkeys(source.buffers, capacity)
    unknown = [name for name in capacity if name not in source.buffers]
    if unknown:
        raise UsageError(f"capacity= names {unknown[0]!r}; the checkpoint's buffers are {', '.join(source.buffers)}")
    return {name: capacity.get(name) for name in source.buffers}


def _held_already(source: Source, rules: Mapping[str, Rules], num_envs: int | None) -> bool:
    """Whether the same ranks keep all bounds as they are, so that nothing need move."""
    within = all(within_bounds(source.units(buffer), rules[name]) for name, buffer in source.buffers.items())
    return within and (num_envs is None or all(map(source.gapless, source.buffers.values())))
