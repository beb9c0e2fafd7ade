"""Pure, no I/O: which checkpoints of a run are to be retained. Deleting the others is not done here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from archive.base import UsageError
from archive.manifest import KeepRule

DIRECTIONS = ("max", "min")


class Candidate(NamedTuple):
    """A whole checkpoint of the run."""

    commit: int
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Keep:
    """Retain a checkpoint if one of these wants it; the newest is always retained, and all, if none is given.

    last: the newest so many.  every: those whose step is a multiple of it.  best: ("return", "max"), the one with the
    greatest value of a metric, or ("loss", "min"); of equals the newest.
    """

    last: int | None = None
    every: int | None = None
    best: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"keep.{name}={value!r}: give a whole number of 1 or more, or None")
        if self.best is not None:
            pair = tuple(self.best)
            if len(pair) != 2 or not isinstance(pair[0], str) or pair[1] not in DIRECTIONS:
                raise UsageError(f"keep.best={self.best!r}: give (metric, 'max') or (metric, 'min')")
            object.__setattr__(self, "best", pair)

    @property
    def rule(self) -> KeepRule:
        """As a commit has it."""
        return KeepRule(self.last, self.every, self.best)  # type: ignore[arg-type]  # the direction was checked

    @classmethod
    def of(cls, rule: KeepRule | None) -> Self:
        """What a commit says of a run; without a rule all are retained."""
        return cls() if rule is None else cls(rule.last, rule.every, rule.best)

    def kept(self, candidates: Sequence[Candidate]) -> list[int]:
        """The commits of those to retain, oldest first."""
        ordered = sorted(candidates, key=lambda c: c.commit)
        if self == Keep() or not ordered:
            return [c.commit for c in ordered]
        chosen = {c.commit for c in ordered[-(self.last or 1) :]}
        if self.every is not None:
            chosen |= {c.commit for c in ordered if c.step % self.every == 0}
        return sorted(chosen | self._best(ordered))

    def _best(self, ordered: Sequence[Candidate]) -> set[int]:
        if self.best is None:
            return set()
        metric, direction = self.best
        sign = 1 if direction == "max" else -1
        scored = [
            (sign * c.metrics[metric], c.commit) for c in ordered if not math.isnan(c.metrics.get(metric, math.nan))
        ]
        return {max(scored)[1]} if scored else set()
