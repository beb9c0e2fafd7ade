"""Pure, no I/O: the placement of live steps on target ranks, and their places there. Only this drops anything.

Units are the live episodes of one buffer in canonical order (source rank, env row, time), as a table of Steps: the
stream is the unit's number, the steps are 0 up to its length, and the columns are UNIT. Ranges of units are dealt
out. Everything is integer arithmetic on arrays, so the answer is the same on every rank and machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from archive.arrays import Ints, Mask, Steps, ascending, codes, group_of, offsets_of, run_heads, since_head, spans
from archive.base import Count, Form, MisshapenError, Positive, Record, UsageError, stored
from archive.tables import NO_ENV

# smaller ages are older; headless: the first step is not live; tailless: the last one is not, or was never made; open:
# of the tailless those that are under way and may go on
UNIT = ("rank", "env", "weight", "age", "headless", "tailless", "open")
FILTERED = "filter"  # the reason: the plan's own condition
POLICIES = ("balanced", "interleaved", "by_trajectory")


@dataclass(frozen=True, slots=True)
class Rules(Record):
    """The rules of dealing units out. `divisible`: steps are independent, so a unit may be cut anywhere."""

    world_size: Positive
    num_envs: Positive | None = stored(None, always=True)
    max_length: Count | None = stored(None, always=True)
    capacity: Count | None = stored(None, always=True)
    max_episodes: Count | None = stored(None, always=True)
    incomplete: str = stored("keep", always=True)
    unfinished: str = stored("close", always=True)
    policy: str = stored("balanced", always=True)
    divisible: bool = stored(False, always=True)

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


def _table(*names: str) -> Form:
    """The form of Steps as a list of these columns."""

    def read(value: Any, at: str) -> Steps:
        if type(value) is not list or len(value) != len(names):
            raise MisshapenError(f"{at} is no list of {len(names)} columns")
        columns = {
            name: _column(name, one, f"{at}[{i}]") for i, (name, one) in enumerate(zip(names, value, strict=True))
        }
        if len({len(column) for column in columns.values()}) > 1:
            raise MisshapenError(f"{at} has columns of several lengths")
        return Steps(**columns)

    def write(steps: Steps) -> list[list[Any]]:
        own = {"stream": steps.stream, "lo": steps.lo, "hi": steps.hi}
        return [(own | steps.columns)[name].tolist() for name in names]

    return Form(read, write)


def _column(name: str, values: Any, at: str) -> Any:
    kind, wanted = (str, "text") if name == "reason" else (int, "whole numbers")
    if type(values) is not list or not set(map(type, values)) <= {kind}:
        raise MisshapenError(f"{at} is a column of other than {wanted}")
    try:
        return np.array(values, object if kind is str else np.int64)
    except OverflowError as e:
        raise MisshapenError(f"{at} has a number of more than 64 bits") from e


_PARTS = _table("target", "stream", "lo", "hi", "env", "position")
_DROPPED = _table("reason", "stream", "lo", "hi")


@dataclass(frozen=True, slots=True, eq=False)
class Placement(Record):
    """The steps of a buffer's units, by the rules: those that a target rank gets, and those that none gets. The stream
    is the unit's number.

    parts: in order of the target, its env row and the position there, which are their columns (target, env, position).
    dropped: in their order, with the reason.
    """

    rules: Rules
    parts: Annotated[Steps, _PARTS]
    dropped: Annotated[Steps, _DROPPED]


def identity(units: Steps, rules: Rules, position: Ints) -> Placement:
    """The placement that moves nothing."""
    parts = Steps(units.stream, units.lo, units.hi, target=units["rank"], env=units["env"], position=position)
    return Placement(rules, parts, _gone("", units.pick(slice(0))))


def within_bounds(units: Steps, rules: Rules) -> bool:
    """True if each rank's contents are within the bounds: it has just these env rows, and nothing is too much."""
    rank, env = units["rank"], units["env"]
    if rules.num_envs is not None:
        rows = np.arange(rules.num_envs)
        if not all(np.array_equal(ascending(env[rank == one]), rows) for one in range(rules.world_size)):
            return False
    most = {
        "max_length": np.bincount(codes(rank, env), weights=units.length),
        "capacity": np.bincount(rank, weights=units.length),
        "max_episodes": np.bincount(rank),
    }
    bounds = {name: getattr(rules, name) for name in most}
    return all(bounds[name] is None or most[name].max(initial=0) <= bounds[name] for name in most)


