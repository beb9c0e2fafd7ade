"""Derived columns that a function makes of the steps of each episode: `episodes.map`.

The results of a batch are rows of the late table. Small columns are within its receipt, and a commit packs those of
many batches into shards; large ones are in shards of their own, which the worker writes.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, Steps, arrow, numbers, places, run_starts, sums
from archive.base import (
    CorruptStateError,
    FieldError,
    IntegrityError,
    JobError,
    StorageError,
    UsageError,
    escape_path,
    jsontree,
    logger,
    seconds_of,
    show,
    unescape_path,
)
from archive.checkpoint import Checkpoints
from archive.fields import FieldSpec, dtypes, loads, parse, to_path
from archive.index import Annotations, EpisodeIndex, Snapshot
from archive.jobs.job import Batches, Job
from archive.jobs.receipts import Agree, Items, Procedure, Receipt, Result
from archive.jobs.records import FINISHED, REPLACED, Fold, FoldCommit, JobRound, check_name
from archive.jobs.runner import Asked, Crew, JobCall, Progress
from archive.log import Addition, Attempt, Change, Commit, CommitLog, Requirement, commits, new_session
from archive.observe import add, gauge, timed
from archive.read import (
    Episodes,
    Gathered,
    LateRows,
    Reader,
    Selection,
    StoredFields,
    derivations,
    lateshards,
    notes,
    sizes,
)
from archive.read.chunks import LastChunks, LateFields
from archive.store import Storage
from archive.tables import STRETCH, coded, distinct, overlaps

if TYPE_CHECKING:
    import pyarrow as pa

KIND = "map"
ONLY = ("all", "missing", "stale")
BATCH_BYTES = 64 * 1024 * 1024  # of the steps that are read
OWN_SHARD_BYTES = 1024 * 1024  # of the columns of a batch: from here on they get shards of their own
_EPISODES, _LEAST_BATCHES, _MOST_BATCHES = 128, 16, 1000  # of a batch, and of a job, where bytes do not decide
FOLDED = 2048  # results that one commit makes visible, at most
_SAME = ": let it return the same fields, in the same dtypes and shapes, for each; nothing was committed"
_MAX_ERROR = 500  # characters


@dataclass(frozen=True)
class Terms:
    """The arguments of a call that its results depend on."""

    fields: Any
    adds: Sequence[Any] | None
    missing: Any
    derive: Any
    on_error: str
    max_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The arguments as JSON, by which a later call is compared."""
        derived = [show(one.name) for one in parse(self.derive)]
        return {
            "fields": _names(self.fields),
            "adds": _names(self.adds),
            "missing": repr(self.missing),
            "derive": derived,
        }


def _names(given: Any) -> list[str] | None:
    """Names of fields, in order; None for all."""
    names = None if given is None else [given] if isinstance(given, str) else list(given)
    return None if names is None else sorted(escape_path(to_path(name)) for name in names)


@timed("map")
def map_columns(
    episodes: Episodes, fn: Any, terms: Terms, crew: Crew, *, job: str | None, only: str, commit_every: str | None,
    batch_size: int | None, provenance: Any, by: str | None, progress: Progress | bool,
) -> None:  # fmt: skip
    """Add the columns that a function makes of each episode; see `Episodes.map`."""
    if only not in ONLY or terms.on_error not in ("raise", "skip"):
        wrong, choices = ("only", ONLY) if only not in ONLY else ("on_error", ("raise", "skip"))
        raise UsageError(f"{wrong}={getattr(terms, wrong, only)!r}: give one of {', '.join(map(repr, choices))}")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size={batch_size}: give a number of episodes above 0")
    annotations = episodes.episode_index.snapshot.annotations
    log = notes.log_of(annotations)
    about = told(fn, provenance)
    function = digest(fn)
    every_s = None if commit_every is None else seconds_of(commit_every, "commit_every")
    if job is not None:
        check_name(job)
    if only != "all" and terms.adds is None:
        raise UsageError(f'only={only!r} looks for columns by name: say which fn makes, as in adds=["reward_v2"]')
    crew.check(log.storage, fn)
    left = partial(_left, episodes, log, terms, function, only)
    if job is None:
        chosen = left()
        plan = Batches.of(_cut(chosen, terms, batch_size, whole=crew.alone))
        call, source = JobCall(log.storage, new_session(), plan, function=function), chosen
    else:
        found = _begun(episodes, log, Job(log.storage, job), function, terms, only, left, batch_size)
        if found is None:
            annotations.show(log.catch_up())
            return
        call, source = found
    columns = _Columns(source, fn, terms, notes.layout_of(log.storage), call.session)
    log = call.log_of(log)
    commit = _Folding(log, call, source, jsontree.dumps(about, where="provenance"), by, every_s if job else None)
    commit.unfinished()
    call.carry_out(columns, crew, progress, commit.when_due)
    commit.rest()
    call.finish()
    annotations.show(log.head)


