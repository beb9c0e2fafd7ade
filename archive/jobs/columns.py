"""Derived columns that a function makes of the steps of each episode: `episodes.map`.

The results of a batch are rows of the late table. Small columns are within its receipt, and a commit packs those of
many batches into shards; large ones are in shards of their own, which the worker writes.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, Steps, arrow, ascending, numbers, run_starts, sums
from archive.base import (
    CorruptStateError,
    FieldError,
    IntegrityError,
    MissingObjectError,
    StorageError,
    UsageError,
    cached_property,
    escape_path,
    jsontree,
    logger,
    one_line,
    seconds_of,
    show,
    unescape_path,
)
from archive.checkpoint import Checkpoints
from archive.fields import ShardSchema, loads, parse, to_path
from archive.index import Annotations, EpisodeIndex
from archive.jobs.folds import SAME, ColumnFolds, chosen, kind_of, steps_of
from archive.jobs.functions import digest, told
from archive.jobs.job import Batches, Job
from archive.jobs.receipts import Agree, Items, Procedure, Result
from archive.jobs.records import FINISHED, REPLACED, JobRound, check_name
from archive.jobs.runner import JobCall, JobRequest, Progress, frozen_snapshot
from archive.jobs.workers import Crew
from archive.log import CommitLog, new_session
from archive.observe import timed
from archive.read import (
    Episodes,
    Gathered,
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
from archive.tables import STRETCH, coded, distinct

if TYPE_CHECKING:
    import pyarrow as pa

KIND = "map"
ONLY = ("all", "missing", "stale")
BATCH_BYTES = 64 * 1024 * 1024  # of the steps that are read
OWN_SHARD_BYTES = 1024 * 1024  # of the columns of a batch: from here on they get shards of their own
_EPISODES, _LEAST_BATCHES, _MOST_BATCHES = 128, 16, 1000  # of a batch, and of a job, where bytes do not decide
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
        missing = repr(self.missing)
        return {
            "fields": _names(self.fields),
            "adds": _names(self.adds),
            "missing": missing if len(missing) <= _MAX_ERROR else hashlib.sha256(missing.encode()).hexdigest(),
            "derive": [f"{show(one.name)} {digest(one.compute)}" for one in parse(self.derive)],
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
    _check_arguments(terms, job, only, batch_size)
    annotations = episodes.episode_index.snapshot.annotations
    log = notes.log_of(annotations)
    about = told(fn, provenance)
    function = digest(fn)
    every_s = None if commit_every is None else seconds_of(commit_every, "commit_every")
    crew.check(log.storage, fn)
    episodes = episodes.pick(np.sort(np.unique(episodes.numbers, return_index=True)[1]))  # each once
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
    commit = ColumnFolds(
        log,
        call,
        source,
        jsontree.dumps(about, where="provenance"),
        by,
        every_s if job else None,
        spares=only == "missing",
    )
    call.carry_out(columns, crew, progress, commit.when_due)
    commit.rest()
    call.finish()
    annotations.show(log.head)
    if call.others and only != "all":  # what came since the round began
        map_columns(
            episodes, fn, terms, crew, job=job, only=only, commit_every=commit_every, batch_size=batch_size,
            provenance=provenance, by=by, progress=progress,
        )  # fmt: skip


def _check_arguments(terms: Terms, job: str | None, only: str, batch_size: int | None) -> None:
    if only not in ONLY or terms.on_error not in ("raise", "skip"):
        wrong, choices = ("only", ONLY) if only not in ONLY else ("on_error", ("raise", "skip"))
        raise UsageError(f"{wrong}={getattr(terms, wrong, only)!r}: give one of {', '.join(map(repr, choices))}")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size={batch_size}: give a number of episodes above 0")
    if job is not None:
        check_name(job)
    if only != "all" and terms.adds is None:
        raise UsageError(f'only={only!r} looks for columns by name: say which fn makes, as in adds=["reward_v2"]')


# -- what is to be done ------------------------------------------------------------------------------------------------


def _left(episodes: Episodes, log: CommitLog, terms: Terms, function: str, only: str) -> Episodes:
    """The episodes that a call is to make columns for. Those that were written with such fields have them."""
    if only == "all" or not len(episodes):
        return episodes
    late = Annotations(log.storage, log.catch_up()).late
    where = LateFields(late, episodes.reader.snapshot.columns(STRETCH)).where
    spans = episodes.step_spans()
    here, covered = Steps(spans.rows, spans.lo, spans.hi), spans.lengths()
    texts, code = coded(late["provenance"].fill_null("null"))
    schemas, schema = coded(episodes.reader.snapshot.take(spans.rows, ["schema"])["schema"])
    mine = np.array([only == "missing" or _source(text) == function for text in texts], bool)[code]
    for name in _names(terms.adds) or ():
        given = where.get(unescape_path(name))
        met = here.meet(here.pick([]) if given is None else given.pick(mine[given["late"]]))
        per_span = np.bincount(met.left, met.hi - met.lo, len(spans.rows)).astype(np.int64)
        written = np.array([name in loads(text).by_name for text in schemas], bool)[schema]  # with the steps: by nobody
        per_span = np.where(written, spans.hi - spans.lo, per_span)
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
    episodes: Episodes,
    log: CommitLog,
    job: Job,
    function: str,
    terms: Terms,
    only: str,
    left: Callable[[], Episodes],
    batch_size: int | None,
) -> tuple[JobCall, Episodes] | None:
    """A call's share in a job, and the episodes that its plan has the places of. None if nothing is left to do."""
    ask = JobRequest(KIND, terms.to_json(), function)
    known = job.newest_round()
    replaces = only == "stale" and known is not None and known.record.kind == KIND and known.record.function != function
    if known is not None and not replaces:
        ask.check(job.name, known.record, log.storage.url)
        if only == "all" and (known.end is None or known.end.outcome == FINISHED):
            _check_chosen(log.storage, job, known.record, episodes)
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
        log,
        job,
        known,
        ask,
        chosen.reader.snapshot.commit,
        partial(_cut, chosen, terms, batch_size, whole=False),
        annotations=annotations,
        checkpoint=chosen.checkpoint,
    )
    return begun, frozen_episodes(log.storage, begun.round) if begun.others and begun.round else chosen


