"""Pure, no I/O: which target rank gets which live steps, and where they stand there. Only this drops anything.

Units are the live episodes of one buffer in canonical order (source rank, env row, time). Everything is integer
arithmetic on arrays, so the answer is the same on every rank and machine.
"""

from __future__ import annotations

import numpy as np

from archive.arrays import Ints, Mask, group_of, offsets_of, run_heads, since_head, spans
from archive.steps import codes
from archive.tables import NO_ENV
from resharding.placing.records import FILTERED, Drop, Dropped, Parts, Placement, Rules, Units


def identity(units: Units, position: Ints) -> Placement:
    """All as it was."""
    zero = np.zeros(units.total, np.int64)
    parts = Parts(units.rank, np.arange(units.total), zero, units.steps, units.env, position)
    return Placement(parts, Dropped.of([]))


def within_bounds(units: Units, rules: Rules) -> bool:
    """Whether what each rank has is within the bounds as it is: it has just these env rows, and nothing is too much."""
    ranks = range(rules.world_size)
    if rules.num_envs is not None:
        rows = np.arange(rules.num_envs)
        if not all(np.array_equal(np.unique(units.env[units.rank == rank]), rows) for rank in ranks):
            return False
    rank_and_row = codes(units.rank, units.env)
    most = {
        "max_length": np.bincount(rank_and_row, weights=units.steps),
        "capacity": np.bincount(units.rank, weights=units.steps),
        "max_episodes": np.bincount(units.rank),
    }
    bounds = {name: getattr(rules, name) for name in most}
    return all(bounds[name] is None or most[name].max(initial=0) <= bounds[name] for name in most)


def place(units: Units, rules: Rules, wanted: Mask) -> Placement:
    """Deal the units out by the rules; `wanted` are those that a filter let pass."""
    drops: list[Drop] = []
    order = np.flatnonzero(_kept_units(units, rules, wanted, drops))
    if rules.policy == "interleaved":
        order = order[np.lexsort((units.rank[order], _ordinals(units)[order]))]
    parts = _dealt(units, rules, order)
    if rules.capacity is not None or rules.max_episodes is not None:
        parts = _within_capacity(units, rules, parts, drops)
    parts = _in_rows(units, rules, parts)
    if rules.max_length is not None:
        parts = _within_length(units, rules.max_length, parts, drops)
    return Placement(parts._replace(position=_positions(parts)), Dropped.of(drops))


def _kept_units(units: Units, rules: Rules, wanted: Mask, drops: list[Drop]) -> Mask:
    keep = np.ones(units.total, bool)
    reasons = [(FILTERED, ~wanted)]
    if rules.incomplete == "drop":
        reasons += [("headless", units.headless), ("open", units.tailless)]
    elif rules.unfinished == "drop":
        reasons += [("open", units.open)]
    for reason, mask in reasons:
        out = np.flatnonzero(mask & keep)
        if len(out):
            drops.append(Drop(reason, out, np.zeros(len(out), np.int64), units.steps[out]))
        keep &= ~mask
    return keep


def _ordinals(units: Units) -> Ints:
    """Number of each unit on its source rank: what a system that counts its trajectories calls them."""
    return since_head(np.arange(units.total), run_heads(units.rank))


def _dealt(units: Units, rules: Rules, order: Ints) -> Parts:
    """Who gets the units, in this order; they stand nowhere yet."""
    if rules.divisible and rules.policy != "by_trajectory":
        return _cut(order, units.steps[order], rules.world_size)
    if rules.policy == "by_trajectory":
        each, more = divmod(len(order), rules.world_size)
        target = np.repeat(np.arange(rules.world_size), [each + (rank < more) for rank in range(rules.world_size)])
    else:
        target = split_evenly(units.weight[order], rules.world_size)
    return _nowhere(target, order, np.zeros(len(order), np.int64), units.steps[order])


def _nowhere(target: Ints, unit: Ints, lo: Ints, hi: Ints) -> Parts:
    return Parts(target, unit, lo, hi, np.full(len(unit), NO_ENV, np.int64), np.zeros(len(unit), np.int64))