def place(units: Steps, rules: Rules, wanted: Mask) -> Placement:
    """Deal the units out by the rules; `wanted` are those that pass the filter."""
    drops = [_gone("", units.pick(slice(0)))]
    order = np.flatnonzero(_kept_units(units, rules, wanted, drops))
    if rules.policy == "interleaved":  # by the number on its source rank, as a system counts its trajectories
        ordinal = since_head(units.stream, run_heads(units["rank"]))
        order = order[np.lexsort((units["rank"][order], ordinal[order]))]
    parts = _dealt(units.pick(order), rules)
    if rules.capacity is not None or rules.max_episodes is not None:
        parts = _within_capacity(units, rules, parts, drops)
    parts = _in_rows(units, rules, parts)
    if rules.max_length is not None:
        parts = _within_length(units, rules.max_length, parts, drops)
    taken = np.maximum(parts.length, 1)  # an episode without steps has a position of its own
    position = since_head(offsets_of(taken)[:-1], run_heads(parts["target"], parts["env"]))
    return Placement(rules, parts.beside(position=position), Steps.joined(drops))


def _gone(reason: str, some: Steps) -> Steps:
    """Dropped steps, with their reason."""
    why: Any = np.full(len(some), reason, object)
    return Steps(some.stream, some.lo, some.hi, reason=why)


def _kept_units(units: Steps, rules: Rules, wanted: Mask, drops: list[Steps]) -> Mask:
    keep = np.ones(len(units), bool)
    reasons: list[tuple[str, Any]] = [(FILTERED, ~wanted)]
    if rules.incomplete == "drop":
        reasons += [("headless", units["headless"]), ("open", units["tailless"])]
    elif rules.unfinished == "drop":
        reasons += [("open", units["open"])]
    for reason, mask in reasons:
        drops.append(_gone(reason, units.pick(mask & keep)))
        keep &= ~mask
    return keep


def _dealt(units: Steps, rules: Rules) -> Steps:
    """The ranges of these units, in this order, with the target of each."""
    ranks = rules.world_size
    if rules.divisible and rules.policy != "by_trajectory":
        return _cut(units, ranks)
    if rules.policy == "by_trajectory":
        each, more = divmod(len(units), ranks)
        target = np.repeat(np.arange(ranks), [each + (rank < more) for rank in range(ranks)])
    else:
        target = split_evenly(units["weight"], ranks)
    return Steps(units.stream, units.lo, units.hi, target=target)


