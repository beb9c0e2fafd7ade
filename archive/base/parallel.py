"""Threads, but no I/O of its own: ordered results of many jobs, with bounds on how far they run ahead."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from archive.base.forking import in_child

S = TypeVar("S")
T = TypeVar("T")


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool that may be left open: its threads end with the interpreter.

    Python's own hook misses a thread that a call was just beginning when a signal interrupted it, and then waits for it
    for ever.
    """
    made = ThreadPoolExecutor(threads, name)
    _pools.add(made)
    return made


def _end_pools() -> None:
    for one in list(_pools):
        one.shutdown(wait=False)


_pools: weakref.WeakSet[ThreadPoolExecutor] = weakref.WeakSet()
in_child(_pools.clear)  # they are the parent's
# After whatever waits for their work, which registers later: the last one is called first.
getattr(threading, "_register_atexit", atexit.register)(_end_pools)


def at_once(call: Callable[[S], T], items: Iterable[S], threads: int) -> list[T]:
    """The results of a call for each item, in order, each by one of this many threads. After an error no more calls
    begin, and none runs any more when it is raised."""
    given = list(items)
    if len(given) < 2:
        return [call(one) for one in given]
    pool = ThreadPoolExecutor(min(threads, len(given)), "archive-at-once")
    try:
        return list(pool.map(call, given))
    finally:
        pool.shutdown(cancel_futures=True)


def taken_in_order(
    items: Iterable[S], found: Mapping[S, object], take: Callable[[Any, S], bool], threads: int, *, look_at_all: bool
) -> bool:
    """Take what is not in `found` yet by `take(found, item)`, which puts it there or gives False; True if all is there
    then.

    It is taken in order, more at once each time, and a missing item ends it, unless all are to be looked at: so to look
    again and again costs few calls each time, in whatever order they come.
    """
    absent = [one for one in items if one not in found]
    at, count = 0, len(absent) if look_at_all else 1
    whole = True
    while at < len(absent) and (whole or look_at_all):
        whole &= all(at_once(partial(take, found), absent[at : at + count], threads))
        at, count = at + count, min(2 * count, 2 * threads)
    return whole


def side_by_side(calls: Sequence[Callable[[], None]], *, cores: int | None = None) -> None:
    """Make calls in any order, as many at once as there are cores (this process's by default), the caller's thread
    among them. None runs any more when this returns, or raises the first error."""
    source = iter(calls)  # of a list: one step of it is never two threads' own

    def work() -> None:
        try:
            for call in source:
                call()
        finally:
            deque(source, maxlen=0)  # after an error no thread begins another

    helpers = [_helpers().submit(work) for _ in range(min(cores or usable_cores(), len(calls)) - 1)]
    try:
        work()
    finally:
        wait([helper for helper in helpers if not helper.cancel()])
    for helper in helpers:
        if not helper.cancelled():
            helper.result()


@cache
def _helpers() -> ThreadPoolExecutor:
    return thread_pool(max(1, usable_cores() - 1), "archive-beside")


in_child(_helpers.cache_clear)


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """Something to run, told by an event when its result is no longer wanted, and the bytes it will hold."""

    run: Callable[[threading.Event], T]
    size: int = 0


def tasks(call: Callable[[S, threading.Event], T], items: Iterable[S]) -> Iterator[Task[T]]:
    """A task for each item, made as it is taken: the call of it and of the event that cancels it."""
    return (Task(partial(call, one)) for one in items)


def in_order(
    pool: ThreadPoolExecutor,
    jobs: Iterable[Task[T]],
    *,
    max_ahead: int,
    max_bytes: int | None = None,
    settle: bool = False,
) -> Generator[T, None, None]:
    """Results in the order of `jobs`, which are taken as they are needed.

    At most `max_ahead` jobs and `max_bytes` (but always one job) are started and not yet given out. The first
    error of any of them is raised at once; then, and when the caller stops early, the rest is cancelled.
    `settle` waits for those that were running, so that nothing is written after the return.
    """
    source = iter(jobs)
    begin = list(islice(source, 2))
    if len(begin) == 1:  # handing it to a thread would take longer than many a read
        yield begin[0].run(threading.Event())
        return
    source = chain(begin, source)
    cancelled, failed = threading.Event(), Future[T]()
    ahead: deque[tuple[Future[T], int]] = deque()
    held, most = 0, math.inf if max_bytes is None else max_bytes
    try:
        job = next(source, None)
        while job is not None or ahead:
            while job is not None and (not ahead or (len(ahead) < max_ahead and held + job.size <= most)):
                ahead.append((pool.submit(_guarded, job, cancelled, failed), job.size))
                held += job.size
                job = next(source, None)
            yield _first(ahead[0][0], failed)
            held -= ahead.popleft()[1]
    finally:
        cancelled.set()
        for future, _ in ahead:
            future.cancel()
        if settle:
            wait([future for future, _ in ahead])


def in_any_order(pool: ThreadPoolExecutor, jobs: Iterable[Task[None]], *, max_ahead: int, max_bytes: int) -> None:
    """Run jobs, which are taken as they are needed: at most `max_ahead` at once, and of `max_bytes` (but always one).

    The first error of any of them is raised at once, and the rest is cancelled; what runs then is not waited for.
    """
    source = iter(jobs)
    begin = list(islice(source, 2))
    if len(begin) == 1:  # as above
        begin[0].run(threading.Event())
        return
    cancelled = threading.Event()
    running: dict[Future[None], int] = {}
    try:
        for job in chain(begin, source):
            while running and (len(running) >= max_ahead or sum(running.values()) + job.size > max_bytes):
                _take_done(running)
            running[pool.submit(job.run, cancelled)] = job.size
        while running:
            _take_done(running)
    finally:
        cancelled.set()
        for future in running:
            future.cancel()


def _take_done(running: dict[Future[None], int]) -> None:
    """Wait for at least one, and drop finished ones; raise the error of one."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        del running[future]
        future.result()


class Gate:
    """A gate that several threads pass through, until it is closed; then no thread is inside any more."""

    def __init__(self) -> None:
        self._inside = 0
        self._open = True
        self._changed = threading.Condition()

    def through(self, call: Callable[[], None]) -> bool:
        """Make a call, if the gate is open; True if it was."""
        with self._changed:
            if not self._open:
                return False
            self._inside += 1
        try:
            call()
            return True
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let no thread in any more, and wait for those inside."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._inside)


def _guarded(job: Task[T], cancelled: threading.Event, failed: Future[T]) -> T:
    try:
        return job.run(cancelled)
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):  # another job failed before
            failed.set_exception(error)
        raise


def _first(future: Future[T], failed: Future[T]) -> T:
    wait([future, failed], return_when=FIRST_COMPLETED)
    return failed.result() if failed.done() else future.result()
