"""A job by its name: its rounds, their results and commits, as they are on the store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive import tables
from archive.base import (
    AlreadyExistsError,
    ArchiveError,
    CorruptStateError,
    ExpiredError,
    JobError,
    MissingObjectError,
    NotFoundError,
    UsageError,
    __version__,
    at_once,
    layout,
    one_line,
    tabulate,
)
from archive.index import Walk
from archive.jobs.receipts import Receipt, Receipts
from archive.jobs.records import (
    CANCELLED,
    FINISHED,
    Fold,
    FoldCommit,
    JobEnd,
    JobRound,
    Named,
    Outcome,
    ResultKind,
    check_name,
    job_of,
    name_of,
    named,
)
from archive.log import Commit, FileRef, commits, tablefiles
from archive.shard import checksum
from archive.store import Storage, smallfiles, under_fresh_name

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 256  # results read together
_THREADS = 16  # that read small objects
COLUMNS = ("job", "kind", "batches", "of", "committed", "failed", "forgotten", "state")


class Batches(NamedTuple):
    """The items of the batches of a round, end to end, and where each batch begins."""

    items: pa.Array
    starts: Any

    def batch(self, batch: int) -> list[Any]:
        """The items of a batch, counted from the round's first."""
        found: list[Any] = self.items[int(self.starts[batch]) : int(self.starts[batch + 1])].to_pylist()
        return found

    @classmethod
    def of(cls, batches: Sequence[Any]) -> Batches:
        """A plan with these items in each batch: numbers, or names."""
        import pyarrow as pa

        named = bool(batches) and isinstance(batches[0][0], str)
        parts = [pa.array(batch, pa.string() if named else pa.int64()) for batch in batches]
        items = pa.concat_arrays(parts) if parts else pa.array([], pa.int64())
        return cls(items, np.cumsum([0, *map(len, batches)]))


class KnownRound(NamedTuple):
    """A round, and its end if it has ended."""

    record: JobRound
    end: JobEnd | None


class Begun(NamedTuple):
    """A round that is there to be worked on; `others`: it was begun by another call."""

    record: JobRound
    plan: Batches
    others: bool


