"""Engine: steps and windows of many episodes as batches of arrays, through a cache of chunks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, spans
from archive.base import UsageError
from archive.fields import Path, Ragged, schema, unflatten
from archive.read.chunkcache import as_disk_cache
from archive.read.chunkstore import ChunkStore, Counts
from archive.read.episodes import Episodes
from archive.read.fieldparts import Selection
from archive.read.fieldrows import FieldPlan, Plans, Round, Rows, StepRows, plan_fields
from archive.read.rowpool import Array, RowPool
from archive.read.segments import cut
from archive.read.stepmap import COLUMNS, Places, Segments, StepMap


class IOStats(NamedTuple):
    """What the last batch took, and all of them, with what was fetched ahead in the background. Text, JSON, ragged and
    whole-episode fields go past the cache and are not counted here, but in the archive's own io_stats()."""

    batch: Counts
    total: Counts


class Gather:
    """Rows of the fields of some episodes, many at a time.

    fields: names as in Episodes.read, None for all that have a step axis.  missing: "error", "skip" (leave the field
    out of a batch in which an episode lacks it), or a value to fill in.  At most `cache_bytes` of decoded chunks are
    kept in memory; `disk_cache`: a folder, or a chunkcache.DiskCache, for chunks as they are stored, which other
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
        self.episodes, self.fields, self.missing = episodes, fields, missing
        self.cache_bytes, self.max_ahead_bytes = cache_bytes, max_ahead_bytes
        self.disk_cache = as_disk_cache(disk_cache)
        self._engine: _Engine | None = None
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

    def rows(self, numbers: Any, steps: Any) -> dict[str, Any]:
        """Step `steps[i]` of episode `numbers[i]`: a nested dict of arrays [n, ...].

        Strings are an array of n; ragged fields, JSON and what belongs to the episode a list of n.
        """
        return self._running().gather(_ints(numbers), _ints(steps), None)

    def windows(self, numbers: Any, starts: Any, length: int) -> dict[str, Any]:
        """Steps [starts[i], starts[i] + length) of episode `numbers[i]`: a nested dict of arrays [n, length, ...]."""
        if length < 1:
            raise UsageError(f"windows of {length} steps hold nothing; give a length of at least 1")
        return self._running().gather(_ints(numbers), _ints(starts), length)

    def whole(self, numbers: Any) -> dict[str, Any]:
        """All steps of these episodes: a nested dict of Ragged (rows end to end, and each episode's number of them); of
        fields that are not numbers of one shape, or of other rows than steps, a list."""
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
        """Which part of the bytes of these steps is in memory or in the disk cache."""
        return self._running().local(_ints(numbers), _ints(steps))

    @property
    def io_stats(self) -> IOStats:
        engine = self._running()
        return IOStats(replace(engine.batch), replace(engine.store.total))

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the cache has taken."""
        return self._running().store.touched_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of the fields gathered so far; many, before any was."""
        return self._running().store.row_bytes or 2**16

    @property
    def full(self) -> bool:
        """Whether another chunk would push out one that is held."""
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

    def _running(self) -> _Engine:
        if self._engine is None or self._engine.pid != os.getpid():
            self._engine = _Engine(self) if self._beside is None else self._beside._running().also(self)
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engine": None}


class _Engine:
    """What one process has of a Gather."""

    def __init__(self, owner: Gather) -> None:
        self.pid = os.getpid()
        self._episodes, self._reader = owner.episodes, owner.episodes.reader
        self._selection = Selection(owner.fields, owner.missing)
        self.segments = Segments(self._reader.snapshot.columns(COLUMNS))
        self.steps = StepMap(owner.episodes.step_parts(), self.segments)
        self.store = ChunkStore(
            self._reader, self.segments, self.steps.steps, owner.cache_bytes, owner.disk_cache, owner.max_ahead_bytes
        )
        self.batch = Counts()
        self._plans: dict[tuple[int, ...], Plans] = {}
        self._extents: dict[str, tuple[Ints, Ints]] = {}
        self._known = np.zeros(len(self.segments.start), bool)
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: list[Future[Any]] = []
        self._stopped = False

    def also(self, owner: Gather) -> _Engine:
        other = copy.copy(self)
        other._selection, other._plans, other._ahead, other._pool = Selection(owner.fields, owner.missing), {}, [], None
        return other

    def pool(self, array: str, dtype: np.dtype[Any], trailing: tuple[int, ...]) -> RowPool:
        return self.store.pool(array, dtype, trailing)

    def extents(self, array: str, segments: Ints) -> tuple[Ints, Ints]:
        """First row and number of rows of a field in each segment, for fields that are not one row a step."""
        new = np.unique(segments[~self._known[segments]])
        for row, segment in self._reader.segments(new.tolist()).items():
            for name, place in segment.extents.items():
                size = len(self._known)
                first, rows = self._extents.setdefault(name, (np.zeros(size, np.int64), np.zeros(size, np.int64)))
                first[row], rows[row] = place
        self._known[new] = True
        size = len(self._known)
        first, rows = self._extents.get(array) or (np.zeros(size, np.int64), np.zeros(size, np.int64))
        return first[segments], rows[segments]

    def gather(self, numbers: Ints, starts: Ints, length: int | None) -> dict[str, Any]:
        self.check()
        where = self._locate(numbers, starts, length or 1)
        plans, counts = self._planned(where), Counts()
        out: dict[Path, Any] = dict(plans.nodes)
        for plan, value in zip(plans.fields, self._rows(plans.fields, where, counts), strict=True):
            out[plan.path] = value if length is None else value.reshape(len(numbers), length, *value.shape[1:])
        if plans.slow:
            out |= self._read(plans.slow, numbers, starts, length)
        self.batch = counts
        return unflatten(out)

    def whole(self, numbers: Ints) -> dict[str, Any]:
        self.check()
        self.steps.check(numbers, np.zeros_like(numbers), 0)
        counts = self.steps.lengths[numbers]
        steps = spans(np.zeros(len(counts), np.int64), counts)
        where = self.steps.locate(np.repeat(numbers, counts), steps)
        plans, counted = self._planned(where), Counts()
        by_step = [plan for plan in plans.fields if plan.spec.axis == "step"]
        others = [plan.path for plan in plans.fields if plan.spec.axis != "step"] + plans.slow
        out: dict[Path, Any] = dict(plans.nodes)
        for plan, value in zip(by_step, self._rows(by_step, where, counted), strict=True):
            out[plan.path] = Ragged(value, counts)
        if others:
            parts = self._episodes[numbers].parts()
            found = self._reader.read(parts, Selection(list(others), self._selection.missing))
            out |= {path: [_at(data, path) for data in found] for path in others}
        self.batch = counted
        return unflatten(out)

    def _locate(self, numbers: Ints, starts: Ints, length: int) -> Places:
        self.steps.check(numbers, starts, length)
        if length == 1:
            return self.steps.locate(numbers, starts)
        return self.steps.locate(np.repeat(numbers, length), spans(starts, np.full(len(starts), length)))

    def _planned(self, where: Places) -> Plans:
        several = len(self.segments.schemas) > 1 and len(where.schema) > 0
        codes = tuple(np.unique(where.schema).tolist()) if several else (0,)
        if codes not in self._plans:
            schemas = {code: schema.loads(self.segments.schemas[code]) for code in codes}
            self._plans[codes] = plan_fields(schemas, self._selection, self)
        return self._plans[codes]

    def _rows(self, plans: Sequence[FieldPlan], where: Places, counts: Counts) -> list[Array]:
        """Each field at these steps."""
        pieces = [(plan, piece) for plan in plans for piece in plan.pieces(where)]
        first = [rows.first(own) for _, (rows, _, own) in pieces]
        taken = self._taken(first, counts)
        second = [
            rows.second(own, round_, found)
            for (_, (rows, _, own)), round_, found in zip(pieces, first, taken, strict=True)
        ]
        later = self._taken(second, counts)
        done: dict[int, list[tuple[Any, Array]]] = {id(plan): [] for plan in plans}
        for (plan, (rows, at, own)), a, b, round_ in zip(pieces, taken, later, second, strict=True):
            done[id(plan)].append((at, rows.finish(len(own.step), a, b, round_.memory)))
        return [plan.joined(len(where.step), done[id(plan)]) for plan in plans]

    def _taken(self, rounds: Sequence[Round], counts: Counts) -> list[list[Array]]:
        wants = [rows for round_ in rounds for rows in round_.rows]
        if not wants:
            return [[] for _ in rounds]
        found, own = self.store.take(wants)
        counts += own
        arrays = iter(found)
        return [[next(arrays) for _ in round_.rows] for round_ in rounds]

    def _read(self, paths: list[Path], numbers: Ints, starts: Ints, length: int | None) -> dict[Path, Any]:
        """Fields that are not numbers of one shape, read as episodes are."""
        distinct, owner = np.unique(numbers, return_inverse=True)
        whole = self._episodes[distinct].parts()
        steps = length or 1
        parts = [cut(whole[i], at, at + steps) for i, at in zip(owner.tolist(), starts.tolist(), strict=True)]
        found = self._reader.read(parts, Selection(list(paths), self._selection.missing))
        return {path: _batch([_at(data, path) for data in found], steps, length is None) for path in paths}

    def load(self, numbers: Ints, starts: Ints, length: int, wanted: Callable[[], bool] = lambda: True) -> Counts:
        where = self._locate(numbers, starts, length)
        pieces = [(rows, own) for plan in self._planned(where).fields for rows, _, own in plan.pieces(where)]
        rounds = [(rows, own, rows.first(own)) for rows, own in pieces]
        counts = self.store.load([want for _, _, round_ in rounds for want in round_.rows], wanted)
        later: list[Rows] = []
        for rows, own, round_ in rounds:
            if type(rows).second is not StepRows.second:
                taken, took = self.store.take(round_.rows)
                counts += took
                later += rows.second(own, round_, taken).rows
        if later:
            counts += self.store.load(later, wanted)
        return counts

    def local(self, numbers: Ints, steps: Ints) -> float:
        where = self._locate(numbers, steps, 1)
        have = whole = 0
        for plan in self._planned(where).fields:
            for rows, _, own in plan.pieces(where):
                for want in rows.most(own):
                    have += int(self.store.local(want).sum()) * want.pool.row_bytes
                    whole += len(want.rows) * want.pool.row_bytes
        return have / whole if whole else 1.0

    def prefetch(self, numbers: Ints, starts: Ints, length: int) -> None:
        self.check()
        self.steps.check(numbers, starts, length)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "archive-prefetch")
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
        self._stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self.check()


def _ints(values: Any) -> Ints:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise UsageError(f"numbers of episodes and steps must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)


def _at(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def _batch(values: list[Any], steps: int, flat: bool) -> Any:
    """What was read of a field for each place, as one array where each is an array of `steps` rows; a list otherwise."""
    if all(isinstance(v, np.ndarray) and v.ndim and len(v) == steps for v in values):
        joined = np.stack(values)
        return joined[:, 0] if flat else joined
    if flat and all(isinstance(v, list) and len(v) == 1 for v in values):
        return [v[0] for v in values]
    return values
