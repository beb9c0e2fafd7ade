"""Pure, no I/O: what all connections of this process have counted together, by kind of store, those that are gone too.

Nothing is added up before somebody asks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from archive.base import forking, in_child
from archive.observe import Label, Sample, source
from archive.store.counters import IOStats

VERBS = ("get", "put", "create", "list", "delete", "head", "copy")


@dataclass(eq=False, slots=True)
class _Counted:
    """The counts of one connection, and what they were when this process began."""

    store: str
    stats: IOStats
    before: IOStats

    @property
    def own(self) -> IOStats:
        return self.stats - self.before


_lock = forking.own(sys.modules[__name__], "_lock", threading.Lock)
_open: set[_Counted] = set()
_gone: deque[_Counted] = deque()  # not added to what follows yet: a collection of garbage may come at any moment
_past: dict[str, IOStats] = {}


def follow(owner: object, store: str, stats: IOStats) -> None:
    """Count the requests of a connection among those of this process, from now on and after it is gone."""
    counted = _Counted(store, stats, stats.snapshot())
    with _lock:
        _fold()
        _open.add(counted)
    weakref.finalize(owner, _gone.append, counted).atexit = False


def _fold() -> None:
    """Add up what is gone, so that nothing grows with the number of connections."""
    while _gone:
        counted = _gone.popleft()
        _open.discard(counted)
        _past.setdefault(counted.store, IOStats()).add(**counted.own.as_dict())


def totals() -> dict[str, IOStats]:
    """What all connections of this process have counted, by kind of store."""
    with _lock:
        _fold()
        found = {store: stats.snapshot() for store, stats in _past.items()}
        for counted in list(_open):
            found.setdefault(counted.store, IOStats()).add(**counted.own.as_dict())
    return found


def _begin_anew() -> None:
    """In a forked child what its parent has counted is not counted once more."""
    _gone.clear()
    _past.clear()
    for counted in list(_open):
        counted.before = counted.stats.snapshot()


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
