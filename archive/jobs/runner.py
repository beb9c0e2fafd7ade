"""The runner: batches go to workers, a window of them at a time, until each has a result; whoever dies in between."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import randrange
from typing import Any

from archive.base import AccessDeniedError, JobError, UsageError, Wait, layout, logger
from archive.index import Annotations, Snapshot
from archive.jobs.job import Batches, Job, KnownRound
from archive.jobs.receipts import Done, Items, Procedure, Receipt, Receipts, Worker
from archive.jobs.records import CANCELLED, FINISHED, JobRound
from archive.jobs.workers import Crew, DiedError, Workers
from archive.log import Commit, CommitLog, commits, new_session
from archive.observe import Advance, add, gauge, telling
from archive.store import Storage

LOOK_S = 1.0  # between looks at what else is to be done
_AT_ONCE = 64  # results read together: each has 1 MB at most
_DEATHS = 3  # of workers at one batch, which they had begun with
Progress = Callable[[int, int], None]


def _nothing() -> None:
    """Nothing is done between batches."""


@dataclass(frozen=True)
class JobRequest:
    """The results that a call asks a job for: their kind, and the arguments and the digest of the function that they
    depend on."""

    kind: str
    terms: Mapping[str, Any]
    function: str | None = None

    def check(self, name: str, known: JobRound, url: str) -> None:
        """UsageError for a round of another kind, of another function, or with other arguments."""
        if known.kind != self.kind:
            raise UsageError(f"job {name!r} at {url} is of kind {known.kind!r}, not {self.kind!r}: give another name")
        if known.function != self.function:
            raise UsageError(
                f"job {name!r} at {url} is of another function: its digest is {known.function}, that of the one given "
                f"here {self.function}. Give another name; or only='stale', which makes again what other versions made"
            )
        for argument, value in self.terms.items():
            if known.terms.get(argument) != value:
                raise UsageError(
                    f"job {name!r} at {url} was begun with {argument}={known.terms.get(argument)!r}, not {value!r}: "
                    "call it with the same, or give another name"
                )


def frozen_snapshot(storage: Storage, round: JobRound) -> Snapshot:
    """The tables as of the commits that a round has frozen."""
    commit, head = commits.read(storage, round.commit), commits.read(storage, round.annotations)
    return Snapshot(storage, commit, Annotations(storage, head, read_only=True))


class JobCall:
    """One call of a job: its round, the batches that have no result yet, and the results of all. Without a job's name
    the results are values of this process."""

    def __init__(
        self,
        storage: Storage,
        session: str,
        plan: Batches,
        job: Job | None = None,
        begun: JobRound | None = None,
        *,
        others: bool = False,
        function: str | None = None,
    ) -> None:
        self.job = job
        self.round = begun
        self.session = session
        self.plan = plan
        self.others = others  # another call began the round
        self.store = Receipts(
            storage, "" if job is None else job.name, session, function, None if begun is None else begun.number
        )
        self.first = 0 if begun is None else begun.first
        self.results = set[int]() if job is None or begun is None else job.results(begun)
        self._values: dict[int, Receipt] = {}
        self._own = set[int]()  # batches that were given to workers since one was drawn
        self._met = False  # one of these was made by another driver

    @classmethod
    def of(
        cls,
        log: CommitLog,
        name: str | None,
        ask: JobRequest,
        frozen: Commit,
        batches: Callable[[], Sequence[Any]],
        **more: Any,
    ) -> JobCall:
        """A call of a job that may be repeated once it is finished, as it has no function: it goes on with the newest
        round or, where that has ended, begins one at a commit. batches: gives the items of each batch.  more: as of
        `beginning`."""
        if name is None:
            return cls(log.storage, new_session(), Batches.of(batches()))
        job = Job(log.storage, name)
        known = job.newest_round()
        if known is None or known.end is not None:
            return cls.beginning(log, job, known, ask, frozen, batches, **more)
        ask.check(job.name, known.record, log.storage.url)
        return cls.going_on(log.storage, job, known.record)

    @classmethod
    def going_on(cls, storage: Storage, job: Job, round: JobRound) -> JobCall:
        """A call that goes on with a round that another call began."""
        return cls(storage, round.session, job.plan(round), job, round, others=True, function=round.function)

    @classmethod
    def beginning(
        cls,
        log: CommitLog,
        job: Job,
        known: KnownRound | None,
        ask: JobRequest,
        frozen: Commit,
        batches: Callable[[], Sequence[Any]],
        annotations: int | None = None,
        **more: Any,
    ) -> JobCall:
        """A call that begins the round after the known one at a commit, or goes on with that of a call that was
        first."""
        try:
            made = job.begin(
                Batches.of(batches()),
                known,
                kind=ask.kind,
                archive=log.archive_id,
                commit=frozen.number,
                annotations=frozen.number if annotations is None else annotations,
                session=new_session(),
                terms=dict(ask.terms),
                function=ask.function,
                **more,
            )
        except AccessDeniedError as e:
            raise AccessDeniedError(
                f"{e}. What a job has done is kept there: ask for the right to write to jobs/, or leave out job="
            ) from e
        if made.others:
            ask.check(job.name, made.record, log.storage.url)
            return cls.going_on(log.storage, job, made.record)
        job.check_there(made.record, log.head)
        return cls(log.storage, made.record.session, made.plan, job, made.record, function=ask.function)

    def log_of(self, log: CommitLog) -> CommitLog:
        """A log that knows the commits since the one that the round froze: what a driver committed before it died is
        found by its key."""
        if self.round is None or min(self.round.frozen) >= log.began:
            return log
        return CommitLog(log.storage, log.archive_id, commits.read_of(log.storage, min(self.round.frozen), log.head))

    @property
    def batches(self) -> int:
        return len(self.plan.starts) - 1

    def frozen(self, given: Snapshot) -> Snapshot:
        """The tables as of the commits that the job has frozen; those given, where that is their commit."""
        if self.round is None or self.round.frozen == {given.commit.number}:
            return given
        return frozen_snapshot(self.store.storage, self.round)

    def carry_out(
        self,
        procedure: Procedure,
        crew: Crew,
        progress: Progress | bool | None = None,
        look: Callable[[], None] = _nothing,
    ) -> None:
        """Make the results that are missing. look: called between batches, every second at least."""
        worker, told = Worker(procedure, self.store), Wait(None, LOOK_S)
        checked = Wait(None, LOOK_S)
        with crew.of(worker) as workers, self._bar(progress, alone=crew.alone) as tell:
            tell(len(self.results), self.batches)
            for done in _through(workers, self._left(), look):
                self._take(done)
                tell(len(self.results), self.batches)
                if self.job is not None and told.due():
                    logger.info("job %r: %d of %d batches", self.job.name, len(self.results), self.batches)
                if checked.due() and self._is_finished:  # its results may be pruned by now: none is made again
                    self.results = {*range(self.first, self.first + self.batches)}
                    return

    @property
    def _is_finished(self) -> bool:
        """True if another driver has finished the round."""
        return self.job is not None and self.round is not None and not self.job.check_going(self.round)

    def _bar(self, progress: Progress | bool | None, *, alone: bool) -> AbstractContextManager[Advance]:
        """A function that is told how many batches are done: the caller's, or one that draws a bar."""
        stores = [self.store] if alone else []  # others' traffic is not counted here
        return telling(progress, "batches" if self.job is None else f"job {self.job.name}", stores, "batches")

    def _left(self) -> Iterator[tuple[int, Items]]:
        """The batches that have no result yet. Another driver may be at work on those of another call, so the first one
        is drawn of those that it comes to last, and they go downwards: the two meet, and do not follow each other. The
        next one is drawn, too, where this driver comes to batches that another has made; else both would be at the same
        ones from there on."""
        given, draws = set[int](), int(self.others)
        while numbers := sorted({*range(self.first, self.first + self.batches)} - self.results - given):
            least = len(numbers) // 2 if self.others and draws == 1 else 0
            begin = randrange(least, len(numbers)) if draws else 0  # noqa: S311 (no secret)
            self._own, self._met = set[int](), False
            for number in _from(numbers, begin, downwards=self.others):
                if self._met:
                    break
                given.add(number)
                self._own.add(number)
                yield number, self.plan.batch(number - self.first)
            if self._met and self.job is not None and self.round is not None:
                self.results |= self.job.results(self.round)
            draws += 1

    def _take(self, done: Done) -> None:
        self.results.add(done.number)
        self._met |= not done.made and done.number in self._own  # and not one that was under way at the last draw
        if done.data is not None:
            self._values[done.number] = Receipt(done.data, layout.batch_key("", done.number), f"batch {done.number}")
        add("archive.job.rows.checkpointed", done.steps)
        add("archive.job.rows.ready", done.steps)
        for part, seconds in done.seconds.items():
            add("archive.job.time", seconds, part=part)

    def read(self, numbers: Iterable[int]) -> Iterator[Receipt]:
        """The results of batches, in order, a few at a time in memory."""
        wanted = sorted(numbers)
        for at in range(0, len(wanted), _AT_ONCE):
            some = wanted[at : at + _AT_ONCE]
            yield from [self._values[n] for n in some] if self.round is None else self.store.read(some)

    def not_ended(self, parent: Commit) -> None:
        """Require that the round is not cancelled or replaced, as of each commit that one of its own would follow. What
        replaces it commits after its end only, and so comes after this one, or this one is refused."""
        if self.job is not None and self.round is not None:
            self.job.check_going(self.round)

    def give_up(self) -> None:
        """End the round where its results are of no use any more: the same call begins anew."""
        if self.job is not None and self.round is not None:
            self.job.ends(self.round, CANCELLED)

    def finish(self) -> None:
        """End the round: all is done with its results."""
        if self.job is not None and self.round is not None:
            self.job.ends(self.round, FINISHED)


