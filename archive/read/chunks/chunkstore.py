"""Rows of stored arrays through a cache of whole chunks: what is absent is fetched, for all arrays together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, run_starts, spans
from archive.read.chunks.chunkcache import DiskCache
from archive.read.chunks.chunkreader import ChunkReader, Counts, Decoded, Key
from archive.read.chunks.placing import RowsWanted, Want
from archive.read.chunks.rowpool import Array, RowPool
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import Shards

_LEAST_SHARE = 16  # where not all fits, a part in so many is dealt out evenly, for arrays of small rows


class _Rows(NamedTuple):
    """Rows wanted of a pool's array: rows[i] of shard number shards[i], for row at[i] of `out`; None: for row i."""

    pool: RowPool
    shards: Ints
    rows: Ints
    out: Array
    at: Ints | None


class _Place(NamedTuple):
    """Where rows of one chunk go; numbers where it is one row, which is copied in a third of the time."""

    out: Array
    at: Any
    row: Any


class ChunkStore:
    """The cache of one process. Safe for threads: no chunk is fetched twice at once."""

    def __init__(
        self, shards: Shards, segments: Segments, steps: int, cache_bytes: int, disk: DiskCache | None, ahead_bytes: int
    ) -> None:
        self._shards = shards
        self._segments = segments
        self._reader = ChunkReader(shards, segments, disk, ahead_bytes)
        self._steps = steps
        self._cache_bytes = cache_bytes
        self._pools: dict[tuple[str, str, tuple[int, ...]], RowPool] = {}
        self._changed = threading.Condition()
        self._busy: set[Key] = set()
        self.total = Counts()

    def _rows(self, want: Want | RowsWanted) -> _Rows:
        """The rows of a want; they are to come to lie in one piece of memory."""
        if isinstance(want, RowsWanted):
            return _Rows(self._pool(want), want.shard, want.rows, want.out, None)
        counts = want.stop - want.start
        (out,) = want.into.arrays
        pool = self._pool(want)
        if (counts == 1).all():
            return _Rows(pool, want.shard, want.start, out, want.at)
        return _Rows(pool, np.repeat(want.shard, counts), spans(want.start, counts), out, spans(want.at, counts))

    def _pool(self, want: Want | RowsWanted) -> RowPool:
        """Where the rows of an array of that stored dtype and shape are kept."""
        key = (want.array, want.like.dtype.str, want.like.shape[1:])
        with self._changed:
            if key not in self._pools:
                self._pools[key] = RowPool(want.array, want.like.dtype, want.like.shape[1:], len(self._segments.shards))
                self._deal()
            return self._pools[key]

    def _deal(self) -> None:
        """Give each array its part of the bytes: in proportion to its rows, which is what lets all be kept alike."""
        pools = list(self._pools.values())
        total = sum(p.row_bytes for p in pools)
        even = 0.0 if self._steps * total * 1.25 < self._cache_bytes else total / _LEAST_SHARE / len(pools)
        whole = sum(p.row_bytes + even for p in pools)
        for p in pools:
            p.resize(int(self._cache_bytes * (p.row_bytes + even) / whole))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of all arrays."""
        with self._changed:
            return sum(p.row_bytes for p in self._pools.values())

    @property
    def full(self) -> bool:
        """Whether another chunk would push out one that is held, but for arrays of few bytes."""
        with self._changed:
            pools = self._pools.values()
            free, chunk = sum(p.free_bytes for p in pools), max((p.chunk_bytes for p in pools), default=0)
            return free < max(chunk, sum(p.max_bytes for p in pools) // _LEAST_SHARE)

    @property
    def touched_bytes(self) -> int:
        """Bytes of memory that the cache has taken; never more than the bound."""
        with self._changed:
            return sum(p.touched_bytes for p in self._pools.values())

    def fill(self, wants: Sequence[Want | RowsWanted]) -> Counts:
        """Put the rows wanted into memory; what is absent here is fetched together, each chunk once."""
        rows = [self._rows(want) for want in wants]
        counts = Counts()
        self._index(rows)
        with self._changed:
            missing: dict[Key, list[_Place]] = {}
            for pool in {own.pool for own in rows}:
                pool.use()
            chunks: dict[RowPool, list[Ints]] = {}
            for own in rows:
                self._from_memory(own, missing, chunks)
        counts.chunks = sum(map(_count, chunks.values()))
        counts.hits = counts.chunks - len(missing)
        if missing:
            self._fetch(missing, counts)
        with self._changed:
            self.total += counts
        return counts

    def load(self, wants: Sequence[Want], wanted: Callable[[], bool] = lambda: True) -> Counts:
        """Bring the chunks of these rows into the cache, as far as they fit; stops early once `wanted` says no."""
        rows = [self._rows(want) for want in wants]
        counts = Counts()
        self._index(rows)
        with self._changed:
            keys = {(own.pool, chunk) for own in rows for chunk in _distinct(own) if not own.pool.present[chunk]}
        self._fetch({key: [] for key in keys}, counts, wanted)
        with self._changed:
            self.total += counts
        return counts

    def local_bytes(self, wants: Sequence[Want]) -> tuple[int, int]:
        """Bytes of these rows that are in memory or in the disk cache, and of all of them."""
        have = whole = 0
        for own in map(self._rows, wants):
            with self._changed:
                known = own.pool.knows(own.shards)
                chunk = own.pool.locate(own.shards[known], own.rows[known])[0]
                here = own.pool.present[chunk] | own.pool.on_disk[chunk]
            have += int(here.sum()) * own.pool.row_bytes
            whole += len(own.rows) * own.pool.row_bytes
        return have, whole

    def _from_memory(self, want: _Rows, missing: dict[Key, list[_Place]], chunks: dict[RowPool, list[Ints]]) -> None:
        pool, out = want.pool, want.out
        chunk, row = pool.locate(want.shards, want.rows)
        chunks.setdefault(pool, []).append(chunk)
        places = pool.find(chunk, row)
        absent = np.flatnonzero(places < 0)
        if not len(absent):
            pool.deliver(places, out, want.at)
            return
        here = np.flatnonzero(places >= 0)
        pool.deliver(places[here], out, here if want.at is None else want.at[here])
        absent = absent[np.argsort(chunk[absent], kind="stable")]
        numbers, rows, at = chunk[absent], row[absent], absent if want.at is None else want.at[absent]
        heads = run_starts(numbers)
        ends = np.append(heads[1:], len(numbers)).tolist()
        for number, first, end in zip(numbers[heads].tolist(), heads.tolist(), ends, strict=True):
            alone = end - first == 1
            place = _Place(out, at[first], rows[first]) if alone else _Place(out, at[first:end], rows[first:end])
            missing.setdefault((pool, number), []).append(place)

    def _fetch(
        self, places: dict[Key, list[_Place]], counts: Counts, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Fetch chunks and put their rows in place; those that another thread is fetching are waited for."""
        keys = set(places)
        while keys and wanted():
            with self._changed:
                while keys <= self._busy:
                    self._changed.wait()
                here = {key for key in keys if key[0].present[key[1]]}
                for pool, chunk in here:
                    _deliver_from(pool, chunk, places[pool, chunk])
                mine = keys - here - self._busy
                self._busy |= mine
            keys -= here
            try:
                for found in self._reader.read(mine, counts):
                    self._hand_out(found, places)
                    keys -= {(one.pool, one.chunk) for one in found}
                    if not wanted():
                        return
            finally:
                with self._changed:
                    self._busy -= mine & keys  # others may have taken up again what was delivered
                    self._changed.notify_all()

    def _hand_out(self, found: Sequence[Decoded], places: dict[Key, list[_Place]]) -> None:
        """Put rows of chunks in place, and keep the chunks."""
        for pool, chunk, values in found:
            for out, at, row in places[pool, chunk]:
                out[at] = values[row]
        with self._changed:
            for pool, chunk, values in found:
                pool.put(chunk, values)
                self._busy.discard((pool, chunk))
            self._changed.notify_all()

    def _index(self, wants: Sequence[_Rows]) -> None:
        """Make the shards of these rows known to their pools; the chunk tables that have them are fetched once."""
        unsure = [want for want in wants if not want.pool.complete]
        new = [found for want in unsure if len(found := want.shards[~want.pool.knows(want.shards)])]
        if not new:
            return
        self._shards.load_indexes(self._segments, np.unique(np.concatenate(new)).tolist())
        with self._changed:
            for want in wants:
                for shard in np.unique(want.shards[~want.pool.knows(want.shards)]).tolist():
                    array = self._shards.index(self._segments.shards[shard]).array(want.pool.array)
                    want.pool.add_shard(shard, array.rows, len(array.offset))


def _count(found: Sequence[Ints]) -> int:
    """How many different numbers there are."""
    numbers = np.sort(found[0] if len(found) == 1 else np.concatenate(found))
    return int(np.count_nonzero(numbers[1:] != numbers[:-1])) + (len(numbers) > 0)


def _distinct(want: _Rows) -> list[int]:
    found: list[int] = np.unique(want.pool.locate(want.shards, want.rows)[0]).tolist()
    return found


def _deliver_from(pool: RowPool, chunk: int, places: Sequence[_Place]) -> None:
    for out, at, row in places:
        rows = np.atleast_1d(row)
        pool.deliver(pool.find(np.full(len(rows), chunk), rows), out, np.atleast_1d(at))
