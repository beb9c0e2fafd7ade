"""Does I/O: objects below one root. The only module that imports fsspec.

A key is a relative POSIX path. `put` and `create` make an object whole or not at all; no object is ever changed in
place. Every failure is an error of archive.base.errors that says what, where and what to do, without credentials.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from archive.base import (
    ByteRange,
    CorruptChunkError,
    Job,
    NotExclusiveError,
    StorageError,
    UsageError,
    in_child,
    in_order,
)
from archive.store.counters import IOStats
from archive.store.drivers import (
    ConditionalDriver,
    FsspecDriver,
    GaveUpError,
    Kind,
    LocalDriver,
    create_alone,
    default_options,
    described,
    driver_for,
    explain,
    judge,
    printable_cause,
)
from archive.store.patience import Patience
from archive.store.payload import B, Buffer, Data, RangeLike, as_parts, batches, measured, total_bytes
from archive.store.retry import MAX_SHORT_READS, Attempt, run
from archive.store.root import Root, check_key, check_listed, parse_root

__all__ = ["Buffer", "ByteRange", "IOStats", "Storage", "check_key"]

DEADLINE_S = 120.0
LOCAL_BATCH_BYTES = 1024 * 1024
LOCAL_PIECE_BYTES = 8 * 1024 * 1024 + 64 * 1024  # the usual largest range
LOCAL_PIECES = 10  # of memory that reads share: a shard and what is read ahead of it
LOCAL_READS_AHEAD = 2  # more only take memory, and from each other: there are no round trips to hide

T = TypeVar("T")


@dataclass(slots=True)
class _Engine:
    """What one process needs to talk to the store; never shared across a fork."""

    pid: int
    driver: LocalDriver | FsspecDriver
    pool: ThreadPoolExecutor


_build_lock = threading.Lock()
_before_fork: list[_Engine] = []  # kept: closing a parent's connections in its child would hang or break them


def _renew_lock() -> None:
    global _build_lock
    _build_lock = threading.Lock()


in_child(_renew_lock)


class Storage:
    """Objects below one root, on any fsspec filesystem. Safe for several threads; pickles and survives fork."""

    def __init__(self, root: Root, concurrency: int, deadline_s: float, single_writer: bool) -> None:
        self._root, self._single_writer = root, single_writer
        self._engine: _Engine | None = None
        self.url = root.url
        self.concurrency = concurrency
        self.deadline_s = deadline_s
        self.stats = IOStats()
        self._patience = Patience()
        self.allowed_bases: bool | tuple[str, ...] = ()  # other archives that may be read for this one

    @classmethod
    def connect(
        cls,
        url: object,
        storage_options: Mapping[str, Any] | None = None,
        *,
        concurrency: int = 32,
        deadline_s: float | None = None,
        single_writer: bool = False,
        first_answer_s: float | None = None,
    ) -> Self:
        """Names a root (URL, path or UPath); sends nothing.

        At most `concurrency` requests run at once; each is retried for at most `deadline_s` (default 120), and for
        `first_answer_s` while nothing there could be reached yet. `single_writer` promises that one process alone writes
        here, which permits stores without a create-only put: what is to be created is then looked for first. Where the
        promise is broken, the later of two writers overwrites the other's commit.
        """
        deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        if concurrency < 1 or deadline_s <= 0:
            raise UsageError(f"concurrency={concurrency} and deadline_s={deadline_s} must both be above zero")
        made = cls(parse_root(url, storage_options), concurrency, deadline_s, single_writer)
        made._patience = Patience(first_answer_s)
        return made

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (
            type(self),
            (self._root, self.concurrency, self.deadline_s, self._single_writer),
            {"allowed_bases": self.allowed_bases},
        )

    def full_url(self, key: str) -> str:
        """Where `key` is, for people."""
        return self._root.full_url(key)

    def spec(self) -> tuple[str, dict[str, Any]]:
        """URL and options that open the root elsewhere. They may hold credentials: not for printing or storing."""
        target = self.url if self._root.protocol == "file" else self._root.target
        return target, dict(self._root.options)

    def exclusive(self) -> bool:
        """Whether the store is known to have a create-only put."""
        return self._running().driver.exclusive

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of an object, all of it by default, in one request.

        MissingObjectError; ShortReadError if it ends before `stop`, or where `start` is at or past its end.
        """
        return self._get(key, start, stop, None)

    def get_head(self, key: str, max_bytes: int) -> bytes:
        """The first bytes of an object of unknown size, at most `max_bytes`, in one request; none of an empty one.

        So what has a bound is read within it: ask for one byte more to know that there are more.
        """
        check_key(key)
        driver = self._running().driver

        def attempt(this: Attempt) -> bytes:
            data = _read(driver, key, 0, max_bytes, this.timeout_s, whole=True)[:max_bytes]
            self.stats.add(bytes_in=len(data))
            return data

        return self._request("get", key, attempt)

    def get_ranges(self, ranges: Sequence[RangeLike]) -> list[bytes]:
        """One request for each range, in any order; results in theirs. The first error cancels the rest."""
        driver = self._running().driver
        if not isinstance(driver, LocalDriver):
            return self._gather([self._range_job(one) for one in ranges])
        found = self._gather([self._batch_job(driver.read_spans, batch) for batch in batches(ranges)])
        return [data for batch in found for data in batch]

    def iter_ranges(self, ranges: Iterable[RangeLike], *, max_bytes: int) -> Generator[Buffer, None, None]:
        """Ranges in order, read ahead by at most `max_bytes` (and always at least one range).

        Closing it cancels what was read ahead. Let go of what you have used: its memory may then serve the next reads.
        """
        engine = self._running()
        if isinstance(engine.driver, LocalDriver):
            return self._iter_batches(engine, engine.driver, ranges, max_bytes)
        jobs = (self._range_job(one) for one in ranges)
        return in_order(engine.pool, jobs, max_ahead=2 * self.concurrency, max_bytes=max_bytes)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Whole objects, one request each; results in the order of `keys`. The first error cancels the rest."""

        def job(key: str) -> Job[bytes]:
            return Job(lambda cancelled: self._get(key, 0, None, cancelled))

        return self._gather([job(key) for key in keys])

    def put(self, key: str, data: Data) -> None:
        """Makes an object, whole or not at all; one of that name is replaced."""
        self._put(key, data, None)

    def put_many(self, items: Iterable[tuple[str, Data]]) -> None:
        """Makes objects, several at once, taking `items` as it goes. After an error nothing more is written."""

        def job(key: str, data: Data) -> Job[None]:
            return Job(lambda cancelled: self._put(key, data, cancelled))

        jobs = (job(key, data) for key, data in items)
        for _ in in_order(self._running().pool, jobs, max_ahead=self.concurrency, settle=True):
            pass

    def create(self, key: str, data: Data) -> None:
        """Makes an object only if there is none of that name; two callers never both succeed.

        AlreadyExistsError if there is one. AmbiguousWriteError if the answer was lost, so that it may be this one.
        NotExclusiveError if the store has no such put (but see `single_writer`); nothing is written then.
        """
        check_key(key)
        driver, parts = self._running().driver, as_parts(data)
        if not driver.exclusive and not self._single_writer:
            raise NotExclusiveError(
                f"create {self.full_url(key)}: no create-only put is known for {self._root.protocol!r}, so two writers "
                "could overwrite each other; use a local folder, memory, s3, gs or az, or connect with "
                "single_writer=True if nobody else writes here"
            )

        def attempt(this: Attempt) -> None:
            self.stats.add(bytes_out=total_bytes(parts), head=int(self._single_writer))
            create = partial(create_alone, driver) if self._single_writer else driver.create
            create(key, parts, this.timeout_s)

        self._request("create", key, attempt)

    def copies_from(self, source: Storage) -> bool:
        """Whether objects of `source` lie in the same store, which can copy them here by itself."""
        mine, theirs = self._root, source._root
        driver = self._running().driver
        same = (mine.protocol, mine.options) == (theirs.protocol, theirs.options)
        return same and isinstance(driver, ConditionalDriver) and driver.copies

    def copy_from(self, source: Storage, source_key: str, key: str, *, least_bytes: int = 0) -> None:
        """Has the store copy an object (see `copies_from`); none of its bytes are read here. Whole or not at all.

        Size and ETag of both are compared. CorruptChunkError, and nothing is left, if they are not the same, or the
        object is shorter than `least_bytes`. What the bytes are is not looked at.
        """
        before = source._stamp(source_key)
        if before[0] < least_bytes:
            raise CorruptChunkError(
                f"{source.full_url(source_key)} has {before[0]} bytes of {least_bytes}: it was not copied; run `archive "
                "verify` there"
            )
        check_key(key)
        here, there = self._running().driver, source._running().driver

        def attempt(this: Attempt) -> None:
            if isinstance(here, ConditionalDriver) and isinstance(there, FsspecDriver):
                self.stats.add(head=1)
                here.copy(there, source_key, key, this.timeout_s)

        self._request("copy", key, attempt)
        after = self._stamp(key)
        if not _alike(before, after):
            self.delete([key])
            raise CorruptChunkError(
                f"the store's copy of {source.full_url(source_key)} as {self.full_url(key)} is not the same ({after} "
                f"instead of {before}): it was removed again; repeat the call, or copy with verify=True"
            )

    def _stamp(self, key: str) -> tuple[int, str]:
        driver = self._running().driver
        if not isinstance(driver, FsspecDriver):
            raise UsageError(f"{self.full_url(key)}: files are not copied by their store")
        return self._request("head", check_key(key), lambda this: driver.stamp(key, this.timeout_s))

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; one that is not there is no error."""
        jobs = (self._delete_job(key) for key in keys)
        for _ in in_order(self._running().pool, jobs, max_ahead=2 * self.concurrency, settle=True):
            pass

    def exists(self, key: str) -> bool:
        """Whether there is an object of that name now. For tools: it may be gone a moment later."""
        driver = self._running().driver
        return self._request("head", check_key(key), lambda this: driver.exists(key, this.timeout_s))

    def _get(self, key: str, start: int, stop: int | None, cancelled: threading.Event | None) -> bytes:
        self._check_range(key, start, stop)
        if start == stop:
            return b""
        driver = self._running().driver

        def attempt(this: Attempt) -> bytes:
            data = _read(driver, key, start, stop, this.timeout_s)
            self.stats.add(bytes_in=len(data))
            return measured(data, start, stop, self.full_url(key))

        return self._request("get", key, attempt, cancelled)

    def _get_batch(
        self, read: Callable[[str, Sequence[tuple[int, int]]], Sequence[B]], batch: Sequence[RangeLike],
        cancelled: threading.Event | None,
    ) -> Sequence[B]:  # fmt: skip
        for one in batch:
            self._check_range(one.key, one.start, one.stop)
        key = batch[0].key

        def attempt(this: Attempt) -> Sequence[B]:
            found = read(key, [(one.start, one.stop) for one in batch])
            self.stats.add(get=sum(one.stop > one.start for one in batch) - 1, bytes_in=total_bytes(found))
            url = self.full_url(key)
            return [measured(data, one.start, one.stop, url) for data, one in zip(found, batch, strict=True)]

        return self._request("get", key, attempt, cancelled)

    def _check_range(self, key: str, start: int, stop: int | None) -> None:
        check_key(key)
        if start < 0 or (stop is not None and stop < start):
            raise UsageError(f"get {self.full_url(key)}: ({start}, {stop}) is no half-open range from 0 upwards")

    def _put(self, key: str, data: Data, cancelled: threading.Event | None) -> None:
        check_key(key)
        driver, parts = self._running().driver, as_parts(data)

        def attempt(this: Attempt) -> None:
            self.stats.add(bytes_out=total_bytes(parts))
            driver.write(key, parts, this.timeout_s)

        self._request("put", key, attempt, cancelled)

    def _delete(self, key: str, cancelled: threading.Event | None) -> None:
        driver = self._running().driver

        def attempt(this: Attempt) -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                driver.delete(key, this.timeout_s)

        self._request("delete", key, attempt, cancelled)

    def _delete_job(self, key: str) -> Job[None]:
        return Job(lambda cancelled: self._delete(check_key(key), cancelled))

    def _iter_batches(
        self, engine: _Engine, driver: LocalDriver, ranges: Iterable[RangeLike], max_bytes: int
    ) -> Generator[Buffer, None, None]:
        """Small ranges of one file are read in one go: handing each to a thread would take longer than reading it."""
        from archive.arrays import Memory

        read = partial(driver.read_spans_into, memory=Memory(LOCAL_PIECE_BYTES, keep=LOCAL_PIECES))
        jobs = (self._batch_job(read, batch) for batch in batches(ranges, min(LOCAL_BATCH_BYTES, max_bytes // 2)))
        with contextlib.closing(in_order(engine.pool, jobs, max_ahead=LOCAL_READS_AHEAD, max_bytes=max_bytes)) as found:
            for batch in found:
                yield from batch
                del batch

    def _batch_job(
        self, read: Callable[[str, Sequence[tuple[int, int]]], Sequence[B]], batch: Sequence[RangeLike]
    ) -> Job[Sequence[B]]:
        size = sum(one.stop - one.start for one in batch)
        return Job(lambda cancelled: self._get_batch(read, batch, cancelled), size)

    def _range_job(self, one: RangeLike) -> Job[bytes]:
        return Job(lambda cancelled: self._get(one.key, one.start, one.stop, cancelled), one.stop - one.start)

    def _gather(self, jobs: Sequence[Job[T]]) -> list[T]:
        if len(jobs) == 1:
            return [jobs[0].run(threading.Event())]
        return list(in_order(self._running().pool, jobs, max_ahead=2 * self.concurrency))

    def _request(
        self, verb: str, key: str, attempt: Callable[[Attempt], T], cancelled: threading.Event | None = None
    ) -> T:
        """One request with its retries, counted; what fails is told as one of the library's errors."""

        def counted(this: Attempt) -> T:
            self.stats.add(**{verb: 1, "retries": int(this.number > 1)})
            return attempt(this)

        def failed(error: Exception, elapsed_s: float) -> bool:
            what, why = self._root.scrub(f"{verb} {self.full_url(key)}"), described(error, self._root.scrub)
            return self._patience.failed(what, why, error, elapsed_s, self.deadline_s)

        short_reads = MAX_SHORT_READS if self._running().driver.remote else 1
        try:
            found = run(
                counted, deadline_s=self.deadline_s, cancelled=cancelled, short_reads=short_reads, failed=failed
            )
            self._patience.answered()
            return found
        except GaveUpError as gave_up:
            self.stats.add(errors=1)
            error = explain(gave_up, verb, self.full_url(key), self._root.scrub)
            cause = gave_up.cause
        if error is cause:
            raise error
        raise error from printable_cause(cause, self._root.scrub)

    def _running(self) -> _Engine:
        """This process's connections, made at the first use."""
        engine = self._engine
        if engine is not None and engine.pid == os.getpid():
            return engine
        with _build_lock:
            if self._engine is None or self._engine.pid != os.getpid():
                if self._engine is not None:
                    _before_fork.append(self._engine)
                self._engine = self._build()
            return self._engine

    def _build(self) -> _Engine:
        driver: LocalDriver | FsspecDriver = LocalDriver(self._root.target)
        if self._root.protocol != "file":
            fs, path = _open_filesystem(self._root, self.deadline_s, self.concurrency)
            driver = driver_for(fs, path, self._root.query)
        return _Engine(os.getpid(), driver, ThreadPoolExecutor(self.concurrency, "archive-storage"))

    # last in the class: its name hides the builtin from the annotations below it
    def list(self, prefix: str) -> list[str]:
        """Names directly below the folder `prefix` ("" for the root), sorted; folders end with "/". Never cached."""
        folder = check_key(prefix.rstrip("/")) if prefix else ""
        driver = self._running().driver

        def attempt(this: Attempt) -> list[str]:
            names, requests = driver.list(folder, this.timeout_s)
            self.stats.add(list=requests - 1)
            return names

        return sorted(check_listed(name, self.full_url(folder)) for name in self._request("list", folder, attempt))


def _read(
    driver: LocalDriver | FsspecDriver, key: str, start: int, stop: int | None, timeout_s: float, *, whole: bool = False
) -> bytes:
    """`whole`: an object of unknown size is meant, as it is without `stop`."""
    try:
        return driver.read(key, start, stop, timeout_s)
    except Exception as error:
        # The range "0-" asks for a whole object without asking for its size first; an empty one has no such bytes.
        if start == 0 and (whole or stop is None) and judge(error).kind is Kind.RANGE:
            return b""
        raise


def _alike(before: tuple[int, str], after: tuple[int, str]) -> bool:
    """Whether two stamps are of the same bytes: ETags of uploads in parts (they have a "-") depend on the parts."""
    plain = all(tag and "-" not in tag for tag in (before[1], after[1]))
    return before[0] == after[0] and (before[1] == after[1] or not plain)


def _alike_schemes(protocol: str) -> str:
    """What may have been meant by a scheme that nobody knows."""
    from fsspec import available_protocols

    known = sorted(available_protocols())
    if protocol in known or "::" in protocol:
        return ""
    alike = difflib.get_close_matches(protocol, known, 3, 0.5)
    meant = f"; did you mean {' or '.join(f'{name}://' for name in alike)}?" if alike else ""
    return f"{meant} (known: {', '.join(known)})"


def _renew_loop() -> None:
    """fsspec before 2025.3.1 goes on waiting for its parent's event loop."""
    asyn: Any = sys.modules.get("fsspec.asyn")
    if asyn is not None and not hasattr(asyn, "reset_after_fork"):
        asyn.reset_lock()


in_child(_renew_loop)


def _open_filesystem(root: Root, deadline_s: float, concurrency: int) -> tuple[Any, str]:
    """The fsspec filesystem of a root and the path in it; sends nothing."""
    options = dict(root.options)
    try:
        from fsspec import get_filesystem_class
        from fsspec.core import url_to_fs

        for part in root.target.split("::"):
            protocol = part.partition("://")[0]
            modules = frozenset(cls.__module__.partition(".")[0] for cls in get_filesystem_class(protocol).__mro__)
            chained = "::" in root.target and part != root.target.partition("::")[0]
            own = options.get(protocol, {}) if chained else options
            filled = default_options(modules, own, deadline_s=deadline_s, width=concurrency)
            options = {**options, protocol: filled} if chained else filled
        fs, path = url_to_fs(root.target, **options)
    except Exception as error:
        detail = root.scrub(f"{type(error).__name__}: {error}{_alike_schemes(root.protocol)}")
        raise StorageError(
            f"open {root.url}: {detail}; install the package that serves {root.protocol}:// and check storage_options"
        ) from printable_cause(error, root.scrub)
    if "s3fs" in {cls.__module__.partition(".")[0] for cls in type(fs).__mro__}:
        fs.retries = 1
    return fs, path
