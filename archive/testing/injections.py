"""Pure, no I/O: what is to be done to which operations on a store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from archive.base import UsageError
from archive.testing.traces import check_verb

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
    """What is to be done to operations k, k + 1, ... of those that match; `hits` says to which it was."""

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
            raise UsageError(f"what={self.what!r} is no fault: give an exception to raise, or {', '.join(KINDS)}")
        if self.what in OF_BYTES and self.op not in ("any", *_WITH_BYTES):
            raise UsageError(f"{self.op} has no bytes to {self.what}: give op= {' or '.join(_WITH_BYTES)}")
        if self.k < 1 or (self.times is not None and self.times < 1):
            raise UsageError(f"k={self.k}, times={self.times}: operations count from 1; times=None is all from then on")

    def strikes(self, verb: str, key: str) -> bool:
        """Whether it is done to this operation, which is counted if it is one of those that match."""
        if self.op not in ("any", verb) or self.key not in key:
            return False
        if self.what in OF_BYTES and verb not in _WITH_BYTES:
            return False
        number = self.seen = next(self._numbers)
        if number < self.k or (self.times is not None and number >= self.k + self.times):
            return False
        self.hits.append(f"{verb} {key}")
        return True
