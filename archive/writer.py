"""The writer of one rank: buffers of steps, uploads in the background, and commits that make them visible."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from archive.base import ClosedError, UsageError, check_text, git_revision, logger, one_line, size
from archive.checkpoint import MAIN_BUFFER, Keep, Pending, Saver, finish_at_exit, fresh_rows, watch
from archive.fields import Schema
from archive.journal import Durable, Journal, JournalObjects, Node, NodeJournal
from archive.ledger import Ledger, Ledgers
from archive.log import Addition, Attempt, Change, Commit, CommitLog, Place, open_session
from archive.maintain import check_newest
from archive.observe import add, operation
from archive.shard import ShardWriter
from archive.store import Storage
from archive.write import (
    Buffer,
    Changes,
    Cut,
    EpisodeRecord,
    Ids,
    Pipeline,
    RankRows,
    Resume,
    ShardObjects,
    Work,
    imports,
)


def _open(
    storage: Storage,
    log: CommitLog,
    place: Place,
    resume: Resume | None,
    keep: Keep | None,
    journal_s: float | None,
    node: Node | None,
    take_over: Callable[[], None],
) -> None:
    """Open the session of a writer, or join it."""
    # at its decision; without a resume, when the archive was opened
    seen = log.began if resume is None or resume.forked_from is not None else resume.seen
    origin, forked_from = (None, None) if resume is None else (resume.origin, resume.forked_from)
    open_session(
        log,
        place,
        seen,
        None if keep is None else keep.rule,
        origin,
        forked_from,
        journal=journal_s is not None,
        nodes=0 if node is None else node.count,
        check=partial(check_newest, storage, place.run),
        take_over=take_over,
    )


class Writer(Buffer):
    """A writer of one rank's buffers; the verbs of a Buffer are those of its main one. It is safe for several threads,
    and belongs to the process that made it.

    Leaving it as a context commits what is pending, unless by an exception.
    """

    def __init__(
        self, storage: Storage, log: CommitLog, place: Place, schema: Schema, archive_layout: str,
        compression: str | None, on_commit: Callable[[Commit], None], resume: Resume | None = None,
        keep: Keep | None = None, chunk_bytes: int | None = None, then: Callable[[Commit], None] | None = None,
        journal_s: float | None = None, take_over: Callable[[], None] = lambda: None, node: Node | None = None,
    ) -> None:  # fmt: skip
        self._storage = storage
        self._log = log
        self._place = place
        self._schema = schema
        self._on_commit = on_commit
        imports.start(partial(git_revision, str(Path.cwd())))
        self._pid = os.getpid()
        self._closed = False
        _open(storage, log, place, resume, keep, journal_s, node, take_over)
        on_commit(log.head)
        came_from = None if resume is None else resume.checkpoint
        shards = ShardWriter(storage, archive_layout, compression, chunk_bytes)
        self._node: NodeJournal | None = None
        if node is not None and journal_s is not None:
            self._node = NodeJournal.of(log, place, node, journal_s)
        ticks = None
        if journal_s is not None:
            ticks = JournalObjects(shards, place, came_from, lambda: log.head.sighting, self._node)
        self._pipeline = Pipeline(shards, ShardObjects(shards, place.session, place.rank) if ticks is None else ticks)
        self._ids_known_at = -1  # the commit up to which existing ids were read; -1: they were not needed yet
        changes = Changes(self._pipeline, self._check, self._surface)
        ids = Ids(place, self._known_ids)
        changes.parts.append(ids.kept)
        self._saver = Saver(storage, log, place, self._pipeline.wait, self._saved, came_from, then)
        self._committed: deque[Sequence[Work]] = deque()  # by the saver's thread; not noted yet
        self._journal: Journal | None = None
        super().__init__(
            MAIN_BUFFER,
            place,
            schema,
            self._pipeline.memory,
            ids,
            changes,
            self._say_later,
            journaled=journal_s is not None,
        )
        self._buffers: dict[str, Buffer] = {MAIN_BUFFER: self}
        holders = dict if resume is None else resume.holders
        self._ledgers = Ledgers(changes, storage, log, place, ids, holders, self._record_of, self._settle_episodes)
        if ticks is not None and journal_s is not None:
            self._journal = Journal(
                place, self._pipeline, ticks, changes, self._buffers, self._send, self._tick, journal_s, log
            )
        if self._node is not None and self._journal is not None:
            self._node.asked = self._journal.ticker.hurry
            weakref.finalize(self, self._node.close).atexit = False
        for name, buffer in (resume.buffers if resume else {}).items():
            self._buffer(name)._take_over(buffer)
        if self._journal is not None:
            self._journal.begin(resumed=resume is not None)
        finish_at_exit(self)
        self._stop_watching = watch(storage, place)

    def buffer(self, name: str) -> Buffer:
        """Another buffer of the same rank: the same verbs, its own streams, committed together."""
        with self._entered():
            return self._buffer(check_text(name, "buffer"))

    def ledger(self, name: str) -> Ledger:
        """The ledger of prompts (tasks, seeds, rows of a data set): `w.ledger("prompts")`, the same for each name."""
        with self._entered():
            return self._ledgers.of(check_text(name, "ledger"))

    def weights(self, uuid: Any = None, update_count: int | None = None) -> None:
        """Set the weights that make what is added from now on, in all buffers of this writer."""
        with self._entered(), self._changes():
            for buffer in self._buffers.values():
                buffer._set_weights(uuid, update_count)

    # -- its journal ---------------------------------------------------------------------------------------------------

    def journal(
        self,
        columns: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Any = None,
        buffer: str | None = None,
        *,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Journal values with the next flush, for recoveries; every checkpoint saves them anew.

        columns: name -> one value a live step, in the order of `live`, or {episode id: one value a live step of it}, of
        live episodes only.  attributes: name -> {episode id: JSON value}.  progress: the run's counters, rank 0's.
        buffer: whose episodes, "replay" by default.
        changes: name -> (env ids, positions, values): new values of these steps of columns, where it is known which
        have changed. One env id, or one a position; None: added without one. Steps that have left are passed over.
        Of columns that are given whole, only values that differ from those journaled before are written.
        """
        if buffer is None or buffer == self.name:
            super().journal(columns, attributes, progress, changes=changes)
            return
        if buffer not in self._buffers:
            raise UsageError(f"there is no buffer {buffer!r}; make it with w.buffer(...) first")
        self._buffers[buffer].journal(columns, attributes, progress, changes=changes)

    def follow(self, name: str, take_in: Callable[[Writer], object]) -> None:
        """Call `take_in(writer)` before each tick of the journal, and now: it appends what a live object got since. In
        the journal's thread, mostly, and never with the writer's lock. A name is followed once: the newest call counts.

        So what is followed is durable within `journal_s`, and by `sync()`; `durable_until.seconds_behind` is above 0.
        The next call of the writer raises the error of `take_in`; the next tick calls it again.
        """
        with self._entered():
            journal = self._kept()
        began = time.monotonic()
        take_in(self)
        with self._entered():
            journal.follow(name, take_in, began)

    @property
    def durable_until(self) -> Durable:
        """The extent to which additions are durable: offsets of each stream, seconds behind, the next object's number.
        SupersededError as of `sync`."""
        with self._entered():
            journal = self._kept()
            state = journal.durable
        journal.check_newest()
        return state

    def sync(self, timeout_s: float = 60.0) -> Durable:
        """Flush all additions so far to the journal, and wait until they are durable; the extent of that.

        Raises the error of a failed upload; NotDurableError (a TimeoutError) after the time. Additions are kept.
        SupersededError if a newer session of the run was opened, as nothing takes over what is journaled since: that is
        looked up once a minute, and after each pause of this process that is longer than a tick.
        """
        stop = time.monotonic() + timeout_s
        if self._journal is not None and self._journal.followed and self._changes.lock._is_owned():  # type: ignore[attr-defined]
            raise UsageError(
                "sync() within `with w.together():` cannot take in what the journal follows: call it after the block"
            )
        self._collect()
        with self._entered():
            journal = self._kept()
            journal.surface()
            journal.send()
        journal.await_durable(timeout_s, stop)
        state = journal.durable
        journal.check_newest()
        return state

    # -- all buffers ---------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world_size(self) -> int:
        return self._place.world_size

    @property
    def run(self) -> str:
        return self._place.run

    @property
    def session(self) -> str:
        return self._place.session

    @property
    def archive_id(self) -> str:
        """The id of the archive that it writes to."""
        return self._log.archive_id

    def flush(self) -> None:
        """Upload all additions so far, and wait. They become visible with the next commit."""
        with self._entered():
            self._settle()
            self._pipeline.wait(self._sent())
            self._pipeline.memory.release()

    def upload(self, timeout_s: float = 60.0) -> None:
        """Upload all additions so far, while other threads may add more; a commit then has little left to do."""
        with self._entered():
            self._send()
        self._pipeline.wait_idle(timeout_s)

    def commit(self, message: str | None = None) -> Commit:
        """Make all additions so far visible: all of them or, if this raises, none.

        May be called again after an error: uncommitted additions are kept, and are committed once.
        """
        self._check_apart()
        with self._entered(), operation("commit", run=self.run, session=self.session, rank=self.rank) as done:
            self._settle()
            works = self._sent()
            rows = RankRows.joined([one.rows for one in self._pipeline.wait(works)])
            if rows.next_sequence:
                commit = self._commit_rows(rows, message)
                nbytes = rows.stored_bytes
                add("archive.written", nbytes, operation="commit")
                told = (commit.number, self.run, self.rank, size(nbytes), done.seconds)
                logger.info("commit %d of run %r: rank %d wrote %s of new steps, %.1f s", *told)
                self._saved(commit, works)
                self._take_note()
            else:
                self._pipeline.forget(works)
                commit = self._log.head
            done.note(commit=commit.number)
            return commit

    def checkpoint(
        self,
        step: int,
        name: str | None = None,
        *,
        state: Any = None,
        columns: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Mapping[str, Any]] | None = None,
        buffers: Mapping[str, Mapping[str, Any]] | None = None,
        progress: Any = None,
        save_replay: bool = True,
        unconsumed: Any = None,
        rewind: Callable[[], Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        config: Any = None,
        incomplete: str = "keep",
        partial: bool = False,
        wait: bool = False,
        timeout_s: float = 600.0,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> Pending:
        """Checkpoint this rank's buffers. Every rank of the world makes the call; all of them are committed, or none.

        Returns once everything is copied; uploading goes on in the background, and its errors surface at
        `Pending.result()` or at the writer's next call.

        name: default "step-{step}".  state: a tree of arrays, numbers, strings.  columns: name -> one value a live
        step, in the order of `live`, or a dict of episode id to array.  attributes: name -> {episode id: JSON value}.
        buffers: the same three for other buffers: {"demo": {"columns": ...}}.  progress: the run's counters, rank 0's.
        save_replay=False skips the buffers: give progress as it is without them (`archive.adapters.xtuner.rollback`);
        `unconsumed` (or the result of `rewind()`) lists the prompts that were drawn and not trained on.
        incomplete: "keep" or "drop" (counted) episodes with missing steps: headless and open ones.
        partial: commit without waiting for the other ranks, for crashes.  timeout_s: how long result() waits for them.
        on_progress: called in the background with {"phase", "name", "step", ...}, in phase "joining" also
        "waiting_for":
        the ranks that have not staged; default: a bar, on a terminal.
        """
        self._check_apart()
        with self._entered():
            self._saver.give_up() if partial else self._saver.settle()
            self._take_note()
            if unconsumed is None and rewind is not None:
                unconsumed = rewind()
            request = self._saver.request(
                step,
                name,
                save_replay=save_replay,
                progress=progress,
                unconsumed=unconsumed,
                metrics=metrics,
                config=config,
                partial=partial,
                known_at=self._ids_known_at,
                node=None if self._node is None else self._node.mark,
            )
            given = {MAIN_BUFFER: {"columns": columns, "attributes": attributes, "state": state}, **(buffers or {})}
            cuts = [self._cut_of(name, given.pop(name, {}), incomplete) for name in list(self._buffers)]
            if given:
                raise UsageError(f"there is no buffer {next(iter(given))!r}; make it with w.buffer(...) first")
            losses = [buffer.losses for buffer in self._buffers.values()]
            works = self._sent()  # last: background work takes the interpreter from the caller
            if self._journal is not None and save_replay:
                self._journal.checkpoint(cuts)
            pending = self._saver.start(request, cuts, works, timeout_s, on_progress, losses)
        if wait:
            pending.result()
        return pending

    def _check_apart(self) -> None:
        """Refuse to commit a part of a group of calls."""
        if self._changes.joined and self._changes.lock._is_owned():  # type: ignore[attr-defined]
            raise UsageError(
                "a commit or checkpoint within `with w.exclusive():` would have a part of its calls: make it "
                "after the block"
            )

    def _cut_of(self, name: str, given: Mapping[str, Any], incomplete: str) -> Cut:
        unknown = set(given) - {"columns", "attributes", "state"}
        if unknown:
            raise UsageError(f"buffers[{name!r}] has {min(unknown)!r}; it takes columns, attributes and state")
        values = {what: given.get(what) for what in ("columns", "attributes", "state")}
        return self._buffers[name]._snapshot(**values, incomplete=incomplete)

    def close(self) -> None:
        """Commit pending additions, and end the writer."""
        self._check_process()
        if not self._closed:
            self._collect()
            try:
                if self._changes.broken:
                    logger.warning("%r: an interrupted call cannot be undone, so nothing more is committed", self)
                else:
                    self.commit()
                    if self._journal is not None:
                        self._journal.surface_missed()
            finally:
                failed = self._end()
            if failed is not None:
                raise failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or error is None:
            self.close()
            return
        if os.getpid() != self._pid:  # a forked child that ends by an exception; the writer goes on in its parent
            return
        self._saver.give_up()  # other ranks may be gone for good
        self._journal_the_rest()
        self._tell_uncommitted()
        if failed := self._end():
            error.add_note(f"a checkpoint that was under way failed too: {failed}")

    def __getstate__(self) -> Any:
        raise UsageError("a Writer does not pickle: open one in each process with arc.writer(rank=...)")

    def __repr__(self) -> str:
        p = self._place
        where = f"run={p.run!r} session={p.session!r} at {self._storage.url}"
        return one_line(f"<Writer rank {p.rank} of {p.world_size}, {where}>")

    def _check(self) -> None:
        """Raise if the writer may not be used. Called at the start of each call, so an overdue journal flushes then."""
        if self._closed:
            raise ClosedError(f"the writer of {self._storage.url} is closed; open another with arc.writer()")
        self._check_process()
        if self._journal is not None and self._journal.ticker.late:
            lock = self._changes.lock
            if not lock._is_owned():  # type: ignore[attr-defined]  # not in the midst of what belongs together
                with lock:
                    self._send()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("a Writer belongs to the process that opened it; open one in each process")

    def _buffer(self, name: str) -> Buffer:
        if name not in self._buffers:
            made = Buffer(
                name,
                self._place,
                self._schema,
                self._pipeline.memory,
                self._ids,
                self._changes,
                self._say_later,
                journaled=self._journal is not None,
            )
            made._step_weights = self._step_weights
            self._buffers[name] = made
        return self._buffers[name]

    def _surface(self) -> None:
        """Raise errors of the background."""
        if self._journal is not None:
            if self._journal.collecting:
                return
            self._journal.surface()
        if error := self._pipeline.failure():
            raise error
        self._saver.surface()

    def settle_at_exit(self) -> None:
        """Finish the checkpoint under way. Its error is printed, as it can't be raised, unless it was seen."""
        if not self._closed and os.getpid() == self._pid:
            try:
                self._saver.settle()
                self._journal_the_rest()
            except BaseException:
                logger.exception("a checkpoint failed while the interpreter was ending")

    def tell_at_exit(self) -> None:
        """Log the number of steps that are in no commit."""
        if not self._closed and os.getpid() == self._pid:
            self._tell_uncommitted()

    def _journal_the_rest(self) -> None:
        """Flush pending steps to the journal, as they will not be committed."""
        if self._journal is not None and not self._closed and not self._changes.broken:
            self._collect()
            with self._changes.lock:
                self._journal.finish()

    def _tell_uncommitted(self) -> None:
        """Log the number of uncommitted steps, which stay so; not where a journal has all of them."""
        if self._journal is not None and not self._journal.seconds_behind and not self._journal.superseded:
            return
        with suppress(ClosedError):  # a part of the interrupted call was sent off: it counts
            self._changes.settle()
        sent = {*self._changes.ready, *self._pipeline.uncommitted()}.difference(*self._committed)
        steps = sum(work.steps for work in sent) + sum(buffer.slabs.steps for buffer in self._buffers.values())
        if steps:
            logger.warning(
                "%r closed with %d uncommitted steps%s: w.commit(), w.checkpoint() and "
                "w.close() commit them, and so does leaving `with arc.writer() as w:` other than by an exception",
                self,
                steps,
                "" if self._journal is None else ", and not all of them in its journal",
            )

    def _tick(self) -> None:
        """Flush pending steps to the journal. Called by the journal's thread."""
        self._collect()
        with self._changes.lock:
            if self._journal is not None and not self._closed:
                self._journal.in_background()

    def _collect(self) -> None:
        """Take in what followed objects got. Not by who holds the lock: another thread may hold one of them, and wait
        for it."""
        owned = self._changes.lock._is_owned()  # type: ignore[attr-defined]
        if self._journal is not None and not (self._closed or self._changes.broken or owned):
            self._journal.collect(self)

    def _say_later(self, buffer: Buffer, *values: Any) -> None:
        """Keep columns, attributes, progress and changes for the next flush."""
        self._kept().say(buffer, *values)

    def _kept(self) -> Journal:
        if self._journal is None:
            raise UsageError("this writer has no journal: open it with arc.writer(journal_s=2.0)")
        return self._journal

    def _settle(self) -> None:
        """Wait for the checkpoint under way, and raise its error unless it was seen."""
        self._saver.settle()
        self._take_note()

    def _sent(self) -> list[Work]:
        """Send off all additions so far; all uncommitted works."""
        self._send()
        return self._pipeline.uncommitted()

    def _send(self) -> None:
        """Send off all additions so far."""
        with self._changes(wait=False):
            for buffer in self._buffers.values():
                buffer._submit()
            self._ledgers.send()
            if self._journal is not None:
                self._changes.add(self._journal.tick())
        if self._journal is not None:
            self._journal.ticked()

    def _end(self) -> BaseException | None:
        """Finish the work under way; the error of a checkpoint that was not seen."""
        self._closed = True
        self._stop_watching()
        failed = self._saver.close()
        if self._journal is not None:
            self._journal.close()
        self._pipeline.close()
        if self._node is not None:
            self._node.close()
        return failed

    def _saved(self, commit: Commit, works: Sequence[Work]) -> None:
        """Take note of committed works. The saver's thread calls it, without a lock: others wait for it with theirs."""
        self._committed.append(works)
        self._on_commit(commit)

    def _take_note(self) -> None:
        """Drop works that were committed. After an interrupt, the next call does the same again."""
        while self._committed:
            works = self._committed[0]
            for written in self._pipeline.wait(works):
                self._saver.committed = max(self._saver.committed, written.rows.next_sequence)
            self._pipeline.forget(works)
            self._committed.popleft()

    def _commit_rows(self, rows: RankRows, message: str | None) -> Commit:
        # The same rows have the same key: a repeated call finds what an earlier one made without knowing.
        place, key = self._place, f"{self.session}/{self.rank}/rows-{rows.next_sequence - 1}"
        who, ids_at = (self.run, self.session, self.rank), max(0, self._ids_known_at)
        change = Change("commit", partial(self._added, rows, message), [place.newest], *who, ids_at)
        return self._log.commit(key, change)

    def _added(self, rows: RankRows, message: str | None, parent: Commit, attempt: Attempt) -> Addition:
        place = self._place
        fresh, sequences = fresh_rows(parent, place, {place.rank: rows})
        runs = parent.runs_with({place.run: replace(parent.runs[place.run], sequences=sequences)})
        return fresh._asdict(), {"runs": runs, "message": message}

    def _known_ids(self) -> set[str]:
        """The ids of all existing episodes; those of later commits are added."""
        self._ids_known_at = self._log.learn_ids().number
        return self._log.ids.names

    def _record_of(self, episode_id: str) -> EpisodeRecord | None:
        """The record that one of the buffers has of an episode; None without one."""
        for buffer in self._buffers.values():
            number = buffer.streams.records.number_of(episode_id)
            if number is not None:
                return buffer.streams.records[number]
        return None

    def _settle_episodes(self, ids: Sequence[str], whole: bool) -> bool:
        """Commit additions if these episodes are among them: no commit has them whole, or as they are now."""
        with self._entered():
            records = [self._record_of(name) for name in ids]
            if not all(records) or (whole and not any(one is not None and one.replaces for one in records)):
                return False
            self.commit()
            return True
