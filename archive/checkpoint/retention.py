"""Retention of a run's checkpoints: the ones to keep, and why. Forgetting the others is `archive.maintain`'s."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Self

from archive.base import MOST_S, CorruptManifestError, UsageError, jsontree, seconds_of, written
from archive.log import KeepRule
from archive.store import Storage

_COMMIT = re.compile(r"commits/[0-9]{6}/([0-9]{9,})\.json")
_BEST = {"max": (1, "greatest"), "min": (-1, "least")}  # the sign with which the best is the greatest, and a word


class Candidate(NamedTuple):
    """A whole checkpoint of the run. `made`: its time, by the clock of the store."""

    commit: int
    step: int
    metrics: Mapping[str, float]
    made: datetime | None = None


@dataclass(frozen=True)
class Keep:
    """A retention policy. A checkpoint stays if a rule selects it; the newest stays always, and all without rules.

    last: this many of the newest.  every: those whose step is a multiple of it.  within: those no older than "7d" or
    "12h" (s, m, h, d, w), by the clock of the store.  best: ("return", "max"), the one with the greatest value of a
    metric, or ("loss", "min"); ("return", 3), the greatest three, or ("loss", "min", 3); of equals the newest.
    """

    last: int | None = None
    every: int | None = None
    best: tuple[str, str] | tuple[str, int] | tuple[str, str, int] | None = None
    within: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and not _is_count(value):
                raise UsageError(f"keep.{name}={value!r}: give a whole number of 1 or more, or None")
        if self.best is not None:
            object.__setattr__(self, "best", _checked_best(self.best))
        if self.within is not None:
            object.__setattr__(self, "within", written(_seconds(self.within)))

    @property
    def rule(self) -> KeepRule:
        """The rule of this policy, as a commit has it."""
        best: Any = self.best or ()  # checked, so that it has a direction, and a number if that is not one
        within_s = None if self.within is None else _seconds(self.within)
        return KeepRule(self.last, self.every, best[:2] or None, best[2] if best[2:] else None, within_s)

    @classmethod
    def of(cls, rule: KeepRule | None) -> Self:
        """The policy of a rule in a commit; without a rule all are retained."""
        if rule is None:
            return cls()
        best: Any = rule.best if rule.best is None or rule.best_count is None else (*rule.best, rule.best_count)
        return cls(rule.last, rule.every, best, None if rule.within_s is None else written(min(rule.within_s, MOST_S)))

    def kept(self, candidates: Sequence[Candidate], now: datetime | None = None) -> list[int]:
        """The commits of the checkpoints to retain, oldest first. now: by the clock of the store, as `made` is."""
        commits = sorted(c.commit for c in candidates)
        if self == Keep() or not commits:
            return commits
        return sorted({commits[-1], *self.reasons(candidates, now)})

    def reasons(self, candidates: Sequence[Candidate], now: datetime | None = None) -> dict[int, list[str]]:
        """Commit -> the rules that select it, in words; only for selected ones."""
        ordered = sorted(candidates, key=lambda c: c.commit)
        out: dict[int, list[str]] = {}
        for commit, reason in (*self._by_place(ordered), *self._by_age(ordered, now), *self._by_value(ordered)):
            out.setdefault(commit, []).append(reason)
        return out

    def _by_place(self, ordered: Sequence[Candidate]) -> Iterator[tuple[int, str]]:
        if self.last is not None:
            yield from ((c.commit, f"last {self.last}") for c in ordered[-self.last :])
        if self.every is not None:
            yield from ((c.commit, f"every {self.every}") for c in ordered if c.step % self.every == 0)

    def _by_age(self, ordered: Sequence[Candidate], now: datetime | None) -> Iterator[tuple[int, str]]:
        """Checkpoints that are young enough, or of unknown age."""
        if self.within is not None:
            most_s = _seconds(self.within)
            for c in ordered:
                if now is None or c.made is None or (now - c.made).total_seconds() <= most_s:
                    yield c.commit, f"within {self.within}"

    def _by_value(self, ordered: Sequence[Candidate]) -> Iterator[tuple[int, str]]:
        if self.best is None:
            return
        best: Any = (*self.best, 1)
        metric, direction, count = best[:3]
        sign, word = _BEST[direction]
        scored = [
            (sign * c.metrics[metric], c.commit) for c in ordered if not math.isnan(c.metrics.get(metric, math.nan))
        ]
        for _, commit in sorted(scored, reverse=True)[:count]:
            yield commit, f"{word} {metric}" if count == 1 else f"one of the {count} of {word} {metric}"

    def __str__(self) -> str:
        given = ((name, getattr(self, name)) for name in ("last", "every", "within", "best"))
        return f"Keep({', '.join(f'{name}={value!r}' for name, value in given if value is not None)})"


@dataclass(frozen=True)
class Clock:
    """The time of the store, and of its commits; a host's own clock may be off by days. Empty: not asked."""

    now: datetime | None = None
    made: Mapping[int, datetime] = field(default_factory=dict)