def _from(numbers: Sequence[int], begin: int, *, downwards: bool) -> Sequence[int]:
    """The numbers from the one at a place on, and then those before it."""
    if downwards:
        return [*reversed(numbers[: begin + 1]), *reversed(numbers[begin + 1 :])]
    return [*numbers[begin:], *numbers[:begin]]


def _through(crew: Workers, batches: Iterator[tuple[int, Items]], look: Callable[[], None]) -> Iterator[Done]:
    """The batches as workers are through with them, a window at a time; the first error ends it."""
    under_way: dict[Future[Done], tuple[int, Items]] = {}
    again, deaths, idle = deque[tuple[int, Items]](), Counter[int](), Wait(None, LOOK_S)
    while True:
        room = crew.room
        if any(deaths[number] == _DEATHS - 1 for number, _ in (*again, *under_way.values())):
            room = min(room, int(not under_way))  # the last time a batch is run alone: no other is blamed
        for _ in range(room):
            if (batch := again.popleft() if again else next(batches, None)) is None:
                break
            under_way[crew.submit(*batch)] = batch
        if not under_way:
            if not again and (batch := next(batches, None)) is not None:
                again.append(batch)
            if not again:
                return
            if idle.due():  # no worker is there yet
                logger.warning("a job waits for %d workers to begin", crew.pending)
        gauge("archive.job.workers", crew.active, state="active")
        gauge("archive.job.workers", crew.pending, state="pending")
        awaited = [*under_way, *crew.coming]
        ended, _ = wait(awaited, LOOK_S, FIRST_COMPLETED)
        if not awaited:  # actors are asked again a little later
            time.sleep(LOOK_S / 10)
        for future in [one for one in under_way if one in ended]:
            number, items = under_way.pop(future)
            try:
                done = future.result()
            except DiedError as e:
                deaths[number] += not e.waited
                if deaths[number] == _DEATHS:
                    raise JobError(
                        f"batch {number} ended the worker that it ran on {_DEATHS} times ({e}): its function may need "
                        "more memory than there is, or end its process. What is finished stays: the same call goes on"
                    ) from e
                logger.warning("a worker ended at batch %d (%s); the batch is run again", number, e)
                again.append((number, items))
            else:
                if done.error is not None:
                    raise done.error
                yield done
        look()