def split_evenly(weight: Ints, parts: int) -> Ints:
    """The number of the contiguous part, of `parts`, that each item goes to: in which its middle is, by running
    weight."""
    weight = np.where(weight.sum() > 0, weight, 1) if len(weight) else weight
    before = np.cumsum(weight) - weight
    total = max(1, int(weight.sum()))
    middle = (
        [min(parts - 1, (2 * int(b) + int(w)) * parts // (2 * total)) for b, w in zip(before, weight, strict=True)]
        if (total * 2 * parts >= 2**62)
        else np.minimum(parts - 1, (2 * before + weight) * parts // (2 * total))
    )
    return np.asarray(middle, np.int64)


def _cut(units: Steps, ranks: int) -> Steps:
    """Independent steps, cut exactly at k/N of all steps. Units without steps go where they stand."""
    steps = units.length
    total = int(steps.sum())
    ends = np.cumsum(steps)
    begins = ends - steps
    edges = np.array([total * k // ranks for k in range(ranks + 1)], np.int64)
    # each unit is cut at those edges that are within it, not at its own
    first, last = group_of(edges[:-1], begins), group_of(edges[:-1], ends - 1)
    count = np.maximum(last - first, 0) + 1
    owner = np.repeat(np.arange(len(units)), count)
    target = spans(first, count)
    lo = np.maximum(edges[target], begins[owner]) - begins[owner]
    hi = np.minimum(edges[target + 1], ends[owner]) - begins[owner]
    parts = Steps(units.stream[owner], np.minimum(lo, hi), hi, target=np.minimum(target, ranks - 1))
    return parts.pick((parts.lo < hi) | (steps[owner] == 0))  # with fewer steps than targets, cuts coincide


def _left(units: Steps, parts: Steps, lo: Ints) -> Steps:
    """The ranges that still have steps from `lo` on, or are of episodes that never had any."""
    there = (parts.hi > lo) | (parts.hi == lo) & (units.length[parts.stream] == 0)
    return parts.cut(there, lo[there], parts.hi[there])


def _within_capacity(units: Steps, rules: Rules, parts: Steps, drops: list[Steps]) -> Steps:
    """The ranges, after the oldest of each target were dropped until the rest fits."""
    lo = parts.lo.copy()
    for target in range(rules.world_size):
        mine = np.flatnonzero(parts["target"] == target)
        lo[mine] = _newest(units, rules, parts.pick(mine), drops)
    return _left(units, parts, lo)


def _newest(units: Steps, rules: Rules, parts: Steps, drops: list[Steps]) -> Ints:
    """New `lo` for the ranges of one target: the oldest are dropped until the rest fits (past `hi`: all of it).

    The last one keeps its newest steps where steps may be cut: independent ones, and those of env rows,
    as rings overwrite them. Episodes that were added whole are dropped whole; so are all, if only whole ones may stay.
    """
    steps = parts.length
    oldest = np.lexsort((np.arange(len(steps)), units["age"][parts.stream]))
    count = max(0, len(steps) - rules.max_episodes) if rules.max_episodes is not None else 0
    over = max(0, int(steps.sum()) - rules.capacity) if rules.capacity is not None else 0
    before = np.cumsum(steps[oldest]) - steps[oldest]  # steps that leave if all older parts do
    crowd, excess = np.arange(len(steps)) < count, before < over
    chosen = crowd | excess
    leaves, crowd, before = oldest[chosen], crowd[chosen], before[chosen]
    ring = (units["env"][parts.stream[leaves]] != NO_ENV) & (rules.incomplete == "keep")
    taken = np.where((ring | rules.divisible) & ~crowd, np.minimum(steps[leaves], over - before), steps[leaves])
    for reason, mine in (("max_episodes", crowd), ("capacity", ~crowd)):
        lo = parts.lo[leaves[mine]]
        drops.append(_gone(reason, parts.cut(leaves[mine], lo, lo + taken[mine])))
    lo = parts.lo.copy()
    lo[leaves] += np.where(taken < steps[leaves], taken, steps[leaves] + 1)
    return lo


def _in_rows(units: Steps, rules: Rules, parts: Steps) -> Steps:
    """The ranges dealt out to env rows, in contiguous groups of about equal steps, in order of target and row."""
    env = np.full(len(parts), NO_ENV, np.int64)
    rows = _num_envs(units, rules)
    if rows is not None:
        for target in range(rules.world_size):
            mine = parts["target"] == target
            env[mine] = split_evenly(parts.length[mine], rows)
    return parts.beside(env=env).pick(np.lexsort((np.arange(len(env)), env, parts["target"])))


def _num_envs(units: Steps, rules: Rules) -> int | None:
    """Env rows per target: as asked, else as many as the source ranks had; None for buffers without env rows."""
    if rules.num_envs is not None:
        return rules.num_envs
    rank, env = units["rank"], units["env"]
    if (env == NO_ENV).all():
        return 1 if rules.max_length is not None else None
    return int(max(len(ascending(env[rank == one])) for one in ascending(rank)))


def _within_length(units: Steps, max_length: int, parts: Steps, drops: list[Steps]) -> Steps:
    """The ranges, after each row has kept its newest `max_length` steps, wherever they are in the row."""
    row = np.cumsum(run_heads(parts["target"], parts["env"])) - 1
    by_age = np.lexsort((np.arange(len(row)), units["age"][parts.stream], row))
    total = np.bincount(row, weights=parts.length).astype(np.int64)
    newer = np.empty_like(parts.lo)  # steps of the row that are newer than this part
    newer[by_age] = np.cumsum(total)[row[by_age]] - np.cumsum(parts.length[by_age])
    lo = parts.hi - np.clip(max_length - newer, 0, parts.length)
    cut = np.flatnonzero(lo > parts.lo)
    drops.append(_gone("max_length", parts.cut(cut, parts.lo[cut], lo[cut])))
    return _left(units, parts, lo)
