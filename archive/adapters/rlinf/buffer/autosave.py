"""Commits in the background what was added, now and then; what goes wrong is raised by the buffer's next call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from archive.base import logger


class AutoSave:
    """Calls `commit` in a thread of its own, `interval_s` after `added()`, soon after `hurry()`,
    and while `now()` waits.

    An error is kept for `surface()`; the commit is tried again an interval later.
    """

    def __init__(self, commit: Callable[[], None], interval_s: float) -> None:
        self._commit = commit
        self._interval_s = interval_s
        self._wake = threading.Condition()
        self._due: float | None = None
        self._ended = False
        self._begun = 0  # how many commits
        self._done = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="archive-autosave", daemon=True)
        self._thread.start()

    def added(self) -> None:
        """There is something to commit, in a while."""
        self._at(time.monotonic() + self._interval_s)

    def hurry(self) -> None:
        """There is something to commit, now."""
        self._at(time.monotonic())

    def now(self) -> None:
        """Wait for a commit that begins after this; what goes wrong is for `surface()`, as always."""
        with self._wake:
            wanted = self._begun + 1
            self._due = time.monotonic()
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._done >= wanted or self._ended)

    def _at(self, due: float) -> None:
        with self._wake:
            if self._due is None or due < self._due:
                self._due = due
                self._wake.notify_all()

    def surface(self) -> None:
        """Raise what went wrong, once."""
        with self._wake:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread; a commit under way is finished, none is begun."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while self._waited():
            try:
                self._commit()
            except BaseException as error:
                with self._wake:
                    self._error = error
                self.added()
            with self._wake:
                self._done = self._begun
                self._wake.notify_all()

    def _waited(self) -> bool:
        """Wait until a commit is due; whether there is one to make."""
        with self._wake:
            while not self._ended:
                now = time.monotonic()
                if self._due is not None and self._due <= now:
                    self._due = None
                    self._begun += 1
                    return True
                self._wake.wait(None if self._due is None else self._due - now)
            return False


def logged(work: Callable[[], None]) -> None:
    """Do what nobody waits for; an error is logged, as there is nobody to raise it to."""
    try:
        work()
    except Exception:
        logger.exception("trajectories that were added could not be committed at the end")