class Job:
    """A job: how far it is, what failed, and its end. Each property looks at the store anew.

    Batches, not steps, are counted by `done` and `total`: those of its newest round.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self.name = check_name(name)

    # -- as it is now --------------------------------------------------------------------------------------------------

    def _look(self) -> Named:
        return named(self._storage.list(layout.job_key(self.name)))

    @property
    def begun(self) -> bool:
        """True if there is such a job: its first round stays for ever."""
        return self._storage.exists(layout.job_key(self.name, "round-000000.json"))

    @property
    def newest(self) -> JobRound:
        """Its newest round; NotFoundError if there is no such job."""
        return self._newest(self._look())

    def _newest(self, there: Named) -> JobRound:
        return self._round(self._number(there))

    def _number(self, there: Named) -> int:
        if not there.round:
            raise NotFoundError(f"there is no job {self.name!r} at {self._storage.url}; `archive jobs` lists them")
        return max(there.round)

    def _round(self, number: int) -> JobRound:
        name = f"round-{number:06d}.json"
        try:
            found: JobRound = self._read(name, JobRound)
            if (found.job, found.number) != (self.name, number):
                where = self._storage.full_url(layout.job_key(self.name, name))
                raise CorruptStateError(f"{where} is round {found.number} of job {found.job!r:.80}")
        except CorruptStateError as e:
            raise CorruptStateError(f"{e}. Put it back from a copy; or cancel the job, and give another name") from e
        return found

    def _read(self, name: str, kind: type[Any]) -> Any:
        return smallfiles.read_small(self._storage, layout.job_key(self.name, name), kind, CorruptStateError)

    def _create(self, name: str, record: Any) -> bool:
        return smallfiles.create_small(self._storage, layout.job_key(self.name, name), record)

    def _end(self, there: Named, number: int) -> JobEnd | None:
        return self._read(f"end-{number:06d}.json", JobEnd) if number in there.end else None

    @property
    def total(self) -> int:
        """The number of batches."""
        return self.standing[1]

    @property
    def done(self) -> int:
        """The number of batches that have a result."""
        return self.standing[0]

    @property
    def state(self) -> str:
        """The state: "unfinished", "finished", "cancelled" or "replaced" (by a round of another function)."""
        return self.standing[2]

    @property
    def finished(self) -> bool:
        """True if all results are committed, or handed over."""
        return self.state == "finished"

    @property
    def standing(self) -> tuple[int, int, str]:
        """The values of `done`, `total` and `state`, by one look."""
        there = self._look()
        return self._standing(there, self._newest(there))

    def _standing(self, there: Named, newest: JobRound) -> tuple[int, int, str]:
        if (end := self._end(there, newest.number)) is not None:
            return end.done, newest.batches, end.outcome
        return len(_of(newest, there)), newest.batches, "unfinished"

    @property
    def about(self) -> dict[str, Any]:
        """A summary: batches with a result, of how many; of the committed ones steps, steps that were forgotten
        meanwhile, and episodes at which the function failed."""
        there = self._look()
        newest = self._newest(there)
        done, of, state = self._standing(there, newest)
        made = [one for _, one in self._made(there, newest)]
        return {
            "job": self.name,
            "kind": newest.kind,
            "batches": done,
            "of": of,
            "committed": sum(one.rows for one in made),
            "failed": sum(one.failed for one in made),
            "forgotten": sum(one.forgotten for one in made),
            "commits": [one.commit for one in made],
            "state": state,
            "function": newest.function,
            "commit": newest.commit,
        }

    @property
    def failed(self) -> dict[str, str]:
        """Episode id -> error, for the episodes at which the function failed."""
        there = self._look()
        newest = self._newest(there)
        found = [self._failed(fold) for fold, one in self._made(there, newest) if one.failed]
        rows = [row for table in [*found, *self._uncommitted(there, newest)] for row in table.to_pylist()]
        return {row["episode_id"]: row["error"] for row in rows}

    def _failed(self, fold: int) -> pa.Table:
        key = layout.job_key(self.name, f"failed-{fold:06d}.parquet")
        try:
            return tables.loads(self._storage.get(key), "failed", where=self._storage.full_url(key))
        except MissingObjectError as e:
            raise ExpiredError(f"the list of failures {self._storage.full_url(key)} was pruned: the job ended") from e

    def _made(self, there: Named, round: JobRound) -> list[tuple[int, FoldCommit]]:
        """The commits of a round's results, by fold."""
        numbers = sorted(there.made)
        every = at_once(lambda n: self._read(f"made-{n:06d}.json", FoldCommit), numbers, _THREADS)
        return [(number, one) for number, one in zip(numbers, every, strict=True) if one.round == round.number]

    def _fold(self, number: int) -> Fold:
        found: Fold = self._read(f"fold-{number:06d}.json", Fold)
        return found

    def _uncommitted(self, there: Named, round: JobRound) -> Iterator[pa.Table]:
        """The failures in results of which there is no commit yet."""
        if round.number in there.end:
            return
        gone = {n for fold in at_once(self._fold, there.fold & there.made, _THREADS) for n in fold.numbers}
        wanted = sorted(_of(round, there) - gone)
        receipts = self.receipts(round)
        for at in range(0, len(wanted), _AT_ONCE):
            yield from (one.failed for one in receipts.read(wanted[at : at + _AT_ONCE]) if one.index.failed)

    def problems(self, *, deep: bool) -> Iterator[tuple[str, str]]:
        """The keys of its objects that are not as they were written, and what is wrong. deep: results that are not
        committed yet are read, too."""
        there = self._look()
        looks: list[tuple[str, Callable[[], Any]]] = []
        for kind, of in (("fold", Fold), ("made", FoldCommit), ("end", JobEnd), ("kind", ResultKind)):
            names = [f"{kind}-{number:06d}.json" for number in sorted(getattr(there, kind))]
            looks += [(name, partial(self._read, name, of)) for name in names]
        for number in sorted(there.round):
            looks.append((f"round-{number:06d}.json", partial(self._look_at_round, number, number not in there.end)))
        for number in sorted(there.batch) if deep and there.round - there.end else ():
            looks.append((f"{number:09d}.zip", partial(self._result, number)))
        for name, look in looks:
            try:
                look()
            except ArchiveError as e:
                if name in self._storage.list(layout.job_key(self.name)):  # else a prune has deleted it meanwhile
                    yield layout.job_key(self.name, name), str(e)

    def _look_at_round(self, number: int, is_going: bool) -> None:
        found = self._round(number)
        if is_going:
            self.plan(found)

    def _result(self, number: int) -> None:
        key = layout.batch_key(self.name, number)
        Receipt(self._storage.get(key), key, self._storage.full_url(key))

    def cancel(self) -> None:
        """End it: a driver that is at work on it stops, what was committed stays, and a prune deletes the rest.
        UsageError if it has ended already."""
        there = self._look()
        number, done = self._number(there), 0
        with suppress(CorruptStateError):  # its damage is no reason to keep it
            done = len(_of(self._round(number), there))
        if number in there.end or not self._create(f"end-{number:06d}.json", JobEnd(CANCELLED, done)):
            outcome = self._read(f"end-{number:06d}.json", JobEnd).outcome
            raise UsageError(f"job {self.name!r} has been {outcome} already")

    def __repr__(self) -> str:
        done, total, state = self.standing
        return one_line(f"<job {self.name!r}, {state}: {done} of {total} batches>")

    # -- at work -------------------------------------------------------------------------------------------------------

    def receipts(self, round: JobRound) -> Receipts:
        """The results of a round."""
        return Receipts(self._storage, self.name, round.session, round.function, round.number)

    def newest_round(self) -> KnownRound | None:
        """Its newest round; None if there is no such job."""
        there = self._look()
        if not there.round:
            return None
        newest = self._newest(there)
        return KnownRound(newest, self._end(there, newest.number))

    def going(self) -> list[JobRound]:
        """Its rounds that have not ended: one at most, but where a driver died as it began another."""
        there = self._look()
        return [self._round(number) for number in sorted(there.round - there.end)]

    def plan(self, round: JobRound) -> Batches:
        """The items of a round's batches."""
        where = self._storage.full_url(round.plan.path)
        if job_of(round.plan.path) != layout.escape(self.name) or round.batches > round.items:
            raise CorruptStateError(f"{where} is no plan of {round.batches} batches of job {self.name!r}")
        table = tablefiles.load(self._storage, "batches", [round.plan])
        batch = table["batch"].to_numpy()
        column = "name" if table["name"].null_count < table.num_rows else "number"
        steps = np.diff(batch, prepend=-1)  # from 0 on, none left out
        if table.num_rows != round.items or not np.isin(steps, (0, 1)).all() or (batch[-1:] != round.batches - 1).any():
            raise CorruptStateError(f"{where} is not the plan of round {round.number} of job {self.name!r}")
        return Batches(table[column].combine_chunks(), np.append(0, np.cumsum(np.bincount(batch))))

    def begin(self, plan: Batches, known: KnownRound | None, **about: Any) -> Begun:
        """Begin the round after the known one, with this plan. Where another call was first with it, that one's counts,
        though it may have ended by now."""
        number, before = (0, 0) if known is None else (known.record.number + 1, known.record.numbers.stop)
        batch = np.repeat(np.arange(len(plan.starts) - 1), np.diff(plan.starts))
        column = "number" if plan.items.type == "int64" else "name"
        data = tables.dumps(tables.from_columns("batches", {"batch": batch, column: plan.items}))
        name = lambda: layout.job_key(self.name, f"plan-{secrets.token_hex(4)}.parquet")  # noqa: E731
        key, _ = under_fresh_name(name, lambda key: self._storage.put_fresh(key, data))
        record = JobRound(
            job=self.name,
            number=number,
            first=before,
            batches=len(plan.starts) - 1,
            items=len(plan.items),
            plan=FileRef(key, len(data), checksum(data), len(plan.items)),
            created_at=datetime.now(UTC),
            library=__version__,
            **about,
        )
        if self._create(f"round-{number:06d}.json", record):
            return Begun(record, plan, others=False)
        first = self._round(number)
        return Begun(first, self.plan(first), others=True)

    def check_there(self, round: JobRound, head: Commit) -> None:
        """ExpiredError, and the round is ended, if a prune deleted its plan, or what it froze, after that was opened
        and before the round was there to be seen: from then on prunes spare it."""
        storage = self._storage
        frozen = [*commits.read_all(storage, round.frozen, head)]
        pruned = commits.pruned_since(storage, min(frozen, key=lambda one: one.number))
        walk = Walk(storage)
        own = {round.plan.path, *(ref.path for one in frozen for ref in one.files_led_to)}
        gone = own & pruned.keys()  # they cannot be read, then
        gone = gone or {key for one in frozen if pruned for key in walk.reach(one).keys & pruned.keys()}
        if gone:
            self.ends(round, CANCELLED)
            raise ExpiredError(
                f"{storage.full_url(min(gone))} was pruned by commit {pruned[min(gone)]} after this was opened; "
                "nothing was done. Open the archive again, and begin the job anew"
            )

    def results(self, round: JobRound) -> set[int]:
        """The numbers of the batches that have a result."""
        return _of(round, self._look())

    def check_going(self, round: JobRound) -> bool:
        """True unless another process has finished a round: all its results are committed, or handed over. JobError if
        it was ended otherwise."""
        try:
            outcome = self._read(f"end-{round.number:06d}.json", JobEnd).outcome
        except MissingObjectError:
            return True
        if outcome != FINISHED:
            raise JobError(
                f"job {self.name!r} at {self._storage.url} was {outcome} by another process; what it had committed "
                "stays. Give another name to begin anew"
            )
        return False

    def folds(self) -> Folds:
        """Its folds."""
        there = self._look()
        numbers = sorted(there.fold)
        return Folds(self, dict(zip(numbers, at_once(self._fold, numbers, _THREADS), strict=True)), there.made)

    def ends(self, round: JobRound, outcome: Outcome) -> bool:
        """End a round; True if this call did."""
        there = self._look()
        if round.number in there.end:
            return False
        return self._create(f"end-{round.number:06d}.json", JobEnd(outcome, len(_of(round, there))))


