"""Pure, no I/O: live episodes as units to deal out, the rules for it, and who got what, as columns of integers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Mask
from archive.base import UsageError

FILTERED = "filter"  # why: the plan's own condition
POLICIES = ("balanced", "interleaved", "by_trajectory")


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

    @classmethod
    def of(cls, drops: Iterable[Drop]) -> Dropped:
        """All that was dropped, in the order in which it was."""
        some = list(drops)
        if not some:
            return cls(np.zeros(0, object), *np.zeros((3, 0), np.int64))
        reasons = np.concatenate([np.full(len(drop.unit), drop.reason, object) for drop in some])
        columns = ([drop.unit for drop in some], [drop.lo for drop in some], [drop.hi for drop in some])
        return cls(reasons, *map(np.concatenate, columns))


class Drop(NamedTuple):
    """Steps [lo, hi) of units that leave for one reason."""

    reason: str
    unit: Ints
    lo: Ints
    hi: Ints


class Placement(NamedTuple):
    """What each target gets, and what none does."""

    parts: Parts
    dropped: Dropped
