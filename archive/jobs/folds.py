"""Commits of results: columns that workers made, folded now and then into one commit for many batches.

Results are read back from the store, where anybody may have been: they must be of the round, and have each step of
their episodes once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, arrow, ascending, numbers, places, sums
from archive.base import CorruptStateError, FieldError, IntegrityError, JobError, escape, layout, logger
from archive.fields import Bools, FieldSpec, ShardSchema, dtypes, loads
from archive.index import Snapshot
from archive.jobs.receipts import Items, Receipt
from archive.jobs.records import Fold, FoldCommit
from archive.jobs.runner import JobCall
from archive.log import Addition, Attempt, Change, Commit, CommitLog
from archive.observe import add, gauge
from archive.read import Episodes, Gathered, LateRows, lateshards, notes
from archive.tables import STREAM, STRETCH, distinct, overlaps

if TYPE_CHECKING:
    import pyarrow as pa

Spared = Callable[[Commit, Attempt], Bools]  # a mask of rows
FOLDED = 2048  # results that one commit makes visible, at most
_READ_AT_ONCE = 64  # results in memory
SAME = ": let it return the same fields, in the same dtypes and shapes, for each"


def kind_of(specs: Iterable[FieldSpec]) -> str:
    """The names of columns, and the dtype and shape of a row of each."""
    return ", ".join(sorted(f"{one.name}: {one.dtype}{list(one.shape)}" for one in specs))


def chosen(episodes: Episodes, items: Items) -> Episodes:
    """The episodes of a batch, by their numbers in the index."""
    at = places(np.asarray(items, np.int64), episodes.numbers)
    if (at < 0).any():
        number = episodes.reader.snapshot.commit.number
        raise JobError(f"the job's plan names an episode that commit {number} does not have; begin another job")
    return episodes.pick(at)


class ColumnFolds:
    """The commits of a call's results: now and then, or one at the end."""

    def __init__(
        self,
        log: CommitLog,
        call: JobCall,
        source: Episodes,
        provenance: str,
        by: str | None,
        every_s: float | None,
        *,
        spares: bool,
    ) -> None:
        """source: the episodes of which the call's plan has the numbers.  spares: steps that got such a column from
        others since the round began keep it."""
        self._log, self._call, self._source, self._every_s = log, call, source, every_s
        self._stamp = provenance, by
        self._since = source.reader.snapshot.annotations.head.number if spares else None
        self._folds = None if call.job is None else call.job.folds()
        self._due = monotonic() + (every_s or 0)

    def when_due(self) -> None:
        """Commit what is ready, if it is time."""
        if self._every_s is not None and monotonic() >= self._due:
            self.rest()
            self._due = monotonic() + self._every_s

    def rest(self) -> None:
        """Commit all that is ready; first what was agreed on, and maybe not committed, when a driver died."""
        call = self._call
        if call.job is None or call.round is None or self._folds is None:
            self._commit(0, Fold(0, ((0, call.batches),)) if call.batches else Fold(0, ()))
            return
        ready = self._folds.ready(call.round, call.results)
        for number, fold in self._folds.without_commit(call.round):
            if call.results.issuperset(fold.numbers):
                self._commit(number, fold)
        while (agreed := self._folds.agree(call.round, ready, FOLDED)) is not None:
            self._commit(*agreed)

    def _commit(self, number: int, fold: Fold) -> None:
        """Make the commit of a fold, once, whoever makes it."""
        log, call = self._log, self._call
        failed: list[pa.Table] = []
        key = f"job/{call.session}/{number}"
        log.catch_up()
        found = log.find(key)
        if found is None:
            late, chunks, forgotten = self._packed(fold, failed)
            if late.num_rows or call.job is not None:
                rows, file = notes.placed(log.storage, call.session, late, chunks, *self._stamp)
                spared = None if self._since is None else partial(_filled, rows, call.session, self._since)
                adds = partial(_addition, rows, forgotten, {"chunks": file}, spared)
                found = log.commit(key, Change("late", adds, [call.not_ended], session=call.session))
        elif self._folds is not None and self._folds.is_noted(number):
            return  # by who made it, and a prune may have deleted the results since
        else:
            failed = [one.failed for one in call.read(fold.numbers) if one.index.failed]
        if found is None:
            return
        rows, gone = (found.added.get(name, 0) for name in ("rows", "forgotten"))
        add("archive.job.rows.committed", rows)
        gauge("archive.job.rows.ready", 0)
        if failed and self._folds is None:
            named = failed[0].to_pylist()[0]
            count = sum(one.num_rows for one in failed)
            told = count, named["episode_id"], named["error"]
            logger.warning("the function failed at %d episodes, which are left out, such as %r: %s", *told)
        if gone:
            logger.info("%d steps were forgotten meanwhile: their results are left out", gone)
        if self._folds is not None:
            table = tables.concat("failed", failed)
            self._folds.note_made(number, FoldCommit(fold.round, found.number, rows, gone, table.num_rows), table)

    def _packed(self, fold: Fold, failed: list[pa.Table]) -> tuple[pa.Table, pa.Table, int]:
        """Rows of the late table and of the chunk table for the results of a fold: small columns of many batches are
        packed into shards, without those of steps that are forgotten by now; the number of these."""
        placed: list[tuple[pa.Table, pa.Table]] = []
        forgotten = [0]
        snapshot = None if self._log.head.let_go is None else Snapshot(self._log.storage, self._log.head)

        def small() -> Iterator[LateRows]:
            for results, held in self._results(fold):
                failed.extend(one.failed for one in results if one.index.failed)
                large = [one for one in results if one.has("chunks.parquet")]
                placed.extend((one.table("late"), one.table("chunks")) for one in large)
                for columns in held:
                    kept = columns.where(_there(columns.rows, snapshot))
                    forgotten.append(steps_of(columns.rows) - steps_of(kept.rows))
                    yield kept

        storage = self._log.storage
        own = lateshards.write(storage, self._call.session, notes.layout_of(storage), small())
        every = zip(own, *placed, strict=True)
        late, chunks = (tables.concat(kind, some) for kind, some in zip(("late", "chunks"), every, strict=True))
        kinds = distinct(late["schema"])
        if self._call.job is None and len(kinds) > 1:  # of several workers, which did not know of each other
            first, other = (kind_of(loads(kind).fields) for kind in kinds[:2])
            raise FieldError(f"the function gave {first} for some episodes, and {other} for others{SAME}")
        return late, chunks, sum(forgotten)

    def _results(self, fold: Fold) -> Iterator[tuple[list[Receipt], list[LateRows]]]:
        """The results of a fold, a few at a time, and the columns that are within them."""
        call, wanted = self._call, fold.numbers
        for at in range(0, len(wanted), _READ_AT_ONCE):
            results = [*call.read(wanted[at : at + _READ_AT_ONCE])]
            items = [call.plan.batch(one.index.batch - call.first) for one in results]
            for one, own in zip(results, items, strict=True) if call.round is not None else ():
                _check(one, call, len(own))
            some = chosen(self._source, [*chain.from_iterable(items)])
            held = _held(results, np.cumsum([0, *map(len, items)]), some)
            if call.round is not None:
                late = [one.table("late") for one in results if one.has("late.parquet")]
                _check_steps(results, tables.concat("late", [*late, *(one.rows for one in held)]), some)
            yield results, held


