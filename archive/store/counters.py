"""Pure, no I/O: counts of requests and bytes, safe to add to from several threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields

from archive.base import forking

_lock = forking.own(
    sys.modules[__name__], "_lock", threading.Lock
)  # one for all: a lock inside would neither pickle nor survive a fork


@dataclass
class IOStats:
    """Requests sent (each try counts) by verb, payload bytes, retries, and calls that ended in an error.

    answered_no: calls answered "not there" or "already there". That is often what is asked, so it is no error.
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
        """All requests together."""
        return self.get + self.put + self.create + self.list + self.delete + self.head + self.copy

    def add(self, **counts: int) -> None:
        """Add to several counts at once."""
        with _lock: self._add(counts)  # fmt: skip  # noqa: E701 (an interrupt by line finds no gap before the release)

    def _add(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        with _lock:
            return {field.name: getattr(self, field.name) for field in fields(self)}

    def snapshot(self) -> IOStats:
        """A copy that stands still."""
        return IOStats(**self.as_dict())

    def __sub__(self, earlier: IOStats) -> IOStats:
        before = earlier.as_dict()
        return IOStats(**{name: count - before[name] for name, count in self.as_dict().items()})
