"""Does I/O: fsspec's memory filesystem, which all of a process shares."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from archive.base import forking
from archive.store.drivers.plain import FsspecDriver, in_pages
from archive.store.drivers.protocols import Buffer, Found, Info

_lock = forking.own(sys.modules[__name__], "_lock", threading.Lock)


class MemoryDriver(FsspecDriver):
    """Objects in memory. One process is all there is, so a lock makes `create` atomic."""

    remote = False
    exclusive = True

    @property
    def creating(self) -> MemoryDriver:
        return self

    @property
    def telling(self) -> MemoryDriver:
        return self

    def now(self, folder: str, timeout_s: float) -> datetime:
        """Look at the clock that fsspec does."""
        return datetime.now(UTC)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        with _lock: self._look_and_put(key, parts, timeout_s)  # fmt: skip  # noqa: E701 (see IOStats.add)

    def _look_and_put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        try:
            self.head(key, timeout_s)
        except FileNotFoundError:
            self.put(key, parts, timeout_s)
        else:
            raise FileExistsError(key)

    def head(self, key: str, timeout_s: float) -> Info:
        """By the name alone: fsspec looks whether any other one begins with it, through all that there are."""
        held = self._fs.store.get(self._fs._strip_protocol(self._path(key)))
        if held is None:
            raise FileNotFoundError(key)
        return Info(int(held.size), "", held.modified)

    def delete(self, key: str, timeout_s: float) -> None:
        self._fs._rm(self._path(key))

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Found]]:
        """fsspec's own way looks through all objects for each folder."""
        stem = f"{self._root}/{prefix}/" if prefix else f"{self._root}/"
        held = [(path, file) for path, file in self._fs.store.copy().items() if path.startswith(stem)]
        found = [Found(path[len(self._root) + 1 :], file.size, file.modified) for path, file in held]
        return in_pages(sorted(one for one in found if one.key > after))
