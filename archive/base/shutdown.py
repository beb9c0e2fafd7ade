"""Pure, no I/O: the time for which this process may wait for others, once it was told to end.

A job that is preempted has seconds. A part of them is for agreeing on the last step, a part for the checkpoint that was
under way, a part for the last one; the rest is for sending it. Missing parts are done without.
"""

from __future__ import annotations

import math
import time

from archive.base.errors import UsageError
from archive.base.forking import in_child

WITHIN_S = 30.0
FORGOTTEN_AFTER = 4.0  # times that long
AGREE_PART, EARLIER_PART, LAST_PART = 0.2, 0.4, 0.7  # of the time, from its beginning on
ANOTHER_TOLD = LAST_PART - 1.0  # gone where another process was told: the last part ends with the whole of its time


class Shutdown:
    """The end of one process: its announcement, and the time that it may take."""

    def __init__(self) -> None:
        self.within_s = WITHIN_S
        self.began = -math.inf  # by the monotonic clock; not announced yet

    def begin(self, gone: float = 0.0) -> None:
        """The process was told to end; the first time counts. gone: the part of its time that is over already; less
        than 0 if it begins only later."""
        began = time.monotonic() - gone * self.within_s
        self.began = min(self.began, began) if self.announced else began

    @property
    def announced(self) -> bool:
        """True once the process was told to end. A process that lives on long after was not meant to end."""
        return time.monotonic() < self.began + FORGOTTEN_AFTER * self.within_s

    def passed(self, part: float, since: float = math.inf) -> bool:
        """True once that part of the time is over; False without an announcement, or if it was forgotten before `since`
        (by the monotonic clock; now by default), from when on something has been going on that an end cuts short."""
        now = time.monotonic()
        forgotten = min(since, now) >= self.began + FORGOTTEN_AFTER * self.within_s
        return not forgotten and now >= self.began + part * self.within_s


process = Shutdown()


def set_within(seconds: float) -> None:
    """Set the time that a shutdown may take; 30 s by default."""
    if not seconds > 0:
        raise UsageError(f"a shutdown within {seconds} s: give a number of seconds above 0")
    process.within_s = float(seconds)


def _forget() -> None:
    process.began = -math.inf


in_child(_forget)
