"""Pure, no I/O: a byte range of an object, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, stop) of one object."""

    key: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start
