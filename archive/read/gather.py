"""Steps and windows of many episodes as batches of arrays, through a cache of chunks: planned, fetched in two rounds,
put together."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Pieces, fresh, group_of, offsets_of, spans
from archive.base import UsageError, thread_pool
from archive.fields import Array, Path, Ragged, dtypes, lookup, unflatten
from archive.fields.axes import empty_rows
from archive.read import sizes
from archive.read.chunks import ChunkStore, Counts, DiskCache, RowsWanted, Segments, Want, as_disk_cache
from archive.read.episodes import Episodes
from archive.read.plan import BatchPlan, FieldRead, at_steps, plan_batch
from archive.read.selection import Selection, path_of
from archive.read.spans import Spans, shown

Empty = Callable[[tuple[int, ...], Any], Array]  # makes an array of a shape and dtype; what is in it is not defined


class StepPlaces(NamedTuple):
    """The places of some steps: number of the segment, step in that segment, number of the schema that they have."""

    segment: Ints
    step: Ints
    schema: Ints


class StepMap:
    """The steps of some episodes, numbered end to end."""

    def __init__(self, spans: Spans, segments: Segments, code: Ints) -> None:
        """code: the number of the schema that each span has."""
        counts = spans.hi - spans.lo
        total = offsets_of(counts)
        self.first = total[spans.offsets[:-1]]
        self.lengths = total[spans.offsets[1:]] - self.first
        self.steps = int(total[-1])
        self._starts = total[:-1]
        self._segment = segments.places(spans.rows)
        self._code = code
        self._shift = spans.lo - total[:-1]
        self._single = bool((np.diff(spans.offsets) == 1).all())

    def check(self, numbers: Ints, starts: Ints, length: int) -> None:
        """UsageError unless each episode has the steps [start, start + length)."""
        if numbers.shape != starts.shape or numbers.ndim != 1:
            raise UsageError(
                f"give one step for each episode's number, not {starts.shape} for {numbers.shape}, both of one axis"
            )
        if not len(numbers):
            return
        if int(numbers.min()) < 0 or int(numbers.max()) >= len(self.first):
            raise UsageError(
                f"episodes are numbered from 0 to {len(self.first)}; {int(numbers.min())} to {int(numbers.max())} were "
                "asked for"
            )
        bad = np.flatnonzero((starts < 0) | (starts + length > self.lengths[numbers]))
        if len(bad):
            number, start = int(numbers[bad[0]]), int(starts[bad[0]])
            raise UsageError(
                f"episode number {number} has {int(self.lengths[number])} steps, so none from {start} to "
                f"{start + length}"
            )

    def place(self, index: Ints) -> tuple[Ints, Ints]:
        """(number of the episode, step of it) of steps numbered end to end."""
        number = group_of(self.first, index)
        return number, index - self.first[number]

    def locate(self, numbers: Ints, steps: Ints) -> StepPlaces:
        """The places of step `steps[i]` of episode `numbers[i]`; they were checked."""
        at = self.first[numbers] + steps
        span = numbers if self._single else group_of(self._starts, at)
        return StepPlaces(self._segment[span], at + self._shift[span], self._code[span])


class Batcher:
    """The part of a Gather that one process has: its cache, and what is on its way."""

    def __init__(
        self, episodes: Episodes, selection: Selection, cache_bytes: int, disk_cache: DiskCache | None, ahead_bytes: int
    ) -> None:
        self.pid = os.getpid()
        self._episodes = episodes
        self._reader = episodes.reader
        self._selection = selection
        spans = episodes.step_spans()
        self.segments = self._reader.segments(spans.rows)
        self._view = shown(spans, self.segments)
        self.schemas = self._view.schemas
        self.steps = StepMap(self._view.spans, self.segments, self._view.code)
        self.store = ChunkStore(
            self._reader.shards, self.segments, self.steps.steps, cache_bytes, disk_cache, ahead_bytes
        )
        self.batch = Counts()
        self._plans: dict[tuple[int, ...], BatchPlan] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: list[Future[Any]] = []
        self._stopped = False

    def also(self, selection: Selection) -> Batcher:
        """Other fields of the same episodes, through the same cache."""
        other = copy.copy(self)
        other._selection = selection
        other._plans = {}
        other._ahead = []
        other._pool = None
        return other

    def gather(self, numbers: Ints, starts: Ints, length: int | None, empty: Empty = fresh) -> dict[str, Any]:
        """Steps starts[i], or `length` from there on, of episodes numbers[i], as a nest of arrays that `empty` makes,
        where they are rows of stored ones."""
        self.check()
        where = self._locate(numbers, starts, length or 1)
        plan = self._planned(where)
        out: dict[Path, Any] = dict(plan.nodes)
        for path, value in self._rows(plan, where, empty).items():
            out[path] = value if length is None else value.reshape(len(numbers), length, *value.shape[1:])
        if plan.slow:
            out |= self._read(plan.slow, numbers, starts, length)
        return unflatten(out)

    def whole(self, numbers: Ints) -> dict[str, Any]:
        """A nest of Ragged with all steps of these episodes; of fields that are not rows of steps, lists."""
        self.check()
        self.steps.check(numbers, np.zeros_like(numbers), 0)
        counts = self.steps.lengths[numbers]
        steps = spans(np.zeros(len(counts), np.int64), counts)
        where = self.steps.locate(np.repeat(numbers, counts), steps)
        plan = self._planned(where)
        others = [one.spec.path for one in plan.fields if one.spec.axis != "step"] + plan.slow
        by_step = plan._replace(fields=[one for one in plan.fields if one.spec.axis == "step"])
        out: dict[Path, Any] = dict(plan.nodes)
        out |= {path: Ragged(value, counts) for path, value in self._rows(by_step, where).items()}
        if others:
            found = self._reader.read(
                self._episodes.pick(numbers).spans(), Selection(list(others), self._selection.missing)
            )
            out |= {path: [lookup(data, path) for data in found] for path in others}
        return unflatten(out)

    def _locate(self, numbers: Ints, starts: Ints, length: int) -> StepPlaces:
        self.steps.check(numbers, starts, length)
        if length == 1:
            return self.steps.locate(numbers, starts)
        return self.steps.locate(np.repeat(numbers, length), spans(starts, np.full(len(starts), length)))

    def _planned(self, where: StepPlaces) -> BatchPlan:
        view = self._view
        several = len(view.schemas) > 1 and len(where.schema) > 0
        codes = tuple(np.unique(where.schema).tolist()) if several else (0,)[: len(view.schemas)]
        if codes not in self._plans:
            self._plans[codes] = plan_batch(codes, view, self._selection, self.segments)
        return self._plans[codes]

    def _rows(self, plan: BatchPlan, where: StepPlaces, empty: Empty = fresh) -> dict[Path, Array]:
        """The fields at these steps, fetched in two rounds: what says where rows lie comes first."""
        out = {path_of(name): self._selection.filled(name, len(where.step)) for name in plan.absent}
        shard, row, counts = *self._places(where), Counts()
        stored: list[tuple[Path, str, Array]] = []
        wants: list[RowsWanted] = []
        for one, array, like in plan.direct:
            rows = empty((len(row), *like.shape[1:]), like.dtype)
            wants += [RowsWanted(array, like, shard, row, rows)] if len(row) else []
            stored.append((one.spec.path, one.spec.dtype, rows))
        reads = self._reads(plan, where)
        self._fill(_single(want for read in reads for want in read.first(self.segments.shard)), counts)
        for read in reads:
            like = empty_rows(read.spec)
            rows = empty((len(row), *like.shape[1:]), like.dtype)
            read.locate(each_step=True).own = Pieces.whole(rows)
            read.prepare()
            wants += _single(read.wants(self.segments.shard))
            stored.append((read.spec.path, read.spec.dtype, rows))
        self._fill(wants, counts)
        for read in reads:
            read.complete()
        self.batch = counts
        return out | {path: dtypes.from_stored(rows, dtype) for path, dtype, rows in stored}

    def _places(self, where: StepPlaces) -> tuple[Ints, Ints]:
        """The shard of each step, and its row there in fields of one row a step."""
        return self.segments.shard[where.segment], self.segments.start[where.segment] + where.step

    def _reads(self, plan: BatchPlan, where: StepPlaces) -> list[FieldRead]:
        return [at_steps(one, where.segment, where.step, self.segments) for one in plan.fields]

    def _fill(self, wants: Sequence[RowsWanted], counts: Counts) -> None:
        if wants:
            counts += self.store.fill(wants)

    def _read(self, paths: list[Path], numbers: Ints, starts: Ints, length: int | None) -> dict[Path, Any]:
        """Fields that are not numbers of one shape, read as episodes are."""
        steps = length or 1
        spans = self._episodes.pick(numbers).spans().cut(starts, starts + steps)
        found = self._reader.read(spans, Selection(list(paths), self._selection.missing))
        return {path: _batch([lookup(data, path) for data in found], steps, length is None) for path in paths}

    def load(self, numbers: Ints, starts: Ints, length: int, wanted: Callable[[], bool] = lambda: True) -> Counts:
        """Bring the chunks of these steps into the cache, as far as they fit; stops early once `wanted` says no."""
        where, counts = self._locate(numbers, starts, length), Counts()
        plan, shards = self._planned(where), self.segments.shard
        plain, others = self._direct(plan, where), []
        for read in self._reads(plan, where):
            if first := _single(read.first(shards)):
                self._fill(first, counts)
                others += _single(read.locate(each_step=True).wants(shards))
            else:
                plain += _single(read.locate(each_step=True).wants(shards))
        counts += self.store.load(plain, wanted)
        if others:
            counts += self.store.load(others, wanted)
        return counts

    def local(self, numbers: Ints, steps: Ints) -> float:
        """Part of the bytes of these steps that is at hand."""
        where = self._locate(numbers, steps, 1)
        plan = self._planned(where)
        wants = self._direct(plan, where)
        for read in self._reads(plan, where):
            wants += _single(read.locate().wants(self.segments.shard, own=True))
        have, whole = self.store.local_bytes(wants)
        return have / whole if whole else 1.0

    def _direct(self, plan: BatchPlan, where: StepPlaces) -> list[RowsWanted]:
        shard, row = self._places(where)
        return [RowsWanted(array, like, shard, row, like) for _, array, like in plan.direct]

    def prefetch(self, numbers: Ints, starts: Ints, length: int) -> None:
        """Load in the background; an error surfaces at the next call."""
        self.check()
        self.steps.check(numbers, starts, length)
        if self._pool is None:
            self._pool = thread_pool(1, "archive-prefetch")
        wanted: Callable[[], bool] = lambda: not self._stopped  # noqa: E731
        self._ahead.append(self._pool.submit(self.load, numbers, starts, length, wanted))

    def check(self) -> None:
        """Raise what failed in the background, once."""
        waiting = []
        failed: BaseException | None = None
        for future in self._ahead:
            if not future.done():
                waiting.append(future)
            elif not future.cancelled():
                failed = failed or future.exception()
        self._ahead = waiting
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Stop what is on its way; raise what failed there."""
        self._stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.check()


