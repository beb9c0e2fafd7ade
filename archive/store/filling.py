"""Does I/O: byte ranges of objects into memory of the caller's, many at once, as they come from the network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from archive.base import Gate, Job, StorageError, in_any_order
from archive.store.connecting import Connection
from archive.store.payload import Buffer, Filling, check_length
from archive.store.reading import check_range
from archive.store.retry import Attempt

if TYPE_CHECKING:
    import numpy as np


def fill(connection: Connection, fillings: Iterable[Filling], use: Callable[[int], None], max_bytes: int) -> None:
    """See Storage.fill."""
    gate = Gate()

    def job(number: int, one: Filling) -> Job[None]:
        def read(cancelled: threading.Event) -> None:
            _fill(connection, one, gate, cancelled)
            gate.through(lambda: use(number))

        return Job(read, one.size)

    jobs = (job(number, one) for number, one in enumerate(fillings))
    try:
        in_any_order(connection.engine().pool, jobs, max_ahead=connection.concurrency, max_bytes=max_bytes)
    finally:
        gate.close()


def _fill(connection: Connection, one: Filling, gate: Gate, cancelled: threading.Event) -> None:
    stop = one.start + one.size
    check_range(connection, one.key, one.start, stop)
    driver = connection.driver

    def attempt(this: Attempt) -> None:
        pour = Pour(one, gate)
        driver.stream(one.key, one.start, stop, pour.take, this.timeout_s)
        connection.stats.add(bytes_in=pour.came)
        check_length(pour.came, one.start, stop, connection.full_url(one.key))

    connection.request("get", one.key, attempt, cancelled)


class Pour:
    """Fills memory with pieces of bytes, one after the other. came: how many bytes there were."""

    def __init__(self, filling: Filling, gate: Gate) -> None:
        self.came = 0
        self._rooms: Iterator[memoryview] = iter(filling.rooms)
        self._room: np.ndarray[Any, Any] | None = None
        self._gate = gate

    def take(self, piece: Buffer) -> None:
        """Put a piece behind what came before; StorageError once nobody waits for it any more."""
        if not self._gate.through(lambda: self._take(piece)):
            raise StorageError("nobody waits for this any more")

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
