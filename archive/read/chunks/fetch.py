"""Stored chunks into memory, shard by shard. The members that a shard's requests bring go to its `ShardRead`, which
checks them and decodes them into their places, whatever their order and thread. They come by one of
three strategies of `Fetch`:

- as they come: several requests of any shards at once, over a network;
- in place: from a folder, if most data is stored as it is in memory: no copy is made, and memory that nothing was
  in yet is first touched by all cores;
- ahead: shard by shard, while the next ones are on their way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, merge_runs
from archive.base import ArchiveError, ByteRange, CorruptChunkError, side_by_side, usable_cores
from archive.fields import Array
from archive.index import METADATA, ArrayChunks, chunkindex
from archive.read.chunks.segments import Segments
from archive.read.chunks.shards import MAX_AHEAD_BYTES, Owner, ReadPlan, Shards, checked
from archive.read.chunks.wants import ChunkRows, Decode, Want, chunk_rows, unwanted
from archive.shard import ShardView, checksum, codecs
from archive.store import Filling

PART_BYTES = 1024 * 1024  # are read in place in one go, and summed up while they are in the processor's cache
LEAST_BYTES = 1024 * 1024  # of a read, from which on reading in place is worth while
SIDE_BY_SIDE_BYTES = 1024 * 1024  # of a shard: less is decoded before another thread has begun
MANY_SHARDS = 4  # for each core: then none waits long for another at the end

Piece = chunkindex.Piece
Rooms = list[memoryview]  # for all bytes of a member, in order; the last one of a chunk with a place is its checksum
Member = tuple[Piece, Rooms]
Keep = Callable[[Piece, Rooms], None]
Call = Callable[[], None]
ArrayRows = tuple[Array, int]  # no rows, of the dtype and shape that its schema says; behind the last row wanted of it
LastChunks = dict[str, dict[str, Member]]  # shard -> array -> the chunk in which reading stopped


class RequestPart(NamedTuple):
    """Bytes of an object from `start` on, memory for them, and the members in them.
    again: they are not the first of their request."""

    key: str
    start: int
    rooms: Rooms
    members: list[Member]
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
    held = {shard: {name: piece.chunk for name, (piece, _) in of.items()} for shard, of in kept.items()}
    plan = shards.plan(runs, known, held)

    def begin(come: Fetch, shard: str) -> ShardRead:
        arrays = {name: (of[0].like, int(runs[shard][name][1].max())) for name, of in wanted[shard].items()}
        rows = _rows(shards, shard, wanted[shard])
        one = ShardRead(come, shard, arrays, partial(_put, rows))
        if tails is not None:
            last = {name: (stop - 1) // shards.index(shard).array(name).rows for name, (_, stop) in arrays.items()}
            mine = tails.setdefault(shard, {})
            one.hold([member for member in mine.values() if member[0].member in rows], partial(_keep_last, last, mine))
        if strategy is not Fetch.ahead:
            one.homes = _homes(shards, shard, wanted[shard], rows)
        if shard in known:
            one.describe(known[shard])
        return one

    strategy = Fetch.ahead
    if shards.roots.is_remote(wanted):
        strategy = Fetch.as_they_come
    elif plan.fetched_bytes >= LEAST_BYTES and _mostly_raw(wanted, shards) and shards.roots.scatters(wanted):
        strategy = Fetch.in_place
    strategy(Fetch(shards, segments.owner, plan, begin))
    for shard in kept.keys() - wanted.keys():
        del kept[shard]  # reading has gone on to other shards


def _rows(shards: Shards, shard: str, wanted: Mapping[str, Sequence[Want]]) -> dict[str, list[ChunkRows]]:
    """Member -> the places of its rows."""
    rows: dict[str, list[ChunkRows]] = {}
    for name, of in wanted.items():
        chunks = shards.index(shard).array(name)
        for want in of:
            for one in chunk_rows(want, chunks.rows):
                rows.setdefault(chunks.member[one.number], []).append(one)
    return rows


def _put(rows: Mapping[str, Sequence[ChunkRows]], piece: Piece, decode: Decode) -> None:
    """Put rows of a chunk into memory. It is decoded once, straight into its place if it can be."""
    found = rows[piece.member]
    if len(found) == 1:
        found[0].put(decode)
        return
    values = decode(None)
    for one in found:
        one.put(lambda out: values)


def _homes(
    shards: Shards, shard: str, wanted: Mapping[str, Sequence[Want]], rows: Mapping[str, Sequence[ChunkRows]]
) -> dict[str, Rooms]:
    """Member -> memory for its bytes, of the chunks that can be read straight into memory of the wants."""
    homes: dict[str, Rooms] = {}
    for name, of in wanted.items():
        chunks = shards.index(shard).array(name)
        raw = _raw_bytes(of[0], chunks) if len(of) == 1 else 0
        for member, size in zip(chunks.member, chunks.size.tolist(), strict=True) if raw else ():
            if size == raw and member in rows and (rooms := rows[member][0].rooms(of[0].like)) is not None:
                homes[member] = [*rooms, *unwanted(codecs.CHECKSUM_BYTES)]
    return homes


def _keep_last(last: Mapping[str, int], kept: dict[str, Member], piece: Piece, rooms: Rooms) -> None:
    """Keep the chunk of an array in which reading stops."""
    if piece.chunk == last[piece.array]:
        kept[piece.array] = piece, [memoryview(b"".join(rooms))]


def plan(shards: Shards, segments: Segments, wants: Sequence[Want]) -> ReadPlan:
    """The requests that fetching these rows takes, metadata included; the same whatever was read before."""
    by_shard = _by_shard(shards, segments, wants)
    return shards.plan({shard: _runs(arrays) for shard, arrays in by_shard.items()})


def _by_shard(shards: Shards, segments: Segments, wants: Sequence[Want]) -> dict[str, dict[str, list[Want]]]:
    """Shard -> array -> its wanted rows; the shards' indexes are loaded."""
    out: dict[int, dict[str, list[Want]]] = {}
    for want in wants:
        for shard, own in want.by_shard():
            out.setdefault(shard, {}).setdefault(want.array, []).append(own)
    shards.load_indexes(segments, list(out))
    return {segments.shards[shard]: arrays for shard, arrays in out.items()}


