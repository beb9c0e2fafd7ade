"""Waits, but does no I/O: the one retry layer, with full jitter and a deadline.

No library does it: each try is given what is left of the deadline, a caller that stops ends the pause, and whether an
earlier try may have written something is remembered. tenacity and stamina have none of the three.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from archive.store.drivers import Kind, chain_of, judge
from archive.store.explaining import GaveUpError

T = TypeVar("T")

# Steps of 1.2 rather than 2: the cap is reached as late as attempt 26, so twenty refusals in a row cost seconds.
BASE_S, CAP_S, GROWTH = 0.05, 5.0, 1.2
MAX_SHORT_READS = 4
LEAST_TRY_S = 0.25  # with less time left, a try would be cut off, and nobody knew whether it had done anything

_BAD_ANSWERS = (Kind.SHORT, Kind.BROKEN)  # the same again and again is damage at rest

_jitter = random.SystemRandom()  # the program's own stream of random numbers is not ours to draw from


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one try may know: its number from 1, and the time left."""

    number: int
    timeout_s: float


def longest_delay(attempt: int) -> float:
    """Upper bound of the pause after try number `attempt`."""
    return min(CAP_S, BASE_S * GROWTH ** min(attempt - 1, 100))


def run(
    call: Callable[[Attempt], T],
    *,
    deadline_s: float,
    cancelled: threading.Event | None = None,
    short_reads: int = MAX_SHORT_READS,
    failed: Callable[[Exception, float], bool] = lambda error, elapsed_s: False,
    renew: Callable[[], bool] = lambda: False,
) -> T:
    """`call` until it answers, fails for good (GaveUpError), is cancelled, or `deadline_s` have passed.

    failed: told of each failure after which it would be tried again; gives whether not to.
    renew: told where credentials have expired; gives whether others may be there now, or soon.

    Once a try may have written something, the GaveUpError of a later one says so (`landed`).
    """
    stop = cancelled or threading.Event()
    started, number, landed = time.monotonic(), 0, False
    handled = sys.exception()
    while True:
        number += 1
        try:
            return call(Attempt(number, max(0.01, deadline_s - (time.monotonic() - started))))
        except Exception as error:
            _part(error, handled)
            failure, elapsed = judge(error), time.monotonic() - started
            landed = landed or failure.landed
            again = failure.kind is Kind.TRANSIENT or (failure.kind in _BAD_ANSWERS and number < short_reads)
            again = again or (failure.kind is Kind.EXPIRED and renew())
            again = again and not failed(error, elapsed)
            pause = _jitter.uniform(0, longest_delay(number))
            over = elapsed + pause + min(LEAST_TRY_S, deadline_s / 4) >= deadline_s
            if not again or over or stop.wait(pause):
                raise GaveUpError(error, failure.kind, number, elapsed, landed) from error


def _part(error: Exception, handled: BaseException | None) -> None:
    """Take from what led to an error that which the caller was handling before: it would be judged as its cause."""
    for one in chain_of(error):
        if handled is not None and one.__context__ is handled:
            one.__context__ = None