# -- what is to be done ------------------------------------------------------------------------------------------------


def _left(episodes: Episodes, log: CommitLog, terms: Terms, function: str, only: str) -> Episodes:
    """The episodes that a call is to make columns for."""
    if only == "all" or not len(episodes):
        return episodes
    late = Annotations(log.storage, log.catch_up()).late
    where = LateFields(late, episodes.reader.snapshot.columns(STRETCH)).where
    spans = episodes.step_spans()
    here, covered = Steps(spans.rows, spans.lo, spans.hi), spans.lengths()
    texts, code = coded(late["provenance"].fill_null("null"))
    mine = np.array([only == "missing" or _source(text) == function for text in texts], bool)[code]
    for name in _names(terms.adds) or ():
        given = where.get(unescape_path(name))
        met = here.meet(here.pick([]) if given is None else given.pick(mine[given["late"]]))
        per_span = np.bincount(met.left, met.hi - met.lo, len(spans.rows)).astype(np.int64)
        covered = np.minimum(covered, sums(per_span, spans.offsets))
    return episodes.pick(np.flatnonzero(covered < spans.lengths()))


def _source(provenance: str) -> Any:
    """The digest of the function that made a column."""
    value = jsontree.loads(provenance)
    return value.get("source") if isinstance(value, dict) else None


