"""Does I/O: byte ranges of objects, many at once and read ahead within bounds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

from archive.base import Job, ShortReadError, UsageError, in_child, in_order
from archive.store.connecting import Connection
from archive.store.drivers import Driver, GetRanges, Kind, judge
from archive.store.payload import B, Buffer, RangeLike, as_bytes, batches, measured, total_bytes
from archive.store.retry import Attempt
from archive.store.root import check_key

if TYPE_CHECKING:
    from archive.arrays import Memory

BATCH_BYTES = 1024 * 1024
SMALL_BATCH_BYTES = 4 * 1024 * 1024  # of ranges that are all smaller than a batch
PIECE_BYTES = 8 * 1024 * 1024 + 64 * 1024  # the usual largest range
PIECES = 10  # of memory that reads share: a shard and what is read ahead of it
BATCHES_AHEAD = 2  # more only take memory, and from each other: there are no round trips to hide

T = TypeVar("T")
Read = Callable[[str, Sequence[RangeLike], float], Sequence[B]]  # ranges of one key, and how long that may take


def get_range(
    connection: Connection, key: str, start: int, stop: int | None, cancelled: threading.Event | None = None
) -> Buffer:
    """Read bytes [start, stop) of an object, to its end without `stop`, in one request; as the client gives them."""
    check_range(connection, key, start, stop)
    if start == stop:
        return b""
    driver = connection.driver

    def attempt(this: Attempt) -> Buffer:
        data = read_once(driver, key, start, stop, this.timeout_s)
        connection.stats.add(bytes_in=len(data))
        return measured(data, start, stop, connection.full_url(key))

    return connection.request("get", key, attempt, cancelled)


def read_once(
    driver: Driver, key: str, start: int, stop: int | None, timeout_s: float, *, whole: bool = False
) -> Buffer:
    """Read once. `whole`: an object of unknown size is meant, as it is without `stop`; none of an empty one."""
    try:
        return driver.get(key, start, stop, timeout_s)
    except Exception as error:
        # The range "0-" asks for a whole object without asking for its size first; an empty one has no such bytes.
        if start == 0 and (whole or stop is None) and judge(error).kind is Kind.RANGE:
            return b""
        raise


def get_ranges(connection: Connection, ranges: Sequence[RangeLike]) -> list[bytes]:
    """Read ranges in any order, those of one object together where the store can; give them in theirs."""
    ranging = connection.driver.ranging
    if ranging is None:
        return [as_bytes(data) for data in gather(connection, [_range_job(connection, one) for one in ranges])]
    read = _reading(ranging)
    found = gather(connection, [_batch_job(connection, read, batch) for batch in batches(ranges)])
    return [data for batch in found for data in batch]


def iter_ranges(connection: Connection, ranges: Iterable[RangeLike], max_bytes: int) -> Generator[Buffer, None, None]:
    """Read ranges in order and ahead, holding at most `max_bytes`, and always at least one range."""
    ranging = connection.driver.ranging
    if ranging is not None:
        return _iter_batches(connection, ranging, ranges, max_bytes)
    jobs = (_range_job(connection, one) for one in ranges)
    return in_order(connection.engine().pool, jobs, max_ahead=2 * connection.concurrency, max_bytes=max_bytes)


def scatter(connection: Connection, key: str, start: int, rooms: Sequence[memoryview], *, again: bool) -> None:
    """Fill `rooms`, one after the other, with the bytes from `start` on, where the driver can; in one request.

    again: this goes on with a range of which a part was read before, and is no request of its own.
    """
    wanted = sum(len(room) for room in rooms)
    check_range(connection, key, start, start + wanted)
    scattering = connection.driver.scattering
    assert scattering is not None

    def attempt(this: Attempt) -> None:
        came = scattering.scatter(key, start, rooms, this.timeout_s)
        connection.stats.add(get=-int(again), bytes_in=came)
        if came < wanted:
            raise ShortReadError(f"{came} of the {wanted} bytes from {start} on came")

    connection.request("get", key, attempt)


@contextlib.contextmanager
def meanwhile(connection: Connection, call: Callable[[threading.Event], T]) -> Generator[Callable[[], T], None, None]:
    """Run a call beside the caller's own requests; what is given waits for it, and gives or raises what it did.

    It is cancelled when the block ends. Where there is no network in between, it only runs when it is waited for.
    """
    cancelled = threading.Event()
    if not connection.driver.remote:
        yield lambda: call(cancelled)
        return
    begun = connection.engine().pool.submit(call, cancelled)
    try:
        yield begun.result
    finally:
        cancelled.set()
        begun.cancel()


def gather(connection: Connection, jobs: Sequence[Job[T]]) -> list[T]:
    """Run jobs at once; give their results in order. The first error cancels the rest."""
    if len(jobs) == 1:
        return [jobs[0].run(threading.Event())]
    return list(in_order(connection.engine().pool, jobs, max_ahead=2 * connection.concurrency))


def _iter_batches(
    connection: Connection, ranging: GetRanges, ranges: Iterable[RangeLike], max_bytes: int
) -> Generator[Buffer, None, None]:
    """Small ranges of one object are read in one go, where all are small by the caller's own thread: handing them to
    another would take longer than reading them."""
    wanted = list(ranges)
    small = all(one.stop - one.start <= BATCH_BYTES for one in wanted)
    read = _reading_into(ranging, _memory())
    batch_bytes = min(SMALL_BATCH_BYTES if small else BATCH_BYTES, max_bytes // 2)
    jobs = (_batch_job(connection, read, batch) for batch in batches(wanted, batch_bytes))
    ahead: Generator[Sequence[Buffer], None, None]
    if small:
        ahead = (job.run(threading.Event()) for job in jobs)
    else:
        ahead = in_order(connection.engine().pool, jobs, max_ahead=BATCHES_AHEAD, max_bytes=max_bytes)
    with contextlib.closing(ahead) as found:
        for batch in found:
            yield from batch
            del batch


@cache
def _memory() -> Memory:
    """One for all reads of this process: who reads run after run has the same pieces each time."""
    from archive.arrays import Memory

    return Memory(PIECE_BYTES, keep=PIECES)


in_child(_memory.cache_clear)


def _reading(ranging: GetRanges) -> Read[bytes]:
    def read(key: str, batch: Sequence[RangeLike], timeout_s: float) -> Sequence[bytes]:
        return ranging.get_ranges(key, [(one.start, one.stop) for one in batch], timeout_s)

    return read


def _reading_into(ranging: GetRanges, memory: Memory) -> Read[Buffer]:
    """Reads into memory that is used again what is large and fits into a piece of it."""

    def read(key: str, batch: Sequence[RangeLike], timeout_s: float) -> Sequence[Buffer]:
        bounds = list(accumulate((one.stop - one.start for one in batch), initial=0))
        if not BATCH_BYTES < bounds[-1] <= memory.piece_bytes:
            return ranging.get_ranges(key, [(one.start, one.stop) for one in batch], timeout_s)
        piece = memory.take().data
        rooms = [piece[start:stop] for start, stop in pairwise(bounds)]
        found = ranging.get_ranges_into(key, [one.start for one in batch], rooms, timeout_s)
        return [data.toreadonly() for data in found]

    return read


def _get_batch(
    connection: Connection, read: Read[B], batch: Sequence[RangeLike], cancelled: threading.Event
) -> Sequence[B]:
    for one in batch:
        check_range(connection, one.key, one.start, one.stop)
    key = batch[0].key

    def attempt(this: Attempt) -> Sequence[B]:
        found = read(key, batch, this.timeout_s)
        connection.stats.add(get=sum(one.stop > one.start for one in batch) - 1, bytes_in=total_bytes(found))
        url = connection.full_url(key)
        return [measured(data, one.start, one.stop, url) for data, one in zip(found, batch, strict=True)]

    return connection.request("get", key, attempt, cancelled)


def check_range(connection: Connection, key: str, start: int, stop: int | None) -> None:
    check_key(key)
    if start < 0 or (stop is not None and stop < start):
        raise UsageError(f"get {connection.full_url(key)}: ({start}, {stop}) is no half-open range from 0 upwards")


def _batch_job(connection: Connection, read: Read[B], batch: Sequence[RangeLike]) -> Job[Sequence[B]]:
    size = sum(one.stop - one.start for one in batch)
    return Job(lambda cancelled: _get_batch(connection, read, batch, cancelled), size)


def _range_job(connection: Connection, one: RangeLike) -> Job[Buffer]:
    return Job(lambda cancelled: get_range(connection, one.key, one.start, one.stop, cancelled), one.stop - one.start)
