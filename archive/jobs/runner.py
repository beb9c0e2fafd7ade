"""The runner: batches go to workers, a window of them at a time, until each has a result; whoever dies in between."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from random import randrange
from typing import Any

from archive.base import JobError, Wait, layout, logger
from archive.jobs.job import Batches, Begun, Job
from archive.jobs.receipts import Done, Items, Procedure, Receipt, Receipts, Worker
from archive.jobs.records import FINISHED, JobRound
from archive.jobs.workers import DiedError, Workers, check, workers
from archive.observe import add, gauge
from archive.store import Storage

LOOK_S = 1.0  # between looks at what else is to be done
_AT_ONCE = 256  # results read together
_DEATHS = 3  # of workers at one batch
Progress = Callable[[int, int], None]


def _nothing() -> None:
    """Nothing is done between batches."""


@dataclass(frozen=True)
class Crew:
    """The workers that a call asks for."""

    engine: str = "local"
    workers: int | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None

    @property
    def alone(self) -> bool:
        """True for a worker in this process."""
        return self.engine == "local" and self.workers in (None, 1)

    def check(self, storage: Storage, fn: Any) -> None:
        """UsageError, before anything is begun, for workers that cannot do this, or not with this function."""
        check(storage, fn, self.engine, self.workers, self.num_cpus, self.num_gpus)

    def of(self, worker: Worker) -> Workers:
        """The workers."""
        return workers(worker, self.engine, self.workers, self.num_cpus, self.num_gpus)


class JobCall:
    """One call of a job: its round, the batches that have no result yet, and the results of all. Without a job's name
    the results are values of this process."""

    def __init__(
        self, storage: Storage, session: str, plan: Batches, job: Job | None = None, begun: Begun | None = None,
        function: str | None = None,
    ) -> None:  # fmt: skip
        self.job = job
        self.round: JobRound | None = None if begun is None else begun.record
        self.session = session if begun is None else begun.record.session
        self.plan = plan if begun is None else begun.plan
        self._others = begun is not None and begun.others
        number = None if self.round is None else self.round.number
        self.store = Receipts(storage, "" if job is None else job.name, self.session, function, number)
        self.first = 0 if self.round is None else self.round.first
        self.results = set[int]() if job is None or self.round is None else job.results(self.round)
        self._values: dict[int, Receipt] = {}

    @property
    def batches(self) -> int:
        return len(self.plan.starts) - 1

    def carry_out(
        self, procedure: Procedure, crew: Crew, progress: Progress | None = None, look: Callable[[], None] = _nothing
    ) -> None:
        """Make the results that are missing. look: called between batches, every second at least."""
        worker, told = Worker(procedure, self.store), Wait(None, LOOK_S)
        checked = Wait(None, LOOK_S)
        with crew.of(worker) as workers:
            for done in _through(workers, self._left(), look):
                self._take(done)
                if progress is not None:
                    progress(len(self.results), self.batches)
                if self.job is not None and told.due():
                    logger.info("job %r: %d of %d batches", self.job.name, len(self.results), self.batches)
                if self.job is not None and self.round is not None and checked.due():
                    self.job.check_going(self.round)

    def _left(self) -> Iterator[tuple[int, Items]]:
        """The batches that have no result yet. Another driver may be at work on those of another call, so the first one
        is drawn: both are rarely at the same."""
        numbers = [n for n in range(self.first, self.first + self.batches) if n not in self.results]
        begin = randrange(len(numbers)) if self._others and numbers else 0  # noqa: S311 (no secret)
        for number in [*numbers[begin:], *numbers[:begin]]:
            yield number, self.plan.batch(number - self.first)

    def _take(self, done: Done) -> None:
        self.results.add(done.number)
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

    def finish(self) -> None:
        """JobEnd the round: all is done with its results."""
        if self.job is not None and self.round is not None:
            self.job.ends(self.round, FINISHED)


def _through(crew: Workers, batches: Iterator[tuple[int, Items]], look: Callable[[], None]) -> Iterator[Done]:
    """The batches as workers are through with them, a window at a time; the first error ends it."""
    under_way: dict[Future[Done], tuple[int, Items]] = {}
    again, deaths, idle = deque[tuple[int, Items]](), Counter[int](), Wait(None, LOOK_S)
    while True:
        for _ in range(crew.room):
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
        ended, _ = wait([*under_way, *crew.coming], LOOK_S, FIRST_COMPLETED)
        for future in [one for one in under_way if one in ended]:
            number, items = under_way.pop(future)
            try:
                done = future.result()
            except DiedError as e:
                deaths[number] += 1
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