def steps_of(late: pa.Table) -> int:
    """The number of steps that rows of the late table are of."""
    return int(numbers(late["length"]).sum())


def _check(receipt: Receipt, call: JobCall, items: int) -> None:
    """CorruptStateError unless this is a result of a call's round, for so many items: with large columns in shards of
    its session alone, and with what its index says."""
    import pyarrow.compute as pc

    index = receipt.index
    said = index.session, index.function, index.items, index.failed
    if said != (call.session, call.store.function, items, receipt.failed.num_rows):
        raise CorruptStateError(f"{receipt.where} is of another round, or says what it does not have; {receipt.damage}")
    if not (receipt.has("late.parquet") or receipt.has("chunks.parquet")):
        return
    late = receipt.table("late")
    shards = {*distinct(late["shard"])}
    strange = [key for key in shards if layout.session_of(key) != escape(call.session)]
    if strange or shards != {*distinct(receipt.table("chunks")["shard"])} or pc.any(late["dropped"]).as_py():
        told = f"such as {strange[0]!r:.200}" if strange else "or has no chunks of them"
        raise CorruptStateError(f"{receipt.where} names shards that are not of its job, {told}; {receipt.damage}")


def schemas_of(receipt: Receipt) -> list[ShardSchema]:
    """The schemas of the columns within a receipt."""
    said = [] if receipt.index.said is None else receipt.index.said
    try:
        if isinstance(said, list) and all(isinstance(text, str) for text in said):
            return [loads(text) for text in said]
    except IntegrityError as e:
        raise CorruptStateError(f"{receipt.where} has columns of no schema ({e}); {receipt.damage}") from e
    raise CorruptStateError(f"{receipt.where} names no schemas of its columns; {receipt.damage}")


