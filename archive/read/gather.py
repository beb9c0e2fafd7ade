"""Steps and windows of many episodes as batches of arrays, through a cache of chunks: planned, fetched in two rounds,
put together."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Pieces, ascending, fresh, group_of, offsets_of
from archive.arrays import spans as spans_of
from archive.base import UsageError, forking, thread_pool
from archive.fields import Array, Path, Ragged, dtypes, empty_rows, lookup, unflatten
from archive.read import sizes
from archive.read.chunks import ChunkStore, Counts, DiskCache, RowsWanted, Want, as_disk_cache
from archive.read.episodes import Episodes
from archive.read.plan import BatchPlan, FieldRead, at_steps, plan_batch
from archive.read.selection import Selection, path_of
from archive.read.spans import Spans, shown

Empty = Callable[[tuple[int, ...], Any], Array]  # makes an array of a shape and dtype, with undefined content


class StepPlaces(NamedTuple):
    """The places of some steps: number of the segment, step in that segment, number of their schema."""

    segment: Ints
    step: Ints
    schema: Ints


class Source:
    """The steps of some episodes, numbered end to end: their places, and the process's cache of chunks."""

    def __init__(self, episodes: Episodes, cache_bytes: int, disk_cache: DiskCache | None, ahead_bytes: int) -> None:
        self.pid = os.getpid()
        reader, spans = episodes.reader, episodes.step_spans()
        self.segments = reader.segments(spans.rows)
        self.view = shown(spans, self.segments)
        spans, self._code = self.view.spans, self.view.code
        total = offsets_of(spans.hi - spans.lo)
        self.first = total[spans.offsets[:-1]]
        self.lengths = total[spans.offsets[1:]] - self.first
        self.steps = int(total[-1])
        self._starts = total[:-1]
        self._segment = self.segments.places(spans.rows)
        self._shift = spans.lo - total[:-1]
        self._single = bool((np.diff(spans.offsets) == 1).all())
        self.store = ChunkStore(reader.shards, self.segments, self.steps, cache_bytes, disk_cache, ahead_bytes)

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

    def locate(self, numbers: Ints, starts: Ints, length: int) -> StepPlaces:
        """The places of steps [starts[i], starts[i] + length) of episodes numbers[i]."""
        self.check(numbers, starts, length)
        if length > 1:
            starts, numbers = spans_of(starts, np.full(len(starts), length)), np.repeat(numbers, length)
        return self.places(numbers, starts)

    def places(self, numbers: Ints, steps: Ints) -> StepPlaces:
        """The places of step `steps[i]` of episode `numbers[i]`, which were checked."""
        at = self.first[numbers] + steps
        span = numbers if self._single else group_of(self._starts, at)
        return StepPlaces(self._segment[span], at + self._shift[span], self._code[span])


class GatherStats(NamedTuple):
    """The cost of the last batch, and of all of them, with background fetches. Text, JSON, ragged and whole-episode
    fields bypass the cache and are not counted here, but in the archive's own io_stats()."""

    batch: Counts
    total: Counts


