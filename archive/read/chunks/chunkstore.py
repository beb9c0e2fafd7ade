"""Rows of stored arrays through a cache of whole chunks of many arrays, in pages. Absent chunks come from the disk
cache, or are fetched together with few requests, and decoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from archive.arrays import Ints, ascending
from archive.base import CorruptManifestError
from archive.fields import Array
from archive.read.chunks.diskcache import DiskCache
from archive.read.chunks.fetch import Fetch, Member, Piece, Rooms, ShardRead
from archive.read.chunks.rowpool import RowPool
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import ReadPlan, Shards
from archive.read.chunks.wants import Decode, RowsWanted, of_each
from archive.shard import ShardView

Key = tuple[RowPool, int]  # a chunk
Target = tuple[Array, Any, Any]  # memory, its rows, and their rows in a chunk: a number where it is one, which is
# copied in a third of the time
_LEAST_SHARE = 16  # where not all fits, 1/16 is dealt out evenly, for arrays of small rows
_REMOTE_GAP_BYTES = 256 * 1024  # between chunks: these bytes come sooner than another answer


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
        """Give each array its share of the bytes: in proportion to its rows, so that all are kept alike."""
        pools = list(self._pools.values())
        total = sum(p.row_bytes for p in pools)
        even = 0.0 if self._steps * total * 1.25 < self._cache_bytes else total / _LEAST_SHARE / len(pools)
        whole = sum(p.row_bytes + even for p in pools)
        for p in pools:
            p.resize(int(self._cache_bytes * (p.row_bytes + even) / whole))

    @property
    def full(self) -> bool:
        """True if another chunk would evict one, but for arrays of few bytes."""
        with self._changed:
            pools = self._pools.values()
            free, chunk = sum(p.free_bytes for p in pools), max((p.chunk_bytes for p in pools), default=0)
            return free < max(chunk, sum(p.max_bytes for p in pools) // _LEAST_SHARE)

    @property
    def touched_bytes(self) -> int:
        """Bytes of memory that the cache has used; never more than the bound."""
        with self._changed:
            return sum(p.touched_bytes for p in self._pools.values())

    def fill(self, wants: Sequence[RowsWanted]) -> Counts:
        """Put the wanted rows into memory; absent chunks are fetched together, each once."""
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
        """Bring the chunks of these rows into the cache, as far as they fit; stop early once `wanted` is false."""
        counts = Counts()
        keys: set[Key] = set()
        for pool, want in zip(self._known(wants), wants, strict=True):
            with self._changed:
                found = ascending(pool.locate(want.shard, want.rows)[0])
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
        """Copy the rows that are in memory, and add the others to `missing`; the chunks of all rows."""
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
        for number, own in of_each(numbers):
            mine: Any = own.start if own.stop - own.start == 1 else own
            missing.setdefault((pool, number), []).append((want.out, at[mine], rows[mine]))
        return chunk

    def _fetch(
        self, places: dict[Key, list[Target]], counts: Counts, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Fetch chunks and put their rows in place; wait for chunks that another thread is fetching."""
        left = set(places)

        def hand_out(key: Key, values: Array) -> None:
            """Put rows of a chunk in place, and keep the chunk."""
            for out, at, row in places[key]:
                out[at] = values[row]
            with self._changed:
                key[0].put(key[1], values)
                self._busy.discard(key)
                left.discard(key)
                self._changed.notify_all()

        while left and wanted():
            with self._changed:
                while left <= self._busy:
                    self._changed.wait()
                here = {key for key in left if key[0].present[key[1]]}
                for pool, chunk in here:
                    self._deliver(pool, chunk, places[pool, chunk])
                mine = left - here - self._busy
                self._busy |= mine
            left -= here
            try:
                self._read(mine, hand_out, counts, wanted)
            finally:
                with self._changed:
                    self._busy -= mine & left  # others may use again what was delivered
                    self._changed.notify_all()

    def _deliver(self, pool: RowPool, chunk: int, places: Sequence[Target]) -> None:
        """Put rows of a chunk in memory in place."""
        for out, at, row in places:
            rows = np.atleast_1d(row)
            found = pool.find(np.full(len(rows), chunk), rows, self._batches)
            pool.deliver(found, out, np.atleast_1d(at))

    def _known(self, wants: Sequence[RowsWanted]) -> list[RowPool]:
        """The pool of each want, with its shards added; their chunk tables are fetched once."""
        pools = [self._pool(want) for want in wants]
        unsure = [(pool, want.shard) for pool, want in zip(pools, wants, strict=True) if not pool.complete]
        new = [found for pool, shards in unsure if len(found := shards[~pool.knows(shards)])]
        if new:
            self._shards.load_indexes(self._segments, ascending(np.concatenate(new)).tolist())
            with self._changed:
                for pool, shards in unsure:
                    for shard in ascending(shards[~pool.knows(shards)]).tolist():
                        array = self._shards.index(self._segments.shards[shard]).array(pool.array)
                        pool.add_shard(shard, array.rows, len(array.offset))
        return pools

    # -- chunks that are not in memory ---------------------------------------------------------------------------------

    def _read(
        self, keys: Iterable[Key], hand_out: Callable[[Key, Array], None], counts: Counts, wanted: Callable[[], bool]
    ) -> None:
        """Hand out these chunks, from the disk cache, or fetched with others of their shard."""
        shards, owner, mine = self._shards, self._segments.owner, self._by_shard(keys)
        held = {shard: self._from_disk(shard, chunks) for shard, chunks in mine.items()}
        reads = {}
        for shard, chunks in mine.items():
            absent: dict[str, list[int]] = {}
            for (name, number), (pool, chunk) in chunks.items():
                if self._disk is None or not pool.on_disk[chunk]:
                    absent.setdefault(name, []).append(number)
            gap = _REMOTE_GAP_BYTES if shards.roots.is_remote([shard]) else None
            reads[shard] = shards.index(shard).plan_chunks({name: np.array(of) for name, of in absent.items()}, gap)

        def begin(come: Fetch, shard: str) -> ShardRead:
            chunks, stored = mine[shard], shards.index(shard).arrays
            counts.requests += len(reads[shard].requests)
            counts.bytes += reads[shard].fetched_bytes
            counts.disk_hits += len(held[shard])

            def put(piece: Piece, decode: Decode) -> None:
                hand_out(chunks[piece.array, piece.chunk], decode(None))

            def keep(piece: Piece, rooms: Rooms) -> None:
                pool, chunk = chunks[piece.array, piece.chunk]
                if self._disk is not None and not pool.on_disk[chunk]:
                    pool.on_disk[chunk] = self._disk.put(f"{shard}/{piece.member}", rooms[0], piece.crc32c)

            def metadata() -> ShardView:
                counts.requests += shard not in shards.views
                return shards.view(shard, owner)

            arrays = {name: (pool.like, number * stored[name].rows + 1) for (name, number), (pool, _) in chunks.items()}
            out = ShardRead(come, shard, arrays, put, metadata)
            out.hold(held.pop(shard), keep)
            return out

        come = Fetch(shards, owner, ReadPlan(reads), begin, wanted, self._ahead_bytes)
        (Fetch.as_they_come if shards.roots.is_remote(reads) else Fetch.ahead)(come)

    def _by_shard(self, keys: Iterable[Key]) -> dict[str, dict[tuple[str, int], Key]]:
        """The chunks of each shard by their array and number there, in order."""
        out: dict[str, dict[tuple[str, int], Key]] = {}
        for number, chunk, pool in sorted(((int(p.shard_of[c]), c, p) for p, c in keys), key=lambda one: one[:2]):
            shard, place = self._segments.shards[number], (pool.array, chunk - int(pool.first_chunk[number]))
            if out.setdefault(shard, {}).setdefault(place, (pool, chunk))[0] is not pool:
                raise CorruptManifestError(
                    f"the segments table has rows of two kinds for array {pool.array!r} of shard {shard!r}; run "
                    "`archive verify`"
                )
        return out

    def _from_disk(self, shard: str, chunks: Mapping[tuple[str, int], Key]) -> list[Member]:
        """The members that the disk cache has."""
        out: list[Member] = []
        if self._disk is None:
            return out
        for (name, number), (pool, chunk) in chunks.items():
            stored = self._shards.index(shard).arrays[name]
            member, size, crc32c = stored.member[number], int(stored.size[number]), int(stored.crc32c[number])
            data = self._disk.get(f"{shard}/{member}", size, crc32c)
            pool.on_disk[chunk] = data is not None
            if data is not None:
                out.append((Piece(0, 0, size, member, crc32c, name, number), [memoryview(data)]))
        return out