def _runs(arrays: Mapping[str, Sequence[Want]]) -> dict[str, tuple[Ints, Ints]]:
    """Array -> ranges of its wanted rows, sorted, apart."""
    out = {}
    for name, wants in arrays.items():
        one = len(wants) == 1
        start = wants[0].start if one else np.concatenate([want.start for want in wants])
        stop = wants[0].stop if one else np.concatenate([want.stop for want in wants])
        out[name] = (start, stop) if len(start) == 1 else merge_runs(start, stop)
    return out


# -- strategies --------------------------------------------------------------------------------------------------------


@dataclass
class Fetch:
    """The requests of some shards, and a function that makes the `ShardRead` of each; they are begun while they are
    `wanted`. At most `max_bytes` (and always one request) are in flight."""

    shards: Shards
    owner: Owner
    plan: ReadPlan
    begin: Callable[[Fetch, str], ShardRead]
    wanted: Callable[[], bool] = lambda: True
    max_bytes: int = MAX_AHEAD_BYTES

    def as_they_come(self) -> None:
        """Use the members of several requests, in any order."""
        under_way: list[tuple[ShardRead, RequestPart] | None] = []

        def fillings() -> Iterator[Filling]:
            for one in (self.begin(self, shard) for shard in self.plan.shards):
                for part in one.parts():
                    if not self.wanted():
                        return
                    under_way.append((one, part))
                    yield Filling(part.key, part.start, part.rooms)

        def use(number: int) -> None:
            come, under_way[number] = under_way[number], None
            assert come is not None
            for call in come[0].take(come[1].members):
                call()

        with self.shards.blaming(self.plan.shards, self.owner):
            self.shards.roots.fill(fillings(), use, max_bytes=self.max_bytes)

    def in_place(self) -> None:
        """Read each shard on a core of its own if there are many, else with all cores together."""
        many = len(self.plan.shards) >= MANY_SHARDS * usable_cores()

        def read(one: ShardRead, part: RequestPart) -> None:
            with self.shards.blaming([one.shard], self.owner, one.shard):
                self.shards.roots.scatter(part.key, part.start, part.rooms, again=part.again)
            for call in one.take(part.members):
                call()

        def read_shard(shard: str) -> None:
            one = self.begin(self, shard)
            cores = 1 if many else one.cores
            side_by_side([partial(read, one, part) for part in one.parts(PART_BYTES)], cores=cores)

        side_by_side([partial(read_shard, shard) for shard in self.plan.shards], cores=None if many else 1)

    def ahead(self) -> None:
        """Use the shards in order, while the next ones are on their way."""
        for shard, reads, blocks in self.shards.blocks(self.plan, self.owner, self.max_bytes):
            if not self.wanted():
                return
            views = [memoryview(block) for block in blocks]
            came = [(piece, [views[piece.request][piece.start : piece.start + piece.size]]) for piece in reads.pieces]
            one = self.begin(self, shard)
            side_by_side(one.take(came), cores=one.cores)
            del one, blocks, views, came  # so that the next shard is read into the same memory