def _check_chosen(storage: Storage, job: Job, round: JobRound, given: Episodes) -> None:
    """UsageError for episodes that were there when a round began, and that it leaves out."""
    import pyarrow.compute as pc

    try:
        every = frozen_episodes(storage, round)
        mine, there = _names_of(chosen(every, job.plan(round).items.to_pylist())), _names_of(every)
    except MissingObjectError:  # the job ended, and its plan was pruned
        return
    wanted = _names_of(given)
    left_out = pc.and_(pc.is_in(wanted, value_set=there), pc.invert(pc.is_in(wanted, value_set=mine)))
    names = wanted.filter(left_out)
    if len(names):
        raise UsageError(
            f"job {job.name!r} was begun with {len(mine)} episodes, and leaves out {len(names)} of those given here, "
            f"such as {names[0].as_py()!r}, which were there: give it the same ones, or another name"
        )


def frozen_episodes(storage: Storage, round: JobRound) -> Episodes:
    """The episodes among which those of a round are, as of the commits that it froze."""
    snapshot = frozen_snapshot(storage, round)
    if round.checkpoint is not None:
        of = Checkpoints(storage, snapshot.commit, annotations=snapshot.annotations)
        return of.at_commit(round.checkpoint, None if round.checkpoint == round.commit else round.commit).episodes
    return Episodes(Reader(snapshot), EpisodeIndex(snapshot))


# -- in a worker -------------------------------------------------------------------------------------------------------


@dataclass
class _Read:
    """The episodes of a batch, in runs that are read together, one after the other; the chunks in which reading them
    stopped; the steps of the first run; and how long things took."""

    episodes: Episodes
    runs: list[tuple[int, int]]
    tails: LastChunks = field(default_factory=dict)
    first: list[dict[str, Any]] | None = None
    times: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "computed": 0.0})


