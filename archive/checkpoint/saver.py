"""Saving checkpoints in the background, one at a time."""

from __future__ import annotations

import atexit
import contextvars
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any, Protocol

from archive.base import Losses, check_text, jsontree, logger, ranks, shutdown, size, thread_pool
from archive.checkpoint.assembly import all_listed, commit_present, join
from archive.checkpoint.checkpoints import Checkpoint
from archive.checkpoint.joint import Joint
from archive.checkpoint.pending import Pending, Progress, SaveAttempt, on_terminal
from archive.checkpoint.requests import look_between
from archive.log import CheckpointRecord, Commit, CommitLog, Lineage, Place
from archive.observe import add, operation
from archive.saved import PartIndex, Request, keeps_rows, name_taken, stage
from archive.store import Storage
from archive.write import Cut, Work, Written


class Saver:
    """The saver of one writer's checkpoints, one after the other. `committed` is called with each."""

    def __init__(
        self,
        storage: Storage,
        log: CommitLog,
        place: Place,
        wait: Callable[[Sequence[Work]], list[Written]],
        committed: Callable[..., None],
        resumed_from: int | None = None,
        then: Callable[[Commit], None] | None = None,
    ) -> None:
        """then: called by one rank, in the background, with each whole checkpoint."""
        self._storage = storage
        self._log = log
        self._place = place
        self._wait = wait
        self._committed = committed
        self._resumed_from = resumed_from
        self._then = then if place.rank == 0 else None
        self._then_failed: BaseException | None = None
        self._thread = thread_pool(1, "archive-checkpoint")
        self._pending: Pending | None = None
        self._earlier: PartIndex | None = None  # this rank's part of the last committed checkpoint with buffers
        self._gone: Callable[[Collection[str]], Collection[str]] = lambda keys: ()  # those of its objects that are gone
        self._names: set[str] = set()  # of staged parts: no name twice, also where one was pruned since
        self._ordinal = 0
        self.durable: int | None = None
        self.committed = 0  # segments of this rank below this number are committed

    def request(
        self, step: int, name: str | None, *, save_replay: bool, progress: Any, unconsumed: Any, metrics: Any,
        config: Any, partial: bool, known_at: int, node: tuple[int, int] | None = None,
    ) -> Request:  # fmt: skip
        self._ordinal += 1
        place = self._place
        index = PartIndex(
            rank=place.rank, world_size=place.world_size, run=place.run, session=place.session,
            name=check_text(f"step-{step}" if name is None else name, "checkpoint name"), step=int(step),
            ordinal=self._ordinal, nonce=secrets.token_hex(8), replay_saved=save_replay, partial=partial,
            known_at=known_at, resumed_from=self._resumed_from, sequence=self.committed, node=node,
            seen=self._log.head.sighting,
            metrics={check_text(k, "metric"): float(v) for k, v in (metrics or {}).items()},
            lineage=Lineage(config=_json(config, "config")), progress=_json(progress, "progress"),
        )  # fmt: skip
        return Request(index, _json(unconsumed, "unconsumed"), str(Path.cwd()))

    def start(
        self,
        request: Request,
        cuts: Sequence[Cut],
        works: Sequence[Work],
        timeout_s: float,
        on_progress: Progress | None,
        losses: Sequence[Losses],
    ) -> Pending:
        """Save in the background. `works`: all that is not committed; it is in the pipeline already."""
        pending = Pending(self, request, timeout_s, on_progress or on_terminal(self._place.rank))
        pending.works, pending.in_shutdown = works, shutdown.process.announced
        pending.losses = [(one, one.counts) for one in losses]
        within = contextvars.copy_context()  # of the caller, for tracing
        work = partial(within.run, self._save, pending, cuts, timeout_s)
        pending.attempt = SaveAttempt(lambda: self._reported(pending, work))
        self._pending = pending  # from now on a waiter makes sure that it is begun
        self.begin(pending)
        return pending

    def again(self, pending: Pending, timeout_s: float) -> None:
        pending.attempt = SaveAttempt(lambda: self._reported(pending, lambda: self._finish(pending, timeout_s)))
        self.begin(pending)

    def begin(self, pending: Pending) -> None:
        """Make sure that it is begun: an interrupted call may have left it."""
        if not pending.attempt.begun:
            self._thread.submit(self._run, pending.attempt)

    def _run(self, attempt: SaveAttempt) -> None:
        """Save and then, once its waiters have the result, do the work that follows a whole checkpoint."""
        if not attempt.run() or self._then is None or attempt.future.exception():
            return
        made = attempt.future.result().commit
        try:
            if made.checkpoint is not None and made.checkpoint.whole:
                self._then(made)
        except BaseException as error:
            self._then_failed = error

    def _reported(self, pending: Pending, work: Callable[[], Checkpoint]) -> Checkpoint:
        try:
            made = work()
            pending.waiting_for = ()
            pending.tell("committed", commit=made.number)
        except BaseException as error:
            pending.tell("failed", error=str(error))
            raise
        return made

    def _save(self, pending: Pending, cuts: Sequence[Cut], timeout_s: float) -> Checkpoint:
        place, request = self._place, pending.request.part
        with operation(
            "checkpoint",
            run=place.run,
            session=place.session,
            rank=place.rank,
            world_size=place.world_size,
            name=request.name,
            step=request.step,
        ) as done:
            nbytes = self._stage(pending, cuts)
            done.note(bytes=nbytes)
            pending.tell("joining")
            checkpoint = self._finish(pending, timeout_s)
            done.note(commit=checkpoint.number)
        add("archive.written", nbytes, operation="checkpoint")
        made = checkpoint.record
        speaker = made.ranks[0].rank  # for all that are in it
        logger.log(
            INFO if place.rank == speaker else DEBUG,
            "checkpoint %r of run %r, step %d, is commit %d: rank %d of %d wrote %s of new steps, %.1f s",
            request.name,
            place.run,
            request.step,
            checkpoint.number,
            place.rank,
            place.world_size,
            size(nbytes),
            done.seconds,
        )
        if place.rank == speaker:
            _log_left_out(made)
        return checkpoint

    def _stage(self, pending: Pending, cuts: Sequence[Cut]) -> int:
        """Upload what is missing, and this rank's part; the number of new bytes of steps, as stored."""
        with operation("checkpoint.stage"):
            pending.tell("uploading")
            written = self._wait(pending.works)
            pending.kept = pending.works if keeps_rows(pending.request.part, written) else []
            pending.tell("staging", bytes=sum(work.nbytes for work in pending.works))
            if pending.name in self._names:
                raise name_taken(self._storage, pending.request.part.key)
            part = stage(self._storage, pending.request, cuts, written, earlier=self._earlier, gone=self._gone)
            self._names.add(pending.name)
            pending.staged = {self._place.rank: part}
        return sum(one.rows.stored_bytes for one in written)

    def _finish(self, pending: Pending, timeout_s: float) -> Checkpoint:
        request = pending.request.part
        joint = Joint(self._place, request.name, request.ordinal)
        with operation("checkpoint.join"):
            if request.partial:
                made = commit_present(self._log, joint, pending.staged)
            else:
                part = shutdown.LAST_PART if pending.in_shutdown else shutdown.EARLIER_PART
                made = join(
                    self._log,
                    joint,
                    pending.staged,
                    timeout_s=timeout_s,
                    given_up=pending.attempt.hurry.is_set,
                    ending=lambda: shutdown.process.passed(part, pending.began),
                    absent=pending.waits_for,
                    otherwise=partial(look_between, self._place),
                )
        if request.replay_saved:
            for losses, counts in pending.losses:
                losses.reported(counts)
            self._earlier = pending.staged[self._place.rank].index
            self._gone = partial(self._log.gone, since=made.number)
            self.durable = request.step
        pending.staged = {}
        self._committed(made, pending.kept)
        return Checkpoint(self._storage, made)

    def all_staged(self, pending: Pending) -> bool:
        """Look once, by one list, for the parts of all ranks; True if all are there."""
        return all_listed(self._storage, Joint(self._place, pending.name, pending.request.part.ordinal))

    def surface(self) -> None:
        """Raise the error of the last checkpoint, or of the work that followed it, unless it was raised before."""
        if (error := self._unseen_error()) is not None:
            raise error

    def _unseen_error(self) -> BaseException | None:
        error = None if self._pending is None else self._pending.unseen_error()
        if error is None:
            error, self._then_failed = self._then_failed, None
        return error

    def settle(self) -> None:
        """Wait until no checkpoint is under way; raise the last one's error unless it was raised before."""
        self._wait_for_pending()
        self.surface()

    def give_up(self) -> None:
        """Wait until no checkpoint is under way, but no longer for other ranks; an error stays to be raised."""
        if self._pending is not None:
            self._pending.attempt.hurry.set()
        self._wait_for_pending()

    def _wait_for_pending(self) -> None:
        if self._pending is not None:
            self.begin(self._pending)
            self._pending.future.exception()

    def close(self) -> BaseException | None:
        """Wait for the checkpoint under way; the error that was not raised yet."""
        if self._pending is not None:
            self.begin(self._pending)
        self._thread.shutdown(wait=True)
        return self._unseen_error()


