"""Rows of stored arrays with pages: through a cache of whole chunks of many arrays. What is absent is taken out of the
disk cache, or fetched together with few requests, and decoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from archive.arrays import Ints, run_starts
from archive.base import side_by_side
from archive.read.chunks.diskcache import DiskCache
from archive.read.chunks.rowpool import Array, RowPool
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import Shards
from archive.read.chunks.wants import RowsWanted
from archive.shard import Buffer, codecs

Key = tuple[RowPool, int]  # a chunk
Decoded = tuple[RowPool, int, Array]  # a chunk and its rows
Target = tuple[Array, Any, Any]  # memory, and which rows of it are which of a chunk: a number where it is one, which is
# copied in a third of the time
_LEAST_SHARE = 16  # where not all fits, a part in so many is dealt out evenly, for arrays of small rows
_AT_ONCE_BYTES = 4 * 1024 * 1024  # of chunks that are decoded side by side, and then handed on
_SIDE_BY_SIDE_BYTES = 1024 * 1024  # less is decoded before another thread has begun
_SMALLER = 0.9  # of its rows: what did not become smaller than that is little more than copied


@dataclass
class Counts:
    """The cost of gathering. chunks: distinct chunks; hits: of these in memory;
    disk_hits: of these in the disk cache."""

    requests: int = 0
    bytes: int = 0
    chunks: int = 0
    hits: int = 0
    disk_hits: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


class ChunkStore:
    """The cache of one process. Safe for threads: no chunk is fetched twice at once."""

    def __init__(
        self, shards: Shards, segments: Segments, steps: int, cache_bytes: int, disk: DiskCache | None, ahead_bytes: int
    ) -> None:
        self._shards = shards
        self._segments = segments
        self._steps = steps
        self._cache_bytes = cache_bytes
        self._disk = disk
        self._ahead_bytes = ahead_bytes
        self._batches = 0
        self._pools: dict[tuple[str, str, tuple[int, ...]], RowPool] = {}
        self._changed = threading.Condition()
        self._busy: set[Key] = set()
        self.total = Counts()

    def _pool(self, want: RowsWanted) -> RowPool:
        """The pool that keeps the rows of an array of that stored dtype and shape."""
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
    def full(self) -> bool:
        """True if another chunk would push out one that is held, but for arrays of few bytes."""
        with self._changed:
            pools = self._pools.values()
            free, chunk = sum(p.free_bytes for p in pools), max((p.chunk_bytes for p in pools), default=0)
            return free < max(chunk, sum(p.max_bytes for p in pools) // _LEAST_SHARE)

    @property
    def touched_bytes(self) -> int:
        """Bytes of memory that the cache has taken; never more than the bound."""
        with self._changed:
            return sum(p.touched_bytes for p in self._pools.values())

    def fill(self, wants: Sequence[RowsWanted]) -> Counts:
        """Put the rows wanted into memory; what is absent here is fetched together, each chunk once."""
        counts = Counts()
        pools = self._known(wants)
        missing: dict[Key, list[Target]] = {}
        chunks: dict[RowPool, list[Ints]] = {}
        with self._changed:
            self._batches += 1
            for pool, want in zip(pools, wants, strict=True):
                chunks.setdefault(pool, []).append(self._from_memory(pool, want, missing))
        for found in chunks.values():
            numbers = np.sort(found[0] if len(found) == 1 else np.concatenate(found))
            counts.chunks += int(np.count_nonzero(numbers[1:] != numbers[:-1])) + (len(numbers) > 0)
        counts.hits = counts.chunks - len(missing)
        if missing:
            self._fetch(missing, counts)
        with self._changed:
            self.total += counts
        return counts

    def load(self, wants: Sequence[RowsWanted], wanted: Callable[[], bool] = lambda: True) -> Counts:
        """Bring the chunks of these rows into the cache, as far as they fit; stops early once `wanted` says no."""
        counts = Counts()
        keys: set[Key] = set()
        for pool, want in zip(self._known(wants), wants, strict=True):
            with self._changed:
                found = np.unique(pool.locate(want.shard, want.rows)[0])
                keys.update((pool, chunk) for chunk in found[~pool.present[found]].tolist())
        self._fetch({key: [] for key in keys}, counts, wanted)
        with self._changed:
            self.total += counts
        return counts

    def local_bytes(self, wants: Sequence[RowsWanted]) -> tuple[int, int]:
        """Bytes of these rows that are in memory or in the disk cache, and of all of them."""
        have = whole = 0
        for want in wants:
            pool = self._pool(want)
            with self._changed:
                known = pool.knows(want.shard)
                chunk = pool.locate(want.shard[known], want.rows[known])[0]
                here = pool.present[chunk] | pool.on_disk[chunk]
            have += int(here.sum()) * pool.row_bytes
            whole += len(want.rows) * pool.row_bytes
        return have, whole

    def _from_memory(self, pool: RowPool, want: RowsWanted, missing: dict[Key, list[Target]]) -> Ints:
        """Put what is here in place, and add what is not to `missing`; the chunks of all rows."""
        chunk, row = pool.locate(want.shard, want.rows)
        places = pool.find(chunk, row, self._batches)
        absent = np.flatnonzero(places < 0)
        if not len(absent):
            pool.deliver(places, want.out, want.at)
            return chunk
        here = np.flatnonzero(places >= 0)
        pool.deliver(places[here], want.out, here if want.at is None else want.at[here])
        absent = absent[np.argsort(chunk[absent], kind="stable")]
        numbers, rows, at = chunk[absent], row[absent], absent if want.at is None else want.at[absent]
        heads = run_starts(numbers)
        ends = np.append(heads[1:], len(numbers)).tolist()
        for number, first, end in zip(numbers[heads].tolist(), heads.tolist(), ends, strict=True):
            mine: Any = first if end - first == 1 else slice(first, end)
            missing.setdefault((pool, number), []).append((want.out, at[mine], rows[mine]))
        return chunk

    def _fetch(
        self, places: dict[Key, list[Target]], counts: Counts, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Fetch chunks and put their rows in place; those that another thread is fetching are waited for."""
        keys = set(places)
        while keys and wanted():
            with self._changed:
                while keys <= self._busy:
                    self._changed.wait()
                here = {key for key in keys if key[0].present[key[1]]}
                for pool, chunk in here:
                    self._deliver(pool, chunk, places[pool, chunk])
                mine = keys - here - self._busy
                self._busy |= mine
            keys -= here
            try:
                for found in self._read(mine, counts):
                    self._hand_out(found, places)
                    keys -= {(pool, chunk) for pool, chunk, _ in found}
                    if not wanted():
                        return
            finally:
                with self._changed:
                    self._busy -= mine & keys  # others may have taken up again what was delivered
                    self._changed.notify_all()

    def _hand_out(self, found: Sequence[Decoded], places: dict[Key, list[Target]]) -> None:
        """Put rows of chunks in place, and keep the chunks."""
        for pool, chunk, values in found:
            for out, at, row in places[pool, chunk]:
                out[at] = values[row]
        with self._changed:
            for pool, chunk, values in found:
                pool.put(chunk, values)
                self._busy.discard((pool, chunk))
            self._changed.notify_all()

    def _deliver(self, pool: RowPool, chunk: int, places: Sequence[Target]) -> None:
        """Put rows of a chunk that is here in place."""
        for out, at, row in places:
            rows = np.atleast_1d(row)
            found = pool.find(np.full(len(rows), chunk), rows, self._batches)
            pool.deliver(found, out, np.atleast_1d(at))

    def _known(self, wants: Sequence[RowsWanted]) -> list[RowPool]:
        """The pool of each, which knows its shards then; the chunk tables that have them are fetched once."""
        pools = [self._pool(want) for want in wants]
        unsure = [(pool, want.shard) for pool, want in zip(pools, wants, strict=True) if not pool.complete]
        new = [found for pool, shards in unsure if len(found := shards[~pool.knows(shards)])]
        if new:
            self._shards.load_indexes(self._segments, np.unique(np.concatenate(new)).tolist())
            with self._changed:
                for pool, shards in unsure:
                    for shard in np.unique(shards[~pool.knows(shards)]).tolist():
                        array = self._shards.index(self._segments.shards[shard]).array(pool.array)
                        pool.add_shard(shard, array.rows, len(array.offset))
        return pools

    # -- chunks that are not in memory ---------------------------------------------------------------------------------

    def _read(self, keys: Iterable[Key], counts: Counts) -> Iterator[list[Decoded]]:
        """These chunks, some at a time: those that the disk cache has beside others of their shard."""
        by_shard = self._by_shard(keys)
        wanted: dict[str, dict[str, Ints]] = {}
        cached: dict[str, dict[str, bytes]] = {}
        for shard, pools in by_shard.items():
            cached[shard] = self._from_disk(shard, pools)
            counts.disk_hits += len(cached[shard])
            for pool, chunks in pools.items():
                if missing := [chunk for chunk in chunks if self._disk is None or not pool.on_disk[chunk]]:
                    first = pool.first_chunk[pool.shard_of[missing[0]]]
                    wanted.setdefault(shard, {})[pool.array] = np.array(missing) - first
        for shard in cached.keys() - wanted.keys():
            yield from self._decoded(shard, by_shard[shard], cached[shard], counts)
        for shard, reads, stored in self._shards.stored_chunks(
            wanted, self._segments.owners, max_bytes=self._ahead_bytes
        ):
            counts.requests += len(reads.requests)
            counts.bytes += reads.fetched_bytes
            yield from self._decoded(shard, by_shard[shard], stored | cached[shard], counts)
            del stored  # so that the next shard is read into the same memory

    def _by_shard(self, keys: Iterable[Key]) -> dict[str, dict[RowPool, list[int]]]:
        """The chunks of each shard and array, in order."""
        out: dict[str, dict[RowPool, list[int]]] = {}
        for number, chunk, pool in sorted(((int(p.shard_of[c]), c, p) for p, c in keys), key=lambda one: one[:2]):
            out.setdefault(self._segments.shards[number], {}).setdefault(pool, []).append(chunk)
        return out

    def _from_disk(self, shard: str, pools: Mapping[RowPool, Sequence[int]]) -> dict[str, bytes]:
        """The bytes of the members that the disk cache has."""
        out: dict[str, bytes] = {}
        if self._disk is None:
            return out
        for pool, chunks in pools.items():
            array, first = self._shards.index(shard).arrays[pool.array], int(pool.first_chunk[pool.shard_of[chunks[0]]])
            for chunk in chunks:
                member, size, crc32c = (column[chunk - first] for column in (array.member, array.size, array.crc32c))
                data = self._disk.get(f"{shard}/{member}", int(size), int(crc32c))
                pool.on_disk[chunk] = data is not None
                if data is not None:
                    out[member] = data
        return out

    def _decoded(
        self, shard: str, pools: Mapping[RowPool, Sequence[int]], stored: Mapping[str, Any], counts: Counts
    ) -> Iterator[list[Decoded]]:
        """Chunks of a shard, as many of an array at a time as come to some megabytes."""
        for pool, chunks in pools.items():
            rows = self._shards.index(shard).arrays[pool.array].rows
            step = max(1, _AT_ONCE_BYTES // (rows * pool.row_bytes))
            for start in range(0, len(chunks), step):
                yield self._together(shard, pool, chunks[start : start + step], stored, counts)

    def _together(
        self, shard: str, pool: RowPool, chunks: Sequence[int], stored: Mapping[str, Any], counts: Counts
    ) -> list[Decoded]:
        """Some chunks of one array."""
        array, first = self._shards.index(shard).arrays[pool.array], int(pool.first_chunk[pool.shard_of[chunks[0]]])
        members = [array.member[chunk - first] for chunk in chunks]
        found = _plain([stored[member] for member in members], pool, array.rows)
        out: list[Decoded] = []
        for chunk, member, values in zip(chunks, members, found, strict=True):
            if values is None:
                counts.requests += shard not in self._shards.views
                values = self._shards.chunk(
                    shard, pool.array, chunk - first, pool.like, stored[member], self._segments.owners
                )
            if self._disk is not None and not pool.on_disk[chunk]:
                crc32c = int(array.crc32c[chunk - first])
                pool.on_disk[chunk] = self._disk.put(f"{shard}/{member}", stored[member], crc32c)
            out.append((pool, chunk, values))
        return out


def _plain(stored: Sequence[Buffer], pool: RowPool, rows: int) -> list[Array | None]:
    """The rows of chunks that say themselves how they are stored; None for those that leave a doubt, or are damaged."""
    found: list[Array | None] = [None] * len(stored)

    def decode(place: int) -> None:
        found[place] = codecs.by_itself(pool.array, pool.dtype, pool.trailing, rows, stored[place])

    nbytes = len(stored) * rows * pool.row_bytes
    smaller = sum(map(len, stored)) < _SMALLER * nbytes
    many = smaller and nbytes >= _SIDE_BY_SIDE_BYTES
    side_by_side([partial(decode, place) for place in range(len(stored))], cores=None if many else 1)
    return found