class Gather:
    """Rows of the fields of some episodes, many at a time.

    fields: names as in Episodes.read, None for all that have a step axis.  missing: "error", "skip" (leave the field
    out of a batch in which an episode lacks it), or a value to fill in.  At most `cache_bytes` of decoded chunks are
    kept in memory; `disk_cache`: a folder, or a DiskCache, for chunks as they are stored, which other
    processes may share.  At most `max_ahead_bytes` are on their way at once.

    Safe for threads, pickles without its cache, and a forked process begins with an empty one.
    """

    def __init__(
        self,
        episodes: Episodes,
        fields: Any = None,
        *,
        missing: Any = "error",
        cache_bytes: int = 2**30,
        disk_cache: Any = None,
        max_ahead_bytes: int = 2**26,
    ) -> None:
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
        self._selection = Selection(fields, missing)
        self._beside: Gather | None = None
        self._source: Source | None = None
        self._lock = forking.lock(self)
        self._begin()

    def _begin(self) -> None:
        """Drop what only this process has."""
        self._plans: dict[tuple[int, ...], BatchPlan] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: list[Future[Any]] = []
        self._stopped = False
        self._batch = Counts()

    def _here(self) -> Source:
        """Give this process a source of its own, with an empty cache after a fork."""
        with self._lock:
            if self._source is None or self._source.pid != os.getpid():
                self._begin()
                self._source = (
                    Source(self.episodes, self.cache_bytes, self.disk_cache, self.max_ahead_bytes)
                    if self._beside is None
                    else self._beside._here()
                )
            return self._source

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None, "_plans": {}, "_pool": None, "_ahead": [], "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._lock = forking.lock(self)

    def also(self, fields: Any) -> Gather:
        """Other fields of the same episodes, through the same cache."""
        other = copy.copy(self)
        other.fields, other._selection, other._beside = fields, Selection(fields, self.missing), self
        other._source = None
        return other

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def lengths(self) -> Ints:
        """Steps of each episode."""
        lengths: Ints = self._here().lengths
        return lengths

    @property
    def steps(self) -> int:
        """Steps of all episodes."""
        return self._here().steps

    def place(self, index: Any) -> tuple[Ints, Ints]:
        """(number of the episode, step of it) of steps that are numbered end to end over all episodes."""
        first, steps = self._here().first, _ints(index)
        number = group_of(first, steps)
        return number, steps - first[number]

    def every_step(self, numbers: Any) -> tuple[Ints, Ints]:
        """(number of the episode, step of it) of all steps of these episodes."""
        counts = self.lengths[_ints(numbers)]
        return np.repeat(_ints(numbers), counts), spans_of(np.zeros(len(counts), np.int64), counts)

    def rows(self, numbers: Any, steps: Any, *, empty: Empty = fresh) -> dict[str, Any]:
        """Step `steps[i]` of episode `numbers[i]`: a nested dict of arrays [n, ...], in memory that `empty` makes.

        Strings are an array of n; ragged fields, JSON and what belongs to the episode a list of n.
        """
        return self._gathered(_ints(numbers), _ints(steps), None, empty)

    def windows(self, numbers: Any, starts: Any, length: int) -> dict[str, Any]:
        """Steps [starts[i], starts[i] + length) of episode `numbers[i]`: a nested dict of arrays [n, length, ...]."""
        if length < 1:
            raise UsageError(f"windows of {length} steps hold nothing; give a length of at least 1")
        return self._gathered(_ints(numbers), _ints(starts), length)

    def _gathered(self, numbers: Ints, starts: Ints, length: int | None, empty: Empty = fresh) -> dict[str, Any]:
        here = self._here()
        self._surface()
        where = here.locate(numbers, starts, length or 1)
        plan = self._planned(here, where)
        out: dict[Path, Any] = dict(plan.nodes)
        for path, value in self._rows(here, plan, where, empty).items():
            out[path] = value if length is None else value.reshape(len(numbers), length, *value.shape[1:])
        if plan.slow:
            steps = self.episodes.pick(numbers).spans().cut(starts, starts + (length or 1))
            read = self._read(plan.slow, steps)
            out |= {path: _batch(values, length or 1, length is None) for path, values in read.items()}
        return unflatten(out)

    def whole(self, numbers: Any) -> dict[str, Any]:
        """Read all steps of these episodes: a nested dict of Ragged (rows end to end, and the number of each episode);
        a list for fields that are not numbers of one shape, or have other rows than steps."""
        here, numbers = self._here(), _ints(numbers)
        self._surface()
        here.check(numbers, np.zeros_like(numbers), 0)
        counts, where = here.lengths[numbers], here.places(*self.every_step(numbers))
        plan = self._planned(here, where)
        others = [one.spec.path for one in plan.fields if one.spec.axis != "step"] + plan.slow
        by_step = plan._replace(fields=[one for one in plan.fields if one.spec.axis == "step"])
        out: dict[Path, Any] = dict(plan.nodes)
        out |= {path: Ragged(value, counts) for path, value in self._rows(here, by_step, where).items()}
        if others:
            out |= self._read(others, self.episodes.pick(numbers).spans())
        return unflatten(out)

    def prefetch(self, numbers: Any, steps: Any, length: int = 1) -> None:
        """Fetch in the background what `rows` (or `windows` of that length) will need; errors come with the next
        call."""
        here, numbers, steps = self._here(), _ints(numbers), _ints(steps)
        self._surface()
        here.check(numbers, steps, length)
        if self._pool is None:
            self._pool = thread_pool(1, "archive-prefetch")
        self._ahead.append(self._pool.submit(self.load, numbers, steps, length, wanted=lambda: not self._stopped))

    def load(self, numbers: Any, starts: Any, length: int = 1, *, wanted: Callable[[], bool] = lambda: True) -> Counts:
        """Bring the chunks of these steps into the cache, as far as they fit; stop early once `wanted` is false."""
        here, counts = self._here(), Counts()
        where = here.locate(_ints(numbers), _ints(starts), length)
        plan = self._planned(here, where)
        reads = self._located(here, plan, where, counts)
        wants = [want for read in reads for want in read.wants(here.segments.shard)]
        counts += here.store.load(self._direct(here, plan, where) + _single(wants), wanted)
        return counts

    def local(self, numbers: Any, steps: Any) -> float:
        """The part of the bytes of these steps that is in memory or in the disk cache."""
        here = self._here()
        where = here.locate(_ints(numbers), _ints(steps), 1)
        plan = self._planned(here, where)
        reads = [at_steps(one, where.segment, where.step, here.segments).locate() for one in plan.fields]
        own = [want for read in reads for want in read.wants(here.segments.shard, own=True)]
        have, whole = here.store.local_bytes(self._direct(here, plan, where) + _single(own))
        return have / whole if whole else 1.0

    @property
    def io_stats(self) -> GatherStats:
        """The cost of the last batch, and of all of them."""
        total = self._here().store.total
        return GatherStats(replace(self._batch), replace(total))

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the cache has taken."""
        return self._here().store.touched_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of the fields that are gathered, at most."""
        return max(1, sizes.step_bytes(self._here().view.schemas, self._selection))

    @property
    def full(self) -> bool:
        """True if another chunk would evict one."""
        return self._here().store.full

    def close(self) -> None:
        """Stop fetching in the background and drop the cache; an error that was not raised yet is raised."""
        source, self._source = self._source, None
        if source is not None and source.pid == os.getpid():
            self._stopped = True
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
            self._surface()

    # -- batches -------------------------------------------------------------------------------------------------------

    def _planned(self, here: Source, where: StepPlaces) -> BatchPlan:
        several = len(here.view.schemas) > 1 and len(where.schema) > 0
        codes = tuple(ascending(where.schema).tolist()) if several else (0,)[: len(here.view.schemas)]
        if codes not in self._plans:
            self._plans[codes] = plan_batch(codes, here.view, self._selection, here.segments)
        return self._plans[codes]

    def _rows(self, here: Source, plan: BatchPlan, where: StepPlaces, empty: Empty = fresh) -> dict[Path, Array]:
        """The fields at these steps, fetched in two rounds: the first has the places of rows."""
        counts = Counts()
        out = {path_of(name): self._selection.filled(name, len(where.step)) for name in plan.absent}
        wants = self._direct(here, plan, where, empty)
        stored = [(one.spec, want.out) for (one, _, _), want in zip(plan.direct, wants, strict=True)]
        reads = self._located(here, plan, where, counts)
        for read in reads:
            like = empty_rows(read.spec)
            rows = empty((len(where.step), *like.shape[1:]), like.dtype)
            read.own = Pieces.whole(rows)
            read.prepare()
            wants += _single(read.wants(here.segments.shard))
            stored.append((read.spec, rows))
        if len(where.step):
            counts += here.store.fill(wants)
        for read in reads:
            read.complete()
        self._batch = counts
        return out | {spec.path: dtypes.from_stored(rows, spec.dtype) for spec, rows in stored}

    def _direct(self, here: Source, plan: BatchPlan, where: StepPlaces, empty: Empty | None = None) -> list[RowsWanted]:
        """The rows of fields of one row a step, and memory for them, where `empty` makes it."""
        shard, row = here.segments.shard[where.segment], here.segments.start[where.segment] + where.step
        out = []
        for _, array, like in plan.direct:
            rows = like if empty is None else empty((len(row), *like.shape[1:]), like.dtype)
            out.append(RowsWanted(array, like, shard, row, rows))
        return out

    def _located(self, here: Source, plan: BatchPlan, where: StepPlaces, counts: Counts) -> list[FieldRead]:
        """The other fields at these steps, once the places of their rows have come."""
        reads = [at_steps(one, where.segment, where.step, here.segments) for one in plan.fields]
        if first := _single(want for read in reads for want in read.first(here.segments.shard)):
            counts += here.store.fill(first)
        return [read.locate(each_step=True) for read in reads]

    def _read(self, paths: list[Path], steps: Spans) -> dict[Path, list[Any]]:
        """Fields that are not numbers of one shape, read as episodes are."""
        found = self.episodes.reader.read(steps, Selection(list(paths), self._selection.missing))
        return {path: [lookup(data, path) for data in found] for path in paths}

    def _surface(self) -> None:
        """Raise an error of the background, once."""
        if not self._ahead:
            return
        given, self._ahead = self._ahead, []
        done: list[Any] = []
        for future in given:  # each is asked once: it may end meanwhile
            (done if future.done() else self._ahead).append(future)
        for future in done:
            if not future.cancelled():
                future.result()


def _single(wants: Iterable[Want]) -> list[RowsWanted]:
    return [want.single_rows() for want in wants]


def _batch(values: list[Any], steps: int, flat: bool) -> Any:
    """The values of a field that were read for each place, as one array if each is an array of `steps` rows; else a
    list."""
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
