"""Does no I/O of its own: a store around a store, which passes everything on. What differs, a subclass overrides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from archive.store.drivers.protocols import (
    Buffer,
    Copy,
    Create,
    DeleteMany,
    Driver,
    GetRanges,
    Info,
    Scan,
    Scatter,
    Tell,
    Versions,
)


class DelegatingDriver(Driver):
    """Another driver, with all that it has."""

    def __init__(self, inner: Driver) -> None:
        self._inner = inner
        self.remote = inner.remote
        self.lists_at_once = inner.lists_at_once

    @property
    def transport(self) -> str:  # type: ignore[override]
        return self._inner.transport

    def renew(self) -> bool:
        return self._inner.renew()

    @property
    def creating(self) -> Create | None:
        return self._inner.creating

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

    @property
    def telling(self) -> Tell | None:
        return self._inner.telling

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
