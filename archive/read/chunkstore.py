"""Engine: rows of stored arrays through a cache of whole chunks: what is absent is fetched, for all arrays together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import CorruptChunkError
from archive.read.chunkcache import DiskCache
from archive.read.fieldrows import Rows
from archive.read.reader import Reader
from archive.read.rowpool import Array, RowPool
from archive.read.stepmap import Segments
from archive.shard import rawchunks

Key = tuple[RowPool, int]  # a chunk
Deliver = Callable[[RowPool, int, Array], None]
_LEAST_SHARE = 16  # where not all fits, a part in so many is dealt out evenly, for arrays of small rows


@dataclass
class Counts:
    """What some gathering took. chunks: distinct chunks; hits: of these in memory;
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


class _Place(NamedTuple):
    """Where rows of one chunk go."""

    out: Array
    at: Ints
    row: Ints


class ChunkStore:
    """The cache of one process. Safe for threads: no chunk is fetched twice at once."""

    def __init__(
        self, reader: Reader, segments: Segments, steps: int, cache_bytes: int, disk: DiskCache | None, ahead_bytes: int
    ) -> None:
        self._reader, self._segments, self._steps = reader, segments, steps
        self._cache_bytes, self._disk, self._ahead_bytes = cache_bytes, disk, ahead_bytes
        self._pools: dict[tuple[str, str, tuple[int, ...]], RowPool] = {}
        self._changed = threading.Condition()
        self._busy: set[Key] = set()
        self._owners = _Owners(reader, segments)
        self.pid = os.getpid()
        self.total = Counts()

    def pool(self, array: str, dtype: np.dtype[Any], trailing: tuple[int, ...]) -> RowPool:
        """Where the rows of an array of that stored dtype and shape are kept."""
        key = (array, dtype.str, trailing)
        with self._changed:
            if key not in self._pools:
                self._pools[key] = RowPool(array, dtype, trailing, len(self._segments.shards))
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

    def take(self, wants: Sequence[Rows]) -> tuple[list[Array], Counts]:
        """The rows wanted, in arrays of their own; what is absent is fetched together, each chunk once."""
        counts = Counts()
        self._index(wants)
        with self._changed:
            missing: dict[Key, list[_Place]] = {}
            for pool in {w.pool for w in wants}:
                pool.use()
            outs: list[Array] = []
            chunks: dict[RowPool, list[Ints]] = {}
            for want in wants:
                outs.append(self._from_memory(want, missing, chunks))
        counts.chunks = sum(len(np.unique(np.concatenate(found))) for found in chunks.values())
        counts.hits = counts.chunks - len(missing)
        if missing:
            self._fill(missing, counts)
        with self._changed:
            self.total += counts
        return outs, counts

    def load(self, wants: Sequence[Rows], wanted: Callable[[], bool] = lambda: True) -> Counts:
        """Bring the chunks of these rows into the cache, as far as they fit; stops early once `wanted` says no."""
        counts = Counts()
        self._index(wants)
        with self._changed:
            keys = {(want.pool, chunk) for want in wants for chunk in _distinct(want) if not want.pool.present[chunk]}
        self._fill({key: [] for key in keys}, counts, wanted)
        with self._changed:
            self.total += counts
        return counts

    def local(self, want: Rows) -> Any:
        """Mask of the rows that are in memory or in the disk cache."""
        with self._changed:
            known = want.pool.knows(want.shards)
            chunk = want.pool.locate(want.shards[known], want.rows[known])[0]
            known[known] = want.pool.present[chunk] | want.pool.on_disk[chunk]
            return known

    def _from_memory(self, want: Rows, missing: dict[Key, list[_Place]], chunks: dict[RowPool, list[Ints]]) -> Array:
        pool = want.pool
        chunk, row = pool.locate(want.shards, want.rows)
        chunks.setdefault(pool, []).append(chunk)
        places = pool.find(chunk, row)
        absent = np.flatnonzero(places < 0)
        if not len(absent):
            return pool.take(places)
        out = np.empty((len(chunk), *pool.trailing), pool.dtype)
        here = np.flatnonzero(places >= 0)
        out[here] = pool.take(places[here])
        absent = absent[np.argsort(chunk[absent], kind="stable")]
        numbers, starts = np.unique(chunk[absent], return_index=True)
        for number, at in zip(numbers.tolist(), np.split(absent, starts[1:]), strict=True):
            missing.setdefault((pool, number), []).append(_Place(out, at, row[at]))
        return out

    def _fill(self, places: dict[Key, list[_Place]], counts: Counts, wanted: Callable[[], bool] = lambda: True) -> None:
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
                for pool, chunk, values in self._read(mine, counts):
                    for out, at, row in places[pool, chunk]:
                        out[at] = values[row]
                    with self._changed:
                        pool.put(chunk, values)
                        keys.discard((pool, chunk))
                        self._busy.discard((pool, chunk))
                        self._changed.notify_all()
                    if not wanted():
                        return
            finally:
                with self._changed:
                    self._busy -= mine & keys  # others may have taken up again what was delivered
                    self._changed.notify_all()

    def _read(self, keys: set[Key], counts: Counts) -> Iterator[tuple[RowPool, int, Array]]:
        """These chunks, decoded: those of the disk cache, then those of the store, with few requests."""
        by_shard: dict[int, list[Key]] = {}
        for pool, chunk in sorted(keys, key=lambda key: (key[0].shard_of[key[1]], key[0].array, key[1])):
            by_shard.setdefault(int(pool.shard_of[chunk]), []).append((pool, chunk))
        wanted: dict[str, dict[str, tuple[Ints, Ints]]] = {}
        cached: dict[str, dict[str, bytes]] = {}
        for number, found in by_shard.items():
            name = self._segments.shards[number]
            own = self._from_disk(number, found, counts)
            cached[name] = dict(own.values())
            runs = _runs(number, [key for key in found if key not in own])
            if runs:
                wanted[name] = runs
        for name in cached.keys() - wanted.keys():
            yield from self._decoded(name, by_shard[self._owners.number(name)], cached[name], counts)
        for name, reads, chunks in self._reader.stored_chunks(wanted, self._owners, max_bytes=self._ahead_bytes):
            counts.requests += len(reads.requests)
            counts.bytes += reads.fetched_bytes
            yield from self._decoded(name, by_shard[self._owners.number(name)], chunks | cached[name], counts)

    def _decoded(
        self, shard: str, keys: Sequence[Key], chunks: Mapping[str, Any], counts: Counts
    ) -> Iterator[tuple[RowPool, int, Array]]:
        index = self._reader.index(shard)
        for pool, chunk in keys:
            array, number = index.arrays[pool.array], chunk - int(pool.first_chunk[pool.shard_of[chunk]])
            member = array.member[number]
            plain = rawchunks.recognised(pool.array, pool.dtype, pool.trailing, array.rows, chunks[member])
            values = None if plain is None else rawchunks.one_chunk(plain, number, chunks)
            if values is None:
                values = self._by_metadata(shard, pool, number, chunks, counts)
            if self._disk is not None and not pool.on_disk[chunk]:
                pool.on_disk[chunk] = self._disk.put(f"{shard}/{member}", chunks[member], int(array.crc32c[number]))
            yield pool, chunk, values

    def _by_metadata(self, shard: str, pool: RowPool, number: int, chunks: Mapping[str, Any], counts: Counts) -> Array:
        """The rows of a chunk of another kind, or one that is damaged: the shard's metadata says how to read it."""
        counts.requests += not self._reader.has_view(shard)
        values = self._reader.decoded_chunk(shard, pool.array, number, chunks, self._owners)
        if values.dtype != pool.dtype or values.shape[1:] != pool.trailing:
            raise CorruptChunkError(
                f"array {pool.array!r} of shard {shard} of {self._reader.snapshot.storage.url} holds "
                f"{values.dtype}{list(values.shape[1:])}, where its schema says {pool.dtype}{list(pool.trailing)}; "
                "run `archive verify`"
            )
        return values

    def _from_disk(self, shard: int, keys: Sequence[Key], counts: Counts) -> dict[Key, tuple[str, bytes]]:
        """Chunk -> (its member's name, its bytes), of those that the disk cache has."""
        out: dict[Key, tuple[str, bytes]] = {}
        if self._disk is None:
            return out
        name = self._segments.shards[shard]
        index = self._reader.index(name)
        for pool, chunk in keys:
            array, number = index.arrays[pool.array], chunk - int(pool.first_chunk[shard])
            member = array.member[number]
            data = self._disk.get(f"{name}/{member}", int(array.size[number]), int(array.crc32c[number]))
            pool.on_disk[chunk] = data is not None
            if data is not None:
                out[pool, chunk] = member, data
        counts.disk_hits += len(out)
        return out

    def _index(self, wants: Sequence[Rows]) -> None:
        """Make the shards of these rows known to their pools; the chunk tables that have them are fetched once."""
        new = [found for want in wants if len(found := want.shards[~want.pool.knows(want.shards)])]
        if not new:
            return
        shards = np.unique(np.concatenate(new)).tolist()
        unread = [self._owners.row(n) for n in shards if not self._reader.has_index(self._segments.shards[n])]
        self._reader.load_indexes(list(self._reader.segments(unread).values()) if unread else [])
        with self._changed:
            for want in wants:
                for shard in np.unique(want.shards[~want.pool.knows(want.shards)]).tolist():
                    array = self._reader.index(self._segments.shards[shard]).array(want.pool.array)
                    want.pool.add_shard(shard, array.rows, len(array.offset))


