"""The part of a buffer that writes to archives: made visible, made durable, and ended."""

from __future__ import annotations

import os
import threading
from threading import Thread
from types import TracebackType
from typing import Self

from archive import Writer
from archive.adapters.rlinf.buffer.autosave import logged
from archive.adapters.rlinf.buffer.ranks import Where
from archive.adapters.rlinf.buffer.sink import Sink
from archive.adapters.rlinf.buffer.sinks import Sinks
from archive.base import ClosedError, UsageError
from archive.journal import Durable


class Writing:
    """Its sinks, which its calls take turns to use, and the process that they belong to."""

    _sinks: Sinks
    _where: Where | None  # that all is appended to
    _journal_s: float | None
    _writing: threading.RLock
    _closed: bool
    _pid: int
    _closing: Thread | None

    def flush(self) -> None:
        """Commit what was added so far (with auto_save)."""
        with self._writing:
            self._enter()
            self._sinks.each(Sink.commit)

    def sync(self, timeout_s: float = 60.0) -> Durable:
        """Wait until all that was added is durable (with journal_s=); how far that is.

        Raises what storing it failed with; NotDurableError (a TimeoutError) after the time. What was added is kept.
        """
        return self._journaling().sync(timeout_s)

    @property
    def durable_until(self) -> Durable:
        """How far what was added is durable, with journal_s=: `durable_until.seconds_behind` is 0.0 if all is."""
        return self._journaling().durable_until

    def _journaling(self) -> Writer:
        """The writer that keeps a journal."""
        if self._where is None or self._journal_s is None:
            raise UsageError("this buffer keeps no journal: make it with auto_save=True and journal_s=2.0")
        with self._writing:
            self._enter()
            return self._sinks.at(self._where).writer

    def close(self, wait: bool = True) -> None:
        """Finish what is under way and commit what was added. What the buffer has may still be sampled.

        wait=False: do so in the background; an error is logged.
        """
        with self._writing:
            if self._closed:
                return
            self._closed = True
            if wait:
                return self._sinks.close_all()
            self._closing = Thread(target=lambda: logged(self._sinks.close_all), name="archive-close")
            self._closing.start()

    def settle_at_exit(self) -> None:
        """Commit what was added with auto_save, before the interpreter ends."""
        if self._pid == os.getpid():
            self._closing.join() if self._closing else logged(lambda: self._sinks.each(Sink.finish))

    def tell_at_exit(self) -> None:
        """Nothing: its writers say what they have left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._sinks.close_all(error)

    def _enter(self) -> None:
        if self._closed:
            raise ClosedError("this buffer is closed; make another, and load what was saved")
        self._sinks.each(Sink.surface)