def _cut(episodes: Episodes, terms: Terms, size: int | None, *, whole: bool) -> list[Ints]:
    """The numbers of the episodes of each batch, in the order in which they are stored: no batch has steps of two
    shards, or more than its bytes. whole: one worker makes all, and a batch may have any number of episodes."""
    spans, count = episodes.step_spans(), len(episodes)
    first = spans.rows[np.minimum(spans.offsets[:-1], max(0, len(spans.rows) - 1))]
    table = episodes.reader.snapshot.take(first, ["shard", "start"])
    shard = coded(table["shard"].cast("string").fill_null(""))[1]
    order = np.lexsort((numbers(table["start"], 0), shard))
    nbytes = episodes.sizes(None if terms.derive else terms.fields)[order]
    most = size or max(1, min(count // _LEAST_BATCHES, max(_EPISODES, count // _MOST_BATCHES)))
    if whole and size is None:
        most, shard = count, np.zeros(count, np.int64)
    heads = run_starts(shard[order])
    out = []
    for start, stop in pairwise([*heads.tolist(), count]):
        for at, end in sizes.runs(nbytes[start:stop], min(BATCH_BYTES, terms.max_bytes)):
            out += [order[i : min(i + most, start + end)] for i in range(start + at, start + end, most)]
    return [episodes.numbers[places_of] for places_of in out]


def _begun(
    episodes: Episodes, log: CommitLog, job: Job, function: str, terms: Terms, only: str,
    left: Callable[[], Episodes], batch_size: int | None,
) -> tuple[JobCall, Episodes] | None:  # fmt: skip
    """A call's share in a job, and the episodes that its plan has the places of. None if nothing is left to do."""
    ask = Asked(KIND, terms.to_json(), function)
    known = job.newest_round()
    if known is not None and not (only == "stale" and known.record.function != function):
        ask.check(job.name, known.record, log.storage.url)
        if known.end is None:
            logger.info("job %r goes on: %d batches of commit %d", job.name, known.record.batches, known.record.commit)
            return JobCall.going_on(log.storage, job, known.record), frozen_episodes(log.storage, known.record)
        if known.end.outcome == FINISHED and only == "all":
            logger.info("job %r is finished; only='missing' makes what came since, another name all anew", job.name)
            return None
    elif known is not None and known.end is None:
        job.ends(known.record, REPLACED)
    chosen = left()
    if not len(chosen):
        logger.info("job %r: nothing is left to do at commit %d", job.name, log.head.number)
        return None
    annotations = chosen.reader.snapshot.annotations.head.number
    begun = JobCall.beginning(
        log, job, ask, chosen.reader.snapshot.commit, partial(_cut, chosen, terms, batch_size, whole=False),
        annotations=annotations, checkpoint=chosen.checkpoint,
    )  # fmt: skip
    return begun, frozen_episodes(log.storage, begun.round) if begun.others and begun.round else chosen


def frozen_episodes(storage: Storage, round: JobRound) -> Episodes:
    """The episodes among which those of a round are, as of the commits that it froze."""
    commit, head = commits.read(storage, round.commit), commits.read(storage, round.annotations)
    annotations = Annotations(storage, head, read_only=True)
    if round.checkpoint is not None:
        of = Checkpoints(storage, commit, annotations=annotations)
        return of.at_commit(round.checkpoint, None if round.checkpoint == round.commit else round.commit).episodes
    snapshot = Snapshot(storage, commit, annotations)
    return Episodes(Reader(snapshot), EpisodeIndex(snapshot))


# -- in a worker -------------------------------------------------------------------------------------------------------


@dataclass
class _Read:
    """The episodes of a batch, in runs that are read together; the steps of the first run; and how long things took."""

    episodes: Episodes
    runs: list[tuple[int, int]]
    first: list[dict[str, Any]] | None = None
    times: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "computed": 0.0})


