"""Threads, but no I/O of its own: when the next tick of a journal is due, and a thread that makes it then; and whether
a journal may still say "durable".

Nobody takes over what is journaled once a newer session has been opened. That one has ended the journal: an object of
it lies where the next one would, until a prune deletes it. So the store is asked for newer commits as well, once a
minute, and once after each pause of the journal's thread that is longer than a tick: a process that was stopped, or a
machine that slept, is replaced meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
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

    def end(self, error: SupersededError) -> None:
        """A newer session has ended the journal."""
        if not self.superseded:
            logger.warning("the journal ends here: %s", error)
        self._superseded = error

    @property
    def superseded(self) -> bool:
        """True if a newer session is known."""
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


QUIET_S = 0.02  # without a call: what belongs together was said
SOON_S = 0.1  # at most, where a shard is full
_PATIENCE = 0.25  # of the time within which a tick is due: how long before a quiet moment is waited for
_MOST_LEAD = 0.5  # of that time
_LATE_S = 0.01
_END_S = 1.0


class Ticker:
    """Calls `work`, a method of its owner, early enough for what was noted to be on its way to the store `within_s`
    after the oldest note; ends when its owner is gone.

    It belongs to the process that made it: a forked child has no such thread.
    """

    def __init__(self, within_s: float, work: Callable[[], None], heartbeat: Heartbeat) -> None:
        self.within_s = within_s
        self.oldest: float | None = None
        self._latest = 0.0
        self._hurry: float | None = None  # since when the next tick is to come soon
        self._lead_s = 0.0  # before what was added is on its way to the store
        self._work = weakref.WeakMethod(work)
        self._heartbeat = heartbeat
        self._woken = threading.Event()
        self._stopped = False
        self._wanted: float | None = None
        self._thread = threading.Thread(target=self._run, name="archive-journal", daemon=True)
        weakref.finalize(work.__self__, self._wake).atexit = False  # type: ignore[attr-defined]
        self._thread.start()

    def note(self, *, soon: bool = False) -> None:
        """Something was added; `soon`: and much is pending."""
        self._latest = now = time.monotonic()
        if soon and self._hurry is None:
            self._hurry = now
            self._wake()
        if self.oldest is None:
            self.oldest = now
            self._wake()

    def take(self) -> None:
        """A tick was made."""
        self.oldest = self._hurry = None

    def took(self, seconds: float) -> None:
        """So long it took to make an object of a tick: the next one comes so much earlier."""
        self._lead_s = min(max(seconds, (self._lead_s + seconds) / 2), _MOST_LEAD * self.within_s)

    def _due(self, oldest: float) -> float:
        return oldest + self.within_s - self._lead_s

    @property
    def late(self) -> bool:
        """True if the tick is overdue, because the thread did not get its turn."""
        oldest = self.oldest
        return oldest is not None and time.monotonic() > self._due(oldest) + _LATE_S

    def stop(self) -> None:
        """End the thread, once it has done what it is doing; it is waited for no longer than a moment, as the caller
        may hold what it waits for."""
        self._stopped = True
        self._wake()
        self._thread.join(_END_S)

    def _wake(self) -> None:
        self._woken.set()

    def _run(self) -> None:
        while not self._stopped:
            self._wait(None)
            if self._work() is None:
                return
            self._wanted = self._await_moment()
            work = self._work()
            if work is not None and self.wanted:
                work()
            del work

    @property
    def wanted(self) -> bool:
        """True if the tick whose moment has come was not made by somebody else meanwhile."""
        return not self._stopped and self._wanted is not None and self._wanted == self.oldest

    def _await_moment(self) -> float | None:
        """Until the tick is due: when the oldest of what it is to have was noted; None if nobody wants one any more."""
        while (oldest := self.oldest) is not None and not self._stopped:
            now, end = time.monotonic(), self._due(oldest)
            begin = end - _PATIENCE * self.within_s
            if (hurry := self._hurry) is not None:
                begin, end = min(begin, hurry), min(end, hurry + SOON_S)
            quiet = self._latest + QUIET_S
            due = min(end, max(begin, quiet))
            if now >= due:
                return oldest
            self._wait(due - now)
        return None

    def _wait(self, seconds: float | None) -> None:
        every_s = self._heartbeat.every_s
        self._woken.wait(every_s if seconds is None else min(seconds, every_s))
        self._woken.clear()
        if not self._stopped:
            self._heartbeat.beat()
