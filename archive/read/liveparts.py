"""Pure, no I/O: which steps of some episodes are live."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from archive.arrays import Ints, spans, sums
from archive.read.segments import Part


class LiveParts:
    """Which steps of each episode are live, where that is not all: CSR rows of (segment row, lo, hi)."""

    def __init__(self, offsets: Ints, rows: Ints, lo: Ints, hi: Ints) -> None:
        self.offsets, self.rows, self.lo, self.hi = offsets, rows, lo, hi

    @classmethod
    def of_one(cls, parts: Sequence[Part]) -> LiveParts:
        """The parts of one episode."""
        rows, lo, hi = (np.array([p[i] for p in parts], np.int64) for i in range(3))
        return cls(np.array([0, len(parts)]), rows, lo, hi)

    def of(self, i: int) -> list[Part]:
        span = range(int(self.offsets[i]), int(self.offsets[i + 1]))
        return [Part(int(self.rows[k]), int(self.lo[k]), int(self.hi[k])) for k in span]

    def lengths(self) -> Ints:
        return sums(self.hi - self.lo, self.offsets)

    def pick(self, chosen: Ints) -> LiveParts:
        counts = np.diff(self.offsets)[chosen]
        index = spans(self.offsets[:-1][chosen], counts)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return LiveParts(offsets, self.rows[index], self.lo[index], self.hi[index])
