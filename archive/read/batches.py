"""Batches of steps of many episodes, through a cache of chunks: planned, fetched in two rounds,
put together."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from archive.arrays import Ints, fresh, spans
from archive.base import thread_pool
from archive.fields import Array, Path, Ragged, unflatten
from archive.read.batchplan import Batch, Empty, FieldPlan, Piece, Plans, batches_of, plan_fields
from archive.read.chunks import ChunkStore, Counts, DiskCache, RowsWanted, Want
from archive.read.episodes import Episodes
from archive.read.latesteps import shown
from archive.read.plan import NOWHERE
from archive.read.selection import Selection
from archive.read.stepmap import Places, StepMap


class Batches:
    """What one process has of a Gather: its cache, and what is on its way."""

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
        self.steps = StepMap(self._view.spans, self.segments, self._view.code)
        self.store = ChunkStore(
            self._reader.shards, self.segments, self.steps.steps, cache_bytes, disk_cache, ahead_bytes
        )
        self.batch = Counts()
        self._plans: dict[tuple[int, ...], Plans] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: list[Future[Any]] = []
        self._stopped = False

    def also(self, selection: Selection) -> Batches:
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
        plans, counts = self._planned(where), Counts()
        out: dict[Path, Any] = dict(plans.nodes)
        for plan, value in zip(plans.fields, self._rows(plans.fields, where, counts, empty), strict=True):
            out[plan.path] = value if length is None else value.reshape(len(numbers), length, *value.shape[1:])
        if plans.slow:
            out |= self._read(plans.slow, numbers, starts, length)
        self.batch = counts
        return unflatten(out)

    def whole(self, numbers: Ints) -> dict[str, Any]:
        """All steps of these episodes, as a nest of Ragged; of fields that are not rows of steps, lists."""
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
            found = self._reader.read(
                self._episodes.pick(numbers).spans(), Selection(list(others), self._selection.missing)
            )
            out |= {path: [_at(data, path) for data in found] for path in others}
        self.batch = counted
        return unflatten(out)

    def _locate(self, numbers: Ints, starts: Ints, length: int) -> Places:
        self.steps.check(numbers, starts, length)
        if length == 1:
            return self.steps.locate(numbers, starts)
        return self.steps.locate(np.repeat(numbers, length), spans(starts, np.full(len(starts), length)))

    def _planned(self, where: Places) -> Plans:
        view = self._view
        several = len(view.schemas) > 1 and len(where.schema) > 0
        codes = tuple(np.unique(where.schema).tolist()) if several else (0,)
        if codes not in self._plans:
            schemas = {code: view.schemas[code] for code in codes if view.schemas}
            self._plans[codes] = plan_fields(schemas, self._selection, {code: view.late[code] for code in schemas})
        return self._plans[codes]

    def _rows(
        self, plans: Sequence[FieldPlan], where: Places, counts: Counts, empty: Empty = fresh
    ) -> list[Array]:  # fmt: skip
        """Each field at these steps, fetched in two rounds: what says where rows lie comes first."""
        batches = batches_of(plans, where, self.segments)
        self._fill([want for one in batches for want in one.first()], counts)
        self._fill([want for one in batches for want in one.wants(empty)], counts)
        return [one.value() for one in batches]

    def _fill(self, wants: Sequence[Want | RowsWanted], counts: Counts) -> None:
        if wants:
            counts += self.store.fill(wants)

    def _read(self, paths: list[Path], numbers: Ints, starts: Ints, length: int | None) -> dict[Path, Any]:
        """Fields that are not numbers of one shape, read as episodes are."""
        steps = length or 1
        spans = self._episodes.pick(numbers).spans().cut(starts, starts + steps)
        found = self._reader.read(spans, Selection(list(paths), self._selection.missing))
        return {path: _batch([_at(data, path) for data in found], steps, length is None) for path in paths}

    def load(self, numbers: Ints, starts: Ints, length: int, wanted: Callable[[], bool] = lambda: True) -> Counts:
        """Bring the chunks of these steps into the cache, as far as they fit; stops early once `wanted` says no."""
        counts = Counts()
        shard = self.segments.shard
        pieces = self._pieces(self._locate(numbers, starts, length))
        plain = [piece for piece in pieces if not piece.companions]
        counts += self.store.load([want for piece in plain for want in piece.locate(NOWHERE).wants(shard)], wanted)
        others = [piece for piece in pieces if piece.companions]
        self._fill([want for piece in others for want in piece.first(shard)], counts)
        later = [want for piece in others for want in piece.locate(NOWHERE).wants(shard)]
        if later:
            counts += self.store.load(later, wanted)
        return counts

    def local(self, numbers: Ints, steps: Ints) -> float:
        """Which part of the bytes of these steps is at hand."""
        pieces = self._pieces(self._locate(numbers, steps, 1))
        have, whole = self.store.local_bytes([w for piece in pieces for w in piece.most().wants(self.segments.shard)])
        return have / whole if whole else 1.0

    def _pieces(self, where: Places) -> list[Piece]:
        return [piece for plan in self._planned(where).fields for piece in Batch(plan, where, self.segments).pieces]

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


def _at(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def _batch(values: list[Any], steps: int, flat: bool) -> Any:
    """What was read of a field for each place, as one array where each is an array of `steps` rows;
    a list otherwise."""
    if all(isinstance(v, np.ndarray) and v.ndim and len(v) == steps for v in values):
        joined = np.stack(values)
        return joined[:, 0] if flat else joined
    if flat and all(isinstance(v, list) and len(v) == 1 for v in values):
        return [v[0] for v in values]
    return values
