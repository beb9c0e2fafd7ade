"""Whether a journal may still say "durable": nobody takes over what is journaled once a newer session has been opened.

The store is asked for newer commits once a minute, and once after each pause of the journal's thread that is longer
than a tick: a process that was stopped, or a machine that slept, is replaced meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from archive.base import SupersededError, forking, logger

LOOK_S = 60.0
_LEAST_PAUSE_S = 1.0  # of shorter ones a busy machine has many
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps, where it can


def _now() -> float:
    return time.clock_gettime(_CLOCK)


class Heartbeat:
    """Knows when the journal's thread was last seen at work, and when a newer session was last looked for.

    `look` asks the store, and raises SupersededError if there is one. Opening the session has just done so.
    """

    def __init__(self, within_s: float, look: Callable[[], object]) -> None:
        self._pause_s = max(within_s, _LEAST_PAUSE_S)
        self.every_s = min(self._pause_s, LOOK_S) / 2
        self._look = look
        self._lock = forking.lock(self)
        self._superseded: SupersededError | None = None
        self._beaten = self._looked = _now()
        self._paused = False

    def beat(self) -> None:
        """The journal's thread is at work. What the store fails with is left to who asks next."""
        due, self._beaten = self._due(), _now()
        if due and not self.superseded:
            try:
                self._look_again()
            except SupersededError as error:
                logger.warning("the journal ends here: %s", error)
            except Exception:
                logger.warning("a newer session could not be looked for; it will be again", exc_info=True)

    @property
    def superseded(self) -> bool:
        """Whether a newer session is known."""
        return self._superseded is not None

    def check(self) -> None:
        """SupersededError if a newer session was opened; asks the store where that was not done since the last pause,
        or for a minute."""
        while not self.superseded and self._due():
            self._look_again()
        self.surface()

    def surface(self) -> None:
        """SupersededError if a newer session is known."""
        if self._superseded is not None:
            raise SupersededError(*self._superseded.args)

    def _due(self) -> bool:
        now = _now()
        self._paused |= now - self._beaten > self._pause_s
        return self._paused or now - self._looked >= LOOK_S

    def _look_again(self) -> None:
        with self._lock:
            began = _now()
            paused, self._paused, self._beaten = self._paused, False, max(self._beaten, began)
            try:
                self._look()
            except SupersededError as error:
                self._superseded = error
                raise
            except BaseException:
                self._paused |= paused
                raise
            self._looked = began
