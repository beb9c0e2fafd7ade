"""Chunks that are stored as they lie in memory, read straight into their place by as many threads as there are
cores: no copy is made, and memory that nothing was in yet is first touched by all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise

from archive.base import ByteRange, side_by_side
from archive.manifest import ShardIndex, ShardReads, chunkindex
from archive.read.chunks import fetching
from archive.read.chunks.fetching import Owner
from archive.read.chunks.placing import ChunkRows, Want, unwanted
from archive.shard import Buffer, checksum, rawchunks
from archive.store import Roots

PART_BYTES = 1024 * 1024  # are read in one go, and summed up while they are in the processor's cache
LEAST_BYTES = 1024 * 1024  # of a read, from which on this is worth while

Rooms = list[memoryview]  # for all bytes of a member, in order; the last of a chunk that has a place: its checksum
Found = dict[str, list[list[ChunkRows]]]  # array -> where its rows go, of each want


@dataclass
class Part:
    """Some members that follow one another in a request, and memory for all bytes from the first one to the last."""

    key: str
    start: int
    again: bool  # it is not the first of its request
    members: list[tuple[chunkindex.Piece, Rooms]] = field(default_factory=list)
    rooms: Rooms = field(default_factory=list)
    size: int = 0

    def add(self, piece: chunkindex.Piece, rooms: Rooms, begins: int) -> None:
        """Take in another member, `begins` bytes after the start."""
        self.rooms += [*unwanted(begins - self.size), *(room for room in rooms if len(room))]
        self.size = begins + piece.size
        self.members.append((piece, rooms))


class Landed(Mapping[str, Buffer]):
    """The members of a shard as they are stored. chunks: those in memory of their own.  rooms: those that were read
    into their place.  sound: those of these that are what they should be."""

    def __init__(self, chunks: dict[str, Buffer]) -> None:
        self.chunks = chunks
        self.rooms: dict[str, Rooms] = {}
        self.sound: set[str] = set()

    def __getitem__(self, member: str) -> Buffer:
        return self.chunks[member] if member in self.chunks else b"".join(self.rooms[member])

    def __iter__(self) -> Iterator[str]:
        return chain(self.chunks, self.rooms)

    def __len__(self) -> int:
        return len(self.chunks) + len(self.rooms)


def worth_while(wants: Mapping[str, Mapping[str, Sequence[Want]]], indexes: Mapping[str, ShardIndex]) -> bool:
    """Whether most of these shards' rows are stored as they lie in memory, and they are many."""
    raw = other = 0
    for shard, arrays in wants.items():
        for name, of in arrays.items():
            chunks = indexes[shard].arrays.get(name)
            if chunks is None or not len(chunks.size):
                return False  # to be told where it is looked for
            nbytes = sum(int((want.stop - want.start).sum()) for want in of) * _row_bytes(chunks)
            if len(of) == 1 and int(chunks.size[0]) == _raw_bytes(of[0], chunks):
                raw += nbytes
            else:
                other += nbytes
    return raw >= max(LEAST_BYTES, other)


def homes(found: Found, wants: Mapping[str, Sequence[Want]], index: ShardIndex) -> dict[str, Rooms]:
    """Member -> memory for its bytes, of those that can be read into their place."""
    out: dict[str, Rooms] = {}
    for name, of in found.items():
        chunks = index.array(name)
        if len(of) != 1 or not (raw := _raw_bytes(wants[name][0], chunks)):
            continue
        for one in of[0]:
            if int(chunks.size[one.number]) == raw and (rooms := one.rooms(wants[name][0].like)) is not None:
                out[chunks.member[one.number]] = [*rooms, *unwanted(rawchunks.CHECKSUM_BYTES)]
    return out


def read(
    roots: Roots, shard: str, reads: ShardReads, into: Mapping[str, Rooms], owner: Owner, cores: int | None = None
) -> Landed:
    """Read a shard's members, those into their place that have one; each is compared with the chunk table.

    What is in its place is summed up, too; one that is damaged is left to who decodes it, and says what is wrong.
    `owner` names what lies there, for errors.
    """
    out = Landed({})
    side_by_side([partial(_read, roots, shard, part, into, owner, out) for part in _parts(reads, into)], cores=cores)
    return out


def _read(roots: Roots, shard: str, part: Part, into: Mapping[str, Rooms], owner: Owner, out: Landed) -> None:
    roots.scatter(part.key, part.start, part.rooms, again=part.again)
    for piece, rooms in part.members:
        data = fetching.checked(shard, piece, rooms[-1], owner)
        if piece.member not in into:
            out.chunks[piece.member] = data
            continue
        out.rooms[piece.member] = rooms
        if checksum(*rooms[:-1]) == piece.crc32c:
            out.sound.add(piece.member)


def _parts(reads: ShardReads, into: Mapping[str, Rooms]) -> Iterator[Part]:
    """The requests in parts that threads can share."""
    part: Part | None = None
    request = -1
    for piece in reads.pieces:
        same = piece.request == request
        begins = reads.requests[piece.request].start + piece.start
        if part is None or not same or part.size >= PART_BYTES or begins < part.start + part.size:
            if part is not None:
                yield part
            part = _next_part(part if same else None, reads.requests[piece.request], begins)
            request = piece.request
        part.add(piece, into.get(piece.member) or [memoryview(bytearray(piece.size))], begins - part.start)
    if part is not None:
        yield part


def whole(reads: ShardReads, into: dict[str, Rooms]) -> list[Part]:
    """The requests, each as one part. What cannot be read into its place after all is taken out of `into`."""
    pieces: list[list[chunkindex.Piece]] = [[] for _ in reads.requests]
    for piece in reads.pieces:
        pieces[piece.request].append(piece)
    return [_whole(request, mine, into) for request, mine in zip(reads.requests, pieces, strict=True)]


def _whole(request: ByteRange, pieces: Sequence[chunkindex.Piece], into: dict[str, Rooms]) -> Part:
    part = Part(request.key, request.start, again=False)
    if all(a.start + a.size <= b.start for a, b in pairwise(pieces)):
        for piece in pieces:
            part.add(piece, into.get(piece.member) or unwanted(piece.size), piece.start)
        return part
    part.rooms = unwanted(request.size)  # members that share bytes, so that no one can have them to himself
    for piece in pieces:
        into.pop(piece.member, None)
        part.members.append((piece, [part.rooms[0][piece.start : piece.start + piece.size]]))
    return part


def _next_part(before: Part | None, request: ByteRange, begins: int) -> Part:
    """The part that begins where the one before ended, if that is of the same request."""
    if before is None:
        return Part(request.key, request.start, again=False)
    return Part(request.key, min(begins, before.start + before.size), again=True)


def _raw_bytes(want: Want, chunks: chunkindex.ArrayChunks) -> int:
    return rawchunks.raw_bytes(want.like.dtype, want.like.shape[1:], chunks.rows)


def _row_bytes(chunks: chunkindex.ArrayChunks) -> int:
    return int(chunks.size[0]) // chunks.rows
