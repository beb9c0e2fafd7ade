"""Does I/O: one process's connection to the store behind a root, requests with their retries, and wrappers between all
connections of this process and their stores."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from archive.base import StorageError, UsageError, forking, thread_pool
from archive.store.counts import IOStats, count
from archive.store.drivers import OWN_OPTIONS, Driver, Location, SingleWriterDriver, open_driver, similar_protocols
from archive.store.retry import MAX_SHORT_READS, Patience, Tries, described, explain, printable_cause
from archive.store.root import StoreRoot, parse_root

DEADLINE_S = 120.0

T = TypeVar("T")
Around = Callable[[str, Driver], Driver]  # the URL of a root, and its driver

_around: list[Around] = []  # the innermost block, which is next to the store, first


@dataclass(slots=True)
class Engine:
    """The driver and threads of one process; never shared across a fork."""

    pid: int
    driver: Driver
    pool: ThreadPoolExecutor


_build_lock = forking.own(sys.modules[__name__], "_build_lock", threading.Lock)
_before_fork: list[Engine] = []  # kept: closing a parent's connections in its child would hang or break them


class Connection:
    """A root and how to talk to its store. Safe for several threads; pickles and survives fork."""

    def __init__(self, root: StoreRoot, concurrency: int, deadline_s: float, single_writer: bool) -> None:
        self.root = root
        self.url = root.url
        self.concurrency = concurrency
        self.deadline_s = deadline_s
        self.single_writer = single_writer
        self.stats = IOStats()
        self.allowed_bases: bool | tuple[str, ...] = ()  # other archives that may be read for this one
        self.proven: set[tuple[int, str, bool]] = set()  # of this one; see `proof`
        self.known: tuple[str, bytes] | None = None  # an object that is there: creates are proven by it
        self._patience = Patience()
        self._engine: Engine | None = None

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
        `first_answer_s` while nothing there could be reached yet. `single_writer` promises that one process alone
        writes here, which permits stores without a create-only put: what is to be created is then looked for first.
        Where the promise is broken, the later of two writers overwrites the other's commit.
        """
        deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        if concurrency < 1 or deadline_s <= 0:
            raise UsageError(f"concurrency={concurrency} and deadline_s={deadline_s} must both be above zero")
        made = cls(parse_root(url, storage_options), concurrency, deadline_s, single_writer)
        made._patience = Patience(first_answer_s)
        return made

    def __repr__(self) -> str:
        through = self._engine and self._engine.driver.transport
        return f"{type(self).__name__}({self.url!r}{f', through {through}' if through else ''})"

    def __reduce__(self) -> tuple[Any, ...]:
        settings = (self.root, self.concurrency, self.deadline_s, self.single_writer)
        return type(self), settings, {"allowed_bases": self.allowed_bases, "known": self.known}

    def full_url(self, key: str) -> str:
        """The URL of `key`, for people."""
        return self.root.full_url(key)

    def spec(self) -> tuple[str, dict[str, Any]]:
        """URL and options that open the root elsewhere. They may hold credentials: not for printing or storing."""
        target = self.url if self.root.protocol == "file" else self.root.target
        return target, {name: value for name, value in self.root.options.items() if name not in OWN_OPTIONS}

    @property
    def driver(self) -> Driver:
        """This process's driver, made at the first use, with its wrappers."""
        driver = self.engine().driver
        for wrap in tuple(_around):
            driver = wrap(self.url, driver)
        return driver

    def engine(self) -> Engine:
        """This process's driver and threads, made at the first use."""
        engine = self._engine
        if engine is not None and engine.pid == os.getpid():
            return engine
        with _build_lock:
            if self._engine is None or self._engine.pid != os.getpid():
                if self._engine is not None:
                    _before_fork.append(self._engine)
                driver = _open(self.root, self.deadline_s, self.concurrency, self.allowed_bases)
                if self.single_writer:
                    driver = SingleWriterDriver(driver)
                self._engine = Engine(os.getpid(), driver, thread_pool(self.concurrency, "archive-storage"))
            return self._engine

    def request(
        self, verb: str, key: str, attempt: Callable[[float], T], cancelled: threading.Event | None = None
    ) -> T:
        """Run one request with its retries, counted; failures become the library's errors.

        `attempt` is given the seconds that it may take. It is tried again until it answers, fails for good, is
        cancelled, or the deadline has passed.
        """
        tries = Tries(self.deadline_s, MAX_SHORT_READS if self.driver.remote else 1)
        stop, scrub = cancelled or threading.Event(), self.root.scrub
        while True:
            count(self.stats, self.root.protocol, **{verb: 1, "retries": int(tries.number > 0)})
            try:
                found = attempt(tries.begin())
                self._patience.answered()
                return found
            except Exception as error:
                cause = error
                if tries.may_go_on(error, lambda: self.driver.renew()):
                    what, why = scrub(f"{verb} {self.full_url(key)}"), described(error, scrub)
                    over = self._patience.failed(what, why, error, tries.elapsed_s, self.deadline_s)
                    if not over and tries.pause(stop):
                        continue
            break  # out of the handler, or what is raised would hang on to the failure with all that it says
        count(self.stats, self.root.protocol, **{"answered_no" if tries.answered_no else "errors": 1})
        told = explain(cause, tries, verb, self.full_url(key), scrub)
        if told is cause:
            raise told
        raise told from printable_cause(cause, scrub)


def _open(root: StoreRoot, deadline_s: float, concurrency: int, allowed: bool | tuple[str, ...]) -> Driver:
    place = Location(root.target, root.protocol, root.options, root.query, deadline_s, concurrency, allowed)
    try:
        return open_driver(place)
    except Exception as error:
        failed = error
    detail = root.scrub(f"{type(failed).__name__}: {failed}{similar_protocols(root.protocol)}")
    raise StorageError(  # out of the handler, or the failure itself would hang on to it with all that it says
        f"open {root.url}: {detail}; install the package that serves {root.protocol}:// and check storage_options"
    ) from printable_cause(failed, root.scrub)


@contextmanager
def around(wrap: Around) -> Iterator[None]:
    """Let every connection of this process, open already or not, go through the driver that `wrap` makes of its root
    and its own driver, until the block ends; processes forked meanwhile keep it. Of nested blocks the inner one is
    nearer to the store."""
    _around.insert(0, wrap)
    try:
        yield
    finally:
        _around.remove(wrap)
