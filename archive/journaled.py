"""The verbs of a writer that keeps a journal; a thin face over `archive.journal`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from archive.base import ClosedError, UsageError, logger
from archive.journal import Durable, Journal, JournalObjects
from archive.log import CommitLog
from archive.write import Buffer, ObjectKind, Pipeline, Work


class Journaled(Buffer):
    """A writer that says how far it is durable, and waits for it: `arc.writer(journal_s=2.0)`."""

    _closed: bool
    _journal: Journal | None
    _buffers: dict[str, Buffer]
    _pipeline: Pipeline
    _log: CommitLog
    _committed: deque[Sequence[Work]]

    @abstractmethod
    def _send(self) -> None:
        """Send off everything added so far, with the lock held."""

    def journal(
        self,
        columns: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Any = None,
        buffer: str | None = None,
    ) -> None:
        """Journal values with the next tick, so that a recovery finds them: for what every checkpoint says anew.

        columns: name -> one value a live step, in the order of `live`, or {episode id: one value a live step of it}, of
        live episodes only.  attributes: name -> {episode id: JSON value}.  progress: the run's counters, rank 0's.
        buffer: whose episodes, "replay" by default.
        """
        if buffer is None or buffer == self.name:
            super().journal(columns, attributes, progress)
            return
        if buffer not in self._buffers:
            raise UsageError(f"there is no buffer {buffer!r}; make it with w.buffer(...) first")
        self._buffers[buffer].journal(columns, attributes, progress)

    @property
    def durable_until(self) -> Durable:
        """How far what was added is durable: positions of each stream, seconds behind, the journal's next number.
        SupersededError as of `sync`."""
        with self._entered():
            journal = self._kept()
            state = journal.durable
        journal.check_newest()
        return state

    def sync(self, timeout_s: float = 60.0) -> Durable:
        """Journal everything added so far, and wait until it is durable; how far that is.

        Raises what storing it failed with; NotDurableError (a TimeoutError) after the time. What was added is kept.
        SupersededError if a newer session of the run was opened, as nobody takes over what is journaled since: that is
        looked up once a minute, and after each pause of this process that is longer than a tick.
        """
        stop = time.monotonic() + timeout_s
        with self._entered():
            journal = self._kept()
            journal.send()
        journal.await_durable(timeout_s, stop, self._looked)
        state = self._looked()
        journal.check_newest()
        return state

    def _journal_of(self, objects: ObjectKind, journal_s: float | None) -> Journal | None:
        if journal_s is None or not isinstance(objects, JournalObjects):
            return None
        return Journal(
            self._place,
            self._pipeline,
            objects,
            self._changes,
            self._buffers,
            self._send,
            self._tick,
            journal_s,
            self._log,
        )

    def _tick_late(self) -> None:
        """By a thread that makes a call, as the journal's own does not get its turn; not in the midst of what belongs
        together."""
        if not self._changes.lock._is_owned():  # type: ignore[attr-defined]
            with self._changes.lock:
                self._send()

    def _journal_the_rest(self) -> None:
        """Journal what is pending, as there will be no commit of it."""
        if self._journal is not None and not self._closed and not self._changes.broken:
            with self._changes.lock:
                self._journal.finish()

    def _tell_uncommitted(self) -> None:
        """Log how many steps are in no commit, as nobody commits them any more; not where a journal has all of them."""
        if self._journal is not None and not self._journal.seconds_behind and not self._journal.superseded:
            return
        with suppress(ClosedError):  # a part of the call that was interrupted was sent off: it counts
            self._changes.settle()
        sent = {*self._changes.ready, *self._pipeline.uncommitted()}.difference(*self._committed)
        steps = sum(work.steps for work in sent) + sum(buffer.pending_steps for buffer in self._buffers.values())
        if steps:
            logger.warning(
                "%r ends with %d steps that are in no commit that it knows of%s: w.commit(), w.checkpoint() and "
                "w.close() commit them, and so does leaving `with arc.writer() as w:` other than by an exception",
                self, steps, "" if self._journal is None else ", and not all of them in its journal",
            )  # fmt: skip

    def _tick(self) -> None:
        """Send off what is pending, called by the journal's thread."""
        with self._changes.lock:
            if self._journal is not None and not self._closed:
                self._journal.in_background()

    def _keep_values(self, inner: Buffer, columns: Any, attributes: Any, progress: Any) -> None:
        """Keep values for the next tick."""
        self._kept().say(inner, columns, attributes, progress)

    def _looked(self) -> Durable:
        with self._changes.lock:
            return self._kept().durable

    def _kept(self) -> Journal:
        if self._journal is None:
            raise UsageError("this writer keeps no journal: open it with arc.writer(journal_s=2.0)")
        return self._journal
