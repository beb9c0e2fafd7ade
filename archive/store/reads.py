"""Does I/O: byte ranges of objects, many at once and read ahead within bounds, also into memory of the caller's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from archive.base import (
    ByteRange,
    Gate,
    ShortReadError,
    StorageError,
    Task,
    UsageError,
    in_any_order,
    in_child,
    in_order,
    tasks,
)
from archive.store.connection import Connection
from archive.store.counts import count
from archive.store.drivers import Buffer, Cause, Driver, judge
from archive.store.root import check_key

if TYPE_CHECKING:
    import numpy as np

    from archive.arrays import Memory

BATCH_BYTES = 1024 * 1024
SMALL_BATCH_BYTES = 4 * 1024 * 1024  # of ranges that are all smaller than a batch
LARGE_BATCH_BYTES = 8 * 1024 * 1024  # where all of them are held anyway
PIECE_BYTES = 8 * 1024 * 1024 + 64 * 1024  # the usual largest range
PIECES = 10  # of memory that reads share: a shard and what is read ahead of it
BATCHES_AHEAD = 2  # more only take memory, and from each other: there are no round trips to hide

T = TypeVar("T")


class Filling(NamedTuple):
    """Bytes of an object from `start` on, and memory for all of them, end to end."""

    key: str
    start: int
    rooms: Sequence[memoryview]

    @property
    def size(self) -> int:
        return sum(len(room) for room in self.rooms)


class ObjectReader(Connection):
    """A connection, and all that reads objects over it."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of an object, all of it by default, in one request.

        MissingObjectError; ShortReadError if it ends before `stop`, or where `start` is at or past its end.
        """
        return _as_bytes(self._get_range(key, start, stop))

    def get_head(self, key: str, max_bytes: int, cancelled: threading.Event | None = None) -> bytes:
        """The first bytes of an object of unknown size, at most `max_bytes`, in one request; none of an empty one.

        To read within a bound, ask for one byte more than it, which shows if there are more.
        """
        return _as_bytes(self._get_range(key, 0, max_bytes, cancelled, head=True))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Whole objects, one request each; results in the order of `keys`. The first error cancels the rest."""

        def read(key: str, cancelled: threading.Event) -> bytes:
            return _as_bytes(self._get_range(key, 0, None, cancelled))

        return self._gather(tasks(read, keys))

    def get_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """One request for each range, in any order; results in theirs. The first error cancels the rest.

        Ranges of one object are read together where the store can.
        """
        driver = self.driver
        if not driver.can("get_ranges"):
            return [_as_bytes(data) for data in self._gather(map(self._range_job, ranges))]
        batches = self._gather(self._batch_job(driver, batch) for batch in _batches(ranges, LARGE_BATCH_BYTES))
        return [_as_bytes(data) for batch in batches for data in batch]

    def iter_ranges(self, ranges: Iterable[ByteRange], *, max_bytes: int) -> Generator[Buffer, None, None]:
        """Ranges in order, read ahead by at most `max_bytes` (and always at least one range).

        Closing it cancels the reads ahead. Drop buffers that you have used: their memory then serves the next reads.
        """
        driver = self.driver
        if driver.can("get_ranges"):
            return self._iter_batches(driver, ranges, max_bytes)
        jobs = map(self._range_job, ranges)
        return in_order(self.engine().pool, jobs, max_ahead=2 * self.concurrency, max_bytes=max_bytes)

    def fill(self, fillings: Iterable[Filling], use: Callable[[int], None], *, max_bytes: int) -> None:
        """Fill memory of the caller's, several requests at once, and call `use` with the number of each that is done.

        They are answered in any order; `use` is called in the thread that read it. At most `max_bytes` (and always
        one filling) are in flight. The first error, of `use` as well, ends it; nothing is written or used any more when
        it is raised, and the content of the memory is undefined.
        """
        gate = Gate()

        driver = self.driver

        def read(number: int, one: Filling, cancelled: threading.Event) -> None:
            stop = one.start + one.size
            self._check_range(one.key, one.start, stop)

            def attempt(timeout_s: float) -> None:
                pour = _Pour(one, gate)
                driver.stream(one.key, one.start, stop, pour.take, timeout_s)
                count(self.stats, self.root.protocol, bytes_in=pour.came)
                _check_length(pour.came, one.start, stop, self.full_url(one.key))

            self.request("get", one.key, attempt, cancelled)
            gate.through(lambda: use(number))

        jobs = (Task(partial(read, number, one), one.size) for number, one in enumerate(fillings))
        try:
            in_any_order(self.engine().pool, jobs, max_ahead=self.concurrency, max_bytes=max_bytes)
        finally:
            gate.close()

    def scatter(self, key: str, start: int, rooms: Sequence[memoryview], *, again: bool = False) -> None:
        """Fill memory of the caller's, `rooms` one after the other, with the bytes of an object from `start` on.

        again: this continues a range of which a part was read before; the request is counted once.
        After an error what they hold is undefined.
        """
        stop = start + sum(len(room) for room in rooms)
        self._check_range(key, start, stop)
        driver = self.driver

        def attempt(timeout_s: float) -> None:
            (came,) = driver.read_into(key, [start], [rooms], timeout_s)
            count(self.stats, self.root.protocol, get=-int(again), bytes_in=came)
            _check_length(came, start, stop, self.full_url(key))

        self.request("get", key, attempt)

    @contextlib.contextmanager
    def meanwhile(self, call: Callable[[threading.Event], T]) -> Generator[Callable[[], T], None, None]:
        """Run a call of requests beside the caller's own, until the block ends; the yielded function waits for it.

        The event that `call` is given is for the requests' `cancelled`: it is set when the block ends. Where there is
        no network in between, the call only runs when it is waited for.
        """
        cancelled = threading.Event()
        if not self.driver.remote:
            yield lambda: call(cancelled)
            return
        begun = self.engine().pool.submit(call, cancelled)
        try:
            yield begun.result
        finally:
            cancelled.set()
            begun.cancel()

    def _gather(self, jobs: Iterable[Task[T]]) -> list[T]:
        """Run jobs at once; give their results in order. The first error cancels the rest."""
        return list(in_order(self.engine().pool, jobs, max_ahead=2 * self.concurrency))

    def _range_job(self, one: ByteRange) -> Task[Buffer]:
        return Task(partial(self._get_range, one.key, one.start, one.stop), one.size)

    def _get_range(
        self, key: str, start: int, stop: int | None, cancelled: threading.Event | None = None, *, head: bool = False
    ) -> Buffer:
        """Bytes [start, stop) of an object, to its end without `stop`, in one request; as the client gives them.
        head: it may end before."""
        self._check_range(key, start, stop)
        if start == stop:
            return b""
        driver, whole = self.driver, start == 0 and (head or stop is None)

        def attempt(timeout_s: float) -> Buffer:
            data = _read_once(driver, key, start, stop, timeout_s, whole)
            if head:
                data = data[:stop]
            count(self.stats, self.root.protocol, bytes_in=len(data))
            return data if head else _measured(data, start, stop, self.full_url(key))

        return self.request("get", key, attempt, cancelled)

    def _iter_batches(
        self, driver: Driver, ranges: Iterable[ByteRange], max_bytes: int
    ) -> Generator[Buffer, None, None]:
        """Read small ranges of one object in one go, by the caller's own thread if all are small: handing them over
        would take longer than reading them."""
        wanted = list(ranges)
        small = all(one.size <= BATCH_BYTES for one in wanted)
        batch_bytes = min(SMALL_BATCH_BYTES if small else BATCH_BYTES, max_bytes // 2)
        jobs = (self._batch_job(driver, batch, _memory()) for batch in _batches(wanted, batch_bytes))
        ahead: Generator[Sequence[Buffer], None, None]
        if small:
            ahead = (job.run(threading.Event()) for job in jobs)
        else:
            ahead = in_order(self.engine().pool, jobs, max_ahead=BATCHES_AHEAD, max_bytes=max_bytes)
        with contextlib.closing(ahead) as found:
            for batch in found:
                yield from batch
                del batch

    def _batch_job(
        self, driver: Driver, batch: Sequence[ByteRange], memory: Memory | None = None
    ) -> Task[Sequence[Buffer]]:
        """The reading of ranges of one object: large ones that fit into a piece of `memory` go there."""
        size = sum(one.size for one in batch)
        into = memory if memory is not None and BATCH_BYTES < size <= memory.piece_bytes else None
        return Task(partial(self._get_batch, driver, batch, into), size)

    def _get_batch(
        self, driver: Driver, batch: Sequence[ByteRange], memory: Memory | None, cancelled: threading.Event
    ) -> Sequence[Buffer]:
        for one in batch:
            self._check_range(one.key, one.start, one.stop)
        key, url = batch[0].key, self.full_url(batch[0].key)

        def attempt(timeout_s: float) -> Sequence[Buffer]:
            found: Sequence[Buffer]
            if memory is None:
                found = driver.get_ranges(key, [(one.start, one.stop) for one in batch], timeout_s)
            else:
                found = _read_into(driver, key, batch, memory.take().data, timeout_s)
            requests = sum(one.stop > one.start for one in batch)
            count(self.stats, self.root.protocol, get=requests - 1, bytes_in=sum(map(len, found)))
            return [_measured(data, one.start, one.stop, url) for data, one in zip(found, batch, strict=True)]

        return self.request("get", key, attempt, cancelled)

    def _check_range(self, key: str, start: int, stop: int | None) -> None:
        check_key(key)
        if start < 0 or (stop is not None and stop < start):
            raise UsageError(f"get {self.full_url(key)}: ({start}, {stop}) is no half-open range from 0 upwards")


def _read_once(driver: Driver, key: str, start: int, stop: int | None, timeout_s: float, whole: bool) -> Buffer:
    """Read once. `whole`: an object of unknown size, maybe empty."""
    try:
        return driver.get(key, start, stop, timeout_s)
    except Exception as error:
        # The range "0-" asks for a whole object without asking for its size first; an empty one has no such bytes.
        if whole and judge(error).kind is Cause.RANGE:
            return b""
        raise


@cache
def _memory() -> Memory:
    """The memory of all reads of this process: repeated reads get the same pieces each time."""
    from archive.arrays import Memory

    return Memory(PIECE_BYTES, keep=PIECES)


in_child(_memory.cache_clear)


def _read_into(
    driver: Driver, key: str, batch: Sequence[ByteRange], piece: memoryview, timeout_s: float
) -> Sequence[Buffer]:
    """Read ranges end to end into a piece of memory; the parts of it that were filled."""
    bounds = accumulate((one.size for one in batch), initial=0)
    rooms = [piece[start:stop] for start, stop in pairwise(bounds)]
    came = driver.read_into(key, [one.start for one in batch], [[room] for room in rooms], timeout_s)
    return [room[:count].toreadonly() for room, count in zip(rooms, came, strict=True)]


def _batches(ranges: Iterable[ByteRange], max_bytes: int) -> Iterator[list[ByteRange]]:
    """Neighbours of the same object together, up to `max_bytes`; what is larger is alone."""
    batch: list[ByteRange] = []
    size = 0
    for one in ranges:
        if batch and (one.key != batch[0].key or size + one.size > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.size
    if batch:
        yield batch


def _as_bytes(data: Buffer) -> bytes:
    """`data` itself if it is of that type, else a copy."""
    return data if isinstance(data, bytes) else bytes(data)


def _measured(data: Buffer, start: int, stop: int | None, url: str) -> Buffer:
    """`data` if it can be bytes [start, stop): ShortReadError for fewer, StorageError for more."""
    if stop is not None:
        _check_length(len(data), start, stop, url)
    elif start and not data:
        raise ShortReadError(f"get {url}: it has no byte {start}; it is damaged or not the object that was meant")
    return data


def _check_length(came: int, start: int, stop: int, url: str) -> None:
    """ShortReadError if fewer bytes came than [start, stop) has, StorageError if there were more."""
    wanted = stop - start
    if came < wanted:
        raise ShortReadError(f"{came} of the {wanted} bytes from {start} on came")
    if came > wanted:
        raise StorageError(
            f"get {url}: {came} bytes came for the range ({start}, {stop}): the server or a proxy ignores "
            "byte ranges; use one that honours them"
        )


class _Pour:
    """Memory that is filled with pieces of bytes, one after the other. came: the number of bytes."""

    def __init__(self, filling: Filling, gate: Gate) -> None:
        self.came = 0
        self._rooms: Iterator[memoryview] = iter(filling.rooms)
        self._room: np.ndarray[Any, Any] | None = None
        self._gate = gate

    def take(self, piece: Buffer) -> None:
        """Put a piece behind the earlier ones; StorageError once no caller waits for it any more."""
        if not self._gate.through(lambda: self._take(piece)):
            raise StorageError("no caller waits for this any more")

    def _take(self, piece: Buffer) -> None:
        import numpy as np  # copies without the interpreter's lock

        rest = np.frombuffer(piece, np.uint8)
        self.came += len(rest)
        while len(rest):
            if self._room is None or not len(self._room):
                following = next(self._rooms, None)
                if following is None:
                    return  # more than was asked for: the length tells
                self._room = np.frombuffer(following, np.uint8)
            count = min(len(rest), len(self._room))
            self._room[:count] = rest[:count]
            self._room, rest = self._room[count:], rest[count:]
