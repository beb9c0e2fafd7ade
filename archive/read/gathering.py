"""Steps and windows of many episodes as batches of arrays, through a cache of chunks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, fresh, spans
from archive.base import UsageError
from archive.read.batches import Batches
from archive.read.batchplan import Empty
from archive.read.chunks import Counts, as_disk_cache
from archive.read.episodes import Episodes
from archive.read.selection import Selection


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
        self.episodes = episodes
        self.fields = fields
        self.missing = missing
        self.cache_bytes = cache_bytes
        self.max_ahead_bytes = max_ahead_bytes
        self.disk_cache = as_disk_cache(disk_cache)
        self._engine: Batches | None = None
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

    def _running(self) -> Batches:
        if self._engine is None or self._engine.pid != os.getpid():
            selection = Selection(self.fields, self.missing)
            self._engine = (
                Batches(self.episodes, selection, self.cache_bytes, self.disk_cache, self.max_ahead_bytes)
                if self._beside is None
                else self._beside._running().also(selection)
            )
        return self._engine

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engine": None}


def _ints(values: Any) -> Ints:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise UsageError(f"numbers of episodes and steps must be integers, not {array.dtype}")
    return array.astype(np.int64, copy=False)