def _of(round: JobRound, there: Named) -> set[int]:
    """The batches of a round that have a result."""
    return {number for number in there.batch if number in round.numbers}


class Folds:
    """The folds of a job, as one driver knows them: batches whose results one commit makes visible. Each is agreed on
    before its commit is made, so that two drivers, or one that was killed in between, commit the same."""

    def __init__(self, job: Job, known: dict[int, Fold], made: set[int]) -> None:
        self._job = job
        self._known = known
        self._made = made

    def without_commit(self, round: JobRound) -> list[tuple[int, Fold]]:
        """The folds of a round of which no commit is recorded."""
        return [(n, one) for n, one in self._known.items() if one.round == round.number and n not in self._made]

    def ready(self, round: JobRound, results: set[int]) -> set[int]:
        """The batches of a round among these that are in no fold. CorruptStateError if one is in two folds."""
        folded = [number for one in self._known.values() if one.round == round.number for number in one.numbers]
        if len(folded) > len({*folded}.intersection(round.numbers)):
            raise CorruptStateError(
                f"folds of job {self._job.name!r} have a batch twice, or one of another round: they are damaged, or "
                "not its own. Put them back from a copy; or cancel the job, and give another name"
            )
        return results.difference(folded)

    @property
    def _next(self) -> int:
        """The number of the next fold: a prune may have deleted those of earlier rounds, not the records of commits."""
        return max([*self._known, *self._made], default=-1) + 1

    def agree(self, round: JobRound, ready: set[int], most: int) -> tuple[int, Fold] | None:
        """The next fold: of these batches, `most` at most, or another driver's that was first. They are taken out of
        `ready`. None once there are none."""
        while ready:
            number, fold = self._next, Fold(round.number, _ranges(sorted(ready)[:most]))
            if not self._job._create(f"fold-{number:06d}.json", fold):
                fold = self._job._fold(number)
            self._known[number] = fold
            ready.difference_update(fold.numbers)
            if fold.round == round.number:
                return number, fold
        return None

    def is_noted(self, number: int) -> bool:
        """True if the commit of a fold is recorded by now."""
        return self._job._storage.exists(layout.job_key(self._job.name, f"made-{number:06d}.json"))

    def note_made(self, number: int, made: FoldCommit, failed: pa.Table) -> None:
        """Record the commit of a fold, and the episodes in it that failed."""
        if failed.num_rows:
            key = layout.job_key(self._job.name, f"failed-{number:06d}.parquet")
            with suppress(AlreadyExistsError):  # another driver noted the same
                self._job._storage.create_once(key, tables.dumps(failed))
        self._job._create(f"made-{number:06d}.json", made)
        self._made.add(number)


