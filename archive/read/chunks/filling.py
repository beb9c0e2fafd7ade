"""Engine: rows of stored arrays into memory: planned as byte ranges, fetched shard by shard,
each chunk decoded once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, merge_runs
from archive.base import side_by_side
from archive.manifest import ArrayChunks, ShardReads, chunkindex
from archive.read.chunks import landing, placing
from archive.read.chunks.landing import Found, Landed
from archive.read.chunks.placing import ChunkRows, Want
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import Owners, ReadPlan, Shards

SIDE_BY_SIDE_BYTES = 1024 * 1024  # of a shard: less is decoded before another thread has begun


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
    by_shard = _by_shard(shards, segments, wants)
    owners, held = segments.owners, {} if tails is None else tails
    wanted = {shard: _runs(arrays) for shard, arrays in by_shard.items()}
    known = {shard: view for shard in wanted if (view := shards.views.get(shard)) is not None}
    reading = shards.plan(wanted, known, _numbers(held))
    for shard, reads, landed, found in _landed(shards, reading, by_shard, owners):
        landed.chunks |= {tail.member: tail.data for tail in held.get(shard, {}).values()}
        view = known.get(shard) or shards.add_view(shard, bytes(landed.chunks.pop("zarr.json")))
        calls: list[placing.Call] = []
        for array, parts in by_shard[shard].items():
            ranges = list(zip(*(edges.tolist() for edges in wanted[shard][array]), strict=True))
            decode = shards.decoder(view, shard, array, parts[0].like, ranges, landed, owners)
            rest = _rest(found[array], landed, shards.index(shard).array(array), view.is_raw(array))
            calls += placing.calls(rest, decode)
        side_by_side(calls, cores=None if reads.needed_bytes >= SIDE_BY_SIDE_BYTES else 1)
        if tails is not None:
            tails.setdefault(shard, {}).update(_tails(shards, shard, wanted[shard], landed))
        del landed, decode, calls  # so that the next shard is read into the same memory
    for shard in held.keys() - wanted.keys():
        del held[shard]  # reading has gone on to other shards


def _landed(
    shards: Shards, reading: ReadPlan, by_shard: Mapping[str, Mapping[str, Sequence[Want]]], owners: Owners
) -> Iterator[tuple[str, ShardReads, Landed, Found]]:
    """Each shard's members, and where its rows go: those that can be are read straight into their place."""
    direct = (
        reading.fetched_bytes >= landing.LEAST_BYTES
        and landing.worth_while(by_shard, shards.indexes)
        and shards.scatters(reading.shards)
    )
    if not direct:
        for shard, reads, chunks in shards.fetched(reading, owners):
            yield shard, reads, Landed(chunks), _found(shards, shard, by_shard[shard])
            del chunks
        return
    for shard, reads in reading.shards.items():
        found = _found(shards, shard, by_shard[shard])
        into = landing.homes(found, by_shard[shard], shards.index(shard))
        yield shard, reads, shards.landed(shard, reads, into, owners), found


def _found(shards: Shards, shard: str, arrays: Mapping[str, Sequence[Want]]) -> Found:
    index = shards.index(shard)
    return {name: placing.chunk_rows(wants, index.array(name).rows) for name, wants in arrays.items()}


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


def _tails(shards: Shards, shard: str, wanted: chunkindex.Wanted, landed: Landed) -> dict[str, Tail]:
    """The chunk of each array that holds the last of these rows."""
    out = {}
    for name, (_, stops) in wanted.items():
        array = shards.index(shard).arrays[name]
        last = (int(stops.max()) - 1) // array.rows
        out[name] = Tail(last, array.member[last], bytes(landed[array.member[last]]))
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
