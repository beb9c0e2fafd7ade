"""Rows of stored arrays into memory: planned as byte ranges, fetched shard by shard,
each chunk decoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, merge_runs
from archive.base import side_by_side, usable_cores
from archive.manifest import ArrayChunks, ShardReads, chunkindex
from archive.read.chunks import arriving, landing, placing
from archive.read.chunks.arriving import Asked
from archive.read.chunks.landing import Found, Landed
from archive.read.chunks.placing import ChunkRows, Want
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import Owners, ReadPlan, Shards
from archive.shard import Buffer, ShardView

SIDE_BY_SIDE_BYTES = 1024 * 1024  # of a shard: less is decoded before another thread has begun
MANY_SHARDS = 4  # for each core: then none waits long for another at the end


class Tail(NamedTuple):
    """A chunk in which reading stopped."""

    chunk: int
    member: str
    data: bytes


Tails = dict[str, dict[str, Tail]]  # shard -> array -> chunk


def fill(shards: Shards, segments: Segments, wants: Sequence[Want], tails: Tails | None = None) -> None:
    """Put rows of stored arrays into memory; each chunk is fetched once and decoded once.

    tails: of a caller that reads on from where it stopped, for the chunks in which it stopped, so as not to fetch them
    again; kept up to date.
    """
    wanted = _by_shard(shards, segments, wants)
    runs = {shard: _runs(arrays) for shard, arrays in wanted.items()}
    known = {shard: view for shard in wanted if (view := shards.views.get(shard)) is not None}
    reading = shards.plan(runs, known, {} if tails is None else _numbers(tails))
    filling = _Filling(shards, wanted, runs, known, segments.owners, tails)
    large = reading.fetched_bytes >= landing.LEAST_BYTES
    if shards.is_remote(wanted):
        filling.as_it_comes(reading)
    elif large and landing.worth_while(wanted, shards.indexes) and shards.scatters(wanted):
        filling.directly(reading)
    else:
        filling.read_ahead(reading)
    if tails is not None:
        for shard in tails.keys() - wanted.keys():
            del tails[shard]  # reading has gone on to other shards


@dataclass(frozen=True)
class _Filling:
    """Rows that are wanted, by shard and array, and the runs that they make up there; and what is at hand."""

    shards: Shards
    wanted: Mapping[str, Mapping[str, Sequence[Want]]]
    runs: Mapping[str, chunkindex.Wanted]
    known: Mapping[str, ShardView]
    owners: Owners
    tails: Tails | None

    def read_ahead(self, reading: ReadPlan) -> None:
        """Shard by shard, while those that follow are on their way."""
        for shard, reads, chunks in self.shards.fetched(reading, self.owners):
            self._put(shard, Landed(chunks), self._found(shard), cores=_cores(reads))
            del chunks  # so that the next shard is read into the same memory

    def as_it_comes(self, reading: ReadPlan) -> None:
        """Several requests of any shards at once, whose chunks are put into their places when they are there."""
        asked = {shard: self._asked(shard, reads) for shard, reads in reading.shards.items()}
        for shard, kept in arriving.fill(self.shards, asked, self.owners).items():
            if self.tails is not None:
                self.tails.setdefault(shard, {}).update(_tails(self.shards, shard, self.runs[shard], kept))

    def _asked(self, shard: str, reads: ShardReads) -> Asked:
        tails = {} if self.tails is None else self.tails.get(shard, {})
        held = {tail.member: tail.data for tail in tails.values()}
        keep = {} if self.tails is None else _last_members(self.shards, shard, self.runs[shard])
        members = frozenset(member for _, member in keep.values())
        return Asked(reads, self.wanted[shard], self.runs[shard], self.known.get(shard), held, members)

    def directly(self, reading: ReadPlan) -> None:
        """What can be is read into its place. Of many shards each is a core's own, else the cores share each."""
        many = len(reading.shards) >= MANY_SHARDS * usable_cores()
        calls = [
            partial(self._read_directly, shard, reads, 1 if many else _cores(reads))
            for shard, reads in reading.shards.items()
        ]
        side_by_side(calls, cores=None if many else 1)

    def _read_directly(self, shard: str, reads: ShardReads, cores: int | None) -> None:
        found = self._found(shard)
        into = landing.homes(found, self.wanted[shard], self.shards.index(shard))
        self._put(shard, self.shards.landed(shard, reads, into, self.owners, cores), found, cores)

    def _found(self, shard: str) -> Found:
        index = self.shards.index(shard)
        return {name: placing.chunk_rows(wants, index.array(name).rows) for name, wants in self.wanted[shard].items()}

    def _put(self, shard: str, landed: Landed, found: Found, cores: int | None) -> None:
        """Decode what is not in its place yet."""
        shards, held = self.shards, {} if self.tails is None else self.tails.get(shard, {})
        landed.chunks |= {tail.member: tail.data for tail in held.values()}
        view = self.known.get(shard) or shards.add_view(shard, bytes(landed.chunks.pop("zarr.json")))
        calls: list[placing.Call] = []
        for array, wants in self.wanted[shard].items():
            ranges = list(zip(*(edges.tolist() for edges in self.runs[shard][array]), strict=True))
            decode = shards.decoder(view, shard, array, wants[0].like, ranges, landed, self.owners)
            rest = _rest(found[array], landed, shards.index(shard).array(array), view.is_raw(array))
            calls += placing.calls(rest, decode)
        side_by_side(calls, cores=cores)
        if self.tails is not None:
            self.tails.setdefault(shard, {}).update(_tails(shards, shard, self.runs[shard], landed))