def _ranges(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Numbers in order, as ranges."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    return tuple((numbers[a], numbers[b - 1] + 1) for a, b in pairwise(cuts))


class Jobs(Mapping[str, Job]):
    """Name -> job of an archive: `arc.jobs["verifier-v2"].done`; prints as a table."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getitem__(self, name: str) -> Job:
        found = Job(self._storage, name)
        if not found.begun:
            found.newest  # noqa: B018 (NotFoundError)
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and Job(self._storage, name).begun

    def get(self, name: str, default: Any = None) -> Any:
        found = Job(self._storage, name)
        return found if found.begun else default

    def _named(self) -> list[Job]:
        """Jobs of these names: of some a driver died before it began the first round."""
        names = [name_of(name.rstrip("/")) for name in self._storage.list(layout.JOBS) if name.endswith("/")]
        return [Job(self._storage, name) for name in sorted(name for name in names if name is not None)]

    def __iter__(self) -> Iterator[str]:
        return (job.name for job in self._named() if job.begun)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def problems(self, *, deep: bool) -> Iterator[tuple[str, str]]:
        """The keys of objects that are not as they were written, and what is wrong."""
        return (found for job in self._named() for found in job.problems(deep=deep))

    def unfinished(self) -> list[JobRound]:
        """The rounds that have not ended."""
        return [one for job in self._named() for one in job.going()]

    @property
    def abouts(self) -> list[dict[str, Any]]:
        """A summary of each; of one that is damaged its name alone."""
        return at_once(_told, self.values(), _THREADS)

    @property
    def _rows(self) -> list[list[Any]]:
        return [[about.get(name) for name in COLUMNS] for about in self.abouts]

    def _repr_html_(self) -> str:
        from archive.view import notebook

        return notebook.rows("Jobs", COLUMNS, self._rows)

    def __str__(self) -> str:
        return "\n".join(tabulate(COLUMNS, self._rows)) or one_line(f"no jobs at {self._storage.url}")

    __repr__ = __str__


def _told(job: Job) -> dict[str, Any]:
    """A summary of a job, damaged or not."""
    try:
        return job.about
    except CorruptStateError:
        return dict.fromkeys(COLUMNS) | {"job": job.name, "state": "damaged"}
