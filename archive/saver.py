"""Checkpoints in the background: one under way at a time, its result to be asked for, its errors never lost."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from archive import jsontree, saving
from archive.checkpoints import Checkpoint
from archive.commits import Commit, CommitLog
from archive.cut import Cut
from archive.errors import DeadlineError, RanksMissingError, UsageError
from archive.joining import Joint, all_staged, commit, join
from archive.losses import Counts, Losses
from archive.names import check_text
from archive.pipeline import Batch, Written
from archive.progress import rollback
from archive.progressbar import Progress, on_terminal
from archive.saving import Request, SavedColumns
from archive.sessions import Place
from archive.staged import StagedFile
from archive.storage import Storage


class Pending:
    """A checkpoint that is being saved."""

    def __init__(self, saver: Saver, request: Request, timeout_s: float, on_progress: Progress | None) -> None:
        self._saver, self.request, self._timeout_s, self._on_progress = saver, request, timeout_s, on_progress
        self.future: Future[Checkpoint] = Future()
        self.columns = SavedColumns()  # what the next one may refer to, once this is committed
        self.losses: list[tuple[Losses, Counts]] = []  # what its `discarded` says
        self.written: list[Written] = []  # the rows that it makes visible
        self._seen = False
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def durable(self) -> int | None:
        """Up to which step data is safe: the step of this writer's newest committed checkpoint."""
        return self._saver.durable

    def done(self) -> bool:
        self._check_process()
        return self.future.done()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # the thread that saves it is the parent's
            raise UsageError(
                f"checkpoint {self.name!r} is being saved by the process that asked for it: wait for it there; a forked "
                "child finds it in arc.checkpoints once it is committed"
            )

    def result(self, timeout_s: float | None = None) -> Checkpoint:
        """The checkpoint, once it is committed; raises what went wrong.

        DeadlineError if that takes longer than `timeout_s`: it goes on, and may be asked again. Once RanksMissingError
        was raised, calling it again waits for the missing ranks again, for `timeout_s`.
        """
        self._check_process()
        if self._seen and self.future.done() and isinstance(self.future.exception(), RanksMissingError):
            self._saver.again(self, self._timeout_s if timeout_s is None else timeout_s)
            timeout_s = None
        self._seen = True
        if not wait([self.future], timeout_s).done:
            self._seen = False
            raise DeadlineError(
                f"checkpoint {self.name!r} is not committed after {timeout_s:.0f} s; it goes on in the background: call "
                "result() again to wait for it"
            )
        return self.future.result()

    def unseen_error(self) -> BaseException | None:
        """The error, once, unless result() has raised it."""
        if self._seen or not self.future.done() or self.future.exception() is None:
            return None
        self._seen = True
        return self.future.exception()

    def tell(self, phase: str, **more: Any) -> None:
        """Tell on_progress; what it raises is logged, and the checkpoint goes on without it."""
        if self._on_progress is None:
            return
        try:
            self._on_progress({"phase": phase, "name": self.name, "step": self.request.step, **more})
        except Exception:
            self._on_progress = None
            logging.getLogger("archive").exception(
                "on_progress of checkpoint %r failed; it is not called again", self.name
            )

    def __repr__(self) -> str:
        if os.getpid() != self._pid:
            return f"<Pending {self.name!r} of another process>"
        what = "under way" if not self.done() else "failed" if self.future.exception() else "committed"
        return f"<Pending {self.name!r} {what}>"


