"""Pure, no I/O: members of a group end to end as a ZIP, or as loose objects, and the offset of each.

Any ZIP reader opens the ZIP: chunks stored, `zarr.json` members deflated, every date 1980-01-01, so equal
members give equal bytes. Our own reader never parses it: the table of `Placed` rows has the offsets.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from archive.base import CorruptChunkError, FieldError

Buffer = bytes | memoryview

_STORED, _DEFLATED = 0, 8
_DATE_1980 = 0x21  # 1 January 1980, midnight: the earliest that a ZIP can say
_UTF8_NAMES = 0x800
_NEEDS_ZIP64 = 45
_NEEDS_DEFLATE = 20
_CREATOR_UNIX = 3 << 8
_MODE = 0o100644 << 16
_MAX_UINT16 = 0xFFFF
_MAX_UINT32 = 0xFFFFFFFF
_MAX_METADATA_BYTES = 1 << 25  # of 50,000 arrays


@dataclass(frozen=True, slots=True)
class Member:
    """One named sequence of bytes of a shard, before it has a place."""

    name: str
    data: Buffer
    array: str  # zarr path of the array, "" for metadata
    chunk: int  # index along axis 0, -1 for metadata
    rows: int  # rows per chunk, 0 for metadata
    crc32c: int  # of metadata: of `data`; of a chunk: the one that it ends in
    tail: bytes = b""  # follows `data`, where joining the two would copy it
    crc32: int | None = None  # of both, where it is known already

    @property
    def size(self) -> int:
        return size_of(self.data) + len(self.tail)


@dataclass(frozen=True, slots=True)
class Placed:
    """One row of the chunk table: the offset of the bytes in the object, and their checksum.

    `crc32c` of metadata is of its stored bytes. A chunk ends in its own crc32c, which zarr checks while
    decoding; the table repeats that number, so that a chunk that is whole but not the one meant is noticed too.
    """

    name: str
    array: str
    chunk: int
    rows: int
    offset: int
    size: int
    crc32c: int


def pack(members: Sequence[Member]) -> tuple[list[Buffer], list[Placed]]:
    """The ZIP file of `members` as buffers in file order, and the table of offsets of each member's bytes.

    Buffers of stored members are the members' own: nothing is copied. The same members give the same bytes.
    """
    buffers: list[Buffer] = []
    placed: list[Placed] = []
    directory: list[bytes] = []
    position = 0
    for member in members:
        data = _deflate(member.data) if member.chunk < 0 else member.data
        header, described = _headers(member, data, position)
        row = _place(member, data, position + len(header))
        buffers += [header, data, member.tail] if member.tail else [header, data]
        placed.append(row)
        directory.append(described)
        position = row.offset + row.size
    rows = b"".join(directory)
    buffers.append(rows + b"".join(_end_records(len(directory), len(rows), position)))
    return buffers, placed


def loose(members: Sequence[Member]) -> tuple[list[tuple[str, Buffer | list[Buffer]]], list[Placed]]:
    """The members as objects of their own, nothing deflated, and the same table with all offsets 0."""
    objects: list[tuple[str, Buffer | list[Buffer]]] = [
        (m.name, [m.data, m.tail] if m.tail else m.data) for m in members
    ]
    return objects, [_place(m, m.data, 0) for m in members]


def inflate(data: Buffer) -> bytes:
    """The plain bytes of a `zarr.json` as `pack` stored it; CorruptChunkError when it is not exactly one such."""
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        plain = stream.decompress(data, _MAX_METADATA_BYTES)
    except zlib.error as error:
        raise CorruptChunkError(_damaged(f"does not inflate ({error})")) from error
    if not stream.eof or stream.unused_data:
        raise CorruptChunkError(_damaged("is cut short, too long, or has bytes after its end"))
    return plain


def _damaged(what: str) -> str:
    return f"A shard's packed zarr.json {what}: read it again; if it stays so, the shard is damaged (`archive verify`)."


def _deflate(data: Buffer) -> bytes:
    if size_of(data) > _MAX_METADATA_BYTES:
        raise FieldError(f"What describes the fields of a shard takes {size_of(data)} bytes: archive fewer fields.")
    stream = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def _place(member: Member, data: Buffer, offset: int) -> Placed:
    crc = member.crc32c if data is member.data else checksum(data)
    size = size_of(data) + len(member.tail)
    return Placed(member.name, member.array, member.chunk, member.rows, offset, size, crc)


def _headers(member: Member, data: Buffer, offset: int) -> tuple[bytes, bytes]:
    """The local header of a member that is stored as `data`, at `offset`, and its row of the directory."""
    name, method = member.name.encode(), _STORED if data is member.data else _DEFLATED
    stored, plain = size_of(data) + len(member.tail), member.size
    crc32 = zip_checksum(member.data, member.tail) if member.crc32 is None else member.crc32

    def common(zip64: bool) -> bytes:
        version = _NEEDS_ZIP64 if zip64 else _NEEDS_DEFLATE
        return struct.pack("<HHHHHI", version, _UTF8_NAMES, method, 0, _DATE_1980, crc32)

    large = max(stored, plain) >= _MAX_UINT32  # the two sizes go to ZIP64 together or not at all: readers expect both
    extra = struct.pack("<HHQQ", 1, 16, plain, stored) if large else b""
    sizes = (_MAX_UINT32, _MAX_UINT32) if large else (stored, plain)
    header = common(large) + struct.pack("<IIHH", *sizes, len(name), len(extra)) + name + extra
    wide = [size for size in (plain, stored, offset) if size >= _MAX_UINT32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    stored, plain, offset = (min(size, _MAX_UINT32) for size in (stored, plain, offset))
    row = struct.pack("<4sH", b"PK\x01\x02", _CREATOR_UNIX | _NEEDS_ZIP64) + common(bool(wide))
    row += struct.pack("<IIHHHHHII", stored, plain, len(name), len(extra), 0, 0, 0, _MODE, offset) + name + extra
    return b"PK\x03\x04" + header, row


def zip_checksum(data: Buffer, tail: bytes) -> int:
    """The crc32 of both, end to end, as a ZIP has it. Other threads run meanwhile."""
    return _crc32()(tail, _crc32()(data, 0))


@cache
def _crc32() -> Callable[[Buffer, int], int]:
    """The checksum of ZIPs: isal's, five times as fast, or zlib's on the few machines without a wheel of isal."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return isal_zlib.crc32


def checksum(data: Buffer, *more: Buffer) -> int:
    """crc32c of the bytes, of all of them end to end; they are not copied."""
    import google_crc32c
    import numpy as np

    # google_crc32c takes bytes and arrays, but no memoryview, be it read-only.
    total = int(google_crc32c.value(data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)))
    for part in more:
        total = int(google_crc32c.extend(total, part if isinstance(part, bytes) else np.frombuffer(part, np.uint8)))
    return total


def size_of(data: Buffer) -> int:
    """Bytes in the buffer, whatever the items of a memoryview are."""
    return data.nbytes if isinstance(data, memoryview) else len(data)


def _end_records(count: int, size: int, start: int) -> Iterator[bytes]:
    """The end records of a central directory, ZIP64 where a count or an offset needs it."""
    if count >= _MAX_UINT16 or max(size, start) >= _MAX_UINT32:
        versions = (_CREATOR_UNIX | _NEEDS_ZIP64, _NEEDS_ZIP64)
        yield struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, *versions, 0, 0, count, count, size, start)
        yield struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    shown = min(count, _MAX_UINT16)
    sizes = (min(size, _MAX_UINT32), min(start, _MAX_UINT32))
    yield struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, shown, shown, *sizes, 0)