def _log_left_out(made: CheckpointRecord) -> None:
    """Log the steps and ranks that a checkpoint lacks."""
    for reason, lost in made.discarded.items():
        logger.info("checkpoint %r left out %d %s episodes with %d steps", made.name, lost.episodes, reason, lost.steps)
    if made.missing:
        absent = ranks(one.rank for one in made.missing)
        logger.warning("checkpoint %r was committed without %s of %d", made.name, absent, made.world_size)


def _json(value: Any, where: str) -> str | None:
    return None if value is None else jsontree.dumps(value, where=where)


class Finishing(Protocol):
    """A saver that has work under way when the interpreter ends."""

    def settle_at_exit(self) -> None: ...
    def tell_at_exit(self) -> None: ...


_open_writers: weakref.WeakSet[Any] = weakref.WeakSet()


def finish_at_exit(writer: Finishing) -> None:
    """Finish checkpoints under way before the interpreter ends. Nothing else is committed."""
    _open_writers.add(writer)


def _finish_all() -> None:
    writers = list(_open_writers)
    for writer in writers:
        writer.settle_at_exit()
    for writer in writers:  # one may have committed what another holds
        writer.tell_at_exit()


# Before concurrent.futures refuses new work, which it does when threads are joined, ahead of atexit's own hooks.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
