"""No I/O: waits for others, with repeated looks and occasional logs of the missing ones; the ranks of a job; durations
in the form for people."""

from __future__ import annotations

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
UNITS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}
_WRITTEN = re.compile(r"([0-9]{1,19})(min|[wdhms])")


class Wait:
    """A wait from now on, for `timeout_s` at most: the pauses between its looks, and the times to log it.

    poll_s: the first pause; each is twice as long as the one before, up to `most_poll_s` (all the same by default).
    """

    def __init__(self, timeout_s: float | None, poll_s: float, most_poll_s: float = 0.0) -> None:
        self._began = time.monotonic()
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._poll_s, self._most_poll_s = poll_s, max(poll_s, most_poll_s)
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
        time.sleep(min(self._poll_s, max(0.0, self._timeout_s - self.waited_s) + 0.001))
        self._poll_s = min(2 * self._poll_s, self._most_poll_s)


def process_group(least: int = 1) -> Any:
    """torch.distributed, if it was started with at least this many ranks; else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if ready and distributed.get_world_size() >= least else None


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
