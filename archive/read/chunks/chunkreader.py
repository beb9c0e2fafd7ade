"""Chunks of stored arrays, decoded: out of the disk cache, others out of the store with few requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import side_by_side
from archive.read.chunks.chunkcache import DiskCache
from archive.read.chunks.rowpool import Array, RowPool
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import Shards
from archive.shard import Buffer, rawchunks

Key = tuple[RowPool, int]  # a chunk
_AT_ONCE_BYTES = 4 * 1024 * 1024  # of chunks that are decoded side by side, and then handed on
_SIDE_BY_SIDE_BYTES = 1024 * 1024  # less is decoded before another thread has begun
_SMALLER = 0.9  # of its rows: what did not become smaller than that is little more than copied


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


class Decoded(NamedTuple):
    """A chunk and its rows."""

    pool: RowPool
    chunk: int
    values: Array


class ChunkReader:
    """Reads chunks that are not in memory. Safe for threads."""

    def __init__(self, shards: Shards, segments: Segments, disk: DiskCache | None, ahead_bytes: int) -> None:
        self._shards = shards
        self._segments = segments
        self._numbers = {name: number for number, name in enumerate(segments.shards)}
        self._disk = disk
        self._ahead_bytes = ahead_bytes

    def read(self, keys: Iterable[Key], counts: Counts) -> Iterator[list[Decoded]]:
        """These chunks, some at a time: those that the disk cache has beside others of their shard."""
        by_shard = _by_shard(keys)
        wanted: dict[str, dict[str, Ints]] = {}
        cached: dict[str, dict[str, bytes]] = {}
        for number, found in by_shard.items():
            name = self._segments.shards[number]
            own = self._from_disk(number, found, counts)
            cached[name] = dict(own.values())
            if missing := _numbers(number, [key for key in found if key not in own]):
                wanted[name] = missing
        for name in cached.keys() - wanted.keys():
            yield from self._decoded(name, by_shard[self._numbers[name]], cached[name], counts)
        for name, reads, chunks in self._shards.stored_chunks(
            wanted, self._segments.owners, max_bytes=self._ahead_bytes
        ):
            counts.requests += len(reads.requests)
            counts.bytes += reads.fetched_bytes
            yield from self._decoded(name, by_shard[self._numbers[name]], chunks | cached[name], counts)
            del chunks  # so that the next shard is read into the same memory

    def _decoded(
        self, shard: str, keys: Sequence[Key], chunks: Mapping[str, Any], counts: Counts
    ) -> Iterator[list[Decoded]]:
        """Chunks of a shard, as many of an array at a time as come to some megabytes."""
        for pool, numbers in _by_pool(keys).items():
            rows = self._shards.index(shard).arrays[pool.array].rows
            step = max(1, _AT_ONCE_BYTES // (rows * pool.row_bytes))
            for start in range(0, len(numbers), step):
                yield self._together(shard, pool, numbers[start : start + step], chunks, counts)

    def _together(
        self, shard: str, pool: RowPool, own: Sequence[int], chunks: Mapping[str, Any], counts: Counts
    ) -> list[Decoded]:
        """Some chunks of one array."""
        stored = self._shards.index(shard).arrays[pool.array]
        first = int(pool.first_chunk[pool.shard_of[own[0]]])
        members = [stored.member[chunk - first] for chunk in own]
        found = _plain([chunks[member] for member in members], pool, stored.rows)
        for place, (chunk, member) in enumerate(zip(own, members, strict=True)):
            if found[place] is None:
                counts.requests += shard not in self._shards.views
                found[place] = self._shards.chunk(
                    shard, pool.array, chunk - first, pool.like, chunks, self._segments.owners
                )
            if self._disk is not None and not pool.on_disk[chunk]:
                crc32c = int(stored.crc32c[chunk - first])
                pool.on_disk[chunk] = self._disk.put(f"{shard}/{member}", chunks[member], crc32c)
        return [Decoded(pool, chunk, values) for chunk, values in zip(own, found, strict=True) if values is not None]

    def _from_disk(self, shard: int, keys: Sequence[Key], counts: Counts) -> dict[Key, tuple[str, bytes]]:
        """Chunk -> (its member's name, its bytes), of those that the disk cache has."""
        out: dict[Key, tuple[str, bytes]] = {}
        if self._disk is None:
            return out
        name = self._segments.shards[shard]
        index = self._shards.index(name)
        for pool, chunk in keys:
            array, number = index.arrays[pool.array], chunk - int(pool.first_chunk[shard])
            member = array.member[number]
            data = self._disk.get(f"{name}/{member}", int(array.size[number]), int(array.crc32c[number]))
            pool.on_disk[chunk] = data is not None
            if data is not None:
                out[pool, chunk] = member, data
        counts.disk_hits += len(out)
        return out


def _plain(stored: Sequence[Buffer], pool: RowPool, rows: int) -> list[Array | None]:
    """The rows of chunks that say themselves how they are stored; None for those that leave a doubt, or are damaged."""
    found: list[Array | None] = [None] * len(stored)

    def decode(place: int) -> None:
        found[place] = rawchunks.by_itself(pool.array, pool.dtype, pool.trailing, rows, stored[place])

    nbytes = len(stored) * rows * pool.row_bytes
    smaller = sum(map(len, stored)) < _SMALLER * nbytes
    many = smaller and nbytes >= _SIDE_BY_SIDE_BYTES
    side_by_side([partial(decode, place) for place in range(len(stored))], cores=None if many else 1)
    return found


def _by_pool(keys: Iterable[Key]) -> dict[RowPool, list[int]]:
    """The numbers of the chunks of each array, in order."""
    out: dict[RowPool, list[int]] = {}
    for pool, chunk in keys:
        out.setdefault(pool, []).append(chunk)
    return {pool: sorted(chunks) for pool, chunks in out.items()}


def _by_shard(keys: Iterable[Key]) -> dict[int, list[Key]]:
    """The chunks of each shard; those of an array one after the other."""
    out: dict[int, list[Key]] = {}
    for pool, chunks in _by_pool(keys).items():
        for shard, chunk in zip(pool.shard_of[chunks].tolist(), chunks, strict=True):
            out.setdefault(shard, []).append((pool, chunk))
    return dict(sorted(out.items()))


def _numbers(shard: int, keys: Iterable[Key]) -> dict[str, Ints]:
    """Array -> the numbers of its chunks among these."""
    return {pool.array: np.array(found) - pool.first_chunk[shard] for pool, found in _by_pool(keys).items()}
