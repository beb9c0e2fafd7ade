"""Pure, no I/O: the metrics that there are, their sums in this process, and their text as Prometheus scrapes it.

A forked child begins its sums anew. Numbers that other modules keep are asked for when metrics are read (`source`).
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from archive.base import forking, in_child

_UNITS = {"": "", "By": "_bytes", "s": "_seconds"}


class MetricKind(StrEnum):
    """The kinds of metrics: a counter only grows, a gauge is as it is now, a histogram has buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its name, and unit ("By", "s" or none), as OpenTelemetry writes them."""

    name: str
    kind: MetricKind
    unit: str
    help: str

    @property
    def prometheus(self) -> str:
        """The name in Prometheus, the same as OpenTelemetry's exporter gives it."""
        total = "_total" if self.kind is MetricKind.COUNTER else ""
        return self.name.replace(".", "_") + _UNITS[self.unit] + total


OPERATION = Family("archive.operation", MetricKind.HISTOGRAM, "s", "Time that operations took, by operation")
FAMILIES = (
    OPERATION,
    Family("archive.operation.failures", MetricKind.COUNTER, "", "Operations that ended in an error, by operation"),
    Family("archive.written", MetricKind.COUNTER, "By", "Steps made visible, as stored, by commit or checkpoint"),
    Family("archive.requests", MetricKind.COUNTER, "", "Requests sent, each try counts, by verb and kind of store"),
    Family("archive.received", MetricKind.COUNTER, "By", "Payload received, by kind of store"),
    Family("archive.sent", MetricKind.COUNTER, "By", "Payload sent, by kind of store"),
    Family("archive.retries", MetricKind.COUNTER, "", "Tries after the first, by kind of store"),
    Family("archive.errors", MetricKind.COUNTER, "", "Requests that failed for good, by kind of store"),
    Family("archive.answered.no", MetricKind.COUNTER, "", "Requests answered as expected: not there, or already there"),
    Family("archive.resume.needed", MetricKind.COUNTER, "By", "Bytes of the steps of shares that were read"),
    Family("archive.resume.received", MetricKind.COUNTER, "By", "What was received while shares were read"),
    Family("archive.resume.planned", MetricKind.COUNTER, "", "Requests to read shares, by what plans say"),
    Family("archive.resume.requests", MetricKind.COUNTER, "", "Requests to read shares, as they were sent"),
    Family("archive.job.rows.checkpointed", MetricKind.COUNTER, "", "Steps of which a worker of a job made a result"),
    Family("archive.job.rows.ready", MetricKind.GAUGE, "", "Steps with a result of a job that are not committed yet"),
    Family("archive.job.rows.committed", MetricKind.COUNTER, "", "Steps whose results jobs committed"),
    Family("archive.job.workers", MetricKind.GAUGE, "", "Workers of a job, by state: active, pending"),
    Family("archive.job.time", MetricKind.COUNTER, "s", "Time of workers of jobs, by part: read, computed, written"),
    Family("archive.journal.behind", MetricKind.GAUGE, "s", "Age of the oldest addition of a writer not yet durable"),
)
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
    """The durations of an operation: the counts within each bound, and above the last one."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0


_lock = forking.own(sys.modules[__name__], "_lock", threading.Lock)
_sums: dict[str, dict[Labels, float]] = {}
_times: dict[str, Times] = {}
_sources: dict[str, Callable[[], Iterable[Sample]]] = {}


def _begin_anew() -> None:
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


def gauge(name: str, value: float, **values: str) -> None:
    """Set the metric `name` that has these labels."""
    with _lock:
        _sums.setdefault(name, {})[labels(**values)] = value


def add_time(operation: str, seconds: float) -> None:
    """Add the duration of an operation."""
    with _lock:
        times = _times.setdefault(operation, Times())
        times.counts[bisect_left(BOUNDS_S, seconds)] += 1
        times.seconds += seconds


def source(name: str, read: Callable[[], Iterable[Sample]]) -> None:
    """Register a function that gives the numbers of the metric `name` when metrics are read."""
    _sources[name] = read


def samples(name: str) -> list[Sample]:
    """The numbers of a metric that is no histogram, now."""
    if name in _sources:
        return list(_sources[name]())
    with _lock:
        return [Sample(own, value) for own, value in _sums.get(name, {}).items()]


def times() -> dict[str, Times]:
    """The times that each operation took, by name, now."""
    with _lock:
        return {name: Times(list(one.counts), one.seconds) for name, one in _times.items()}


_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def metrics() -> str:
    """The metrics of this process since it began (of a forked child, since the fork), as Prometheus scrapes them.

    It waits for nothing, and blocks nothing: it may be called at any time, from any thread.
    """
    return "".join(f"{line}\n" for family in FAMILIES for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    name = family.prometheus
    yield f"# HELP {name} {family.help}."
    yield f"# TYPE {name} {family.kind}"
    if family is OPERATION:
        yield from _histograms(name)
        return
    for sample in sorted(samples(family.name)):
        yield _line(name, sample.labels, sample.value)


def _histograms(name: str) -> Iterator[str]:
    for operation, one in sorted(times().items()):
        own = labels(operation=operation)
        bounds = [*map(repr, BOUNDS_S), "+Inf"]
        for bound, count in zip(bounds, accumulate(one.counts), strict=True):
            yield _line(f"{name}_bucket", own + labels(le=bound), count)
        yield _line(f"{name}_sum", own, one.seconds)
        yield _line(f"{name}_count", own, sum(one.counts))


def _line(name: str, own: Labels, value: float) -> str:
    inside = ",".join(f'{label.name}="{label.value.translate(_ESCAPED)}"' for label in own)
    return f"{name}{{{inside}}} {value:.15g}" if inside else f"{name} {value:.15g}"
