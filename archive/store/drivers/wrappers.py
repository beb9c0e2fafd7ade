"""Does no I/O: stores around a store: one whose requests all pass through a method, and one for a single writer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

from archive.base import NotExclusiveError, forking
from archive.store.drivers.driver import Buffer, Driver, Listed, ObjectInfo, Write
from archive.store.drivers.failures import Cause, judge

T = TypeVar("T")
_lock = forking.own(sys.modules[__name__], "_lock", threading.Lock)


class DelegatingDriver(Driver):
    """Another driver, with all that it has. What differs, a subclass overrides: `_ask` for all requests alike.

    Reads of many ranges, and the question of versions, are the inner driver's own.
    """

    def __init__(self, inner: Driver) -> None:
        self._inner = inner
        self.remote = inner.remote
        self.lists_at_once = inner.lists_at_once
        self.exclusive = inner.exclusive

    def _ask(self, verb: str, key: str, call: Callable[[Driver], T], timeout_s: float) -> T:
        """Send a request, by calling `call` with the driver that it goes to; its answer."""
        return call(self._inner)

    @property
    def transport(self) -> str:  # type: ignore[override]
        return self._inner.transport

    def can(self, verb: str) -> bool:
        return self._inner.can(verb)

    def renew(self) -> bool:
        return self._inner.renew()

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        return self._ask("get", key, lambda driver: driver.get(key, start, stop, timeout_s), timeout_s)

    def stream(self, key: str, start: int, stop: int, take: Callable[[Buffer], None], timeout_s: float) -> None:
        self._ask("get", key, lambda driver: driver.stream(key, start, stop, take, timeout_s), timeout_s)

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._ask("put", key, lambda driver: driver.put(key, parts, timeout_s), timeout_s)

    def put_fresh(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._ask("put", key, lambda driver: driver.put_fresh(key, parts, timeout_s), timeout_s)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._ask("create", key, lambda driver: driver.create(key, parts, timeout_s), timeout_s)

    def create_in_parts(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._ask("create", key, lambda driver: driver.create_in_parts(key, parts, timeout_s), timeout_s)

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        return self._ask("head", key, lambda driver: driver.head(key, timeout_s), timeout_s)

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        return self._ask("list", prefix, lambda driver: driver.list(prefix, timeout_s), timeout_s)

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        asked: Driver | None = None
        pages: Iterator[Sequence[Listed]] = iter(())

        def following(driver: Driver) -> Sequence[Listed]:
            nonlocal asked, pages
            if driver is not asked:
                asked, pages = driver, driver.scan(prefix, after, timeout_s)
            return next(pages, [])

        while page := self._ask("list", prefix, following, timeout_s):
            yield page
            after = page[-1].key

    def delete(self, key: str, timeout_s: float) -> None:
        self._ask("delete", key, lambda driver: driver.delete(key, timeout_s), timeout_s)

    def delete_many(self, keys: Sequence[str], timeout_s: float) -> Mapping[str, Exception]:
        return self._ask("delete", keys[0], lambda driver: driver.delete_many(keys, timeout_s), timeout_s)

    def get_ranges(self, key: str, spans: Sequence[tuple[int, int]], timeout_s: float) -> Sequence[bytes]:
        return self._inner.get_ranges(key, spans, timeout_s)

    def read_into(
        self, key: str, starts: Sequence[int], rooms: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Sequence[int]:
        return self._inner.read_into(key, starts, rooms, timeout_s)

    def versioned(self, timeout_s: float) -> bool:
        return self._inner.versioned(timeout_s)

    def locate(self, key: str) -> str:
        return self._inner.locate(key)

    def copy(self, source: str, key: str, timeout_s: float) -> None:
        self._ask("copy", key, lambda driver: driver.copy(source, key, timeout_s), timeout_s)

    def now(self, folder: str, timeout_s: float) -> datetime | None:
        return self._ask("list", folder, lambda driver: driver.now(folder, timeout_s), timeout_s)


class SingleWriterDriver(DelegatingDriver):
    """Another driver, whose every create looks first, and puts if the store cannot create.

    Threads of this process take turns; other writing processes are not noticed.
    """

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.lists_at_once = False  # a store that needs this is not taken at its word

    def can(self, verb: str) -> bool:
        return verb == "create" or super().can(verb)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Create after a look in any case: some stores ignore a condition that they do not know."""
        self._look_and(self._create_or_put, key, parts, timeout_s)

    def create_in_parts(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._look_and(self._inner.put, key, parts, timeout_s)

    def _look_and(self, send: Write, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        with _lock:
            try:
                self._inner.head(key, timeout_s)
            except FileNotFoundError:
                send(key, parts, timeout_s)
            else:
                raise FileExistsError(key)

    def put_fresh(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Put without a condition, which the store may not know."""
        self._inner.put(key, parts, timeout_s)

    def _create_or_put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        try:
            if self._inner.can("create"):
                self._inner.create(key, parts, timeout_s)
                return
        except Exception as error:
            if not isinstance(error, NotExclusiveError) and judge(error).kind is not Cause.UNSUPPORTED:
                raise
        self._inner.put(key, parts, timeout_s)
