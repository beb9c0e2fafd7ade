"""Pure, no I/O: counts of requests and bytes, of one connection and of all of this process by kind of store."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial

from archive.base import forking, in_child
from archive.observe import Label, Sample, source

VERBS = ("get", "put", "create", "list", "delete", "head", "copy")
# One lock for all counts: one inside would neither pickle nor survive a fork.
_lock = forking.own(sys.modules[__name__], "_lock", threading.Lock)


@dataclass
class IOStats:
    """Requests sent (each try counts) by verb, payload bytes, retries, and calls that ended in an error.

    answered_no: calls answered "not there" or "already there". Callers often expect that, so it is no error.
    """

    get: int = 0
    put: int = 0
    create: int = 0
    list: int = 0
    delete: int = 0
    head: int = 0
    copy: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    retries: int = 0
    answered_no: int = 0
    errors: int = 0

    @property
    def requests(self) -> int:
        """The number of requests of all verbs together."""
        return sum(getattr(self, verb) for verb in VERBS)

    def as_dict(self) -> dict[str, int]:
        with _lock:
            return {field.name: getattr(self, field.name) for field in fields(self)}

    def snapshot(self) -> IOStats:
        """A copy that does not change."""
        return IOStats(**self.as_dict())

    def __sub__(self, earlier: IOStats) -> IOStats:
        before = earlier.as_dict()
        return IOStats(**{name: count - before[name] for name, count in self.as_dict().items()})


_totals: dict[str, IOStats] = {}  # of all connections of this process, open or not, by kind of store


def count(stats: IOStats, store: str, **counts: int) -> None:
    """Add to several counts at once: of one connection, and of this process."""
    with _lock: _add(stats, store, counts)  # fmt: skip  # noqa: E701 (an interrupt by line finds no gap before the release)


def _add(stats: IOStats, store: str, counts: Mapping[str, int]) -> None:
    total = _totals.setdefault(store, IOStats())
    for name, more in counts.items():
        setattr(stats, name, getattr(stats, name) + more)
        setattr(total, name, getattr(total, name) + more)


def totals() -> dict[str, IOStats]:
    """The counts of all connections of this process together, by kind of store."""
    return {store: stats.snapshot() for store, stats in list(_totals.items())}


def _begin_anew() -> None:
    """Reset the counts in a forked child, so that its parent's are not counted twice."""
    _totals.update({store: IOStats() for store in _totals})


in_child(_begin_anew)


def _requests() -> Iterable[Sample]:
    for store, stats in totals().items():
        for verb in VERBS:
            yield Sample((Label("store", store), Label("verb", verb)), getattr(stats, verb))


def _of(count: str) -> Iterable[Sample]:
    return [Sample((Label("store", store),), getattr(stats, count)) for store, stats in totals().items()]


_COUNTS = {
    "archive.received": "bytes_in",
    "archive.sent": "bytes_out",
    "archive.retries": "retries",
    "archive.errors": "errors",
    "archive.answered.no": "answered_no",
}

source("archive.requests", _requests)
for _family, _count in _COUNTS.items():
    source(_family, partial(_of, _count))
