"""Shards of remote stores, whose chunks are put into their places as they come, while others are under way.

What is stored as it lies in memory goes there as it comes from the network; what is compressed is decoded when its
request has been answered. Nothing waits for a whole shard but what zarr has to look at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from archive.fields import Array
from archive.manifest import METADATA, ShardReads, chunkindex
from archive.read.chunks import fetching, landing, placing
from archive.read.chunks.landing import Part
from archive.read.chunks.placing import ChunkRows, Want
from archive.read.chunks.shards import Owners, Shards, episode_in
from archive.shard import Buffer, ShardView, checksum
from archive.store import Filling


class Asked(NamedTuple):
    """What is wanted of a shard."""

    reads: ShardReads
    wants: Mapping[str, Sequence[Want]]
    wanted: chunkindex.Wanted
    view: ShardView | None  # its metadata, where that is not among the requests
    held: Mapping[str, bytes]  # member -> its bytes, of chunks that are at hand
    keep: frozenset[str]  # members whose bytes are wanted afterwards


def fill(shards: Shards, asked: Mapping[str, Asked], owners: Owners) -> dict[str, dict[str, Buffer]]:
    """Put rows of shards into memory; shard -> the bytes of the members to keep."""
    kept: dict[str, dict[str, Buffer]] = {}
    asked_for: list[tuple[Arrival, int]] = []

    def fillings() -> Iterator[Filling]:
        for shard, own in asked.items():
            arrival = Arrival(shards, shard, own, owners)
            kept[shard] = arrival.kept
            for number in arrival.requests():
                asked_for.append((arrival, number))
                yield arrival.filling(number)

    def take(number: int) -> None:
        arrival, request = asked_for[number]
        arrival.take(request)

    shards.fill(fillings(), take, asked, owners)
    return kept


class _DoubtError(Exception):
    """A chunk that is not plain rows, or is damaged: zarr is to say."""


class Arrival:
    """One shard. Its requests are answered in any order, from several threads."""

    def __init__(self, shards: Shards, shard: str, asked: Asked, owners: Owners) -> None:
        self._shards, self._shard, self._asked, self._owners = shards, shard, asked, owners
        index = shards.index(shard)
        found = {name: placing.chunk_rows(wants, index.array(name).rows) for name, wants in asked.wants.items()}
        self._rows: dict[str, list[ChunkRows]] = {}  # member -> where its rows go
        for name, rows in found.items():
            for one in chain.from_iterable(rows):
                self._rows.setdefault(index.array(name).member[one.number], []).append(one)
        self._homes = landing.homes(found, asked.wants, index)
        self._parts = landing.whole(asked.reads, self._homes)
        self._left = len(self._parts)
        self.kept: dict[str, Buffer] = {member: data for member, data in asked.held.items() if member in asked.keep}
        self._doubtful: dict[str, Buffer] = dict(asked.held)  # what is decoded when all has come
        self._early: list[int] = []  # answers that came before the metadata did
        self._lock = threading.Lock()
        self._view = asked.view
        if asked.view is not None:
            self._check(asked.view)
        if not self._left:
            self._finish()

    def requests(self) -> list[int]:
        """The numbers of the requests as they are to be sent: first the one that the others are decoded by."""
        return sorted(range(len(self._parts)), key=lambda number: self._metadata(number) is None)

    def filling(self, request: int) -> Filling:
        """What a request asks for, and the memory that it goes to."""
        part = self._parts[request]
        return Filling(part.key, part.start, part.rooms)

    def take(self, request: int) -> None:
        """Use what a request has brought: have all rows of it where they belong."""
        metadata = self._metadata(request)
        ready = [request]
        if metadata is not None:
            ready += self._described(self._checked(*metadata))
        else:
            with self._lock:
                if self._view is None:
                    self._early.append(request)
                    return
        for number in ready:
            self._take(self._parts[number])

    def _metadata(self, request: int) -> tuple[chunkindex.Piece, landing.Rooms] | None:
        return next((one for one in self._parts[request].members if one[0].array == METADATA), None)

    def _described(self, metadata: Buffer) -> list[int]:
        """Keep the shard's metadata; give what has waited for it."""
        view = self._shards.add_view(self._shard, bytes(metadata))
        self._check(view)
        with self._lock:
            self._view = view
            waiting, self._early = self._early, []
        return waiting

    def _check(self, view: ShardView) -> None:
        for name, (starts, stops) in self._asked.wanted.items():
            ranges = list(zip(starts.tolist(), stops.tolist(), strict=True))
            self._shards.check(view, self._shard, name, self._asked.wants[name][0].like, ranges, self._owners)

    def _take(self, part: Part) -> None:
        for piece, rooms in part.members:
            if piece.array != METADATA:
                self._land(piece, rooms, self._checked(piece, rooms))
        part.members.clear()
        part.rooms.clear()
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._finish()

    def _checked(self, piece: chunkindex.Piece, rooms: landing.Rooms) -> Buffer:
        return fetching.checked(self._shard, piece, rooms[-1], partial(episode_in, self._owners, self._shard))

    def _land(self, piece: chunkindex.Piece, rooms: landing.Rooms, data: Buffer) -> None:
        if piece.member in self._asked.keep:
            self.kept[piece.member] = b"".join(rooms)
        assert self._view is not None
        if piece.member not in self._homes:
            self._put(self._view, piece, data)
        elif not self._view.is_raw(piece.array) or checksum(*rooms[:-1]) != piece.crc32c:
            self._put(self._view, piece, b"".join(rooms))

    def _put(self, view: ShardView, piece: chunkindex.Piece, data: Buffer) -> None:
        def decode(number: int, out: Array | None) -> Array:
            if (found := view.plain_chunk(piece.array, number, {piece.member: data}, out)) is None:
                raise _DoubtError
            return found

        try:
            for call in placing.calls([[one] for one in self._rows[piece.member]], decode):
                call()
        except _DoubtError:
            self._doubtful[piece.member] = data

    def _finish(self) -> None:
        """Decode what zarr has to look at, which may take several chunks together."""
        for name, wants in self._asked.wants.items():
            members = self._shards.index(self._shard).array(name).member
            found = [one for m in members if m in self._doubtful for one in self._rows.get(m, ())]
            if found and self._view is not None:
                self._decode(self._view, name, wants[0].like, found)
        self._doubtful.clear()
        self._rows.clear()

    def _decode(self, view: ShardView, name: str, like: Array, found: Sequence[ChunkRows]) -> None:
        ranges = [edges for one in found for edges in one.ranges()]
        decode = self._shards.decoder(view, self._shard, name, like, ranges, self._doubtful, self._owners)
        for one in found:
            one.put(decode)
