"""Does I/O: objects below one root.

A key is a relative POSIX path. `put` and `create` make an object whole or not at all; no object is ever changed in
place. Every failure is an error of archive.base.errors that says what, where and what to do, without credentials.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice

from archive.base import (
    AccessDeniedError,
    CorruptChunkError,
    DeadlineError,
    StorageError,
    UsageError,
    in_order,
    tasks,
)
from archive.store.counts import count
from archive.store.drivers import PAGE, Listed, ObjectInfo
from archive.store.root import check_key, check_listed
from archive.store.writes import ObjectWriter

Errors = dict[str, StorageError]

_LOOKS_AT_ONCE = 4  # beside what else is under way
_BATCHES_AT_ONCE = 4  # of a thousand each: stores take a few thousand deletes a second below one prefix


class Storage(ObjectWriter):
    """Objects below one root, on any fsspec filesystem. Safe for several threads; pickles and survives fork."""

    def exclusive(self) -> bool:
        """True if the store is known to have a create-only put."""
        return self.driver.exclusive

    def check_shared(self, instead: str) -> None:
        """UsageError for a store that other processes do not see. instead: what to do then."""
        if self.root.protocol == "memory":
            raise UsageError(
                f"{self.url} is in the memory of this process, which workers in others do not see; {instead}"
            )

    def copies_from(self, source: Storage) -> bool:
        """True if objects of `source` are in the same store, which can copy them here by itself."""
        same = (source.root.protocol, source.root.options) == (self.root.protocol, self.root.options)
        return same and self.driver.can("copy")

    def copy_from(self, source: Storage, source_key: str, key: str, *, least_bytes: int = 0) -> None:
        """Let the store copy an object (see `copies_from`); none of its bytes are read here. Whole or not at all.

        Size and ETag of both are compared. CorruptChunkError, and nothing is left, if they are not the same, or the
        object is shorter than `least_bytes`. The bytes themselves are not read.
        """
        before = source._look(source_key)
        if before.size < least_bytes:
            raise CorruptChunkError(
                f"{source.full_url(source_key)} has {before.size} bytes of {least_bytes}: it was not copied; run "
                "`archive verify` there"
            )
        check_key(key)
        here, there = self.driver, source.driver
        if not (here.can("copy") and there.can("copy")):
            raise UsageError(f"{self.full_url(key)}: its store does not copy objects by itself")

        def attempt(timeout_s: float) -> None:
            count(self.stats, self.root.protocol, head=1)
            here.copy(there.locate(source_key), key, timeout_s)

        self.request("copy", key, attempt)
        after = self._look(key)
        if not _alike(before, after):
            self.delete([key])
            raise CorruptChunkError(
                f"the store's copy of {source.full_url(source_key)} as {self.full_url(key)} is not the same ({after} "
                f"instead of {before}): it was removed again; repeat the call, or copy with verify=True"
            )

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; a missing one is no error."""
        self._settle(tasks(self._delete_one, keys), max_ahead=2 * self.concurrency)

    def delete_many(
        self, keys: Iterable[str], *, per_second: float | None = None, told: Callable[[int], None] | None = None
    ) -> Errors:
        """Remove objects, by a request for a thousand if the store takes that; a missing one is no error.

        Returns the errors of those that are still there; goes on after them. DeadlineError if no answer comes any more.
        per_second: the most to delete a second. told: called with the number of further tried ones, on the way.
        """
        if per_second is not None and per_second <= 0:
            raise UsageError(f"per_second={per_second} must be above zero, or None for no limit")
        errors, delete = Errors(), partial(self._delete_batch, self.driver.can("delete_many"))
        batches = tasks(delete, _paced(keys, per_second))
        for batch, left, refused in in_order(self.engine().pool, batches, max_ahead=_BATCHES_AT_ONCE, settle=True):
            errors |= refused | self._delete_singly(left)
            if told is not None:
                told(len(batch))
        return errors

    def scan(self, prefix: str) -> Iterator[Listed]:
        """Find all objects below the folder `prefix` ("" for the root), however deep, in the store's own order.

        A request a thousand where the store lists so many; one that fails goes on where the last one ended. Read as it
        is iterated, and never cached.
        """
        folder = check_key(prefix.rstrip("/")) if prefix else ""
        driver, after = self.driver, ""
        if not driver.can("scan"):
            raise StorageError(f"scan {self.full_url(folder)}: this store's driver cannot say what lies below a folder")
        pages: Iterator[Sequence[Listed]] | None = None

        def attempt(timeout_s: float) -> Sequence[Listed]:
            nonlocal pages
            going, pages = pages or driver.scan(folder, after, timeout_s), None  # after a failure it is begun anew
            page = next(going, [])
            pages = going
            return page

        while page := self.request("list", folder, attempt):
            for one in page:
                check_listed(one.key, self.full_url(folder))
            yield from page
            after = page[-1].key

    def clock(self, prefix: str) -> datetime:
        """The time in UTC as the store tells it; nothing is written.

        It comes with the answer to a LIST, or is the clock of a local folder. If a store has none (a mounted folder, or
        another filesystem of fsspec), it is the time when the newest object below the folder `prefix` was made: objects
        are at least as old as they look by that.
        """
        folder, driver = check_key(prefix), self.driver
        now = driver.can("now") and self.request("list", folder, lambda timeout_s: driver.now(folder, timeout_s))
        made = [] if now else [one.modified for one in self.scan(folder)]
        if not (now or made):
            raise StorageError(f"clock of {self.full_url(folder)}: this store says no time, and nothing is there")
        return now or max(made)

    def versioned(self) -> bool | None:
        """True if deleted objects stay as older versions, which take space; None if the store does not say."""
        driver = self.driver
        if not driver.can("versioned"):
            return None
        try:
            return self.request("head", "", lambda timeout_s: driver.versioned(timeout_s))
        except StorageError:  # refused, or not known to this store
            return None

    def exists(self, key: str) -> bool:
        """True if there is an object of that name now. For tools: it may be gone a moment later."""
        return self._bytes_of(key) is not None

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """The bytes that each of a few objects has, by a request each; 0 of one that is not there."""
        asked = [*keys]
        found = in_order(self.engine().pool, tasks(self._bytes_of, asked), max_ahead=_LOOKS_AT_ONCE)
        return {key: size or 0 for key, size in zip(asked, found, strict=True)}

    def _bytes_of(self, key: str, cancelled: threading.Event | None = None) -> int | None:
        driver = self.driver

        def attempt(timeout_s: float) -> int | None:
            with contextlib.suppress(FileNotFoundError):
                return driver.head(key, timeout_s).size
            return None

        return self.request("head", check_key(key), attempt, cancelled)

    def _look(self, key: str) -> ObjectInfo:
        """The store's facts on an object: its size and ETag."""
        check_key(key)
        return self.request("head", key, lambda timeout_s: self.driver.head(key, timeout_s))

    def _delete_one(self, key: str, cancelled: threading.Event) -> None:
        driver = self.driver

        def attempt(timeout_s: float) -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                driver.delete(key, timeout_s)

        self.request("delete", check_key(key), attempt, cancelled)

    def _delete_batch(
        self, together: bool, batch: Sequence[str], cancelled: threading.Event
    ) -> tuple[Sequence[str], Sequence[str], Errors]:
        """Delete a batch by one request; the batch, its keys that must be tried one by one, and the store's errors.
        DeadlineError without an answer."""
        driver = self.driver
        if not together:
            return batch, batch, {}
        try:
            found = self.request("delete", batch[0], lambda timeout_s: driver.delete_many(batch, timeout_s), cancelled)
        except DeadlineError:
            raise
        except AccessDeniedError as error:
            return batch, (), dict.fromkeys(batch, error)
        except StorageError:  # clients that name one object alone, and stores that do not know such a request
            return batch, batch, {}
        return batch, list(found), {}

    def _delete_singly(self, keys: Sequence[str]) -> Errors:
        """Delete objects side by side; the errors of those that stay. DeadlineError where nothing answers."""

        def error_of(key: str, cancelled: threading.Event) -> StorageError | None:
            try:
                self._delete_one(key, cancelled)
            except DeadlineError:
                raise
            except StorageError as error:
                return error
            return None

        found = in_order(self.engine().pool, tasks(error_of, keys), max_ahead=2 * self.concurrency, settle=True)
        return {key: error for key, error in zip(keys, found, strict=True) if error is not None}

    # last in the class: its name hides the builtin from the annotations below it
    def list(self, prefix: str, cancelled: threading.Event | None = None) -> list[str]:
        """Names directly below the folder `prefix` ("" for the root), sorted; folders end with "/". Never cached."""
        folder = check_key(prefix.rstrip("/")) if prefix else ""
        driver = self.driver

        def attempt(timeout_s: float) -> list[str]:
            names, requests = driver.list(folder, timeout_s)
            count(self.stats, self.root.protocol, list=requests - 1)
            return names

        found = self.request("list", folder, attempt, cancelled)
        return sorted(check_listed(name, self.full_url(folder)) for name in found)


def _paced(keys: Iterable[str], per_second: float | None) -> Iterator[Sequence[str]]:
    """The keys in batches of at most PAGE, no faster than this many keys a second."""
    size = PAGE if per_second is None else max(1, min(PAGE, int(per_second)))
    source, due = iter(keys), time.monotonic()
    while batch := [check_key(key) for key in islice(source, size)]:
        if per_second is not None:
            time.sleep(max(0.0, due - time.monotonic()))
            due += len(batch) / per_second
        yield batch


def _alike(before: ObjectInfo, after: ObjectInfo) -> bool:
    """True if two are of the same bytes: ETags of uploads in parts (they have a "-") depend on the parts."""
    plain = all(etag and "-" not in etag for etag in (before.etag, after.etag))
    return before.size == after.size and (before.etag == after.etag or not plain)
