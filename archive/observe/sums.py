"""Pure, no I/O: sums of this process, which a forked child begins anew, and where to ask for more."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from archive.base import in_child

BOUNDS_S = (0.01, 0.05, 0.25, 1.0, 5.0, 25.0, 120.0, 600.0)  # of the buckets of a histogram


class Label(NamedTuple):
    """One dimension of a metric."""

    name: str
    value: str


Labels = tuple[Label, ...]


class Sample(NamedTuple):
    """A number of a metric."""

    labels: Labels
    value: float


@dataclass(slots=True)
class Times:
    """How long something took: how often it was within each bound, and longer than the last one."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0


_lock = threading.Lock()
_sums: dict[str, dict[Labels, float]] = {}
_times: dict[str, Times] = {}
_sources: dict[str, Callable[[], Iterable[Sample]]] = {}


def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _sums.clear()
    _times.clear()


in_child(_begin_anew)


def labels(**values: str) -> Labels:
    """Labels by name."""
    return tuple(Label(name, value) for name, value in values.items())


def add(name: str, amount: float, **values: str) -> None:
    """Add to the sum of the metric `name` that has these labels."""
    own = labels(**values)
    with _lock:
        of = _sums.setdefault(name, {})
        of[own] = of.get(own, 0) + amount


def add_time(operation: str, seconds: float) -> None:
    """Note that an operation took so long."""
    with _lock:
        times = _times.setdefault(operation, Times())
        times.counts[bisect_left(BOUNDS_S, seconds)] += 1
        times.seconds += seconds


def source(name: str, read: Callable[[], Iterable[Sample]]) -> None:
    """Say where the numbers of the metric `name` are asked for, when somebody looks."""
    _sources[name] = read


def samples(name: str) -> list[Sample]:
    """The numbers of a metric that is no histogram, now."""
    if name in _sources:
        return list(_sources[name]())
    with _lock:
        return [Sample(own, value) for own, value in _sums.get(name, {}).items()]


def times() -> dict[str, Times]:
    """How long each operation took, by name, now."""
    with _lock:
        return {name: Times(list(one.counts), one.seconds) for name, one in _times.items()}
