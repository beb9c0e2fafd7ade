"""Parties, their threads, and the one that runs: at each lock, wait, sleep and request a chooser may let another go on.

A strand is a thread of a party, as a greenlet; a party is a process. One strand runs at a time, until its next point.
Time is virtual: requests take some of it, and it jumps to the next alarm when all strands wait.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any, Generic, NoReturn, TypeVar

import greenlet

from tests.support.simulation.choosers import Chooser

T = TypeVar("T")
BEGAN_S = 1_000.0
_pids = itertools.count(10_000_000)  # of no process that there is; never the same in two histories
_active: list[Scheduler] = []


class HungError(AssertionError):
    """Nobody can go on, or nobody comes to an end."""


class _Nobody:
    """Stands in between histories, where what is collected may still set an event, and for threads that other tests
    have left behind: these have the time, and wait, as ever."""

    def __init__(self) -> None:
        party = SimpleNamespace(pid=os.getpid(), rng=random.SystemRandom(), launcher=SimpleNamespace(clock_s=0.0))
        self.running: Any = SimpleNamespace(party=party)

    @property
    def now(self) -> float:
        return time.monotonic()

    def block(self, why: str, seconds: float) -> None:
        time.sleep(seconds)

    def point(self, what: str) -> None:
        """Nobody else is there."""

    def unblock(self, strand: Any) -> None:
        """It is gone."""


_nobody: Any = _Nobody()


def here() -> Scheduler:
    """The scheduler of the history that runs, in its thread."""
    return _active[-1] if _active and _active[-1].thread == threading.get_ident() else _nobody


class DiedError(Exception):
    """A process died before it had done its work."""


class Party:
    """A process: its strands, its clock, its random numbers, and what is to befall it at which of its points. launcher:
    the process that began it, which it ends with, and whose points its own are: a job's, of one of its ranks."""

    def __init__(self, name: str, seed: object = 0, points: int = 0, launcher: Party | None = None) -> None:
        self.name = name
        self.pid = next(_pids)
        self.rng = random.Random(f"{seed} {name}")
        self.clock_s = 0.0  # its wall clock is so much ahead of the true time
        self.points = points
        self.alive = True
        self.stopped = False
        self.parked: list[Strand] = []  # ready, but for being stopped
        self.strikes: list[tuple[int, Callable[[], None]]] = []  # the next one first
        self.launcher = launcher or self
        self.launched: list[Party] = []
        if launcher is not None:
            launcher.launched.append(self)

    def reached(self) -> None:
        """It has come to one more point."""
        launcher = self.launcher
        launcher.points += 1
        while launcher.alive and launcher.strikes and launcher.strikes[0][0] <= launcher.points:
            launcher.strikes.pop(0)[1]()

    @property
    def all(self) -> tuple[Party, ...]:
        """It, and those that it has launched."""
        return self, *self.launched


class Strand:
    """A thread of a party."""

    def __init__(
        self, number: int, name: str, party: Party, run: Callable[[], None], hub: greenlet.greenlet, *, main: bool
    ) -> None:
        self.number, self.name, self.party, self.main = number, name, party, main
        self.fiber = greenlet.greenlet(run, hub)
        self.waits: str | None = None  # for what; None while it is ready
        self.blocking = self.woken = False  # it begins to wait; it need not wait any longer
        self.alarm: float | None = None
        self.done = False
        self.joining: list[Strand] = []

    def __repr__(self) -> str:
        return f"{self.name} ({self.waits or 'ready'})"