class _Owners(Mapping[str, str]):
    """Shard -> an episode that lies in it, looked up when asked for: for errors."""

    def __init__(self, reader: Reader, segments: Segments) -> None:
        self._reader, self._segments = reader, segments
        self._rows: Ints | None = None
        self._known: dict[str, str] = {}
        self._numbers = {name: number for number, name in enumerate(segments.shards)}

    def number(self, shard: str) -> int:
        """The shard's place among all shards."""
        return self._numbers[shard]

    def row(self, shard: int) -> int:
        """A row of the segments table that lies in that shard."""
        if self._rows is None:
            rows = np.zeros(len(self._segments.shards), np.int64)
            held = np.flatnonzero(self._segments.shard >= 0)
            rows[self._segments.shard[held]] = held
            self._rows = rows
        return int(self._rows[shard])

    def __getitem__(self, shard: str) -> str:
        if shard not in self._known:
            row = self.row(self.number(shard))
            self._known[shard] = self._reader.snapshot.take([row], ["episode_id"])["episode_id"][0].as_py()
        return self._known[shard]

    def __iter__(self) -> Iterator[str]:
        return iter(self._segments.shards)

    def __len__(self) -> int:
        return len(self._segments.shards)


def _distinct(want: Rows) -> list[int]:
    found: list[int] = np.unique(want.pool.locate(want.shards, want.rows)[0]).tolist()
    return found


def _deliver_from(pool: RowPool, chunk: int, places: Sequence[_Place]) -> None:
    for out, at, row in places:
        out[at] = pool.take(pool.find(np.full(len(row), chunk), row))


def _runs(shard: int, keys: Sequence[Key]) -> dict[str, tuple[Ints, Ints]]:
    """Array -> runs of its rows that the chunks hold."""
    numbers: dict[str, list[int]] = {}
    rows: dict[str, int] = {}
    for pool, chunk in keys:
        numbers.setdefault(pool.array, []).append(chunk - int(pool.first_chunk[shard]))
        rows[pool.array] = int(pool.rows_per_chunk[shard])
    return {
        name: (np.array(found, np.int64) * rows[name], (np.array(found, np.int64) + 1) * rows[name])
        for name, found in numbers.items()
    }