class Saver:
    """Saves the checkpoints of one writer, one after the other. `committed` is told of each."""

    def __init__(
        self, storage: Storage, log: CommitLog, place: Place, committed: Callable[..., None],
        resumed_from: int | None = None,
    ) -> None:  # fmt: skip
        self._storage, self._log, self._place, self._committed = storage, log, place, committed
        self._resumed_from = resumed_from
        self._thread = ThreadPoolExecutor(1, "archive-checkpoint")
        self._pending: Pending | None = None
        self._columns = SavedColumns()
        self._ordinal = 0
        self._hurry = threading.Event()
        self.durable: int | None = None
        self.committed = 0  # segments of this rank below this number are committed

    def request(
        self, step: int, name: str | None, *, save_replay: bool, progress: Any, unconsumed: Any, metrics: Any, config: Any,
        partial: bool, known_at: int,
    ) -> Request:  # fmt: skip
        self._ordinal += 1
        if progress is not None and not save_replay:
            progress = rollback(progress)
        lineage = {"git": git_revision(), "config": None if config is None else jsontree.dumps(config, where="config")}
        return Request(
            check_text(f"step-{step}" if name is None else name, "checkpoint name"), int(step), self._ordinal, save_replay,
            _json(progress, "progress"), _json(unconsumed, "unconsumed"),
            {check_text(k, "metric"): float(v) for k, v in (metrics or {}).items()}, lineage, partial, known_at,
            self._resumed_from, self.committed,
        )  # fmt: skip

    def start(
        self, request: Request, cuts: Sequence[Cut], batch: Batch, uncommitted: list[Written], timeout_s: float,
        on_progress: Progress | None, losses: Sequence[Losses],
    ) -> Pending:  # fmt: skip
        pending = self._pending = Pending(self, request, timeout_s, on_progress or on_terminal(self._place.rank))
        pending.losses = [(one, one.mark()) for one in losses]
        self._run(pending, lambda: self._save(pending, cuts, batch, uncommitted, timeout_s))
        return pending

    def again(self, pending: Pending, timeout_s: float) -> None:
        pending.future = Future()
        self._run(pending, lambda: self._finish(pending, timeout_s))

    def _run(self, pending: Pending, work: Callable[[], Checkpoint]) -> None:
        future = pending.future

        def job() -> None:
            try:
                made = work()
                pending.tell("committed", commit=made.number)
            except BaseException as error:
                pending.tell("failed", error=str(error))
                future.set_exception(error)
            else:
                future.set_result(made)

        self._thread.submit(job)

    def _save(
        self, pending: Pending, cuts: Sequence[Cut], batch: Batch, uncommitted: list[Written], timeout_s: float
    ) -> Checkpoint:
        pending.tell("uploading")
        written = batch.wait()
        uncommitted += written
        pending.written = list(uncommitted)
        pending.tell("staging", bytes=sum(w.data_bytes for w in written))
        _, _, pending.columns = saving.stage(
            self._storage, self._place, pending.request, cuts, pending.written, self._columns
        )
        pending.tell("joining")
        return self._finish(pending, timeout_s)

    def _finish(self, pending: Pending, timeout_s: float) -> Checkpoint:
        request = pending.request
        joint = Joint(self._place, request.name, request.ordinal)
        made = self._partial(joint) if request.partial else self._join(joint, timeout_s)
        about = made.body["checkpoint"]
        if request.save_replay:
            for losses, counts in pending.losses:
                losses.told(counts)
            self._columns, self.durable = pending.columns, request.step
        self._committed(made, pending.written if request.save_replay else [])
        _log_discarded(about)
        return Checkpoint(self._storage, made)

    def _join(self, joint: Joint, timeout_s: float) -> Commit:
        return join(self._log, joint, timeout_s=timeout_s, given_up=self._hurry.is_set)

    def _partial(self, joint: Joint) -> Commit:
        """Commit with the ranks that have staged by now."""
        staged: dict[int, StagedFile] = {}
        all_staged(self._storage, joint, staged, look_at_all=True)
        whole = len(staged) == joint.place.world_size
        return commit(self._log, joint, staged, partial=not whole)

    def surface(self) -> None:
        """Raise the error of the last checkpoint, if nobody has seen it."""
        if self._pending is not None and (error := self._pending.unseen_error()):
            raise error

    def settle(self) -> None:
        """Wait until no checkpoint is under way; raise the last one's error if nobody has seen it."""
        if self._pending is not None:
            self._pending.future.exception()
            self.surface()

    def give_up(self) -> None:
        """Wait until no checkpoint is under way, but no longer for other ranks; an error stays to be raised."""
        if self._pending is not None:
            self._hurry.set()
            self._pending.future.exception()
            self._hurry.clear()

    def close(self) -> BaseException | None:
        """Wait for what is under way; the error that nobody has seen."""
        self._thread.shutdown(wait=True)
        return None if self._pending is None else self._pending.unseen_error()


def _json(value: Any, where: str) -> str | None:
    return None if value is None else jsontree.dumps(value, where=where)


def _log_discarded(about: Mapping[str, Any]) -> None:
    for reason, counts in about["discarded"].items():
        logging.getLogger("archive").info(
            "checkpoint %r left out %d %s episodes with %d steps",
            about["name"],
            counts["episodes"],
            reason,
            counts["steps"],
        )


def git_revision() -> str | None:
    """The revision of the working directory's git checkout when it was first asked for, if it is one."""
    return _git_revision(str(Path.cwd()))


@cache
def _git_revision(folder: str) -> str | None:
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.strip() or None if out.returncode == 0 else None


class Finishing(Protocol):
    """What has work under way when the interpreter ends."""

    def settle_at_exit(self) -> None: ...


_open_writers: weakref.WeakSet[Any] = weakref.WeakSet()


def finish_at_exit(writer: Finishing) -> None:
    """Checkpoints under way are finished before the interpreter ends; commits that nobody asked for are not made."""
    _open_writers.add(writer)


def _finish_all() -> None:
    for writer in list(_open_writers):
        writer.settle_at_exit()


# Before concurrent.futures refuses new work, which it does when threads are joined, ahead of atexit's own hooks.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