class Scheduler:
    """The scheduler of one history. `failures`: errors that ended strands."""

    def __init__(self, chooser: Chooser, most_points: int = 1_000_000, most_s: float = 100 * 86_400) -> None:
        self.chooser = chooser
        self.now = BEGAN_S
        self.points = 0
        self.trace: list[str] = []
        self.deviations: list[tuple[int, int]] = []  # (point, strand) where another one went on than by default
        self.failures: list[BaseException] = []
        self.running: Strand
        self.ready: dict[int, Strand] = {}
        self.strands: list[Strand] = []
        self.over = False
        self._mains = 0
        self._asleep: list[tuple[float, int, Strand]] = []
        self._order = itertools.count()
        self._most = most_points, BEGAN_S + most_s
        self._hub = greenlet.getcurrent()

    # -- for parties ---------------------------------------------------------------------------------------------------

    def spawn(self, name: str, party: Party, work: Callable[[], Any], *, main: bool = False) -> Strand:
        """Begin a thread. The history ends when all main ones have."""

        def run() -> None:
            try:
                work()
            except greenlet.GreenletExit:
                pass
            except BaseException as error:
                if not self.over:
                    self.failures.append(error)
                    self._mains = 0  # all end
            self._end(strand)

        strand = Strand(len(self.strands), f"{party.name}/{name}", party, run, self._hub, main=main)
        self.strands.append(strand)
        self._mains += main
        strand.done = not party.alive
        self._make_ready(strand)
        return strand

    def point(self, what: str) -> None:
        """A point at which another strand may go on, and at which a party may be struck."""
        if self.over:
            raise greenlet.GreenletExit
        self._note(what)
        if self.points >= self.chooser.next:
            self._go_on(self.chooser.at(self.points, what, self.running, self.ready), self.running)

    def block(self, waits: str, timeout_s: float | None = None) -> bool:
        """Wait until another strand unblocks this one; False if the time was over before."""
        if self.over:
            raise greenlet.GreenletExit
        strand = self.running
        strand.blocking, strand.woken = True, False
        self._note(waits)  # where its party may be stopped for a while
        if strand.woken:
            strand.blocking = False
            return True
        strand.waits, strand.alarm = waits, None
        self.ready.pop(strand.number, None)
        if timeout_s is not None:
            strand.alarm = self.now + max(0.0, timeout_s)
            heappush(self._asleep, (strand.alarm, next(self._order), strand))
        self._leave()
        strand.blocking = False
        return strand.woken

    def unblock(self, strand: Strand) -> None:
        strand.woken = strand.blocking
        if strand.waits is not None:
            self._make_ready(strand)

    def advance(self, seconds: float) -> None:
        """Time passes: strands whose alarm has come are ready."""
        self.now += seconds
        while self._asleep and self._asleep[0][0] <= self.now:
            self._ring()

    # -- what befalls parties ------------------------------------------------------------------------------------------

    def kill(self, party: Party) -> None:
        """Nothing of a party, or of those that it has launched, runs any more; not even what it would do at its end."""
        for one in party.all:
            one.alive = False
        for strand in self.strands:
            if not strand.party.alive and not strand.done:
                self.ready.pop(strand.number, None)
                self._mains -= strand.main
                strand.done = True
                for waiting in strand.joining:
                    self.unblock(waiting)
        if not self.running.party.alive:
            self._leave()

    def works(self, party: Party) -> bool:
        """True if its main strand has not ended."""
        return any(one.main and not one.done for one in self.strands if one.party is party)

    def stop(self, party: Party, seconds: float) -> None:
        """A party, and those that it has launched, do not run for so long, while the time goes on."""
        for one in party.all:
            one.stopped = True
        for number in [number for number, strand in self.ready.items() if strand.party.stopped]:
            strand = self.ready.pop(number)
            strand.party.parked.append(strand)
        stopped = party.all
        self.spawn("continue", Party("kernel"), lambda: self._continue(stopped, seconds))
        if self.running.party.stopped:
            self._leave()

    def _continue(self, parties: Sequence[Party], seconds: float) -> None:
        self.block("", seconds)
        for party in parties:
            party.stopped, parked, party.parked = False, party.parked, []
            for strand in parked:
                if party.alive:
                    self.ready[strand.number] = strand

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until all main strands have ended. HungError if that does not come."""
        self.thread = threading.get_ident()
        _active.append(self)
        try:
            while self._mains > 0:
                strand = self._next()
                self.running = strand
                strand.fiber.switch()
        finally:
            self.over = True
            for strand in self.strands:
                if strand.fiber:
                    strand.fiber.throw(greenlet.GreenletExit)
            _active.pop()

    def _note(self, what: str) -> None:
        strand, self.points = self.running, self.points + 1
        self.trace.append(f"{strand.name} {what}")
        strand.party.reached()
        if self.points > self._most[0] or self.now > self._most[1]:
            self._hang("does not come to an end")

    def _go_on(self, strand: Strand, default: Strand) -> None:
        if strand is not default:
            self.deviations.append((self.points, strand.number))
        if strand is not self.running:
            self.running = strand
            strand.fiber.switch()

    def _leave(self) -> None:
        """Let another one go on, as this one cannot."""
        strand = self._next()
        if strand is not self.running:
            self.running = strand
            strand.fiber.switch() if self._mains > 0 else self._hub.switch()

    def _next(self) -> Strand:
        if self._mains <= 0 and greenlet.getcurrent() is not self._hub:
            self._hub.switch()
        while not self.ready:
            if not self._asleep:
                self._hang("is hung")
            self._ring()
        default = self.ready[min(self.ready)]
        strand = self.chooser.pick(self.points, self.ready) if len(self.ready) > 1 else default
        if strand is not default:
            self.deviations.append((self.points, strand.number))
        return strand

    def _ring(self) -> None:
        at, _, strand = heappop(self._asleep)
        if strand.alarm == at and strand.waits is not None and not strand.done:
            self.now = max(self.now, at)
            self._make_ready(strand)

    def _make_ready(self, strand: Strand) -> None:
        strand.waits = strand.alarm = None
        if strand.done or not strand.party.alive:
            return
        if strand.party.stopped:
            strand.party.parked.append(strand)
        else:
            self.ready[strand.number] = strand
            self.chooser.woke()

    def _end(self, strand: Strand) -> None:
        self.points += 1  # who goes on now is another turn than the last one of this strand
        if not strand.done:
            strand.done = True
            self.ready.pop(strand.number, None)
            self._mains -= strand.main
            for one in strand.joining:
                self.unblock(one)

    def _hang(self, how: str) -> NoReturn:
        waiting = [f"{one.name} waits for {one.waits}" for one in self.strands if not one.done and one.waits]
        error = HungError(f"the history {how} after {self.points} points: {'; '.join(waiting) or 'nobody waits'}")
        if greenlet.getcurrent() is self._hub:
            raise error
        self._hub.throw(error)
        raise greenlet.GreenletExit


class Errand(Generic[T]):
    """Work that a party does in a strand of its own, from now on."""

    def __init__(self, party: Party, work: Callable[[], T]) -> None:
        self._work, self._party = work, party
        self._done: list[Callable[[], T]] = []
        self._strand = here().spawn("work", party, self._run)

    def _run(self) -> None:
        try:
            value = self._work()
        except Exception as failed:
            error = failed
            self._done.append(lambda: _raise(error))
        else:
            self._done.append(lambda: value)

    def result(self) -> T:
        """Its result, once it is done; DiedError if the party dies before."""
        while not self._strand.done:
            self._strand.joining.append(here().running)
            here().block(f"the end of {self._strand.name}")
        if not self._done:
            raise DiedError(f"{self._party.name} died")
        return self._done[0]()


def _raise(error: Exception) -> NoReturn:
    raise error
