"""Does no I/O of its own: a store around a store, for a single writer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from archive.base import NotExclusiveError, forking
from archive.store.drivers.delegating import DelegatingDriver
from archive.store.drivers.failures import Kind, judge
from archive.store.drivers.protocols import Buffer, Driver

_lock = forking.own(sys.modules[__name__], "_lock", threading.Lock)


class SingleWriterDriver(DelegatingDriver):
    """Another driver, whose every create looks first, and only puts where the store can't create.

    Threads of this process take turns; another process that writes there, too, is not seen.
    """

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.lists_at_once = False  # a store that needs this is not taken at its word
        self.exclusive = inner.creating is not None and inner.creating.exclusive

    @property
    def creating(self) -> SingleWriterDriver:
        return self

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
