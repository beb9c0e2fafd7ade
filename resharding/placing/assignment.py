"""Pure, no I/O: which target rank gets which live steps, and where they stand there. Only this drops anything.

Units are the live episodes of one buffer in canonical order (source rank, env row, time). Everything is integer
arithmetic on arrays, so the answer is the same on every rank and machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import UsageError
from archive.manifest import NO_ENV

FILTERED = "filter"  # why: the plan's own condition
POLICIES = ("balanced", "interleaved", "by_trajectory")
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Units(NamedTuple):
    """Live episodes (or what is left of them), one entry each, in canonical order."""

    rank: Ints
    env: Ints
    steps: Ints
    weight: Ints
    age: Ints  # smaller is older
    headless: Mask  # the first step is not live
    tailless: Mask  # the last step is not live, or was never made
    open: Mask  # of the tailless: the episode is under way and may go on

    @property
    def total(self) -> int:
        return len(self.rank)


@dataclass(frozen=True)
class Rules:
    """How to deal them out. `divisible`: steps are independent, so a unit may be cut anywhere."""

    world_size: int
    num_envs: int | None = None
    max_length: int | None = None
    capacity: int | None = None
    max_episodes: int | None = None
    incomplete: str = "keep"
    unfinished: str = "close"
    policy: str = "balanced"
    divisible: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"policy={self.policy!r}: give one of {', '.join(POLICIES)}")
        if self.incomplete not in ("keep", "drop"):
            raise UsageError(f"incomplete={self.incomplete!r}: give 'keep' or 'drop'")
        if self.unfinished not in ("close", "continue", "drop"):
            raise UsageError(f"unfinished={self.unfinished!r}: give 'close', 'continue' or 'drop'")
        for name in ("world_size", "num_envs", "max_length", "capacity", "max_episodes"):
            value = getattr(self, name)
            if value is not None and value < (1 if name in ("world_size", "num_envs") else 0):
                raise UsageError(f"{name}={value}: give a positive number")


class Parts(NamedTuple):
    """Steps [lo, hi) of units, each on its target rank, in order of target, env row and position."""

    target: Ints
    unit: Ints
    lo: Ints
    hi: Ints
    env: Ints
    position: Ints

    @property
    def steps(self) -> Ints:
        return self.hi - self.lo

    def pick(self, index: Any) -> Parts:
        return Parts(*(column[index] for column in self))


class Dropped(NamedTuple):
    """Steps [lo, hi) of units that no target gets, and why."""

    reason: np.ndarray[Any, Any]
    unit: Ints
    lo: Ints
    hi: Ints


class Placement(NamedTuple):
    parts: Parts
    dropped: Dropped


def identity(units: Units, position: Ints) -> Placement:
    """All as it was."""
    zero = np.zeros(units.total, np.int64)
    parts = Parts(units.rank, np.arange(units.total), zero, units.steps, units.env, position)
    return Placement(parts, _dropped([]))


def within_bounds(units: Units, rules: Rules) -> bool:
    """Whether what each rank has is within the bounds as it is: it has just these env rows, and nothing is too much."""
    ranks = range(rules.world_size)
    if rules.num_envs is not None:
        rows = np.arange(rules.num_envs)
        if not all(np.array_equal(np.unique(units.env[units.rank == rank]), rows) for rank in ranks):
            return False
    rank_and_row = np.unique(np.stack([units.rank, units.env]), axis=1, return_inverse=True)[1].reshape(-1)
    most = {
        "max_length": np.bincount(rank_and_row, weights=units.steps),
        "capacity": np.bincount(units.rank, weights=units.steps),
        "max_episodes": np.bincount(units.rank),
    }
    bounds = {name: getattr(rules, name) for name in most}
    return all(bounds[name] is None or most[name].max(initial=0) <= bounds[name] for name in most)


def place(units: Units, rules: Rules, wanted: Mask) -> Placement:
    """Deal the units out by the rules; `wanted` are those that a filter let pass."""
    drops: list[tuple[str, Ints, Ints, Ints]] = []
    keep = _kept_units(units, rules, wanted, drops)
    order = np.flatnonzero(keep)
    if rules.policy == "interleaved":
        order = order[np.lexsort((units.rank[order], _ordinals(units)[order]))]
    unit, lo, hi, target = _targets(units, rules, order)
    for target_rank in range(rules.world_size) if rules.capacity is not None or rules.max_episodes is not None else ():
        mine = np.flatnonzero(target == target_rank)
        lo[mine] = _within_capacity(units, rules, unit[mine], lo[mine], hi[mine], drops)
    stays = (lo < hi) | (lo == hi) & (units.steps[unit] == 0)
    unit, lo, hi, target = (column[stays] for column in (unit, lo, hi, target))
    parts = _rows(units, rules, unit, lo, hi, target, drops)
    return Placement(parts, _dropped(drops))


def _kept_units(units: Units, rules: Rules, wanted: Mask, drops: list[Any]) -> Mask:
    keep = np.ones(units.total, bool)
    reasons = [(FILTERED, ~wanted)]
    if rules.incomplete == "drop":
        reasons += [("headless", units.headless), ("open", units.tailless)]
    elif rules.unfinished == "drop":
        reasons += [("open", units.open)]
    for reason, mask in reasons:
        out = np.flatnonzero(mask & keep)
        if len(out):
            drops.append((reason, out, np.zeros(len(out), np.int64), units.steps[out]))
        keep &= ~mask
    return keep


def _ordinals(units: Units) -> Ints:
    """Number of each unit on its source rank: what a system that counts its trajectories calls them."""
    heads = np.r_[True, units.rank[1:] != units.rank[:-1]] if units.total else np.zeros(0, bool)
    index = np.arange(units.total)
    return index - np.maximum.accumulate(np.where(heads, index, 0))


def _targets(units: Units, rules: Rules, order: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """(unit, lo, hi, target) in dealing order."""
    steps, n = units.steps[order], rules.world_size
    zero = np.zeros(len(order), np.int64)
    if rules.policy == "by_trajectory":
        per, more = divmod(len(order), n)
        sizes = [per + (rank < more) for rank in range(n)]
        return order, zero, steps, np.repeat(np.arange(n), sizes)
    if rules.divisible:
        return _cut(order, steps, n)
    return order, zero, steps, split_evenly(units.weight[order], n)


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


def _cut(order: Ints, steps: Ints, n: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Independent steps: cut exactly at k/N of all steps. Units without steps go where they stand."""
    total = int(steps.sum())
    ends = np.cumsum(steps)
    begins = ends - steps
    cuts = np.array([total * k // n for k in range(1, n)], np.int64)
    # each unit is cut at those cuts that lie within it, not at its edges
    first, last = np.searchsorted(cuts, begins, side="right"), np.searchsorted(cuts, ends, side="left")
    count = np.maximum(last - first, 0) + 1
    owner = np.repeat(np.arange(len(order)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    target = first[owner] + within
    edges = np.concatenate([[0], cuts, [total]])
    lo = np.maximum(edges[target], begins[owner]) - begins[owner]
    hi = np.minimum(edges[target + 1], ends[owner]) - begins[owner]
    lo, target = np.minimum(lo, hi), np.minimum(target, n - 1)
    some = (lo < hi) | (steps[owner] == 0)  # with fewer steps than targets, cuts coincide
    return order[owner][some], lo[some], hi[some], target[some]


def _within_capacity(units: Units, rules: Rules, unit: Ints, lo: Ints, hi: Ints, drops: list[Any]) -> Ints:
    """New `lo` for the parts of one target: the oldest leave until the rest fits (past `hi`: all of the part).

    Of the last one that leaves, its newest steps stay where steps may be cut: independent ones, and those of env rows,
    as rings overwrite them. Episodes that were added whole leave whole, and all do where only whole ones are wanted.
    """
    steps = hi - lo
    oldest = np.lexsort((np.arange(len(unit)), units.age[unit]))
    count = max(0, len(unit) - rules.max_episodes) if rules.max_episodes is not None else 0
    over = max(0, int(steps.sum()) - rules.capacity) if rules.capacity is not None else 0
    before = np.cumsum(steps[oldest]) - steps[oldest]  # steps that leave if all older parts do
    crowd, excess = np.arange(len(unit)) < count, before < over
    leaves = oldest[crowd | excess]
    taken = steps[leaves]
    ring = (units.env[unit[leaves]] != NO_ENV) & (rules.incomplete == "keep")
    cut = (ring | rules.divisible) & ~crowd[crowd | excess]
    taken = np.where(cut, np.minimum(taken, over - before[crowd | excess]), taken)
    for reason, mask in (("max_episodes", crowd), ("capacity", excess & ~crowd)):
        mine = mask[crowd | excess]
        if mine.any():
            some = leaves[mine]
            drops.append((reason, unit[some], lo[some], lo[some] + taken[mine]))
    lo = lo.copy()
    lo[leaves] += np.where(taken < steps[leaves], taken, steps[leaves] + 1)
    return lo


def _rows(units: Units, rules: Rules, unit: Ints, lo: Ints, hi: Ints, target: Ints, drops: list[Any]) -> Parts:
    """Env rows and positions: contiguous runs of about equal steps; of a row too long, the oldest steps leave."""
    steps = hi - lo
    env = np.full(len(unit), NO_ENV, np.int64)
    rows = _num_envs(units, rules)
    if rows is not None:
        for rank in range(rules.world_size):
            mine = target == rank
            env[mine] = split_evenly(steps[mine], rows)
    order = np.lexsort((np.arange(len(unit)), env, target))
    unit, lo, hi, target, env = (column[order] for column in (unit, lo, hi, target, env))
    if rules.max_length is not None:
        lo = _within_length(units.age[unit], unit, lo, hi, _row_heads(target, env), rules.max_length, drops)
        left = (hi > lo) | (units.steps[unit] == 0)
        unit, lo, hi, target, env = (column[left] for column in (unit, lo, hi, target, env))
    return Parts(target, unit, lo, hi, env, _positions(hi - lo, _row_heads(target, env)))


def _num_envs(units: Units, rules: Rules) -> int | None:
    """Env rows per target: as asked, else as many as the source ranks had; None for buffers without env rows."""
    if rules.num_envs is not None:
        return rules.num_envs
    rows = units.env[units.env != NO_ENV]
    if not len(rows):
        return 1 if rules.max_length is not None else None
    return int(max(len(np.unique(units.env[units.rank == r])) for r in np.unique(units.rank)))


def _row_heads(target: Ints, env: Ints) -> Mask:
    if not len(target):
        return np.zeros(0, bool)
    heads: Mask = np.r_[True, (target[1:] != target[:-1]) | (env[1:] != env[:-1])]
    return heads


def _positions(steps: Ints, heads: Mask) -> Ints:
    taken = np.maximum(steps, 1)  # an episode without steps has a position of its own
    ends = np.cumsum(taken) - taken
    return ends - np.maximum.accumulate(np.where(heads, ends, 0)) if len(steps) else ends


def _within_length(age: Ints, unit: Ints, lo: Ints, hi: Ints, heads: Mask, max_length: int, drops: list[Any]) -> Ints:
    """New `lo`: each row keeps its newest `max_length` steps, wherever in the row they stand."""
    if not len(unit):
        return lo
    row = np.cumsum(heads) - 1
    by_age = np.lexsort((np.arange(len(unit)), age, row))
    steps = (hi - lo)[by_age]
    total = np.bincount(row, weights=hi - lo).astype(np.int64)
    newer = np.empty_like(lo)
    newer[by_age] = np.cumsum(total)[row[by_age]] - np.cumsum(steps)  # steps of the row that are newer than this part
    fits = np.clip(max_length - newer, 0, hi - lo)
    cut = np.flatnonzero(fits < hi - lo)
    if len(cut):
        drops.append(("max_length", unit[cut], lo[cut], (hi - fits)[cut]))
    return hi - fits


def _dropped(drops: list[tuple[str, Ints, Ints, Ints]]) -> Dropped:
    if not drops:
        zero = np.zeros(0, np.int64)
        return Dropped(np.zeros(0, object), zero, zero, zero)
    reasons = np.concatenate([np.full(len(d[1]), d[0], object) for d in drops])
    return Dropped(reasons, *(np.concatenate([np.asarray(d[i], np.int64) for d in drops]) for i in (1, 2, 3)))
