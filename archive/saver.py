"""Checkpoints in the background: one under way at a time, its result to be asked for, its errors never lost."""

from __future__ import annotations

import atexit
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from archive import jsontree, saving
from archive.checkpoints import Checkpoint
from archive.commits import Commit, CommitLog
from archive.cut import Cut
from archive.errors import RanksMissingError
from archive.joining import Joint, all_staged, commit, join
from archive.names import check_text
from archive.pipeline import Batch, Written
from archive.progress import rollback
from archive.saving import Request, SavedColumns
from archive.sessions import Place
from archive.staged import StagedFile
from archive.storage import Storage

Progress = Callable[[dict[str, Any]], None]


class Pending:
    """A checkpoint that is being saved."""

    def __init__(self, saver: Saver, request: Request, timeout_s: float, on_progress: Progress | None) -> None:
        self._saver, self.request, self._timeout_s, self._on_progress = saver, request, timeout_s, on_progress
        self.future: Future[Checkpoint] = Future()
        self._seen = False

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def durable(self) -> int | None:
        """Up to which step data is safe: the step of this writer's newest committed checkpoint."""
        return self._saver.durable

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> Checkpoint:
        """The checkpoint, once it is committed; raises what went wrong.

        After RanksMissingError, calling it again waits for the missing ranks again.
        """
        self._seen = True
        if self.future.done() and isinstance(self.future.exception(), RanksMissingError):
            self._saver.again(self, timeout_s or self._timeout_s)
        return self.future.result(timeout_s)

    def unseen_error(self) -> BaseException | None:
        """The error, once, unless result() has raised it."""
        if self._seen or not self.future.done() or self.future.exception() is None:
            return None
        self._seen = True
        return self.future.exception()

    def tell(self, phase: str, **more: Any) -> None:
        if self._on_progress is not None:
            self._on_progress({"phase": phase, "name": self.name, "step": self.request.step, **more})

    def __repr__(self) -> str:
        what = "under way" if not self.done() else "failed" if self.future.exception() else "committed"
        return f"<Pending {self.name!r} {what}>"


class Saver:
    """Saves the checkpoints of one writer, one after the other. `committed` is told of each."""

    def __init__(self, storage: Storage, log: CommitLog, place: Place, committed: Callable[..., None]) -> None:
        self._storage, self._log, self._place, self._committed = storage, log, place, committed
        self._thread = ThreadPoolExecutor(1, "archive-checkpoint")
        self._pending: Pending | None = None
        self._columns = SavedColumns()
        self._ordinal = 0
        self.durable: int | None = None

    def request(
        self, step: int, name: str | None, *, save_replay: bool, progress: Any, unconsumed: Any, metrics: Any, config: Any,
        partial: bool,
    ) -> Request:  # fmt: skip
        self._ordinal += 1
        if progress is not None and not save_replay:
            progress = rollback(progress)
        lineage = {"git": git_revision(), "config": None if config is None else jsontree.dumps(config, where="config")}
        return Request(
            check_text(f"step-{step}" if name is None else name, "checkpoint name"), int(step), self._ordinal, save_replay,
            _json(progress, "progress"), _json(unconsumed, "unconsumed"),
            {check_text(k, "metric"): float(v) for k, v in (metrics or {}).items()}, lineage, partial,
        )  # fmt: skip

    def start(
        self, request: Request, cuts: Sequence[Cut], batch: Batch, uncommitted: list[Written], timeout_s: float,
        on_progress: Progress | None,
    ) -> Pending:  # fmt: skip
        pending = self._pending = Pending(self, request, timeout_s, on_progress)
        self._run(pending, lambda: self._save(pending, cuts, batch, uncommitted, timeout_s))
        return pending

    def again(self, pending: Pending, timeout_s: float) -> None:
        pending.future = Future()
        self._run(pending, lambda: self._finish(pending, timeout_s, self._columns))

    def _run(self, pending: Pending, work: Callable[[], Checkpoint]) -> None:
        future = pending.future

        def job() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._thread.submit(job)

    def _save(
        self, pending: Pending, cuts: Sequence[Cut], batch: Batch, uncommitted: list[Written], timeout_s: float
    ) -> Checkpoint:
        pending.tell("uploading")
        written = batch.wait()
        uncommitted += written
        pending.tell("staging", bytes=sum(w.data_bytes for w in written))
        _, _, columns = saving.stage(self._storage, self._place, pending.request, cuts, uncommitted, self._columns)
        pending.tell("joining")
        return self._finish(pending, timeout_s, columns)

    def _finish(self, pending: Pending, timeout_s: float, columns: SavedColumns) -> Checkpoint:
        request = pending.request
        joint = Joint(self._place, request.name, request.ordinal)
        made = self._partial(joint) if request.partial else join(self._log, joint, timeout_s=timeout_s)
        self._columns = columns if request.save_replay else self._columns
        self.durable = request.step if request.save_replay else self.durable
        self._committed(made, rows=request.save_replay)
        pending.tell("committed", commit=made.number)
        return Checkpoint(self._storage, made)

    def _partial(self, joint: Joint) -> Commit:
        """Commit with the ranks that have staged by now."""
        staged: dict[int, StagedFile] = {}
        all_staged(self._storage, joint, staged)
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

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _json(value: Any, where: str) -> str | None:
    return None if value is None else jsontree.dumps(value, where=where)


def git_revision() -> str | None:
    """The revision of the working directory's git checkout, if it is one."""
    try:
        out = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
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
