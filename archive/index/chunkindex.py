"""Pure, no I/O: the places of a shard's chunks, and the byte ranges that wanted rows take.

Requests are data: nothing here sees a socket, and the code that fetches them never sees an array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from archive.arrays import (
    MAX_GAP_BYTES,
    MIN_GAP_BYTES,
    Ints,
    arrow,
    coalesce,
    covered,
    numbers,
    run_starts,
    widest_gap,
)
from archive.base import ByteRange, CorruptManifestError, MissingObjectError, UnsafePathError, cached_property, layout
from archive.shard import checksum
from archive.tables import coded

if TYPE_CHECKING:
    import pyarrow as pa

SPARE_PART = 20  # 1/20 of the needed bytes may be read on top to save requests
METADATA = ""  # the "array" of the group's own zarr.json
Wanted = Mapping[str, tuple[Ints, Ints]]  # array -> starts and stops of ranges of rows


class ArrayChunks(NamedTuple):
    """The chunks of one array in order: rows per chunk, and the offset, size and checksum of each chunk."""

    rows: int
    offset: Ints
    size: Ints
    crc32c: Ints
    member: list[str]


class Piece(NamedTuple):
    """One member within a fetched block."""

    request: int
    start: int
    size: int
    member: str
    crc32c: int
    array: str
    chunk: int


class ShardReads(NamedTuple):
    """The requests for rows of one shard, and the members that they bring."""

    requests: list[ByteRange]
    pieces: list[Piece]
    needed_bytes: int

    @property
    def fetched_bytes(self) -> int:
        return sum(r.size for r in self.requests)


@dataclass(frozen=True)
class ShardIndex:
    """The chunks of one shard, by array."""

    shard: str
    packed: bool
    arrays: Mapping[str, ArrayChunks]

    def plan(
        self,
        wanted: Wanted,
        *,
        metadata: bool = True,
        held: Mapping[str, int] | None = None,
        max_gap: int | None = None,
    ) -> ShardReads:
        """Byte ranges for ranges of rows of some arrays: whole chunks, neighbours in one request.

        held: array -> number of a chunk that is already in memory.
        """
        every = {name: self._chunks(name, *runs) for name, runs in wanted.items()}
        missing = {name: chunks[chunks != (held or {}).get(name, -1)] for name, chunks in every.items()}
        found = {name: chunks for name, chunks in missing.items() if len(chunks)}
        if metadata:
            found[METADATA] = np.zeros(1, np.int64)
        needed = sum(self._row_bytes(name) * int((stops - starts).sum()) for name, (starts, stops) in wanted.items())
        return self._reads(found, needed, max_gap)

    def plan_chunks(self, wanted: Mapping[str, Ints], max_gap: int | None = None) -> ShardReads:
        """Byte ranges for chunks of some arrays, by their numbers, each once; neighbours in one request."""
        needed_bytes = sum(int(self.arrays[name].size[chunks].sum()) for name, chunks in wanted.items())
        return self._reads(wanted, needed_bytes, max_gap)

    def _reads(self, found: Mapping[str, Ints], needed_bytes: float, max_gap: int | None = None) -> ShardReads:
        """Byte ranges for these chunks; `needed_bytes`: size of the wanted rows in them."""
        if not found:
            return ShardReads([], [], 0)
        table = [(name, self.arrays[name], chunks) for name, chunks in found.items()]
        starts, sizes, crc32c = (
            np.concatenate([column[chunks] for column, chunks in of])
            for of in zip(*([(a.offset, c), (a.size, c), (a.crc32c, c)] for _, a, c in table), strict=True)
        )
        order = np.argsort(starts, kind="stable") if self.packed else np.arange(len(starts))
        starts, sizes = starts[order], sizes[order]
        if max_gap is None and self.packed:
            spare_bytes = self._spare_bytes(needed_bytes, found, int(sizes.sum()))
            max_gap = widest_gap(starts, starts + sizes, spare_bytes)
        which = [(name, array.member[chunk], chunk) for name, array, chunks in table for chunk in chunks.tolist()]
        which = [which[i] for i in order.tolist()]
        gaps = self._gaps([name for name, _, _ in which], max_gap or 0)
        requests, owner, base = self._requests(starts, sizes, [member for _, member, _ in which], gaps)
        columns = (owner.tolist(), (starts - base).tolist(), sizes.tolist(), crc32c[order].tolist(), which)
        pieces = [
            Piece(request, at, size, member, crc, name, chunk)
            for request, at, size, crc, (name, member, chunk) in zip(*columns, strict=True)
        ]
        return ShardReads(requests, pieces, int(sizes.sum()))

    def array(self, name: str) -> ArrayChunks:
        """The chunks of one array; CorruptManifestError if the table has none of it."""
        if name not in self.arrays:
            raise CorruptManifestError(f"the chunk table has no array {name!r} in {self.shard}; run `archive verify`")
        return self.arrays[name]

    def everything(self) -> Wanted:
        """Ranges of rows that cover all rows of all arrays."""
        return {
            name: (np.zeros(1, np.int64), np.array([chunks.rows * len(chunks.offset)]))
            for name, chunks in self.arrays.items()
            if name != METADATA
        }

    def _chunks(self, name: str, starts: Ints, stops: Ints) -> Ints:
        full = stops > starts
        if name not in self.arrays and not full.any():
            return np.zeros(0, np.int64)
        array, starts, stops = self.array(name), starts[full], stops[full]
        if len(starts) and (int(starts.min()) < 0 or int(stops.max()) > len(array.offset) * array.rows):
            raise CorruptManifestError(
                f"rows {int(starts.min())} to {int(stops.max())} of {name!r} in {self.shard} are not all in its "
                f"{len(array.offset)} chunks; run `archive verify`"
            )
        return np.flatnonzero(covered(starts // array.rows, (stops - 1) // array.rows + 1, len(array.offset)))

    def _spare_bytes(self, needed_bytes: float, names: Iterable[str], chunk_bytes: int) -> int:
        """The most bytes of gaps that may be read over: 1/20 of the rows' own bytes, and a chunk a field."""
        a_chunk_each = sum(self._largest[name] for name in names)
        return int(needed_bytes * (1 + 1 / SPARE_PART)) + a_chunk_each - chunk_bytes

    def _gaps(self, names: Sequence[str], max_gap: int) -> Ints:
        """The largest gaps between neighbours of these arrays that may be read over. Behind the metadata, which comes
        first, a gap may be a chunk long: a small field follows it closely, and one request serves both."""
        out = np.full(max(0, len(names) - 1), max_gap)
        if len(out) and names[0] == METADATA:
            out[0] = max(max_gap, min(MAX_GAP_BYTES, self._largest[names[1]] + MIN_GAP_BYTES))
        return out

    @cached_property
    def _largest(self) -> Mapping[str, int]:
        """Bytes of the largest chunk of each array."""
        return {name: int(array.size.max(initial=0)) for name, array in self.arrays.items()}

    def _row_bytes(self, name: str) -> float:
        array = self.arrays.get(name)
        return float(array.size.sum()) / (array.rows * len(array.size)) if array else 0.0

    def _requests(
        self, starts: Ints, sizes: Ints, members: list[str], max_gap: Ints
    ) -> tuple[list[ByteRange], Ints, Ints]:
        if not self.packed:
            ranges = [
                ByteRange(f"{self.shard}/{member}", 0, size)
                for member, size in zip(members, sizes.tolist(), strict=True)
            ]
            return ranges, np.arange(len(ranges)), np.zeros(len(ranges), np.int64)
        block_starts, block_stops, owner = coalesce(starts, starts + sizes, max_gap=max_gap)
        bounds = zip(block_starts.tolist(), block_stops.tolist(), strict=True)
        key = layout.object_of(self.shard)
        return [ByteRange(key, *one) for one in bounds], owner, block_starts[owner]


