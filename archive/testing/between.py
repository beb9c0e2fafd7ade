"""Does no I/O of its own: a store around a store, whose every request passes through one function."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

from archive.store.drivers import Copy, Create, DelegatingDriver, DeleteMany, Found, Info, Scan, Tell

T = TypeVar("T")


class BetweenDriver(DelegatingDriver):
    """Another driver, and what is to happen to its requests: those without bytes go through `_through`; how bytes come
    and go, a subclass says."""

    @abstractmethod
    def _through(self, verb: str, key: str, send: Callable[[], T], timeout_s: float) -> T:
        """Send a request, and give its answer."""

    @property
    def exclusive(self) -> bool:
        """Whether of two creators at most one succeeds."""
        return self._inner.creating is not None and self._inner.creating.exclusive

    @property
    @abstractmethod
    def creating(self) -> Create | None: ...

    @property
    def copying(self) -> Copy | None:
        return self if self._inner.copying is not None else None

    @property
    def scanning(self) -> Scan | None:
        return self if self._inner.scanning is not None else None

    @property
    def deleting(self) -> DeleteMany | None:
        return self if self._inner.deleting is not None else None

    @property
    def telling(self) -> Tell | None:
        return self if self._inner.telling is not None else None

    def now(self, folder: str, timeout_s: float) -> datetime | None:
        telling = self._inner.telling
        assert telling is not None
        return self._through("list", folder, lambda: telling.now(folder, timeout_s), timeout_s)

    def head(self, key: str, timeout_s: float) -> Info:
        return self._through("head", key, lambda: self._inner.head(key, timeout_s), timeout_s)

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Found]]:
        assert self._inner.scanning is not None
        pages = self._inner.scanning.scan(prefix, after, timeout_s)
        while (page := self._through("list", prefix, lambda: next(pages, None), timeout_s)) is not None:
            yield page

    def delete(self, key: str, timeout_s: float) -> None:
        self._through("delete", key, lambda: self._inner.delete(key, timeout_s), timeout_s)

    def delete_many(self, keys: Sequence[str], timeout_s: float) -> Mapping[str, Exception]:
        deleting = self._inner.deleting
        assert deleting is not None
        return self._through("delete", keys[0], lambda: deleting.delete_many(keys, timeout_s), timeout_s)

    def locate(self, key: str) -> str:
        assert self._inner.copying is not None
        return self._inner.copying.locate(key)

    def copy(self, source: str, key: str, timeout_s: float) -> None:
        copying = self._inner.copying
        assert copying is not None
        self._through("copy", key, lambda: copying.copy(source, key, timeout_s), timeout_s)
