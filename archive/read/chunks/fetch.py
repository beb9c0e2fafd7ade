"""Rows of stored arrays into memory, shard by shard. A request carries what becomes of its bytes: memory for them, and
the members that lie in them, which the shard's `ShardRead` checks and puts into their places, whatever order and thread
they come in. How they come is one of three strategies:

- as they come: several requests of any shards at once, where a network lies in between;
- in place: from a folder, where most of it is stored as it lies in memory: no copy is made, and memory that nothing was
  in yet is first touched by all cores;
- ahead: shard by shard, while those that follow are on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, merge_runs
from archive.base import ByteRange, side_by_side, usable_cores
from archive.index import METADATA, ArrayChunks, ShardReads, chunkindex
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import MAX_FILLING_BYTES, Owners, ReadPlan, Shards, checked, episode_in
from archive.read.chunks.wants import ChunkRows, Want, chunk_rows, put, unwanted
from archive.shard import Buffer, ShardView, checksum, codecs
from archive.store import Filling

PART_BYTES = 1024 * 1024  # are read in place in one go, and summed up while they are in the processor's cache
LEAST_BYTES = 1024 * 1024  # of a read, from which on reading in place is worth while
SIDE_BY_SIDE_BYTES = 1024 * 1024  # of a shard: less is decoded before another thread has begun
MANY_SHARDS = 4  # for each core: then none waits long for another at the end

Rooms = list[memoryview]  # for all bytes of a member, in order; the last of a chunk that has a place: its checksum
Members = Sequence[tuple[chunkindex.Piece, Rooms]]
Call = Callable[[], None]


class LastChunk(NamedTuple):
    """A chunk in which reading stopped."""

    chunk: int
    member: str
    data: bytes


LastChunks = dict[str, dict[str, LastChunk]]  # shard -> array -> chunk


class RequestPart(NamedTuple):
    """Bytes of an object from `start` on, memory for them, and the members in them.
    again: they are not the first of their request."""

    key: str
    start: int
    rooms: Rooms
    members: list[tuple[chunkindex.Piece, Rooms]]
    again: bool = False


def fill(shards: Shards, segments: Segments, wants: Sequence[Want], tails: LastChunks | None = None) -> None:
    """Put rows of stored arrays into memory; each chunk is fetched once and decoded once.

    tails: of a caller that reads on from where it stopped, for the chunks in which it stopped, so as not to fetch them
    again; kept up to date.
    """
    wanted = _by_shard(shards, segments, wants)
    runs = {shard: _runs(arrays) for shard, arrays in wanted.items()}
    known = {shard: view for shard in wanted if (view := shards.views.get(shard)) is not None}
    kept = {} if tails is None else tails
    held = {shard: {name: tail.chunk for name, tail in of.items()} for shard, of in kept.items()}
    plan = shards.plan(runs, known, held)
    strategy = _ahead
    if shards.roots.is_remote(wanted):
        strategy = _as_they_come
    elif plan.fetched_bytes >= LEAST_BYTES and _mostly_raw(wanted, shards) and shards.roots.scatters(wanted):
        strategy = _in_place

    def begun(shard: str) -> ShardRead:
        one = ShardRead(shards, segments.owners, shard, plan.shards[shard], wanted[shard], runs[shard])
        if strategy is not _ahead:
            one.give_places()
        if tails is not None:
            one.keep_last(tails.setdefault(shard, {}))
        if shard in known:
            one.describe(known[shard])
        return one

    strategy(shards, plan, segments.owners, begun)
    for shard in kept.keys() - wanted.keys():
        del kept[shard]  # reading has gone on to other shards


def plan(shards: Shards, segments: Segments, wants: Sequence[Want]) -> ReadPlan:
    """The requests that fetching these rows takes, metadata included; the same whatever was read before."""
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


def _runs(arrays: Mapping[str, Sequence[Want]]) -> dict[str, tuple[Ints, Ints]]:
    """Array -> runs of its rows that are wanted, sorted, apart."""
    out = {}
    for name, wants in arrays.items():
        one = len(wants) == 1
        start = wants[0].start if one else np.concatenate([want.start for want in wants])
        stop = wants[0].stop if one else np.concatenate([want.stop for want in wants])
        out[name] = (start, stop) if len(start) == 1 else merge_runs(start, stop)
    return out


# -- strategies: how bytes come ----------------------------------------------------------------------------------------

Begin = Callable[[str], "ShardRead"]


def _as_they_come(shards: Shards, plan: ReadPlan, owners: Owners, begin: Begin) -> None:
    under_way: list[tuple[ShardRead, RequestPart] | None] = []

    def fillings() -> Iterator[Filling]:
        for one in map(begin, plan.shards):
            for part in one.parts():
                under_way.append((one, part))
                yield Filling(part.key, part.start, part.rooms)

    def use(number: int) -> None:
        come, under_way[number] = under_way[number], None
        assert come is not None
        for call in come[0].take(come[1].members):
            call()

    with shards.blaming(plan.shards, owners):
        shards.roots.fill(fillings(), use, max_bytes=MAX_FILLING_BYTES)


def _in_place(shards: Shards, plan: ReadPlan, owners: Owners, begin: Begin) -> None:
    """Read each shard by a core of its own where there are many, else by all cores together."""
    many = len(plan.shards) >= MANY_SHARDS * usable_cores()

    def read(one: ShardRead, part: RequestPart) -> None:
        with shards.blaming([one.shard], owners, one.shard):
            shards.roots.scatter(part.key, part.start, part.rooms, again=part.again)
        for call in one.take(part.members):
            call()

    def read_shard(shard: str) -> None:
        one, cores = begin(shard), 1 if many else _cores(plan.shards[shard])
        side_by_side([partial(read, one, part) for part in one.parts(PART_BYTES)], cores=cores)

    side_by_side([partial(read_shard, shard) for shard in plan.shards], cores=None if many else 1)


def _ahead(shards: Shards, plan: ReadPlan, owners: Owners, begin: Begin) -> None:
    for shard, reads, blocks in shards.blocks(plan, owners):
        views = [memoryview(block) for block in blocks]
        members = [(piece, [views[piece.request][piece.start : piece.start + piece.size]]) for piece in reads.pieces]
        side_by_side(begin(shard).take(members), cores=_cores(reads))
        del blocks, views, members  # so that the next shard is read into the same memory


def _cores(reads: ShardReads) -> int | None:
    """The number of cores that share a shard; None for all."""
    return None if reads.needed_bytes >= SIDE_BY_SIDE_BYTES else 1


def _mostly_raw(wants: Mapping[str, Mapping[str, Sequence[Want]]], shards: Shards) -> bool:
    """True if most of these shards' rows are stored as they lie in memory, and they are many."""
    raw = other = 0
    for shard, arrays in wants.items():
        for name, of in arrays.items():
            chunks = shards.index(shard).arrays.get(name)
            if chunks is None or not len(chunks.size):
                return False  # to be told where it is looked for
            nbytes = sum(int((want.stop - want.start).sum()) for want in of) * (int(chunks.size[0]) // chunks.rows)
            if len(of) == 1 and int(chunks.size[0]) == _raw_bytes(of[0], chunks):
                raw += nbytes
            else:
                other += nbytes
    return raw >= max(LEAST_BYTES, other)


def _raw_bytes(want: Want, chunks: ArrayChunks) -> int:
    return codecs.raw_bytes(want.like.dtype, want.like.shape[1:], chunks.rows)


# -- what becomes of the bytes of a shard ------------------------------------------------------------------------------


class ShardRead:
    """The reading of one shard. Its requests are answered in any order, from several threads."""

    def __init__(
        self, shards: Shards, owners: Owners, shard: str, reads: ShardReads, wants: Mapping[str, Sequence[Want]],
        runs: chunkindex.Wanted,
    ) -> None:  # fmt: skip
        """wants, runs: of each array the rows that are wanted, and the runs that they make up."""
        self.shard = shard
        self._shards, self._owners, self._reads, self._wants, self._runs = shards, owners, reads, wants, runs
        self._rows: dict[str, list[ChunkRows]] = {}  # member -> where its rows go
        self._homes: dict[str, Rooms] = {}  # member -> memory for its bytes, of those that are read into their place
        self._at_hand: dict[str, Buffer] = {}  # what an earlier read had fetched
        self._tails: dict[str, LastChunk] | None = None
        self._last: dict[str, tuple[int, str]] = {}  # of each array the chunk in which reading stops, and its member
        self._kept: dict[str, bytes] = {}
        self._early: list[tuple[chunkindex.Piece, Rooms]] = []  # what came before the metadata did
        self._left = self._expected = sum(piece.array != METADATA for piece in reads.pieces)
        self._view: ShardView | None = None
        self._lock = threading.Lock()
        for name, of in wants.items():
            chunks = shards.index(shard).array(name)
            for one in (one for want in of for one in chunk_rows(want, chunks.rows)):
                self._rows.setdefault(chunks.member[one.number], []).append(one)

    def give_places(self) -> None:
        """Have the chunks that can be read straight into memory of the wants go there."""
        for name, of in self._wants.items():
            chunks = self._shards.index(self.shard).array(name)
            raw = _raw_bytes(of[0], chunks) if len(of) == 1 else 0
            for member, size in zip(chunks.member, chunks.size.tolist(), strict=True) if raw else ():
                if size == raw and member in self._rows:
                    rooms = self._rows[member][0].rooms(of[0].like)
                    if rooms is not None:
                        self._homes[member] = [*rooms, *unwanted(codecs.CHECKSUM_BYTES)]

    def keep_last(self, tails: dict[str, LastChunk]) -> None:
        """Take chunks that are at hand; those in which this read stops take their place."""
        self._tails = tails
        self._at_hand = {tail.member: tail.data for tail in tails.values()}
        for name, (_, stops) in self._runs.items():
            chunks = self._shards.index(self.shard).array(name)
            number = (int(stops.max()) - 1) // chunks.rows
            self._last[name] = number, chunks.member[number]
        keep = {member for _, member in self._last.values()}
        self._kept = {tail.member: tail.data for tail in tails.values() if tail.member in keep}

    def describe(self, view: ShardView) -> None:
        """Take the shard's metadata; CorruptChunkError if it is not of the rows that are wanted."""
        for name, edges in self._runs.items():
            ranges = list(zip(*(edge.tolist() for edge in edges), strict=True))
            self._shards.check(view, self.shard, name, self._wants[name][0].like, ranges, self._owners)
        self._view = view

    def parts(self, most_bytes: float = inf) -> list[RequestPart]:
        """The requests with memory for their bytes, the metadata's first; those with more bytes in several parts."""
        members: list[list[chunkindex.Piece]] = [[] for _ in self._reads.requests]
        for piece in self._reads.pieces:
            members[piece.request].append(piece)
        out: list[RequestPart] = []
        for request, own in zip(self._reads.requests, members, strict=True):
            apart = all(a.start + a.size <= b.start for a, b in pairwise(own))
            out += self._apart(request, own, most_bytes) if apart else [_shared(request, own)]
        if not out:
            self._finish()
        return sorted(out, key=lambda part: all(piece.array != METADATA for piece, _ in part.members))

    def _apart(
        self, request: ByteRange, pieces: Sequence[chunkindex.Piece], most_bytes: float
    ) -> Iterator[RequestPart]:
        at = request.start
        part = RequestPart(request.key, at, [], [])
        for piece in pieces:
            if at - part.start >= most_bytes:
                yield part
                part = RequestPart(request.key, at, [], [], again=True)
            begins = request.start + piece.start
            rooms = self._homes.get(piece.member) or [memoryview(bytearray(piece.size))]
            part.rooms.extend([*unwanted(begins - at), *(room for room in rooms if len(room))])
            part.members.append((piece, rooms))
            at = begins + piece.size
        yield part

    def take(self, members: Members) -> list[Call]:
        """Calls that put members that have come into their places, in any order or at once; without the metadata there
        are none yet."""
        for piece, rooms in members:
            if piece.array == METADATA:
                self.describe(self._shards.add_view(self.shard, bytes(self._checked(piece, rooms))))
        with self._lock:
            self._early += [one for one in members if one[0].array != METADATA]
            if self._view is None:
                return []
            ready, self._early = self._early, []
        return [partial(self._put, *one) for one in ready] if self._expected else [self._finish]

    def _checked(self, piece: chunkindex.Piece, rooms: Rooms) -> Buffer:
        return checked(self.shard, piece, rooms[-1], partial(episode_in, self._owners, self.shard))

    def _put(self, piece: chunkindex.Piece, rooms: Rooms) -> None:
        data, view = self._checked(piece, rooms), self._view
        assert view is not None
        if any(piece.member == member for _, member in self._last.values()):
            self._kept[piece.member] = b"".join(rooms)
        home = rooms is self._homes.get(piece.member)
        if not (home and view.is_raw(piece.array) and checksum(*rooms[:-1]) == piece.crc32c):
            self._decode(piece.array, piece.member, b"".join(rooms) if home else data)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._finish()

    def _decode(self, array: str, member: str, data: Buffer) -> None:
        """Put the rows of a chunk into their places."""
        assert self._view is not None
        put(self._rows[member], partial(self._shards.decoded, self._view, self.shard, self._owners, array, data))

    def _finish(self) -> None:
        """Decode what was at hand."""
        for name in self._wants if self._at_hand else ():
            for member in self._shards.index(self.shard).array(name).member:
                if member in self._at_hand and member in self._rows:
                    self._decode(name, member, self._at_hand[member])
        self._at_hand.clear()
        self._rows.clear()
        self._homes.clear()
        if self._tails is not None:
            self._tails.update({name: LastChunk(*last, self._kept[last[1]]) for name, last in self._last.items()})


def _shared(request: ByteRange, pieces: Sequence[chunkindex.Piece]) -> RequestPart:
    """A request whose members share bytes, so that none can have its own to itself."""
    room = memoryview(bytearray(request.size))
    members = [(piece, [room[piece.start : piece.start + piece.size]]) for piece in pieces]
    return RequestPart(request.key, request.start, [room], members)
