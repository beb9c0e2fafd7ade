"""Threads, but no I/O of its own: the times of a journal's flushes, a thread that makes them, and the check that the
journal may still report additions as durable.

Nothing takes over what is journaled once a newer session has been opened. That one has ended the journal: an object of
it is in the place of the next one, until a prune deletes it. So the store is asked for newer commits as well, once a
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
_LEAST_PAUSE_S = 1.0  # a busy machine has many shorter ones
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps, where it can


def uptime() -> float:
    """Seconds since some time, also those in which the machine slept."""
    return time.clock_gettime(_CLOCK)


class Heartbeat:
    """The times at which the journal's thread was last at work, and a newer session was last looked for.

    `look` asks the store, and raises SupersededError if there is one. Opening the session has just done so.
    """

    def __init__(self, within_s: float, look: Callable[[], object]) -> None:
        self._pause_s = max(within_s, _LEAST_PAUSE_S)
        self.every_s = min(self._pause_s, LOOK_S) / 2
        self._look = look
        self._lock = forking.lock(self)
        self._superseded: SupersededError | None = None
        self._beaten = self._looked = uptime()
        self._paused = False

    def beat(self) -> None:
        """Take note that the journal's thread is at work. Errors of the store are left to the next caller."""
        due, self._beaten = self._due(), uptime()
        if due and not self.superseded:
            try:
                self._look_again()
            except SupersededError as error:
                logger.warning("the journal ends here: %s", error)
            except Exception:
                logger.warning("could not check for a newer session; the journal checks again", exc_info=True)

    def end(self, error: SupersededError) -> None:
        """Take note that a newer session has ended the journal."""
        if not self.superseded:
            logger.warning("the journal ends here: %s", error)
        self._superseded = error

    @property
    def superseded(self) -> bool:
        """True if a newer session is known."""
        return self._superseded is not None

    def check(self) -> None:
        """SupersededError if a newer session was opened. The store is asked after a pause, or once a minute."""
        while not self.superseded and self._due():
            self._look_again()
        self.surface()

    def surface(self) -> None:
        """SupersededError if a newer session is known."""
        if self._superseded is not None:
            raise SupersededError(*self._superseded.args)

    def _due(self) -> bool:
        now = uptime()
        self._paused |= now - self._beaten > self._pause_s
        return self._paused or now - self._looked >= LOOK_S

    def _look_again(self) -> None:
        with self._lock:
            began = uptime()
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


QUIET_S = 0.02  # without a call: a group of calls is complete
SOON_S = 0.1  # at most, where a shard is full
PATIENCE = 0.25  # part of the time until a tick is due in which it waits for a quiet moment
_MOST_LEAD = 0.5  # part of that time
_LATE_S = 0.01
_END_S = 1.0


class Ticker:
    """A thread that calls `work`, a method of its owner, early enough that what was noted is on its way to the store
    `within_s` after the oldest note. It ends when its owner is gone.

    It belongs to the process that made it: a forked child has no such thread.
    """

    def __init__(self, within_s: float, work: Callable[[], None], heartbeat: Heartbeat) -> None:
        self.within_s = within_s
        self.oldest: float | None = None
        self._flushed = self._latest = 0.0
        self._hurry: float | None = None  # the time since which the next flush is urgent
        self._lead_s = 0.0  # from the flush until additions are on their way to the store
        self._work = weakref.WeakMethod(work)
        self._heartbeat = heartbeat
        self._woken = threading.Event()
        self._stopped = False
        self._wanted: float | None = None
        self._thread = threading.Thread(target=self._run, name="archive-journal", daemon=True)
        weakref.finalize(work.__self__, self._wake).atexit = False  # type: ignore[attr-defined]
        self._thread.start()

    def note(self, *, soon: bool = False) -> None:
        """Note an addition; `soon`: much is pending."""
        self._latest = now = time.monotonic()
        if soon and self._hurry is None:
            self._hurry = now
            self._wake()
        if self.oldest is None:
            self.oldest = now
            self._wake()

    def hurry(self) -> bool:
        """Flush soon what was noted, as others of the node do; False if nothing was."""
        if self.oldest is None:
            return False
        if self._hurry is None:
            self._hurry = time.monotonic()
            self._wake()
        return True

    def take(self, oldest: float | None = None) -> None:
        """Take note that a flush was made. oldest: the time of the oldest addition that may not be in it."""
        self.oldest, self._hurry, self._flushed = oldest, None, time.monotonic()
        if oldest is not None:
            self._wake()

    def took(self, seconds: float) -> None:
        """Start the next flush earlier by the time the last one took."""
        self._lead_s = min(max(seconds, (self._lead_s + seconds) / 2), _MOST_LEAD * self.within_s)

    def _due(self, oldest: float) -> float:
        return oldest + self.within_s - self._lead_s

    @property
    def late(self) -> bool:
        """True if the flush is overdue, because the thread did not get its turn."""
        oldest = self.oldest
        return oldest is not None and time.monotonic() > self._due(max(oldest, self._flushed)) + _LATE_S

    def stop(self) -> None:
        """End the thread once its work is done. The wait is short, as the caller may hold a lock that it needs."""
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
        """True if the flush whose moment has come was not made by another thread meanwhile."""
        return not self._stopped and self._wanted is not None and self._wanted == self.oldest

    def _await_moment(self) -> float | None:
        """Wait until the flush is due; the time of its oldest note, None if no flush is wanted any more."""
        while (oldest := self.oldest) is not None and not self._stopped:
            now, end = time.monotonic(), self._due(oldest)
            begin = end - PATIENCE * self.within_s
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