class _Columns(Procedure):
    """A function over episodes. Items are their numbers in the index."""

    def __init__(self, episodes: Episodes, fn: Any, terms: Terms, archive_layout: str, session: str) -> None:
        self._episodes, self._fn, self._terms = episodes, fn, terms
        self._layout, self._session = archive_layout, session
        self._tails: LastChunks = {}
        self._call: Any = None
        self._adds, self._most = _names(terms.adds), terms.max_bytes // 4
        self._known = set[Any]()  # names as the function gives them, once they were looked at

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_call": None, "_tails": {}}

    def prepare(self, items: Items) -> _Read:
        some = _chosen(self._episodes, items)
        found = _Read(some, [*sizes.runs(some.sizes(None if self._terms.derive else self._terms.fields), self._most)])
        found.first = self._run_of(found, found.runs[0])
        return found

    def run(self, prepared: _Read, agree: Agree) -> Result:
        if self._call is None:
            self._call = self._fn() if inspect.isclass(self._fn) else self._fn
        some, times, failed = prepared.episodes, prepared.times, list[tuple[str, str]]()
        snapshot, storage = some.reader.snapshot, some.reader.snapshot.storage
        made = lateshards.gathered(self._made(prepared, agree, failed))
        held, nbytes, spans = list[Gathered](), 0, some.step_spans()
        for one in made:
            held.append(one)
            nbytes += one.nbytes
            if nbytes >= OWN_SHARD_BYTES:
                rows = (each.of(snapshot, spans) for each in chain(held, made))
                late, chunks = lateshards.write(storage, self._session, self._layout, rows)
                return Result({"late": late, "chunks": chunks}, steps=_steps(late), failed=failed, seconds=times)
        arrays = {f"{i}/{name}": array for i, one in enumerate(held) for name, array in one.arrays.items()}
        arrays |= {f"{i}": one.episodes for i, one in enumerate(held)}
        steps = sum(int(spans.lengths()[one.episodes].sum()) for one in held)
        return Result({}, arrays, [one.schema for one in held], steps, failed, times)

    def _made(self, prepared: _Read, agree: Agree, failed: list[tuple[str, str]]) -> Iterator[tuple[int, StoredFields]]:
        """The number of each episode here, and its columns. Episodes at which the function fails are left out and
        listed, or its error is raised."""
        some, times = prepared.episodes, prepared.times
        spans = some.step_spans()
        known, steps, ids = some.reader.shown(spans).schemas, spans.lengths().tolist(), _ids(some)
        first: StoredFields | None = None
        for i, read in self._read(prepared):
            began = perf_counter()
            try:
                values = self._columns(read(), ids[i])
                columns = None if first is None else lateshards.alike(first, values, steps[i])
                if columns is None:
                    columns = lateshards.checked(values, steps[i], ids[i], known)
                    self._check_kind(columns, agree, ids[i])
                    first = columns
            except Exception as e:
                if self._terms.on_error == "raise" or isinstance(e, StorageError):
                    e.add_note(f"at episode {ids[i]!r}; on_error='skip' goes on without such, and lists them")
                    raise
                failed.append((ids[i], f"{type(e).__name__}: {e}"[:_MAX_ERROR]))
                continue
            finally:
                times["computed"] += perf_counter() - began
            yield i, columns

    def _check_kind(self, columns: StoredFields, agree: Agree, episode: str) -> None:
        """FieldError for columns of another kind than the first ones of the job."""
        kind = _kind(columns.specs.values())
        if kind != (first := agree(kind)):
            raise FieldError(f"the function gave {kind} for episode {episode!r}, and {first} for the first ones{_SAME}")

    def _read(self, prepared: _Read) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
        """The number of each episode, and its steps once they are asked for; or the error of reading them."""
        for number, run in enumerate(prepared.runs):
            data = self._run_of(prepared, run) if number else prepared.first
            prepared.first = None
            if data is None:
                yield from ((i, partial(self._alone, prepared.episodes, i)) for i in range(*run))
                continue
            data.reverse()
            yield from ((i, data.pop) for i in range(*run))

    def _run_of(self, prepared: _Read, run: tuple[int, int]) -> list[dict[str, Any]] | None:
        """The steps of some episodes; None if they are to be read one by one, as those of some cannot be."""
        began = perf_counter()
        try:
            return self._steps(prepared.episodes[slice(*run)])
        except (FieldError, IntegrityError):
            if self._terms.on_error == "raise":
                raise
            return None
        finally:
            prepared.times["read"] += perf_counter() - began

    def _steps(self, run: Episodes) -> list[dict[str, Any]]:
        selection = Selection(self._terms.fields, self._terms.missing)
        if self._terms.derive:
            return derivations.read_all(run, selection, self._terms.derive)
        return run.reader.read(run.spans(), selection, self._tails)

    def _alone(self, some: Episodes, i: int) -> dict[str, Any]:
        return self._steps(some[i : i + 1])[0]

    def _columns(self, data: dict[str, Any], episode: str) -> Mapping[Any, Any]:
        """The columns that the function makes of the steps of an episode."""
        found = self._call(data)
        if not isinstance(found, Mapping) or not found or (found.keys() != self._known and self._differ(found)):
            gave = _names(list(found)) if isinstance(found, Mapping) and found else "no dict"
            raise FieldError(
                f"the function gave {gave} for episode {episode!r}; let it return a dict of one array each, with a "
                f"row a step, of {self._adds or 'the fields to add'}"
            )
        return found

    def _differ(self, found: Mapping[Any, Any]) -> bool:
        """True if these are not the fields to add; their names are known then."""
        differ = self._adds is not None and _names(list(found)) != self._adds
        self._known = self._known if differ else set(found)
        return differ


def _kind(specs: Iterable[FieldSpec]) -> str:
    """The names of columns, and the dtype and shape of a row of each."""
    return ", ".join(sorted(f"{one.name}: {one.dtype}{list(one.shape)}" for one in specs))


