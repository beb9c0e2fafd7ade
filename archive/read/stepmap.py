"""Pure, no I/O: from steps of episodes to steps of segments, many at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, group_of, offsets_of
from archive.base import UsageError
from archive.read.chunks import Segments
from archive.read.spans import Spans


class Places(NamedTuple):
    """Where some steps lie: number of the segment, step in that segment, number of the schema that they have."""

    segment: Ints
    step: Ints
    schema: Ints

    def pick(self, index: Any) -> Places:
        return Places(*(column[index] for column in self))


class StepMap:
    """The steps of some episodes, numbered end to end."""

    def __init__(self, spans: Spans, segments: Segments, code: Ints) -> None:
        """code: the number of the schema that each span has."""
        counts = spans.hi - spans.lo
        total = offsets_of(counts)
        self.first = total[spans.offsets[:-1]]
        self.lengths = total[spans.offsets[1:]] - self.first
        self.steps = int(total[-1])
        self._starts = total[:-1]
        self._segment = segments.places(spans.rows)
        self._code = code
        self._shift = spans.lo - total[:-1]
        self._single = bool((np.diff(spans.offsets) == 1).all())

    def check(self, numbers: Ints, starts: Ints, length: int) -> None:
        """Whether each episode has the steps [start, start + length)."""
        if numbers.shape != starts.shape or numbers.ndim != 1:
            raise UsageError(
                f"give one step for each episode's number, not {starts.shape} for {numbers.shape}, both of one axis"
            )
        if not len(numbers):
            return
        if int(numbers.min()) < 0 or int(numbers.max()) >= len(self.first):
            raise UsageError(
                f"episodes are numbered from 0 to {len(self.first)}; {int(numbers.min())} to {int(numbers.max())} were "
                "asked for"
            )
        bad = np.flatnonzero((starts < 0) | (starts + length > self.lengths[numbers]))
        if len(bad):
            number, start = int(numbers[bad[0]]), int(starts[bad[0]])
            raise UsageError(
                f"episode number {number} has {int(self.lengths[number])} steps, so none from {start} to "
                f"{start + length}"
            )

    def place(self, index: Ints) -> tuple[Ints, Ints]:
        """(number of the episode, step of it) of steps numbered end to end."""
        number = group_of(self.first, index)
        return number, index - self.first[number]

    def locate(self, numbers: Ints, steps: Ints) -> Places:
        """Where step `steps[i]` of episode `numbers[i]` lies; they were checked."""
        at = self.first[numbers] + steps
        span = numbers if self._single else group_of(self._starts, at)
        return Places(self._segment[span], at + self._shift[span], self._code[span])