class _Columns(Procedure):
    """A function over episodes. Items are their numbers in the index."""

    def __init__(self, episodes: Episodes, fn: Any, terms: Terms, archive_layout: str, session: str) -> None:
        self._episodes, self._fn, self._terms = episodes, fn, terms
        self._layout, self._session = archive_layout, session
        self._call: Any = None
        self._adds, self._most = _names(terms.adds), terms.max_bytes // 4
        self._known = set[Any]()  # names as the function gives them, once they were looked at

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_derived"} | {"_call": None}

    def prepare(self, items: Items) -> _Read:
        some = chosen(self._episodes, items)
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
                return Result({"late": late, "chunks": chunks}, steps=steps_of(late), failed=failed, seconds=times)
        arrays = {f"{i}/{name}": array for i, one in enumerate(held) for name, array in one.arrays.items()}
        arrays |= {f"{i}": one.episodes for i, one in enumerate(held)}
        steps = sum(int(spans.lengths()[one.episodes].sum()) for one in held)
        return Result({}, arrays, [one.schema for one in held], steps, failed, times)

    def _made(self, prepared: _Read, agree: Agree, failed: list[tuple[str, str]]) -> Iterator[tuple[int, StoredFields]]:
        """The number of each episode here, and its columns. Episodes at which the function fails are left out and
        listed, or its error is raised."""
        some, times = prepared.episodes, prepared.times
        spans = some.step_spans()
        known, steps = [*some.reader.shown(spans).schemas, *self._derived], spans.lengths().tolist()
        ids = _names_of(some).to_pylist()
        first: StoredFields | None = None
        for i, read in self._read(prepared):
            if not steps[i]:  # there is nothing to be added to
                continue
            began = perf_counter()
            try:
                values = self._columns(read(), ids[i])
                columns = None if first is None else lateshards.alike(first, values, steps[i])
                if columns is None:
                    columns = lateshards.checked(values, steps[i], ids[i], known)
                    self._check_kind(columns, agree, ids[i])
                    first = columns
            except Exception as e:
                if self._terms.on_error == "raise" or isinstance(e, (StorageError, CorruptStateError)):
                    e.add_note(f"at episode {ids[i]!r}; on_error='skip' goes on without such, and lists them")
                    raise
                failed.append((ids[i], one_line(f"{type(e).__name__}: {e}"[:_MAX_ERROR])))
                continue
            finally:
                times["computed"] += perf_counter() - began
            # a function may give the same memory again, with other values
            yield i, columns._replace(rows={name: rows.copy() for name, rows in columns.rows.items()})

    @cached_property
    def _derived(self) -> list[ShardSchema]:
        """The derived columns that some steps have, each as the one field of a schema: new rows must be alike."""
        snapshot = self._episodes.reader.snapshot
        late = snapshot.annotations.late
        where = LateFields(late, snapshot.columns(STRETCH)).where
        out = []
        for path, steps in where.items():
            for text in distinct(late["schema"].take(arrow(ascending(steps["late"])))):
                one = loads(text)
                out.append(replace(one, fields=tuple(spec for spec in one.fields if spec.path == path)))
        return out

    def _check_kind(self, columns: StoredFields, agree: Agree, episode: str) -> None:
        """FieldError for columns of another kind than the first ones of the job."""
        kind = kind_of(columns.specs.values())
        if kind != (first := agree(kind)):
            raise FieldError(f"the function gave {kind} for episode {episode!r}, and {first} for the first ones{SAME}")

    def _read(self, prepared: _Read) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
        """The number of each episode, and its steps once they are asked for; or the error of reading them."""
        for number, run in enumerate(prepared.runs):
            data = self._run_of(prepared, run) if number else prepared.first
            prepared.first = None
            if data is None:
                yield from ((i, partial(self._alone, prepared, i)) for i in range(*run))
                continue
            data.reverse()
            yield from ((i, data.pop) for i in range(*run))

    def _run_of(self, prepared: _Read, run: tuple[int, int]) -> list[dict[str, Any]] | None:
        """The steps of some episodes; None if they are to be read one by one, as those of some cannot be."""
        began = perf_counter()
        try:
            return self._steps(prepared, slice(*run))
        except (FieldError, IntegrityError):
            if self._terms.on_error == "raise":
                raise
            return None
        finally:
            prepared.times["read"] += perf_counter() - began

    def _steps(self, prepared: _Read, places: slice) -> list[dict[str, Any]]:
        run, selection = prepared.episodes[places], Selection(self._terms.fields, self._terms.missing)
        if self._terms.derive:
            return derivations.read_all(run, selection, self._terms.derive)
        return run.reader.read(run.spans(), selection, prepared.tails)

    def _alone(self, prepared: _Read, i: int) -> dict[str, Any]:
        return self._steps(prepared, slice(i, i + 1))[0]

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


def _names_of(some: Episodes) -> pa.Array:
    return some.columns(["episode_id"])["episode_id"].combine_chunks()
