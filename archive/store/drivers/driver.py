"""Pure, no I/O: the verbs of a store, with their arguments and results.

A driver sends one request a call, and none again. It raises FileNotFoundError for an object that is not there,
FileExistsError for one that is, PermissionError where it is refused, TimeoutError or ConnectionError for what may be
tried again; exceptions of client libraries are recognised in `failures`. Keys have been checked before they come here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

Buffer = bytes | bytearray | memoryview
Write = Callable[[str, Sequence[Buffer], float], None]  # the form of each verb that makes an object
LARGEST_PUT_BYTES = 4 * 1024**3  # stores take 5 GB at once
PAGE = 1000  # names in an answer to LIST, and keys in a request that deletes many


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """A place for a driver to work at, and for how many requests at once. It may hold credentials.

    allowed: URLs below which links of the local disk may lead; True for anywhere.
    """

    target: str
    protocol: str
    options: Mapping[str, Any]
    query: str
    deadline_s: float
    width: int
    allowed: bool | tuple[str, ...] = ()

    @property
    def timeouts_s(self) -> tuple[float, float]:
        """The seconds that one read may take, not the whole of a large object; and those to connect."""
        part = max(1.0, self.deadline_s / 4)
        return min(15.0, part), min(5.0, part)


class ObjectInfo(NamedTuple):
    """The facts that a store has on an object. `etag` is empty where the store has none.

    modified: the time when it was made, in UTC and by the store's own clock; None if unknown.
    """

    size: int
    etag: str
    modified: datetime | None = None


class Listed(NamedTuple):
    """An object that a scan has found; `modified` is the time when it was made, in UTC and by the store's own clock."""

    key: str
    bytes: int
    modified: datetime


class Driver(ABC):
    """The verbs that every store has (they are abstract), and those that only some have: a driver has the ones that it
    overrides, and `can` tells."""

    remote: bool = True  # over a network, whose answers may be cut short
    lists_at_once: bool = False  # whatever was made before a LIST began is known to be in its answer
    exclusive: bool = False  # of two creators anywhere at most one succeeds; else that holds for this process alone
    transport: str = ""  # the client that requests go through, where there are several

    def can(self, verb: str) -> bool:
        """True if it has a verb that not every store has."""
        return getattr(type(self), verb) is not getattr(Driver, verb)

    def renew(self) -> bool:
        """Forget the credentials, so that the next request asks their source; False where they were given for good."""
        return False

    # -- of every store ------------------------------------------------------------------------------------------------

    @abstractmethod
    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        """Read bytes [start, stop) of an object, to its end without `stop`; fewer where it ends before."""

    @abstractmethod
    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Make or replace an object of these bytes. Atomic: a reader sees the old one or the new one, whole."""

    def put_fresh(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Make an object under a fresh name, by as many requests as `put`. FileExistsError if there is one of that name
        and the store tells so by the same request; else it is replaced."""
        self.put(key, parts, timeout_s)

    @abstractmethod
    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        """Look at an object, not at a folder: FileNotFoundError if it is not there."""

    @abstractmethod
    def delete(self, key: str, timeout_s: float) -> None:
        """Remove an object; FileNotFoundError, or nothing, where there is none."""

    @abstractmethod
    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        """Find the names directly below the folder `prefix`, and the number of requests that took.

        Those of folders have a final slash; in any order. What was made before is found: nothing is cached.
        """

    def stream(self, key: str, start: int, stop: int, take: Callable[[Buffer], None], timeout_s: float) -> None:
        """Call `take` with bytes [start, stop) of an object, piece by piece as they come; fewer if it ends before.

        `take` is not called any more once this has returned, or raised.
        """
        take(self.get(key, start, stop, timeout_s))

    # -- of some stores ------------------------------------------------------------------------------------------------

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Make an object, whole or not at all, only if there is none: FileExistsError.

        Atomic: looking and making are one step of the store.
        """
        raise NotImplementedError

    def create_in_parts(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Make what is too large for one request, as `create` does: the condition is on the last request of several.

        A store that heeds the condition of the one need not heed that of the other.
        """
        raise NotImplementedError

    def get_ranges(self, key: str, spans: Sequence[tuple[int, int]], timeout_s: float) -> Sequence[bytes]:
        """Read several ranges of one object for little more than one of them; fewer bytes where it ends before.

        A driver that has this has `read_into`, too.
        """
        raise NotImplementedError

    def read_into(
        self, key: str, starts: Sequence[int], rooms: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> Sequence[int]:
        """Fill memory of the caller's, from several threads at once: `rooms[i]`, one after the other, with the bytes
        from `starts[i]` on; the number of bytes of each range."""
        raise NotImplementedError

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        """Find all objects below the folder `prefix`, however deep, in pages of at most PAGE; a request a page.

        In the store's own order, from the key `after` on, which was found before; keys are relative to the root.
        What was made before is found: nothing is cached. Links that lead elsewhere are not followed.
        """
        raise NotImplementedError

    def delete_many(self, keys: Sequence[str], timeout_s: float) -> Mapping[str, Exception]:
        """Remove at most PAGE objects by one request; give the errors of those that are still there.

        A missing object is no error. An exception is of the whole request: each object may be there or not.
        """
        raise NotImplementedError

    def versioned(self, timeout_s: float) -> bool:
        """Ask if the store keeps deleted or replaced objects as versions, which still take space."""
        raise NotImplementedError

    def now(self, folder: str, timeout_s: float) -> datetime | None:
        """Ask the store for its time, in UTC, by a look at `folder` that changes nothing; None if its answer has none.
        Of whole seconds it is the end of that second, so that a new object is never younger."""
        raise NotImplementedError

    def locate(self, key: str) -> str:
        """The place of an object, in the form for `copy` of any driver of the same store; nothing is sent."""
        raise NotImplementedError

    def copy(self, source: str, key: str, timeout_s: float) -> None:
        """Let the store copy an object to `key`, whole or not at all; none of its bytes pass through here."""
        raise NotImplementedError
