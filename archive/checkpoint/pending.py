"""A checkpoint in the background: its result, its errors, which are never lost, and a progress bar."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from logging import DEBUG, WARNING
from typing import TYPE_CHECKING, Any

from archive.base import Counts, DeadlineError, Losses, RanksMissingError, UsageError, logger, one_line, ranks
from archive.checkpoint.checkpoints import Checkpoint
from archive.saved import Part, Request
from archive.write import Work

if TYPE_CHECKING:
    from archive.checkpoint.saver import Saver


class SaveAttempt:
    """One try at a checkpoint. `run` may be called any number of times, and runs it once; True if it did."""

    def __init__(self, work: Callable[[], Checkpoint]) -> None:
        self._work: Callable[[], Checkpoint] | None = work
        self._claim = threading.Lock()
        self.future: Future[Checkpoint] = Future()
        self.hurry = threading.Event()  # set: stop waiting for other ranks

    @property
    def begun(self) -> bool:
        return self._claim.locked()

    def run(self) -> bool:
        if not self._claim.acquire(blocking=False):
            return False
        work, self._work = self._work, None  # its copies are freed when it is done
        assert work is not None
        try:
            self.future.set_result(work())
        except BaseException as error:
            self.future.set_exception(error)
        return True


class Pending:
    """A checkpoint that is being saved."""

    def __init__(self, saver: Saver, request: Request, timeout_s: float, on_progress: Progress | None) -> None:
        self._saver = saver
        self.request = request
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self.attempt: SaveAttempt
        self.works: Sequence[Work] = ()  # uncommitted works at its request
        self.kept: Sequence[Work] = ()  # those whose rows it makes visible
        self.began = time.monotonic()  # its upload may take longer than an announcement of the end is known
        self.in_shutdown = False  # asked for after the process was told to end
        self.waiting_for: tuple[int, ...] = ()  # ranks that have not staged, known some seconds after this one staged
        self.staged: dict[int, Part] = {}  # known parts, its own among them; until it is committed
        self.losses: list[tuple[Losses, Counts]] = []  # the sources of its `discarded`
        self._seen = False
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        return self.request.part.name

    @property
    def durable(self) -> int | None:
        """The step up to which data is safe: that of this writer's newest committed checkpoint."""
        return self._saver.durable

    @property
    def future(self) -> Future[Checkpoint]:
        return self.attempt.future

    def waits_for(self, missing: Sequence[int], waited_s: float, speaks: bool) -> None:
        """Show that these ranks have not staged, and log it, if this rank speaks for all."""
        self.waiting_for = tuple(missing)
        if missing:
            logger.log(
                WARNING if speaks else DEBUG,
                "checkpoint %r has waited %.0f s for %s of this job to save its part: check that it still runs",
                self.name,
                waited_s,
                ranks(missing),
            )
            self.tell("joining", waiting_for=list(missing))

    def done(self) -> bool:
        self._check_process()
        return self.future.done()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # the thread that saves it is the parent's
            raise UsageError(
                f"checkpoint {self.name!r} is being saved by the process that asked for it: wait for it there; a "
                "forked child finds it in arc.checkpoints once it is committed"
            )

    def result(self, timeout_s: float | None = None) -> Checkpoint:
        """The checkpoint, once it is committed; raises the error if saving failed.

        DeadlineError if that takes longer than `timeout_s`: saving goes on, and you may ask again. Once
        RanksMissingError was raised, calling it again waits for the missing ranks again, for `timeout_s`.
        """
        self._check_process()
        if self._seen and self.future.done() and isinstance(self.future.exception(), RanksMissingError):
            self._saver.again(self, self._timeout_s if timeout_s is None else timeout_s)
            timeout_s = None
        self._saver.begin(self)
        self._seen = True
        try:
            wait([self.future], timeout_s)
        finally:
            self._seen = self.future.done()
        if not self.future.done():
            whom = f", and waits for {ranks(self.waiting_for)}" if self.waiting_for else ""
            raise DeadlineError(
                f"checkpoint {self.name!r} is not committed after {timeout_s:.0f} s{whom}; it goes on in the "
                "background: call result() again to wait for it"
            )
        return self.future.result()

    def all_staged(self) -> bool:
        """Look once for the parts of all ranks; True if only the commit is left to wait for."""
        return self._saver.all_staged(self)

    def unseen_error(self) -> BaseException | None:
        """The error, once, unless result() has raised it."""
        if self._seen or not self.future.done() or self.future.exception() is None:
            return None
        self._seen = True
        return self.future.exception()

    def tell(self, phase: str, **more: Any) -> None:
        """Call on_progress; its errors are logged, and the checkpoint goes on without it."""
        if self._on_progress is None:
            return
        try:
            self._on_progress({"phase": phase, "name": self.name, "step": self.request.part.step, **more})
        except Exception:
            self._on_progress = None
            logger.exception("on_progress of checkpoint %r failed; it is not called again", self.name)

    def __repr__(self) -> str:
        if os.getpid() != self._pid:
            return f"<Pending {self.name!r} of another process>"
        what = "under way" if not self.done() else "failed" if self.future.exception() else "committed"
        whom = f", waits for {ranks(self.waiting_for)}" if what == "under way" and self.waiting_for else ""
        return f"<Pending {self.name!r} {what}{whom}>"


PHASES = ("uploading", "staging", "joining", "committed")

Progress = Callable[[dict[str, Any]], None]


def on_terminal(world_rank: int) -> Progress | None:
    """The function that draws the bar, on rank 0 of a job on a terminal; None elsewhere."""
    if world_rank != 0 or not sys.stderr.isatty():
        return None
    return Bar()


class Bar:
    """The progress bar of one checkpoint, drawn as its phases are reported."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
            TimeElapsedColumn(),
        )
        self._drawn = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._drawn.add_task("checkpoint", total=len(PHASES), phase="")

    def __call__(self, event: dict[str, Any]) -> None:
        phase = event["phase"]
        if phase == PHASES[0]:
            self._drawn.start()
        done = PHASES.index(phase) + (phase == PHASES[-1]) if phase in PHASES else 0
        if waiting := event.get("waiting_for"):
            phase = f"waiting for {ranks(waiting)}"
        self._drawn.update(self._task, completed=done, phase=phase, description=one_line(f"checkpoint {event['name']}"))
        if phase in (PHASES[-1], "failed"):
            self._drawn.stop()