class GatherStats(NamedTuple):
    """The cost of the last batch, and of all of them, with what was fetched ahead in the background. Text, JSON, ragged
    and whole-episode fields go past the cache and are not counted here, but in the archive's own io_stats()."""

    batch: Counts
    total: Counts


class Gather:
    """Rows of the fields of some episodes, many at a time.

    fields: names as in Episodes.read, None for all that have a step axis.  missing: "error", "skip" (leave the field
    out of a batch in which an episode lacks it), or a value to fill in.  At most `cache_bytes` of decoded chunks are
    kept in memory; `disk_cache`: a folder, or a DiskCache, for chunks as they are stored, which other
    processes may share.  At most `max_ahead_bytes` are on their way at once.

    Safe for threads, pickles without what it holds, and a forked process begins with an empty memory.
    """

    def __init__(
        self, episodes: Episodes, fields: Any = None, *, missing: Any = "error", cache_bytes: int = 2**30,
        disk_cache: Any = None, max_ahead_bytes: int = 2**26,
    ) -> None:  # fmt: skip
        if cache_bytes < 0 or max_ahead_bytes < 1:
            raise UsageError(
                f"cache_bytes={cache_bytes} must be 0 or more, and max_ahead_bytes={max_ahead_bytes} above 0"
            )
        self.episodes = episodes
        self.fields = fields
        self.missing = missing
        self.cache_bytes = cache_bytes
        self.max_ahead_bytes = max_ahead_bytes
        self.disk_cache = as_disk_cache(disk_cache)
        self._engine: Batcher | None = None
        self._beside: Gather | None = None

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def lengths(self) -> Ints:
        """Steps of each episode."""
        lengths: Ints = self._running().steps.lengths
        return lengths

    @property
    def steps(self) -> int:
        """Steps of all episodes."""
        return self._running().steps.steps

    def place(self, index: Any) -> tuple[Ints, Ints]:
        """(number of the episode, step of it) of steps that are numbered end to end over all episodes."""
        return self._running().steps.place(_ints(index))

    def rows(self, numbers: Any, steps: Any, *, empty: Empty = fresh) -> dict[str, Any]:
        """Step `steps[i]` of episode `numbers[i]`: a nested dict of arrays [n, ...], in memory that `empty` makes.

        Strings are an array of n; ragged fields, JSON and what belongs to the episode a list of n.
        """
        return self._running().gather(_ints(numbers), _ints(steps), None, empty)

    def windows(self, numbers: Any, starts: Any, length: int) -> dict[str, Any]:
        """Steps [starts[i], starts[i] + length) of episode `numbers[i]`: a nested dict of arrays [n, length, ...]."""
        if length < 1:
            raise UsageError(f"windows of {length} steps hold nothing; give a length of at least 1")
        return self._running().gather(_ints(numbers), _ints(starts), length)

    def whole(self, numbers: Any) -> dict[str, Any]:
        """Read all steps of these episodes: a nested dict of Ragged (rows end to end, and each episode's number of
        them); of fields that are not numbers of one shape, or of other rows than steps, a list."""
        return self._running().whole(_ints(numbers))

    def every_step(self, numbers: Any) -> tuple[Ints, Ints]:
        """(number of the episode, step of it) of all steps of these episodes."""
        counts = self.lengths[_ints(numbers)]
        return np.repeat(_ints(numbers), counts), spans(np.zeros(len(counts), np.int64), counts)

    def prefetch(self, numbers: Any, steps: Any, length: int = 1) -> None:
        """Fetch in the background what `rows` (or `windows` of that length) will need; an error surfaces at the next
        call."""
        engine = self._running()
        engine.prefetch(_ints(numbers), _ints(steps), length)

    def load(self, numbers: Any, starts: Any, length: int = 1, *, wanted: Callable[[], bool] = lambda: True) -> Counts:
        """Bring the chunks of these steps into the cache now, as far as they fit; stops early once `wanted` says no."""
        return self._running().load(_ints(numbers), _ints(starts), length, wanted)

    def local(self, numbers: Any, steps: Any) -> float:
        """The part of the bytes of these steps that is in memory or in the disk cache."""
        return self._running().local(_ints(numbers), _ints(steps))

    @property
    def io_stats(self) -> GatherStats:
        engine = self._running()
        return GatherStats(replace(engine.batch), replace(engine.store.total))

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the cache has taken."""
        return self._running().store.touched_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of the fields that are gathered, at most."""
        return max(1, sizes.step_bytes(self._running().schemas, Selection(self.fields)))

    @property
    def full(self) -> bool:
        """True if another chunk would push out one that is held."""
        return self._running().store.full

    def close(self) -> None:
        """Stop fetching in the background and drop what is held; an error there that nobody was told of surfaces."""
        engine, self._engine = self._engine, None
        if engine is not None and engine.pid == os.getpid():
            engine.close()

    def also(self, fields: Any) -> Gather:
        """Other fields of the same episodes, through the same cache."""
        other = copy.copy(self)
        other.fields, other._engine, other._beside = fields, None, self
        return other

    def _running(self) -> Batcher:
        if self._engine is None or self._engine.pid != os.getpid():
            selection = Selection(self.fields, self.missing)
            self._engine = (
                Batcher(self.episodes, selection, self.cache_bytes, self.disk_cache, self.max_ahead_bytes)
                if self._beside is None
                else self._beside._running().also(selection)
            )
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engine": None}


def _single(wants: Iterable[Want]) -> list[RowsWanted]:
    return [want.single_rows() for want in wants]


def _batch(values: list[Any], steps: int, flat: bool) -> Any:
    """The values of a field that were read for each place, as one array where each is an array of `steps` rows;
    a list otherwise."""
    if all(isinstance(v, np.ndarray) and v.ndim and len(v) == steps for v in values):
        joined = np.stack(values)
        return joined[:, 0] if flat else joined
    if flat and all(isinstance(v, list) and len(v) == 1 for v in values):
        return [v[0] for v in values]
    return values


def _ints(values: Any) -> Ints:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise UsageError(f"numbers of episodes and steps must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)
