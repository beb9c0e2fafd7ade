"""Threads, but no I/O of its own: when the next tick of a journal is due, and a thread that makes it then."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from archive.journal.heartbeat import Heartbeat

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
        """Whether the tick is overdue, because the thread did not get its turn."""
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
        """Whether the tick whose moment has come was not made by somebody else meanwhile."""
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
