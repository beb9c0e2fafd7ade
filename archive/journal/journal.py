"""The journal of one writer: it makes additions durable, and reports how far they are."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from archive import tables
from archive.base import NotDurableError, UsageError, in_child, logger, size
from archive.journal.ticker import Heartbeat, Ticker
from archive.journal.ticks import JournalObjects, Saying
from archive.log import CommitLog, Place, commits
from archive.observe import Label, Sample, source
from archive.write import Buffer, Changes, Cut, Pipeline, Seal, kept


@dataclass(frozen=True)
class Durable:
    """The extent to which a writer's additions are durable beyond its commits.

    positions: (buffer, env id) -> the offset below which all steps are durable; -1 stands for no env id.
    seconds_behind: age of the oldest addition that is not durable, 0.0 if all are.  number: of the next object of
    the journal.  pending_bytes: of steps that are not durable.
    """

    positions: Mapping[tuple[str, int], int]
    seconds_behind: float
    number: int
    pending_bytes: int

    def __repr__(self) -> str:
        if not self.seconds_behind:
            return f"<durable: all, next object {self.number}>"
        behind = f"{self.seconds_behind:.1f} s and {size(self.pending_bytes)} behind"
        return f"<durable: {behind}, next object {self.number}>"


_AT_EXIT_S = 10.0  # the wait for the store at an end without a commit


class Journal:
    """The journal of a writer. `send`: hands in all pending steps, and `tick()`; it is called with the writer's lock
    held. `background`: a method of the writer that takes the lock and calls `in_background`."""

    def __init__(
        self,
        place: Place,
        pipeline: Pipeline,
        objects: JournalObjects,
        changes: Changes,
        buffers: Mapping[str, Buffer],
        send: Callable[[], object],
        background: Callable[[], None],
        within_s: float,
        log: CommitLog,
    ) -> None:
        self._place = place
        self._pipeline = pipeline
        self._lock = changes.lock
        self._buffers = buffers
        self.send = send
        self.saying = Saying()
        changes.parts.append(kept(self.saying, *vars(self.saying)))
        self._durable: Mapping[tuple[str, int], int] = {}
        self._error: BaseException | None = None
        self.followed: dict[str, Callable[[Any], object]] = {}  # name -> takes in what it got, given the writer
        self._looked = 0.0  # the time at which followed objects were last looked at
        self._missed: float | None = None  # the time since which one of them may have what could not be taken in
        self._collecting = threading.local()
        self._heartbeat = Heartbeat(within_s, _Newest(log, place).check)
        self.ticker = Ticker(within_s, background, self._heartbeat)
        _open.add(self)
        changes.kept = self._kept
        pipeline.failed = self.ticker.note
        objects.took = self.ticker.took
        objects.ended = self._heartbeat.end

    def begin(self, resumed: bool) -> None:
        """Begin with the buffers as they are. Buffers that were resumed are journaled at once."""
        self._durable = self._positions()
        if resumed:
            self.saying.live = tables.concat(
                "live", [buffer.live_set.rows(name) for name, buffer in self._buffers.items()]
            )
            self.ticker.note(soon=True)

    def say(self, inner: Buffer, columns: Any, attributes: Any, progress: Any, changes: Any) -> None:
        """Values for the next tick."""
        if columns:
            self.saying.columns(inner, columns)
        if changes:
            self.saying.changes(inner, changes)
        if attributes:
            self.saying.attributes(inner, attributes)
        if progress is not None:
            self.saying.progress(progress)

    def _kept(self) -> None:
        self.ticker.note(soon=self._pipeline.waiting)

    def _positions(self) -> dict[tuple[str, int], int]:
        found = ((name, buffer.streams.positions()) for name, buffer in self._buffers.items())
        return {(name, env): position for name, of in found for env, position in of.items()}

    def tick(self) -> Seal:
        """The seal of a tick, with all that it records; its steps were handed in just before."""
        gone = {name: taken for name, buffer in self._buffers.items() if (taken := buffer.live_set.take_left())}
        return Seal(self.saying.take(gone), self._positions(), self.ticker.oldest)

    def ticked(self) -> None:
        """Take note that the tick was handed in."""
        self.ticker.take(self._looked if self.followed else None)  # nobody says when these change
        if not self.superseded:
            self._pipeline.retry_failed()
        self._pipeline.fold()
        self._settle()

    def follow(self, name: str, take_in: Callable[[Any], object], looked: float) -> None:
        """Take this in before each tick from now on. looked: the time at which that was last done."""
        self._looked = min(self._looked, looked) if self.followed else looked
        self.followed[name] = take_in
        self.ticker.note()

    def collect(self, writer: Any) -> None:
        """Take in what followed objects got since, without the writer's lock: such an object is held first, then the
        writer. The user's next call raises what fails, and the next tick tries it again."""
        if self.superseded or not self.followed:
            return
        began, failed = time.monotonic(), False
        self._collecting.now = True
        try:
            for name, take_in in list(self.followed.items()):
                try:
                    take_in(writer)
                except BaseException as error:
                    failed = True
                    self._fail(error, "what the journal follows as %r could not be taken in", name)
        finally:
            self._collecting.now = False
        self._missed = None if not failed else self._looked if self._missed is None else self._missed
        self._looked = began

    def checkpoint(self, cuts: Sequence[Cut]) -> None:
        """A checkpoint is on its way, with all that was sent off."""
        self.saying.checkpoint(cuts, {name: buffer.live_set for name, buffer in self._buffers.items()})

    def in_background(self) -> None:
        """Flush pending steps to the journal, from its thread and with the lock. The next call raises any error."""
        try:
            if self.ticker.wanted and not self.superseded:  # else the same puts would fail again and again
                self.send()
        except BaseException as error:
            self._fail(error, "the journal could not flush; the next call of the writer raises the error")

    def _fail(self, error: BaseException, *words: str) -> None:
        """Keep the first error for the user's next call, or an interrupt."""
        if self._error is None or not isinstance(error, Exception):  # an interrupt is told at once
            self._error = error
        logger.exception(*words)

    def surface(self) -> None:
        """Raise the thread's error; SupersededError if a newer session is known."""
        self._heartbeat.surface()
        if (error := self._error) is not None:
            self._error = None
            raise error

    @property
    def collecting(self) -> bool:
        """True in a thread that takes in what is followed: earlier errors are for the user's calls to raise."""
        return getattr(self._collecting, "now", False)

    def surface_missed(self) -> None:
        """Raise the error if what is followed could not be taken in the last time."""
        if self._missed is not None:
            self.surface()

    # -- progress ------------------------------------------------------------------------------------------------------

    @property
    def superseded(self) -> bool:
        """True if a newer session is known, which does not read what is journaled from now on."""
        return self._heartbeat.superseded

    def check_newest(self) -> None:
        """SupersededError if a newer session of the run was opened. Called before anything is reported as durable."""
        self._heartbeat.check()

    @property
    def durable(self) -> Durable:
        """The extent to which additions are durable now."""
        with self._lock:
            self._settle()
            pending = self._pipeline.pending_bytes + sum(buffer.slabs.nbytes for buffer in self._buffers.values())
            return Durable(dict(self._durable), self.seconds_behind, self._pipeline.number, pending)

    @property
    def seconds_behind(self) -> float:
        """The age of the oldest addition that is not durable, 0.0 if all are. Needs no lock."""
        ticks = dropwhile(lambda tick: tick.durable, list(self._pipeline.seals))
        oldest = next((tick.oldest for tick in ticks if tick.oldest is not None), self.ticker.oldest)
        since = [one for one in (oldest, self._missed) if one is not None]
        return max(time.monotonic() - min(since), 1e-6) if since else 0.0

    def _settle(self) -> None:
        """Take note of additions that have become durable."""
        for tick in list(self._pipeline.seals):
            if not tick.durable:
                return
            self._durable = tick.positions
            self._pipeline.seals.popleft()

    def await_durable(self, timeout_s: float, stop: float) -> None:
        """Wait until all ticks so far are durable. Raises the error of a failed upload; NotDurableError at `stop`."""
        for tick in list(self._pipeline.seals):
            done = _done(tick.laid_out, stop) and all(_stored(upload.future, stop) for upload in tick.uploads)
            if not done:
                state = self.durable
                behind = f"{size(state.pending_bytes)} are {state.seconds_behind:.1f} s behind"
                raise NotDurableError(
                    f"not durable within {timeout_s:g} s: {behind}, object {state.number} of the journal is next; the "
                    "store is slow or does not answer: wait longer (sync(timeout_s=...)), or add less at a time"
                )

    def finish(self) -> None:
        """Flush pending steps, which will not be committed; errors are logged. With the writer's lock."""
        self.followed.clear()
        try:
            self.send()
            self.await_durable(_AT_EXIT_S, time.monotonic() + _AT_EXIT_S)
            self.check_newest()
        except Exception:
            logger.warning("the last steps could not be flushed; they are lost when the process ends", exc_info=True)

    @property
    def behind(self) -> Sample:
        """`seconds_behind` as a metric."""
        where = (Label("rank", str(self._place.rank)), Label("run", self._place.run))
        return Sample(where, self.seconds_behind)

    def close(self) -> None:
        """End the thread."""
        _open.discard(self)
        self.ticker.stop()


