"""Pure, no I/O: what is sent and received, its sizes and its checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from archive.base import ByteRange as ByteRange
from archive.base import ShortReadError, StorageError
from archive.store.drivers import Buffer as Buffer

Data = Buffer | Sequence[Buffer]
B = TypeVar("B", bytes, Buffer)

BATCH_BYTES = 8 * 1024 * 1024


class RangeLike(Protocol):
    """Anything that names bytes [start, stop) of one object."""

    @property
    def key(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Filling(NamedTuple):
    """Bytes of an object from `start` on, and memory for all of them, end to end."""

    key: str
    start: int
    rooms: Sequence[memoryview]

    @property
    def size(self) -> int:
        return sum(len(room) for room in self.rooms)


def as_parts(data: Data) -> list[Buffer]:
    """`data` as a list of flat byte buffers; anything with the buffer protocol will do."""
    try:
        return [_flat(memoryview(data))]  # type: ignore[arg-type]
    except TypeError:
        return [_flat(memoryview(part)) for part in data]  # type: ignore[arg-type]


def _flat(view: memoryview) -> Buffer:
    if isinstance(view.obj, bytes):  # itself, so that it is sent without a copy
        return view.obj if view.nbytes == len(view.obj) else view
    return view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()


def as_bytes(data: Buffer) -> bytes:
    """`data` itself if it is of that type, else a copy."""
    return data if isinstance(data, bytes) else bytes(data)


def total_bytes(parts: Sequence[Buffer]) -> int:
    return sum(len(part) for part in parts)


def measured(data: B, start: int, stop: int | None, url: str) -> B:
    """`data` if it can be bytes [start, stop): ShortReadError for fewer, StorageError for more."""
    if stop is None:
        if start and not data:
            raise ShortReadError(f"get {url}: it has no byte {start}; it is damaged or not the object that was meant")
        return data
    check_length(len(data), start, stop, url)
    return data


def check_length(came: int, start: int, stop: int, url: str) -> None:
    """ShortReadError if fewer bytes came than [start, stop) has, StorageError if there were more."""
    wanted = stop - start
    if came < wanted:
        raise ShortReadError(f"{came} of the {wanted} bytes from {start} on came")
    if came > wanted:
        raise StorageError(
            f"get {url}: {came} bytes came for the range ({start}, {stop}): the server or a proxy ignores "
            "byte ranges; use one that honours them"
        )


def batches(ranges: Iterable[RangeLike], max_bytes: int = BATCH_BYTES) -> Iterator[list[RangeLike]]:
    """Neighbours of the same object together, up to `max_bytes`; what is larger is alone."""
    batch: list[RangeLike] = []
    size = 0
    for one in ranges:
        if batch and (one.key != batch[0].key or size + one.stop - one.start > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.stop - one.start
    if batch:
        yield batch