def read_clock(storage: Storage, keep: Keep) -> Clock:
    """The clock of the store, which lists the commits; empty unless the policy has an age."""
    if keep.within is None:
        return Clock()
    found = ((_COMMIT.fullmatch(one.key), one.modified) for one in storage.scan("commits"))
    made = {int(match[1]): modified for match, modified in found if match}
    return Clock(storage.clock("commits"), made)


def candidates(rows: Iterable[Mapping[str, Any]], clock: Clock) -> list[Candidate]:
    """The whole checkpoints among these rows of the checkpoints table, with the facts that a policy needs."""
    out = []
    for row in rows:
        if row["whole"]:
            metrics = jsontree.loads(row["metrics"] or "{}")
            if not isinstance(metrics, dict) or not all(isinstance(value, (int, float)) for value in metrics.values()):
                raise CorruptManifestError(
                    f"the row of checkpoint {row['commit']} in the checkpoints table has metrics "
                    f"{row['metrics']!r:.80}, which are not numbers by name; run `archive verify`"
                )
            out.append(Candidate(row["commit"], row["step"], metrics, clock.made.get(row["commit"])))
    return out


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def keep_of(last: int | None, every: int | None, within: str | None, best: str | None) -> Keep | None:
    """The policy of command-line options; None without any. best: as METRIC[:min|max][:N]."""
    if all(given is None for given in (last, every, within, best)):
        return None
    return Keep(last, every, None if best is None else _best_of(best), within)


def _best_of(text: str) -> Any:
    """METRIC[:min|max][:N] in the form of `Keep(best=)`: "loss:min:3", "return:3". The metric may have colons, too."""
    parts = text.split(":")
    ending: list[str | int] = []
    while len(parts) > 1 and (parts[-1].isdigit() or parts[-1] in _BEST) and len(ending) < 2:
        last = parts.pop()
        ending.insert(0, int(last) if last.isdigit() else last)
    return (":".join(parts), *(ending or ["max"]))


def _checked_best(given: Any) -> Any:
    """(metric, direction), or (metric, direction, number) if the number is more than one."""
    parts = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(parts) == 2 and _is_count(parts[1]):
        parts = (parts[0], "max", parts[1])
    metric, direction, count = (*parts, 1)[:3] if len(parts) in (2, 3) else (None, None, None)
    if not isinstance(metric, str) or direction not in tuple(_BEST) or not _is_count(count):
        raise UsageError(
            f"keep.best={given!r}: give (metric, 'max'), (metric, 'min'), (metric, 3) for the greatest three, or "
            "(metric, 'min', 3)"
        )
    return (metric, direction) if count == 1 else (metric, direction, count)


def _seconds(within: Any) -> int:
    """The seconds of a duration such as "7d"."""
    found = int(seconds_of(within, "keep.within"))
    if found < 1:
        raise UsageError(f"keep.within={within!r}: give a time of a second or more, such as '7d'")
    return found