def _mostly_raw(wants: Mapping[str, Mapping[str, Sequence[Want]]], shards: Shards) -> bool:
    """True if most of these shards' rows are stored as they are in memory, and they are many."""
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


# -- the bytes of a shard ----------------------------------------------------------------------------------------------

Put = Callable[[Piece, Decode], None]


class ShardRead:
    """The reading of one shard. Its requests are answered in any order, from several threads."""

    def __init__(
        self,
        come: Fetch,
        shard: str,
        arrays: Mapping[str, ArrayRows],
        put: Put,
        metadata: Callable[[], ShardView] | None = None,
    ) -> None:
        """put: puts rows of a chunk in their places.

        metadata: gives the shard's metadata, where none is among the requests: chunks are decoded by what they say
        themselves, and those that leave a doubt by that.
        """
        self.shard = shard
        self.homes: Mapping[str, Rooms] = {}  # member -> memory for its bytes, for those that are read into their place
        self._shards, self._owner, self._reads = come.shards, come.owner, come.plan.shards[shard]
        self._index = come.shards.index(shard)
        self._arrays, self._put, self._metadata = arrays, put, metadata
        self._keep: Keep | None = None
        self._waiting: list[Member] = []  # members that came before the metadata
        self._bytes = self._reads.needed_bytes
        self._view: ShardView | None = None
        self._lock = threading.Lock()

    def hold(self, members: Sequence[Member], keep: Keep) -> None:
        """Take chunks that are in memory. keep: called with each chunk whose rows are in place, and its bytes."""
        self._waiting += members
        self._bytes += sum(piece.size for piece, _ in members)
        self._keep = keep

    @property
    def cores(self) -> int | None:
        """The number of cores that share the shard; None for all."""
        return None if self._bytes >= SIDE_BY_SIDE_BYTES else 1

    def describe(self, view: ShardView) -> None:
        """Take the shard's metadata; CorruptChunkError if it contradicts its schema or the chunk table."""
        for name, (like, stop) in self._arrays.items():
            rows = self._index.array(name).rows
            try:
                view.check_rows(name, [(0, stop)])
                found = view.describe(name)
                if found.dtype != like.dtype or found.shape[1:] != like.shape[1:] or found.chunk_rows != rows:
                    raise CorruptChunkError(
                        f"it holds {found.dtype}{list(found.shape[1:])} in chunks of {found.chunk_rows} rows, where "
                        f"its schema and the chunk table say {like.dtype}{list(like.shape[1:])} in chunks of {rows}"
                    )
            except ArchiveError as e:
                raise self._undecodable(e, name) from e
        self._view = view

    def _undecodable(self, error: ArchiveError, name: str) -> CorruptChunkError:
        return CorruptChunkError(
            f"array {name!r} of shard {self._shards.roots.full_url(self.shard)}, where {self._owner(self.shard)} "
            f"lies, cannot be decoded: {error}; the bytes are damaged, run `archive verify`"
        )

    def parts(self, most_bytes: float = inf) -> list[RequestPart]:
        """The requests with memory for their bytes, the metadata's first; those with more bytes in several parts."""
        side_by_side(self.take(), cores=self.cores)  # what is at hand
        members: list[list[Piece]] = [[] for _ in self._reads.requests]
        for piece in self._reads.pieces:
            members[piece.request].append(piece)
        out: list[RequestPart] = []
        for request, own in zip(self._reads.requests, members, strict=True):
            apart = all(a.start + a.size <= b.start for a, b in pairwise(own))
            out += self._apart(request, own, most_bytes) if apart else [_shared(request, own)]
        return sorted(out, key=lambda part: all(piece.array != METADATA for piece, _ in part.members))

    def _apart(self, request: ByteRange, pieces: Sequence[Piece], most_bytes: float) -> Iterator[RequestPart]:
        at = request.start
        part = RequestPart(request.key, at, [], [])
        for piece in pieces:
            if at - part.start >= most_bytes:
                yield part
                part = RequestPart(request.key, at, [], [], again=True)
            begins = request.start + piece.start
            rooms = self.homes.get(piece.member) or [memoryview(bytearray(piece.size))]
            part.rooms.extend([*unwanted(begins - at), *(room for room in rooms if len(room))])
            part.members.append((piece, rooms))
            at = begins + piece.size
        yield part

    def take(self, members: Sequence[Member] = ()) -> list[Call]:
        """Calls that put arrived members in their places, in any order or at once; none before the metadata."""
        for piece, rooms in members:
            if piece.array == METADATA:
                zarr_json = checked(self.shard, piece, rooms[-1], self._owner)
                self.describe(self._shards.add_view(self.shard, bytes(zarr_json)))
        with self._lock:
            self._waiting += [one for one in members if one[0].array != METADATA]
            if self._view is None and self._metadata is None:
                return []
            ready, self._waiting = self._waiting, []
        return [partial(self._use, *one) for one in ready]

    def _use(self, piece: Piece, rooms: Rooms) -> None:
        """Put a chunk in its place, if it is not there already."""
        checked(self.shard, piece, rooms[-1], self._owner)
        in_place = len(rooms) > 1 and self._view is not None and self._view.is_raw(piece.array)
        if not (in_place and checksum(*rooms[:-1]) == piece.crc32c):
            rooms = [memoryview(b"".join(rooms))] if len(rooms) > 1 else rooms
            self._put(piece, partial(self._decoded, piece, rooms[0]))
        if self._keep is not None:
            self._keep(piece, rooms)

    def _decoded(self, piece: Piece, data: memoryview, out: Array | None) -> Array:
        """The rows of a chunk, decoded by the metadata unless it needs none."""
        if self._view is None:
            like, rows = self._arrays[piece.array][0], self._index.arrays[piece.array].rows
            found = codecs.by_itself(piece.array, like.dtype, like.shape[1:], rows, data)
            if found is not None:
                return found
            with self._lock:  # looked up once
                if self._view is None and self._metadata is not None:
                    self.describe(self._metadata())
        assert self._view is not None
        try:
            return self._view.chunk(piece.array, piece.chunk, data, out)
        except ArchiveError as e:
            raise self._undecodable(e, piece.array) from e


def _shared(request: ByteRange, pieces: Sequence[Piece]) -> RequestPart:
    """A request whose members share bytes, so that none can have its own."""
    room = memoryview(bytearray(request.size))
    members = [(piece, [room[piece.start : piece.start + piece.size]]) for piece in pieces]
    return RequestPart(request.key, request.start, [room], members)