def stored_checksum(data: memoryview, piece: Piece) -> int:
    """The checksum of a member as the chunk table has it. A chunk ends in its own crc32c (zarr's last codec checks it
    while decoding), which shows that it is this chunk; the checksum of metadata is computed here."""
    return int.from_bytes(data[-4:], "little") if piece.array != METADATA else checksum(data)


def is_sound(data: memoryview, crc32c: int, *, is_chunk: bool) -> bool:
    """True if the bytes of a chunk or of metadata match the chunk table."""
    if is_chunk:
        return int.from_bytes(data[-4:], "little") == crc32c == checksum(data[:-4])
    return checksum(data) == crc32c


def from_table(table: pa.Table) -> dict[str, ShardIndex]:
    """Shard -> its index, from a chunk table."""
    known = numbers(table["chunk"]) >= 0
    known |= np.array([member == "zarr.json" for member in table["member"].to_pylist()], bool)
    table = table.filter(arrow(known))
    shards, shard = coded(table["shard"])
    arrays, array = coded(table["array"])
    columns = {name: numbers(table[name]).astype(np.int64) for name in ("chunk", "rows", "offset", "size", "crc32c")}
    order = np.lexsort((columns["chunk"], array, shard))
    heads = run_starts(shard[order], array[order])
    members = table["member"].to_pylist()
    out: dict[str, dict[str, ArrayChunks]] = {}
    for own in np.split(order, heads[1:]) if len(heads) else ():
        where, name = shards[shard[own[0]]], arrays[array[own[0]]]
        out.setdefault(where, {})[name] = _array(where, name, {n: c[own] for n, c in columns.items()}, own, members)
    return {where: _shard(where, found) for where, found in out.items()}


def _array(shard: str, name: str, columns: Mapping[str, Ints], rows: Ints, members: list[str]) -> ArrayChunks:
    if name and (columns["chunk"] != np.arange(len(rows))).any():
        raise CorruptManifestError(f"the chunk table lacks chunks of {name!r} in {shard}; run `archive verify`")
    return ArrayChunks(
        max(1, int(columns["rows"][0])),
        columns["offset"],
        columns["size"],
        columns["crc32c"],
        [members[row] for row in rows.tolist()],
    )


def _shard(shard: str, arrays: dict[str, ArrayChunks]) -> ShardIndex:
    if not shard.startswith(("shards/", "journal/")) or ".." in shard:
        raise UnsafePathError(f"the chunk table names the shard {shard!r}, which is not below shards/; not read")
    if METADATA not in arrays:
        raise MissingObjectError(f"the chunk table has no zarr.json for {shard}; run `archive verify`")
    return ShardIndex(shard, shard.endswith(".zip"), arrays)