def _check_steps(results: Sequence[Receipt], late: pa.Table, some: Episodes) -> None:
    """CorruptStateError unless results have each step of their episodes once, but for the episodes at which the
    function failed. late: their rows of the late table."""
    import pyarrow as pa

    spans = some.step_spans()
    taken = some.reader.snapshot.take(spans.rows, STRETCH)
    begins, counts = numbers(taken["position"]) + spans.lo, spans.hi - spans.lo
    met = overlaps(late, pa.table({**{name: taken[name] for name in STREAM}, "position": begins, "length": counts}))
    found = sums(np.bincount(met.stream, met.length, len(spans.rows)).astype(np.int64), spans.offsets)
    lack = some.pick(np.flatnonzero(found < spans.lengths())).columns(["episode_id"])["episode_id"].to_pylist()
    failed = {name for one in results if one.index.failed for name in one.failed["episode_id"].to_pylist()}
    once = int(met.union().length.sum()) == int(met.length.sum()) == steps_of(late)
    if not once or not failed.issuperset(lack):
        wrong = "lack steps of their episodes" if once else "have steps twice, or of others"
        raise CorruptStateError(
            f"results {results[0].index.batch} to {results[-1].index.batch} of job {results[0].index.job!r}, the first "
            f"of which is {results[0].where}, {wrong}: they are damaged, or not its own, and nothing of them was "
            f"committed; {results[0].damage}"
        )


def _held(results: Sequence[Receipt], starts: Ints, some: Episodes) -> list[LateRows]:
    """The columns within receipts, gathered by kind. some: the episodes of all their batches; starts: the first one of
    each receipt's, and the number of all."""
    spans = some.step_spans()
    lengths = spans.lengths()
    parts: dict[str, list[Gathered]] = {}
    for receipt, start, stop in zip(results, starts, starts[1:], strict=False):
        for i, schema in enumerate(schemas_of(receipt)):
            form = receipt.index.arrays.get(str(i))
            which = receipt.values(str(i), form.shape[0] if form is not None and form.shape else -1)
            if (
                which.dtype != np.int64
                or which.ndim != 1
                or len(ascending(which)) < len(which)
                or (len(which) and not 0 <= which.min() <= which.max() < stop - start)
            ):
                raise CorruptStateError(f"{receipt.where} names episodes that its batch has not; {receipt.damage}")
            which = which + start
            arrays = {one.name: receipt.values(f"{i}/{one.name}", int(lengths[which].sum())) for one in schema.fields}
            for spec in schema.fields:
                dtypes.check_stored(arrays[spec.name], spec.dtype)
            parts.setdefault(schema.dumps(), []).append(Gathered(schema.dumps(), which, arrays))
    return [_joined(of).of(some.reader.snapshot, spans) for of in parts.values()]


def _joined(parts: Sequence[Gathered]) -> Gathered:
    """Columns of one kind, end to end."""
    arrays = {name: np.concatenate([one.arrays[name] for one in parts]) for name in parts[0].arrays}
    return Gathered(parts[0].schema, np.concatenate([one.episodes for one in parts]), arrays)


def _there(late: pa.Table, snapshot: Snapshot | None) -> Bools:
    """A mask of the rows of the late table whose steps are there. snapshot: None if nothing was ever forgotten."""
    there = np.full(late.num_rows, snapshot is None)
    if snapshot is not None:
        there[overlaps(late, snapshot.columns(STRETCH))["late"]] = True
    return there


def _addition(
    late: pa.Table, forgotten: int, says: Mapping[str, Any], spared: Spared | None, parent: Commit, attempt: Attempt
) -> Addition:
    """Rows of the late table without those whose steps were forgotten, or are to be spared, as of a commit. forgotten:
    steps left out before."""
    there = _there(late, None if parent.let_go is None else Snapshot(attempt.storage, parent))
    gone = int(numbers(late["length"])[~there].sum())
    kept = late.filter(arrow(there if spared is None else there & ~spared(parent, attempt)))
    return {"late": kept}, {**says, "added": {"rows": steps_of(kept), "forgotten": forgotten + gone}}


def _filled(late: pa.Table, session: str, since: int, parent: Commit, attempt: Attempt) -> Bools:
    """A mask of the rows of the late table whose steps got one of these columns since a commit, but from a session."""
    every = attempt.load("late", parent.files("late"))
    names = {name for row in late["fields"].to_pylist() for name in row}
    own = {shard for shard in distinct(every["shard"]) if layout.session_of(layout.object_of(shard)) == escape(session)}
    told = zip(*(every[name].to_pylist() for name in ("commit", "shard", "fields")), strict=True)
    newer = [commit > since and shard not in own and not names.isdisjoint(fields) for commit, shard, fields in told]
    met = overlaps(late, every.filter(arrow(np.array(newer, bool))))
    filled: Bools = np.bincount(met["late"], met.length, late.num_rows) >= numbers(late["length"])
    return filled
