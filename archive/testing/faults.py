"""Faults of stores: a chosen operation fails, is delayed, cut, changed or throttled, or its answer is lost.

with faults.at(url, op="create", k=3, what="lose_answer") as fault:
    train(url)
assert fault.hits

with faults.at(url, op="create", k=3, what="lose_answer") as fault:
    train(url)
assert fault.hits
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from archive.base import UsageError
from archive.store import around
from archive.store.drivers import Buffer, DelegatingDriver, Driver, Write
from archive.testing.roots import is_within, url_of
from archive.testing.tracing import check_verb

KINDS = {  # what may be done to an operation
    "fail": "the store refuses for good: StorageError",
    "deny": "the store refuses the credentials: AccessDeniedError",
    "full": "no space left: StorageFullError",
    "vanish": "the object is not there: MissingObjectError",
    "reset": "the connection breaks before anything is done; the library tries again",
    "throttle": "the store asks to slow down, as S3 does with 503; the library tries again",
    "lose_answer": "it is done, and the connection breaks instead of an answer; the library finds out",
    "delay": "it is done `seconds` later, or times out before",
    "truncate": "only `keep` of the bytes come, or are kept by the store; by default half of them",
    "corrupt": "a bit in the middle is flipped, of what comes or of what the store keeps",
    "kill": "it is done, and this process gets SIGKILL: for processes that a test has started",
}
OF_BYTES = ("truncate", "corrupt")
_WITH_BYTES = ("get", "put", "create")


@dataclass
class Injection:
    """A fault for operations k, k + 1, ... of the matching ones; `hits` lists those that it struck."""

    what: str | Exception
    op: str = "any"
    k: int = 1
    times: int | None = 1
    key: str = ""
    seconds: float = 1.0
    keep: int | None = None
    hits: list[str] = field(default_factory=list)
    seen: int = 0  # operations that matched so far
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def __post_init__(self) -> None:
        check_verb(self.op)
        if isinstance(self.what, str) and self.what not in KINDS:
            raise UsageError(f"what={self.what!r} is unknown: give an exception to raise, or {', '.join(KINDS)}")
        if self.what in OF_BYTES and self.op not in ("any", *_WITH_BYTES):
            raise UsageError(f"{self.op} has no bytes to {self.what}: give op= {' or '.join(_WITH_BYTES)}")
        if self.k < 1 or (self.times is not None and self.times < 1):
            raise UsageError(f"k={self.k}, times={self.times}: operations count from 1; times=None is all from then on")

    def strikes(self, verb: str, key: str) -> bool:
        """True if this operation is struck; it is counted if it matches."""
        if self.op not in ("any", verb) or self.key not in key:
            return False
        if self.what in OF_BYTES and verb not in _WITH_BYTES:
            return False
        number = self.seen = next(self._numbers)
        if number < self.k or (self.times is not None and number >= self.k + self.times):
            return False
        self.hits.append(f"{verb} {key}")
        return True


T = TypeVar("T")


class ThrottledError(Exception):
    """The answer 503 of S3, in the form of botocore."""

    response: dict[str, Any] = {  # noqa: RUF012 (never written to)
        "Error": {"Code": "SlowDown", "Message": "Please reduce your request rate (injected)"},
        "ResponseMetadata": {"HTTPStatusCode": 503},
    }


_BEFORE: dict[str, Callable[[], Exception]] = {
    "fail": lambda: OSError(errno.EIO, "injected: the store failed"),
    "deny": lambda: PermissionError(errno.EACCES, "injected: refused"),
    "full": lambda: OSError(errno.ENOSPC, "injected: no space left"),
    "vanish": lambda: FileNotFoundError(errno.ENOENT, "injected: not there"),
    "reset": lambda: ConnectionRefusedError(errno.ECONNREFUSED, "injected: the connection broke before it was sent"),
    "throttle": lambda: ThrottledError("injected: SlowDown"),
}


class FaultyDriver(DelegatingDriver):
    """Another driver with faults. Reads of several ranges, or into memory of the caller's, go through `get`."""

    def __init__(self, inner: Driver, injection: Injection) -> None:
        super().__init__(inner)
        self._injection = injection

    def can(self, verb: str) -> bool:
        return verb not in ("get_ranges", "read_into") and super().can(verb)

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        strikes = self._injection.strikes("get", key)
        data = self._sent(strikes, lambda: self._inner.get(key, start, stop, timeout_s), timeout_s)
        return _changed(data, self._injection) if strikes else data

    def stream(self, key: str, start: int, stop: int, take: Callable[[Buffer], None], timeout_s: float) -> None:
        take(self.get(key, start, stop, timeout_s))

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._write("put", self._inner.put, key, parts, timeout_s)

    def put_fresh(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._write("put", self._inner.put_fresh, key, parts, timeout_s)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._write("create", self._inner.create, key, parts, timeout_s)

    def _write(self, verb: str, send: Write, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        strikes = self._injection.strikes(verb, key)
        kept = [_changed(b"".join(parts), self._injection)] if strikes else parts
        self._sent(strikes, lambda: send(key, kept, timeout_s), timeout_s)

    def _ask(self, verb: str, key: str, call: Callable[[Driver], T], timeout_s: float) -> T:
        return self._sent(self._injection.strikes(verb, key), lambda: call(self._inner), timeout_s)

    def _sent(self, strikes: bool, send: Callable[[], T], timeout_s: float) -> T:
        """Send the request with the injected fault."""
        what = self._injection.what
        if not strikes or what in OF_BYTES:
            return send()
        if isinstance(what, Exception):
            raise what
        if what in _BEFORE:
            raise _BEFORE[what]()
        if what == "delay":
            _wait(self._injection.seconds, timeout_s)
        answer = send()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "lose_answer":
            raise ConnectionResetError(errno.ECONNRESET, "injected: the answer was lost")
        return answer


def _wait(seconds: float, timeout_s: float) -> None:
    """Wait as long as a client with a time-out does."""
    time.sleep(min(seconds, timeout_s))
    if seconds > timeout_s:
        raise TimeoutError(errno.ETIMEDOUT, "injected: no answer in time")


def _changed(data: Buffer, injection: Injection) -> Buffer:
    """The bytes after the fault; only faults of bytes change them."""
    if injection.what == "truncate":
        return data[: len(data) // 2 if injection.keep is None else injection.keep]
    if injection.what == "corrupt" and len(data):
        middle = len(data) // 2
        return bytes(data[:middle]) + bytes([data[middle] ^ 1]) + bytes(data[middle + 1 :])
    return data


__all__ = ["KINDS", "Injection", "at"]


@contextmanager
def at(
    where: Any,
    *,
    op: str = "any",
    k: int = 1,
    what: str | Exception = "fail",
    times: int | None = 1,
    key: str = "",
    seconds: float = 1.0,
    keep: int | None = None,
) -> Iterator[Injection]:
    """Within the block, break operations on the store of an archive or URL, whoever in this process sends them.

    op: get, put, create, list, delete, head or copy.  key: a text in the matching keys.  k: the first one that is
    broken, counted from 1 among the matching ones; each try counts.  times: their number; None for all from then on.
    what: one of KINDS, or an exception, which is raised instead.  Blocks may be nested; forked processes
    inherit it, and count by themselves. UsageError for an unknown fault.
    """
    injection = Injection(what, op, k, times, key, seconds, keep)
    place = url_of(where)

    def wrap(url: str, driver: Driver) -> Driver:
        return FaultyDriver(driver, injection) if is_within(url, place) else driver

    with around(wrap):
        yield injection
