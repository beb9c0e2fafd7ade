"""Engine: rows of stored arrays into memory: planned as byte ranges, fetched shard by shard,
each chunk decoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, merge_runs
from archive.base import side_by_side
from archive.manifest import chunkindex
from archive.read.chunks import placing
from archive.read.chunks.placing import Want
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import ReadPlan, Shards

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
    for shard, reads, chunks in shards.fetched(shards.plan(wanted, known, _numbers(held)), owners):
        chunks |= {tail.member: tail.data for tail in held.get(shard, {}).values()}
        view = known.get(shard) or shards.add_view(shard, bytes(chunks.pop("zarr.json")))
        calls: list[placing.Call] = []
        for array, parts in by_shard[shard].items():
            ranges = list(zip(*(edges.tolist() for edges in wanted[shard][array]), strict=True))
            decode = shards.decoder(view, shard, array, parts[0].like, ranges, chunks, owners)
            calls += placing.places(parts, shards.index(shard).array(array).rows, decode)
        side_by_side(calls, cores=None if reads.needed_bytes >= SIDE_BY_SIDE_BYTES else 1)
        if tails is not None:
            tails.setdefault(shard, {}).update(_tails(shards, shard, wanted[shard], chunks))
        del chunks, decode, calls  # so that the next shard is read into the same memory
    for shard in held.keys() - wanted.keys():
        del held[shard]  # reading has gone on to other shards


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


def _tails(shards: Shards, shard: str, wanted: chunkindex.Wanted, chunks: Mapping[str, Any]) -> dict[str, Tail]:
    """The chunk of each array that holds the last of these rows."""
    out = {}
    for name, (_, stops) in wanted.items():
        array = shards.index(shard).arrays[name]
        last = (int(stops.max()) - 1) // array.rows
        out[name] = Tail(last, array.member[last], bytes(chunks[array.member[last]]))
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