def _chosen(episodes: Episodes, items: Items) -> Episodes:
    """The episodes of a batch, by their numbers in the index."""
    at = places(np.asarray(items, np.int64), episodes.numbers)
    if (at < 0).any():
        number = episodes.reader.snapshot.commit.number
        raise JobError(f"the job's plan names an episode that commit {number} does not have; begin another job")
    return episodes.pick(at)


def _ids(some: Episodes) -> list[str]:
    found: list[str] = some.columns(["episode_id"])["episode_id"].to_pylist()
    return found


def _steps(late: pa.Table) -> int:
    return int(numbers(late["length"]).sum())


# -- commits -----------------------------------------------------------------------------------------------------------


class _Folding:
    """The commits of a call's results: now and then, or one at the end."""

    def __init__(
        self, log: CommitLog, call: JobCall, episodes: Episodes, provenance: str, by: str | None, every_s: float | None
    ) -> None:
        self._log, self._call, self._episodes, self._every_s = log, call, episodes, every_s
        self._stamp = provenance, by
        self._folds = None if call.job is None else call.job.folds()
        self._due = monotonic() + (every_s or 0)

    def unfinished(self) -> None:
        """Make the commits that were agreed on, and not made, when a driver died."""
        call = self._call
        if self._folds is not None and call.round is not None:
            for number, fold in self._folds.without_commit(call.round):
                self._commit(number, fold)

    def when_due(self) -> None:
        """Commit what is ready, if it is time."""
        if self._every_s is not None and monotonic() >= self._due:
            self.rest()
            self._due = monotonic() + self._every_s

    def rest(self) -> None:
        """Commit all that is ready."""
        call = self._call
        if call.job is None or call.round is None or self._folds is None:
            self._commit(0, Fold(0, ((0, call.batches),)) if call.batches else Fold(0, ()))
            return
        ready = self._folds.ready(call.results)
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
            late, chunks = self._packed(fold, failed)
            if late.num_rows or call.job is not None:
                rows, file = notes.placed(log.storage, call.session, late, chunks, *self._stamp)
                adds = partial(_still_there, rows, {"chunks": file})
                found = log.commit(key, Change("late", adds, self._going, session=call.session))
        elif self._folds is not None:
            failed = [one.failed for one in call.read(fold.numbers) if one.index.failed]
        if found is None:
            return
        rows, gone = (found.added.get(name, 0) for name in ("rows", "forgotten"))
        add("archive.job.rows.committed", rows)
        gauge("archive.job.rows.ready", 0)
        if gone:
            logger.info("%d steps were forgotten meanwhile: their results are left out", gone)
        if self._folds is not None:
            table = tables.concat("failed", failed)
            self._folds.note_made(number, FoldCommit(fold.round, found.number, rows, gone, table.num_rows), table)

    @property
    def _going(self) -> list[Requirement]:
        """A requirement of each commit: nobody has ended the round. It is looked at for each parent, so that no commit
        follows one of a round that has taken the place of this one."""
        job, round = self._call.job, self._call.round
        return [] if job is None or round is None else [lambda parent: job.check_going(round)]

    def _packed(self, fold: Fold, failed: list[pa.Table]) -> tuple[pa.Table, pa.Table]:
        """Rows of the late table and of the chunk table for the results of a fold: small columns of many batches are
        packed into shards."""
        placed: list[tuple[pa.Table, pa.Table]] = []

        def small() -> Iterator[LateRows]:
            for one in self._call.read(fold.numbers):
                if one.index.failed:
                    failed.append(one.failed)
                if one.has("chunks.parquet"):
                    placed.append((one.table("late"), one.table("chunks")))
                else:
                    yield from self._held(one)

        storage = self._log.storage
        own = lateshards.write(storage, self._call.session, notes.layout_of(storage), small())
        every = zip(own, *placed, strict=True)
        late, chunks = (tables.concat(kind, some) for kind, some in zip(("late", "chunks"), every, strict=True))
        kinds = distinct(late["schema"])
        if self._call.job is None and len(kinds) > 1:  # of several workers, which did not know of each other
            first, other = (_kind(loads(kind).fields) for kind in kinds[:2])
            raise FieldError(f"the function gave {first} for some episodes, and {other} for others{_SAME}")
        return late, chunks

    def _held(self, receipt: Receipt) -> Iterator[LateRows]:
        """The columns within a receipt, of episodes of its batch."""
        call, said = self._call, receipt.index.said or []
        some = _chosen(self._episodes, call.plan.batch(receipt.index.batch - call.first))
        spans = some.step_spans()
        lengths = spans.lengths()
        for i, schema in enumerate(said):
            form = receipt.index.arrays.get(str(i))
            which = receipt.values(str(i), form.shape[0] if form is not None and form.shape else -1)
            if which.dtype != np.int64 or which.ndim != 1 or len(np.unique(which)) < len(which) or (
                len(which) and not 0 <= which.min() <= which.max() < len(some)
            ):  # fmt: skip
                raise CorruptStateError(f"{receipt.where} names episodes that its batch has not; {receipt.damage}")
            count = int(lengths[which].sum())
            fields = loads(schema).fields
            arrays = {spec.name: receipt.values(f"{i}/{spec.name}", count) for spec in fields}
            for spec in fields:
                dtypes.check_stored(arrays[spec.name], spec.dtype)
            yield Gathered(schema, which, arrays).of(some.reader.snapshot, spans)


