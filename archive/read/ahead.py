"""Reading ahead for who looks at episodes one after the other: `for ep in eps: ep.read()`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from archive.arrays import Ints
from archive.base import ArchiveError
from archive.read.selection import Selection

MAX_BYTES = 32 * 1024 * 1024
MAX_EPISODES = 256

Key = tuple[Any, ...]
ReadRun = Callable[[int, int, Selection], list[dict[str, Any]]]


class Ahead:
    """What the episodes of one iteration share. Once two that follow each other were read, the next one brings two
    more, then four, up to MAX_BYTES; so no more is read in vain than was asked for before."""

    def __init__(self, read: ReadRun, sizes: Callable[[], Ints]) -> None:
        self._read = read
        self._sizes = sizes
        self._bytes: Ints | None = None
        self._lock = threading.Lock()  # never waited for: after a fork it may be held for ever
        self._held: dict[int, dict[str, Any]] = {}
        self._key: Key = ()
        self._next = -1
        self._count = 1

    def read(self, place: int, selection: Selection) -> dict[str, Any] | None:
        """The steps of the episode at that place; None if it should be read alone. What is given is kept no longer."""
        key = _key(selection)
        if key is None or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._found(place, key, selection)
        finally:
            self._lock.release()

    def _found(self, place: int, key: Key, selection: Selection) -> dict[str, Any] | None:
        follows = key == self._key and place == self._next
        self._key, self._next = key, place + 1
        if follows and place in self._held:
            return self._held.pop(place)
        self._held = {}
        if not follows:
            self._count = 1
            return None
        self._count = min(2 * self._count, MAX_EPISODES)
        stop = self._stop(place)
        if stop - place < 2:
            return None
        try:
            data = self._read(place, stop, selection)
        except ArchiveError:  # of any of them: who asks for that one gets the error
            self._count = 1
            return None
        self._held = dict(enumerate(data[1:], place + 1))
        return data[0]

    def _stop(self, place: int) -> int:
        if self._bytes is None:
            self._bytes = self._sizes()
        taken = np.cumsum(self._bytes[place : place + self._count])
        return place + int((taken <= MAX_BYTES).sum())


def _key(selection: Selection) -> Key | None:
    """Tells selections apart; None for one whose stand-in for missing fields is not plain."""
    if not isinstance(selection.missing, (str, int, float)):
        return None
    names = None if selection.names is None else tuple(n if isinstance(n, str) else tuple(n) for n in selection.names)
    return names, repr(selection.missing), selection.ragged