def _cores(reads: ShardReads) -> int | None:
    """How many cores share a shard; None for all."""
    return None if reads.needed_bytes >= SIDE_BY_SIDE_BYTES else 1


def _rest(found: list[list[ChunkRows]], landed: Landed, stored: ArrayChunks, raw: bool) -> list[list[ChunkRows]]:
    """What is not in its place yet; all of it, where chunks are not stored as they lie in memory after all."""
    if not landed.sound or not raw:
        return found
    return [[one for one in of if stored.member[one.number] not in landed.sound] for of in found]


def plan(shards: Shards, segments: Segments, wants: Sequence[Want]) -> ReadPlan:
    """What fetching these rows takes, metadata included; the same whatever was read before."""
    by_shard = _by_shard(shards, segments, wants)
    return shards.plan({shard: _runs(arrays) for shard, arrays in by_shard.items()}, {}, {})


def _by_shard(shards: Shards, segments: Segments, wants: Sequence[Want]) -> dict[str, dict[str, list[Want]]]:
    """Shard -> array -> the rows wanted of it; the shards' indexes are loaded."""
    out: dict[int, dict[str, list[Want]]] = {}
    for want in wants:
        for shard, own in want.by_shard():
            out.setdefault(shard, {}).setdefault(want.array, []).append(own)
    shards.load_indexes(segments, list(out))
    return {segments.shards[shard]: arrays for shard, arrays in out.items()}


def _tails(shards: Shards, shard: str, wanted: chunkindex.Wanted, chunks: Mapping[str, Buffer]) -> dict[str, Tail]:
    """The chunk of each array that holds the last of these rows."""
    last = _last_members(shards, shard, wanted)
    return {name: Tail(chunk, member, bytes(chunks[member])) for name, (chunk, member) in last.items()}


def _last_members(shards: Shards, shard: str, wanted: chunkindex.Wanted) -> dict[str, tuple[int, str]]:
    """Of each array the chunk that holds the last of these rows, and its member."""
    out = {}
    for name, (_, stops) in wanted.items():
        array = shards.index(shard).arrays[name]
        last = (int(stops.max()) - 1) // array.rows
        out[name] = (last, array.member[last])
    return out


def _runs(arrays: Mapping[str, Sequence[Want]]) -> dict[str, tuple[Ints, Ints]]:
    """Array -> runs of its rows that are wanted, sorted, apart."""
    out = {}
    for name, wants in arrays.items():
        one = len(wants) == 1
        start = wants[0].start if one else np.concatenate([want.start for want in wants])
        stop = wants[0].stop if one else np.concatenate([want.stop for want in wants])
        out[name] = (start, stop) if len(start) == 1 else merge_runs(start, stop)
    return out


def _numbers(tails: Tails) -> dict[str, dict[str, int]]:
    """Shard -> array -> the chunk of it that is held."""
    return {shard: {name: tail.chunk for name, tail in of.items()} for shard, of in tails.items()}
