"""No I/O: waits for others, with repeated looks and occasional logs of the missing ones; the ranks of a job, and who of
them acts for all; durations in the form for people."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from archive.base.errors import UsageError

FIRST_S, GAP_S = 3.0, 60.0  # until a wait is logged first, and at most from then on
MOST_S = 1000 * 365 * 86_400  # longer than any wait, and short enough to be added to times
RANKS_A_STEP = 20  # a rank that acts for more of them has longer for it
FIRST_IN_HASTE = 6  # the ranks after the first one that have a step each in haste; of those behind twice as many
DOUBLING_STEPS = 1.5  # try with each of so many steps
TOLD = 16  # the first ones in line see who is missing
UNITS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}
_WRITTEN = re.compile(r"([0-9]{1,19})(min|[wdhms])")


class Wait:
    """A wait from now on, for `timeout_s` at most: the pauses between its looks, and the times to log it.

    poll_s: the first pause; each is twice as long as the one before, up to `most_poll_s` (all the same by default).
    """

    def __init__(self, timeout_s: float | None, poll_s: float, most_poll_s: float = 0.0) -> None:
        self._began = time.monotonic()
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._first_s = self._poll_s = poll_s
        self._most_poll_s = max(poll_s, most_poll_s)
        self._gap = FIRST_S
        self._next = self._began + FIRST_S

    def due(self) -> bool:
        """True if it is time for a log line; then not again for twice as long as the last time, a minute at most."""
        if time.monotonic() < self._next:
            return False
        self._gap = min(2 * self._gap, GAP_S)
        self._next = time.monotonic() + self._gap
        return True

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def over(self) -> bool:
        """True once it has lasted too long."""
        return self.waited_s > self._timeout_s

    def pause(self) -> None:
        """Sleep until the next look, which comes at the end at the latest."""
        self._sleep(self._poll_s)
        self._poll_s = min(2 * self._poll_s, self._most_poll_s)

    def put_off(self) -> None:
        """Sleep for as long as the first pause: the next look comes that much later, as another one was due."""
        self._sleep(self._first_s)

    def _sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, max(0.0, self._timeout_s - self.waited_s) + 0.001))


class Recurrence:
    """A thing that is done now and then, by whichever thread comes to it first; it was done when this began."""

    def __init__(self, *, begun: bool = True) -> None:
        """begun: False where it was never done so far."""
        self._last = time.monotonic() if begun else -math.inf

    def within(self, seconds: float) -> bool:
        """True if it was done within these seconds."""
        return time.monotonic() < self._last + seconds

    def take(self, after_s: float) -> bool:
        """True if it was last done so long ago: the caller does it now."""
        if self.within(after_s):
            return False
        self._last = time.monotonic()
        return True


class Line:
    """The ranks of a job in the order in which they do, for all, what is done once: rank 0, and others where it died.

    The next in line is far from the one before, so that ranks of one machine are not next to each other. Clocks only
    say when one more tries: it is done once whoever does it, and whatever else they do meanwhile.
    """

    def __init__(self, rank: int, world_size: int, step_s: float) -> None:
        """step_s: the time that the first one has for it before the next one tries, too."""
        self.step_s = step_s
        self._world_size = world_size
        self._bits = (world_size - 1).bit_length()
        self._rank = rank
        own = self._reversed(rank)
        self.turn = sum(self._reversed(at) < world_size for at in range(own))
        self._due_s: float | None = 0.0  # when to step in: 0 before the first look, None while it is not possible

    def _reversed(self, number: int) -> int:
        return int(f"{number:0{self._bits}b}"[::-1], 2)

    def step_of(self, ranks: int) -> float:
        """The time that each has where there are so many ranks, whose objects it has to read."""
        return self.step_s * ranks / RANKS_A_STEP

    @property
    def looks_around(self) -> bool:
        """True if it may look who is missing, for its user; in a large world not all do, which would be many lists."""
        return self.turn < TOLD

    def before(self, present: Iterable[int]) -> int:
        """The number of these ranks that come before this one in line."""
        own = self._reversed(self._rank)
        return sum(self._reversed(rank) < own for rank in present)

    def in_haste_s(self, before: int) -> float:
        """The time that a rank gives so many before it in line where time is short: a step each, as far as they are
        few; of very many the last waits for 17 steps, and not all of them try at once."""
        further = math.log2(max(before, FIRST_IN_HASTE) / FIRST_IN_HASTE)
        return self.step_s * (min(before, FIRST_IN_HASTE) + DOUBLING_STEPS * further)

    def leads(self, present: Iterable[int]) -> bool:
        """True if it is the first in line of these ranks and itself: then it speaks for all."""
        return self.before(present) == 0

    def is_due(self, waited_s: float) -> bool:
        """True once it should look if those before it in line have left something undone."""
        return self.turn > 0 and waited_s >= (self.turn - 0.5) * self._pace_s

    def steps_in(self, waited_s: float, possible: bool) -> bool:
        """True if it should do it now; it `is_due`. Those before it had the time for it since it was possible: what is
        so at its first look is taken to have been so for long, but for half a step.

        possible: if it can be done, as it has just seen.
        """
        if not possible:
            self._due_s = None
            return False
        if self._due_s == 0.0:
            self._due_s = waited_s + 0.5 * self._pace_s
        elif self._due_s is None:
            self._due_s = waited_s + self.turn * self._pace_s
        return waited_s >= self._due_s

    @property
    def _pace_s(self) -> float:
        return max(self.step_s, self.step_of(self._world_size))

    def wait(self, timeout_s: float | None, poll_s: float, most_poll_s: float) -> Wait:
        """A wait whose looks are further apart the more ranks there are, so that a world of any size makes about as
        many of them a second; in one of a hundred ranks and more each looks as rarely as `most_poll_s` says."""
        return Wait(timeout_s, min(most_poll_s, poll_s * max(1, self._world_size / 2)), most_poll_s)


def process_group(least: int = 1) -> Any:
    """torch.distributed, if it was started with at least this many ranks; else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if ready and distributed.get_world_size() >= least else None


def level_of(rank: int, level: int) -> int:
    """The level at which a rank logs what each of them could: DEBUG, but for rank 0, which says it once for the job."""
    return logging.DEBUG if rank else level


def ranks(numbers: Iterable[int]) -> str:
    """Ranks for people: "rank 1", "ranks 1, 2"; of many, the first ones and the number."""
    listed: Sequence[int] = sorted(numbers)
    shown = ", ".join(map(str, listed[:20])) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")
    return f"rank{'s' if len(listed) > 1 else ''} {shown}"


def seconds_of(given: Any, what: str) -> float:
    """Seconds of "24h", "7d", "90m" or "90min" (w, d, h, m or s), or of a timedelta; UsageError for anything else."""
    if isinstance(given, timedelta) and given >= timedelta(0):
        return given.total_seconds()
    written = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    found = None if written is None else int(written[1]) * UNITS[written[2][0]]
    if found is None or found > MOST_S:
        raise UsageError(
            f"{what}={given!r}: give a time such as '24h' or '7d' (w, d, h, m or s), of 1000 years at most"
        )
    return found


def written(seconds: float) -> str:
    """A duration in the largest unit that makes it a whole number."""
    fits = (f"{int(seconds) // size}{unit}" for unit, size in UNITS.items() if seconds and seconds % size == 0)
    return next(fits, f"{seconds:g}s")