def split_evenly(weight: Ints, parts: int) -> Ints:
    """Which of `parts` contiguous parts each item goes to: that in which its middle lies, by running weight."""
    weight = np.where(weight.sum() > 0, weight, 1) if len(weight) else weight
    before = np.cumsum(weight) - weight
    total = max(1, int(weight.sum()))
    middle = (
        [min(parts - 1, (2 * int(b) + int(w)) * parts // (2 * total)) for b, w in zip(before, weight, strict=True)]
        if (total * 2 * parts >= 2**62)
        else np.minimum(parts - 1, (2 * before + weight) * parts // (2 * total))
    )
    return np.asarray(middle, np.int64)


def _cut(order: Ints, steps: Ints, n: int) -> Parts:
    """Independent steps: cut exactly at k/N of all steps. Units without steps go where they stand."""
    total = int(steps.sum())
    ends = np.cumsum(steps)
    begins = ends - steps
    edges = np.array([total * k // n for k in range(n + 1)], np.int64)
    # each unit is cut at those edges that lie within it, not at its own
    first, last = group_of(edges[:-1], begins), group_of(edges[:-1], ends - 1)
    count = np.maximum(last - first, 0) + 1
    owner = np.repeat(np.arange(len(order)), count)
    target = spans(first, count)
    lo = np.maximum(edges[target], begins[owner]) - begins[owner]
    hi = np.minimum(edges[target + 1], ends[owner]) - begins[owner]
    parts = _nowhere(np.minimum(target, n - 1), order[owner], np.minimum(lo, hi), hi)
    return parts.pick((parts.lo < hi) | (steps[owner] == 0))  # with fewer steps than targets, cuts coincide


def _left(units: Units, parts: Parts) -> Parts:
    """The parts that still have steps, or are of episodes that never had any."""
    return parts.pick((parts.hi > parts.lo) | (parts.hi == parts.lo) & (units.steps[parts.unit] == 0))


def _within_capacity(units: Units, rules: Rules, parts: Parts, drops: list[Drop]) -> Parts:
    """The parts after the oldest of each target have left until the rest fits."""
    lo = parts.lo.copy()
    for target in range(rules.world_size):
        mine = np.flatnonzero(parts.target == target)
        lo[mine] = _newest(units, rules, parts.pick(mine), drops)
    return _left(units, parts._replace(lo=lo))


def _newest(units: Units, rules: Rules, parts: Parts, drops: list[Drop]) -> Ints:
    """New `lo` for the parts of one target: the oldest leave until the rest fits (past `hi`: all of the part).

    Of the last one that leaves, its newest steps stay where steps may be cut: independent ones, and those of env rows,
    as rings overwrite them. Episodes that were added whole leave whole, and all do where only whole ones are wanted.
    """
    steps = parts.steps
    oldest = np.lexsort((np.arange(len(steps)), units.age[parts.unit]))
    count = max(0, len(steps) - rules.max_episodes) if rules.max_episodes is not None else 0
    over = max(0, int(steps.sum()) - rules.capacity) if rules.capacity is not None else 0
    before = np.cumsum(steps[oldest]) - steps[oldest]  # steps that leave if all older parts do
    crowd, excess = np.arange(len(steps)) < count, before < over
    chosen = crowd | excess
    leaves, crowd, before = oldest[chosen], crowd[chosen], before[chosen]
    ring = (units.env[parts.unit[leaves]] != NO_ENV) & (rules.incomplete == "keep")
    taken = np.where((ring | rules.divisible) & ~crowd, np.minimum(steps[leaves], over - before), steps[leaves])
    for reason, mine in (("max_episodes", crowd), ("capacity", ~crowd)):
        if mine.any():
            some = parts.pick(leaves[mine])
            drops.append(Drop(reason, some.unit, some.lo, some.lo + taken[mine]))
    lo = parts.lo.copy()
    lo[leaves] += np.where(taken < steps[leaves], taken, steps[leaves] + 1)
    return lo


def _in_rows(units: Units, rules: Rules, parts: Parts) -> Parts:
    """The parts dealt out to env rows, in contiguous runs of about equal steps, in order of target and row."""
    env = parts.env.copy()
    rows = _num_envs(units, rules)
    if rows is not None:
        for target in range(rules.world_size):
            mine = parts.target == target
            env[mine] = split_evenly(parts.steps[mine], rows)
    return parts._replace(env=env).pick(np.lexsort((np.arange(len(env)), env, parts.target)))


def _num_envs(units: Units, rules: Rules) -> int | None:
    """Env rows per target: as asked, else as many as the source ranks had; None for buffers without env rows."""
    if rules.num_envs is not None:
        return rules.num_envs
    rows = units.env[units.env != NO_ENV]
    if not len(rows):
        return 1 if rules.max_length is not None else None
    return int(max(len(np.unique(units.env[units.rank == r])) for r in np.unique(units.rank)))


def _positions(parts: Parts) -> Ints:
    taken = np.maximum(parts.steps, 1)  # an episode without steps has a position of its own
    return since_head(offsets_of(taken)[:-1], run_heads(parts.target, parts.env))


def _within_length(units: Units, max_length: int, parts: Parts, drops: list[Drop]) -> Parts:
    """The parts after each row has kept its newest `max_length` steps, wherever in the row they stand."""
    row = np.cumsum(run_heads(parts.target, parts.env)) - 1
    by_age = np.lexsort((np.arange(len(row)), units.age[parts.unit], row))
    total = np.bincount(row, weights=parts.steps).astype(np.int64)
    newer = np.empty_like(parts.lo)  # steps of the row that are newer than this part
    newer[by_age] = np.cumsum(total)[row[by_age]] - np.cumsum(parts.steps[by_age])
    lo = parts.hi - np.clip(max_length - newer, 0, parts.steps)
    cut = np.flatnonzero(lo > parts.lo)
    if len(cut):
        drops.append(Drop("max_length", parts.unit[cut], parts.lo[cut], lo[cut]))
    return _left(units, parts._replace(lo=lo))
