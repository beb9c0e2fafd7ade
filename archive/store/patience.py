"""Does no I/O: says in the log what is tried again and why, and when a store that never answered is given up."""

from __future__ import annotations

import math
import time

from archive.base import logger
from archive.store.drivers import Kind, judge, unreached

TELL_S, TELL_AGAIN_S = 3.0, 30.0


class Patience:
    """What one process has seen of one store. Threads may share it: at worst two of them tell the same.

    first_answer_s: give up after that while nothing there could be reached at all; None: go on to the deadline.
    """

    def __init__(self, first_answer_s: float | None = None) -> None:
        self._first_answer_s = first_answer_s
        self._told_at = -math.inf

    def answered(self) -> None:
        """Somebody is there."""
        self._first_answer_s = None

    def failed(self, what: str, why: str, error: Exception, elapsed_s: float, deadline_s: float) -> bool:
        """Decide whether to give up on a failed request that may be tried again; after some seconds, log it."""
        if not unreached(error) and judge(error).kind is not Kind.EXPIRED:
            self.answered()
        limit_s = min(deadline_s, self._first_answer_s or deadline_s)
        if elapsed_s >= limit_s:
            return True
        if elapsed_s >= TELL_S and time.monotonic() - self._told_at >= TELL_AGAIN_S:
            self._told_at = time.monotonic()
            rest_s = limit_s - elapsed_s
            text = "%s has failed for %.0f s (%s); it is tried again for up to %.0f s more"
            logger.warning(text, what, elapsed_s, why, rest_s)
        return False