class _Newest:
    """The newest commit that is known; it reads on from there."""

    def __init__(self, log: CommitLog, place: Place) -> None:
        self._log, self._place = log, place
        self._head = log.head

    def check(self) -> None:
        """SupersededError if a newer session of the run was opened."""
        known = max(self._head, self._log.head, key=lambda commit: commit.number)
        self._head = commits.newest_after(self._log.storage, known)
        self._place.newest(self._head)


def _done(future: Future[Any], stop: float) -> bool:
    """True if the future ends in time; raises its error."""
    wait([future], timeout=max(0.0, stop - time.monotonic()))
    if not future.done():
        return False
    future.result()
    return True


def _stored(future: Future[Any] | None, stop: float) -> bool:
    return future is not None and _done(future, stop)


def seconds(journal_s: float | None) -> float | None:
    """The seconds that were given, checked; UsageError if they are no length of time."""
    if journal_s is None:
        return None
    good = isinstance(journal_s, (int, float)) and not isinstance(journal_s, bool) and 0 < journal_s <= 86400
    if not good:
        raise UsageError(
            f"journal_s={journal_s!r}: give the seconds after which additions are durable at the latest, above 0, "
            "such as 2.0; or None for no journal"
        )
    return float(journal_s)


_open: weakref.WeakSet[Journal] = weakref.WeakSet()
in_child(_open.clear)  # journals belong to the parent
source("archive.journal.behind", lambda: [journal.behind for journal in list(_open)])
