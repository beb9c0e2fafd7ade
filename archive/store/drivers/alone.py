"""Does no I/O of its own: a store around a store, for a single writer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from archive.base import NotExclusiveError, in_child
from archive.store.drivers.failures import Kind, judge
from archive.store.drivers.protocols import Buffer, Copy, DeleteMany, Driver, GetRanges, Info, Scan, Scatter, Versions

_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


in_child(_renew_lock)


class SingleWriterDriver(Driver):
    """Another driver, whose every create looks first, and only puts where the store can't create.

    Threads of this process take turns; another process that writes there, too, is not seen.
    """

    def __init__(self, inner: Driver) -> None:
        self._inner = inner
        self.remote = inner.remote
        self.exclusive = inner.creating is not None and inner.creating.exclusive

    @property
    def creating(self) -> SingleWriterDriver:
        return self

    @property
    def transport(self) -> str:  # type: ignore[override]
        return self._inner.transport

    @property
    def ranging(self) -> GetRanges | None:
        return self._inner.ranging

    @property
    def scattering(self) -> Scatter | None:
        return self._inner.scattering

    @property
    def copying(self) -> Copy | None:
        return self._inner.copying

    @property
    def scanning(self) -> Scan | None:
        return self._inner.scanning

    @property
    def deleting(self) -> DeleteMany | None:
        return self._inner.deleting

    @property
    def versioning(self) -> Versions | None:
        return self._inner.versioning

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Looked at first in any case, as there are stores that pass over a condition which they do not know."""
        with _lock:
            try:
                self._inner.head(key, timeout_s)
            except FileNotFoundError:
                self._create_or_put(key, parts, timeout_s)
            else:
                raise FileExistsError(key)

    def _create_or_put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        try:
            if self._inner.creating is not None:
                self._inner.creating.create(key, parts, timeout_s)
                return
        except Exception as error:
            if not isinstance(error, NotExclusiveError) and judge(error).kind is not Kind.UNSUPPORTED:
                raise
        self._inner.put(key, parts, timeout_s)

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        return self._inner.get(key, start, stop, timeout_s)

    def stream(self, key: str, start: int, stop: int, take: Callable[[Buffer], None], timeout_s: float) -> None:
        self._inner.stream(key, start, stop, take, timeout_s)

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._inner.put(key, parts, timeout_s)

    def head(self, key: str, timeout_s: float) -> Info:
        return self._inner.head(key, timeout_s)

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        return self._inner.list(prefix, timeout_s)

    def delete(self, key: str, timeout_s: float) -> None:
        self._inner.delete(key, timeout_s)
