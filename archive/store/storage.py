"""Does I/O: objects below one root.

A key is a relative POSIX path. `put` and `create` make an object whole or not at all; no object is ever changed in
place. Every failure is an error of archive.base.errors that says what, where and what to do, without credentials.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TypeVar

from archive.base import (
    AlreadyExistsError,
    AmbiguousWriteError,
    CorruptChunkError,
    DeadlineError,
    Job,
    MissingObjectError,
    NotExclusiveError,
    StorageError,
    Wait,
    in_order,
)
from archive.store import copying, deleting, filling, reading, scanning
from archive.store.connecting import Connection
from archive.store.drivers import Found
from archive.store.payload import Buffer, Data, Filling, RangeLike, as_bytes, as_parts, total_bytes
from archive.store.retry import Attempt
from archive.store.root import check_key, check_listed

T = TypeVar("T")
_LOOKS_AT_ONCE = 4  # beside what else is under way
LOOK_BYTES = 256 * 1024  # of an object that may be another's
LOOK_AGAIN_S = 0.05


class Storage(Connection):
    """Objects below one root, on any fsspec filesystem. Safe for several threads; pickles and survives fork."""

    def exclusive(self) -> bool:
        """Whether the store is known to have a create-only put."""
        creating = self.driver.creating
        return creating is not None and creating.exclusive

    @property
    def lists_at_once(self) -> bool:
        """Whether `list` is known to give whatever was made before it began."""
        return self.driver.lists_at_once

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of an object, all of it by default, in one request.

        MissingObjectError; ShortReadError if it ends before `stop`, or where `start` is at or past its end.
        """
        return as_bytes(reading.get_range(self, key, start, stop))

    def get_head(self, key: str, max_bytes: int, cancelled: threading.Event | None = None) -> bytes:
        """The first bytes of an object of unknown size, at most `max_bytes`, in one request; none of an empty one.

        So what has a bound is read within it: ask for one byte more to know that there are more.
        """
        check_key(key)
        driver = self.driver

        def attempt(this: Attempt) -> bytes:
            data = reading.read_once(driver, key, 0, max_bytes, this.timeout_s, whole=True)[:max_bytes]
            self.stats.add(bytes_in=len(data))
            return as_bytes(data)

        return self.request("get", key, attempt, cancelled)

    def get_ranges(self, ranges: Sequence[RangeLike]) -> list[bytes]:
        """One request for each range, in any order; results in theirs. The first error cancels the rest."""
        return reading.get_ranges(self, ranges)

    def iter_ranges(self, ranges: Iterable[RangeLike], *, max_bytes: int) -> Generator[Buffer, None, None]:
        """Ranges in order, read ahead by at most `max_bytes` (and always at least one range).

        Closing it cancels what was read ahead. Let go of what you have used: its memory may then serve the next reads.
        """
        return reading.iter_ranges(self, ranges, max_bytes)

    def fill(self, fillings: Iterable[Filling], use: Callable[[int], None], *, max_bytes: int) -> None:
        """Fill memory of the caller's, several requests at once, and call `use` with the number of each that is done.

        They are answered in any order; `use` is called in the thread that read it. At most `max_bytes` (and always
        one filling) are under way. The first error, of `use` as well, ends it; nothing is written or used any more when
        it is raised, and what the memory holds is undefined.
        """
        filling.fill(self, fillings, use, max_bytes)

    @property
    def scatters(self) -> bool:
        """Whether `scatter` is to be had."""
        return self.driver.scattering is not None

    def scatter(self, key: str, start: int, rooms: Sequence[memoryview], *, again: bool = False) -> None:
        """Fill memory of the caller's, `rooms` one after the other, with the bytes of an object from `start` on.

        again: this goes on with a range of which a part was read before; the request is counted once.
        After an error what they hold is undefined.
        """
        reading.scatter(self, key, start, rooms, again=again)

    def meanwhile(self, call: Callable[[threading.Event], T]) -> contextlib.AbstractContextManager[Callable[[], T]]:
        """Run a call of requests beside the caller's own, until the block ends; what it gives waits for the result.

        The event that `call` is given is for the requests' `cancelled`.
        """
        return reading.meanwhile(self, call)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Whole objects, one request each; results in the order of `keys`. The first error cancels the rest."""

        def job(key: str) -> Job[bytes]:
            return Job(lambda cancelled: as_bytes(reading.get_range(self, key, 0, None, cancelled)))

        return reading.gather(self, [job(key) for key in keys])

    def put(self, key: str, data: Data) -> None:
        """Makes an object, whole or not at all; one of that name is replaced."""
        self._put(key, data, None)

    def put_many(self, items: Iterable[tuple[str, Data]]) -> None:
        """Makes objects, several at once, taking `items` as it goes. After an error nothing more is written."""

        def job(key: str, data: Data) -> Job[None]:
            return Job(lambda cancelled: self._put(key, data, cancelled))

        self._settle((job(key, data) for key, data in items), max_ahead=self.concurrency)

    def create(self, key: str, data: Data) -> None:
        """Makes an object only if there is none of that name; two callers never both succeed.

        AlreadyExistsError if there is one. AmbiguousWriteError if the answer was lost, so that it may be this one.
        NotExclusiveError if the store has no such put (but see `single_writer`); nothing is written then.
        """
        check_key(key)
        creating, parts = self.driver.creating, as_parts(data)
        if creating is None:
            raise NotExclusiveError(
                f"create {self.full_url(key)}: no create-only put is known for {self.root.protocol!r}, so two writers "
                "could overwrite each other; use a local folder, memory, s3, gs or az, or connect with "
                "single_writer=True if nobody else writes here"
            )

        def attempt(this: Attempt) -> None:
            self.stats.add(bytes_out=total_bytes(parts), head=int(self.single_writer))
            creating.create(key, parts, this.timeout_s)

        self.request("create", key, attempt)

    def create_once(self, key: str, data: Data, *, unclear: Exception | None = None, look: bool = True) -> None:
        """Makes an object as `create` does, and finds out whether it did where the answer is lost.

        Nobody else makes the same bytes (a nonce is among them, or it does not matter who does): if they are there,
        this did it; if there are others, AlreadyExistsError; if there are none, they are sent again. Where the store
        does not say by the deadline, `unclear` is raised (by default AmbiguousWriteError). Without `look`, a first
        answer that it is there is taken as it is: the caller finds its own by other means.
        """
        wait = Wait(2 * self.deadline_s, LOOK_AGAIN_S)  # once for sending, once for looking
        while True:
            try:
                return self.create(key, data)
            except (AlreadyExistsError, AmbiguousWriteError) as e:
                cause: StorageError | AlreadyExistsError = e
                if isinstance(e, AlreadyExistsError) and not look:
                    raise
                look = True
            try:
                if self._holds(key, b"".join(as_parts(data))):
                    return None
                raise AlreadyExistsError(f"create {self.full_url(key)}: another is there already") from cause
            except MissingObjectError:
                if isinstance(cause, AlreadyExistsError):  # it was there
                    raise cause from None
            except StorageError as e:
                cause = e
            if wait.over or isinstance(cause, DeadlineError):
                text = f"create {self.full_url(key)}: no answer whether it is there ({cause}); repeat the same call"
                raise (unclear or AmbiguousWriteError(text)) from cause
            wait.pause()

    def _holds(self, key: str, data: bytes) -> bool:
        """Whether these are an object's bytes; of a large one that differs no more than the first are read."""
        first = min(len(data) + 1, LOOK_BYTES)
        return self.get_head(key, first) == data[:first] and (
            len(data) < first or self.get_head(key, len(data) + 1) == data
        )

    def refuses_again(self, key: str, data: Data) -> bool:
        """Whether the store refuses to create an object that is there, with the bytes that it has."""
        try:
            self.create(key, data)
        except (AlreadyExistsError, AmbiguousWriteError):
            return True
        return False

    def copies_from(self, source: Storage) -> bool:
        """Whether objects of `source` lie in the same store, which can copy them here by itself."""
        return copying.can_copy(source, self)

    def copy_from(self, source: Storage, source_key: str, key: str, *, least_bytes: int = 0) -> None:
        """Has the store copy an object (see `copies_from`); none of its bytes are read here. Whole or not at all.

        Size and ETag of both are compared. CorruptChunkError, and nothing is left, if they are not the same, or the
        object is shorter than `least_bytes`. What the bytes are is not looked at.
        """
        before = copying.copy(source, source_key, self, key, least_bytes)
        after = copying.look(self, key)
        if not copying.alike(before, after):
            self.delete([key])
            raise CorruptChunkError(
                f"the store's copy of {source.full_url(source_key)} as {self.full_url(key)} is not the same ({after} "
                f"instead of {before}): it was removed again; repeat the call, or copy with verify=True"
            )

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; one that is not there is no error."""

        def job(key: str) -> Job[None]:
            return Job(lambda cancelled: deleting.delete_one(self, key, cancelled))

        self._settle((job(key) for key in keys), max_ahead=2 * self.concurrency)

    def delete_many(
        self, keys: Iterable[str], *, per_second: float | None = None, told: Callable[[int], None] | None = None
    ) -> dict[str, StorageError]:
        """Removes objects, by a request for a thousand where the store takes that; one that is not there is no error.

        Gives the errors of those that are still there; goes on after them. DeadlineError if nothing answers any more.
        per_second: delete at most so many. told: called with how many more were tried, as it goes.
        """
        return deleting.delete_many(self, keys, per_second, told)

    def scan(self, prefix: str) -> Iterator[Found]:
        """Finds all objects below the folder `prefix` ("" for the root), however deep, in the store's own order.

        A request a thousand where the store lists so many; read as it is iterated, and never cached.
        """
        for page in scanning.pages(self, prefix):
            yield from page

    def clock(self, prefix: str) -> datetime:
        """The time in UTC as the store tells it; nothing is written.

        That of its answer to a LIST, or the clock of a folder on this machine. Where a store does not say it (what is
        mounted from elsewhere, or goes through any other filesystem of fsspec), it is when the newest object below the
        folder `prefix` was made: things are at least as old as they look by that.
        """
        return scanning.clock(self, prefix)

    def versioned(self) -> bool | None:
        """Whether what is deleted stays as an older version, which takes space; None where the store does not say."""
        return scanning.versioned(self)

    def exists(self, key: str) -> bool:
        """Whether there is an object of that name now. For tools: it may be gone a moment later."""
        return self._bytes_of(key) is not None

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """How many bytes each of a few objects has, by a request each; 0 of one that is not there."""
        asked = [*keys]

        def job(key: str) -> Job[int | None]:
            return Job(lambda cancelled: self._bytes_of(key, cancelled))

        found = in_order(self.engine().pool, map(job, asked), max_ahead=_LOOKS_AT_ONCE)
        return {key: size or 0 for key, size in zip(asked, found, strict=True)}

    def _bytes_of(self, key: str, cancelled: threading.Event | None = None) -> int | None:
        driver = self.driver

        def attempt(this: Attempt) -> int | None:
            with contextlib.suppress(FileNotFoundError):
                return driver.head(key, this.timeout_s).size
            return None

        return self.request("head", check_key(key), attempt, cancelled)

    def _put(self, key: str, data: Data, cancelled: threading.Event | None) -> None:
        check_key(key)
        driver, parts = self.driver, as_parts(data)

        def attempt(this: Attempt) -> None:
            self.stats.add(bytes_out=total_bytes(parts))
            driver.put(key, parts, this.timeout_s)

        self.request("put", key, attempt, cancelled)

    def _settle(self, jobs: Iterable[Job[None]], max_ahead: int) -> None:
        """Run jobs at once; return or raise once none of them runs any more."""
        for _ in in_order(self.engine().pool, jobs, max_ahead=max_ahead, settle=True):
            pass

    # last in the class: its name hides the builtin from the annotations below it
    def list(self, prefix: str, cancelled: threading.Event | None = None) -> list[str]:
        """Names directly below the folder `prefix` ("" for the root), sorted; folders end with "/". Never cached."""
        folder = check_key(prefix.rstrip("/")) if prefix else ""
        driver = self.driver

        def attempt(this: Attempt) -> list[str]:
            names, requests = driver.list(folder, this.timeout_s)
            self.stats.add(list=requests - 1)
            return names

        found = self.request("list", folder, attempt, cancelled)
        return sorted(check_listed(name, self.full_url(folder)) for name in found)