def _still_there(late: pa.Table, says: Mapping[str, Any], parent: Commit, attempt: Attempt) -> Addition:
    """Rows of the late table without those whose steps were forgotten, as of a commit."""
    length = numbers(late["length"])
    there = np.ones(late.num_rows, bool)
    if parent.let_go is not None:
        there[:] = False
        there[overlaps(late, Snapshot(attempt.storage, parent).columns(STRETCH))["late"]] = True
    kept, rows = late.filter(arrow(there)), int(length[there].sum())
    return {"late": kept}, {**says, "added": {"rows": rows, "forgotten": int(length.sum()) - rows}}


# -- the function ------------------------------------------------------------------------------------------------------


def told(fn: Any, provenance: Any) -> dict[str, Any]:
    """A record of the function that makes columns: its name, the version of its package, and its digest."""
    module = getattr(fn, "__module__", None) or ""
    out = {"function": f"{module}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"}
    package = sys.modules.get(module.partition(".")[0])
    version = getattr(fn, "__version__", None) or getattr(package, "__version__", None)
    if version is not None:
        out["version"] = str(version)
    out["source"] = digest(fn)
    return out if provenance is None else {**out, "provenance": provenance}


def digest(fn: Any) -> str:
    """A digest of a function or class: of its text and of the plain values that are bound to it, so that another
    version has another one. Where there is no text, as of one typed at a prompt, of its code."""
    return hashlib.sha256(_text(fn).encode()).hexdigest()[:16]


def _text(fn: Any) -> str:
    if isinstance(fn, partial):
        return f"{_text(fn.func)} {_plain(fn.args)} {_plain(tuple(sorted(fn.keywords.items())))}"
    named = inspect.unwrap(fn) if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn)
    code = getattr(named, "__code__", None)
    try:
        text = inspect.getsource(named)
    except (OSError, TypeError):  # typed at a prompt, or not written in Python
        text = repr((code.co_code, _plain(code.co_consts), code.co_names)) if code is not None else named.__qualname__
    cells = getattr(named, "__closure__", None) or ()
    bound = [cell.cell_contents for cell in cells if _has(cell)]
    version = getattr(fn, "__version__", None)
    more = [str(version)] if version is not None else []
    return "\n".join([text, *more, *([_plain(tuple(bound))] if bound else [])])


def _has(cell: Any) -> bool:
    with suppress(ValueError):  # it is empty
        return cell.cell_contents is not cell
    return False


def _plain(value: Any) -> str:
    """Plain values as text; of others the type, as they may change, and their text may have an address."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_plain, value))})"
    is_plain = value is None or isinstance(value, (bool, int, float, str, bytes))
    return repr(value) if is_plain else type(value).__qualname__
