"""Pure, no I/O: ZIPs with an index in front: a rank's part of a checkpoint, and an object of its journal.

Such an object is also a Zarr group. Its first member, `index.json`, is stored plainly and has the offsets of the
others, counted from the end of its own bytes, so that a reader with the object's name alone needs one or two requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from archive.base import CorruptStateError, Form, Record, StateError, layout, records, refuse
from archive.shard import packing
from archive.shard.packing import Member, Placed, checksum

INDEX = "index.json"
INDEX_AT = 30 + len(INDEX)  # after the ZIP's local header, which has no extra field
HEAD_BYTES = 256 * 1024
MAX_INDEX_BYTES = 1 << 28  # a line a member: millions of them
MAX_PLACE = (1 << 63) - 1
MAX_CHUNK, MAX_CHECKSUM = (1 << 31) - 1, (1 << 32) - 1
_MEMBER = [str, str, int, int, int, int, int]  # name, array, chunk, rows, offset, size, crc32c


def _read_members(value: Any, at: str) -> tuple[Placed, ...]:
    """The members, which may be millions, so they are not read field by field."""
    if type(value) is not list:
        refuse(value, at, "no list")
    for one in value:
        if (
            type(one) is not list
            or list(map(type, one)) != _MEMBER
            or not (
                one[0].isascii()  # as all escaped names are: a lone surrogate fits into no table
                and one[1].isascii()
                and -1 <= one[2] <= MAX_CHUNK
                and min(one[3:]) >= 0
                and max(one[2:]) <= MAX_PLACE
                and one[4] + one[5] <= MAX_PLACE
                and one[6] <= MAX_CHECKSUM
            )
        ):
            refuse(one, at, "no member")
    return tuple([Placed(*one) for one in value])


def _write_members(members: Sequence[Placed]) -> list[list[Any]]:
    return [[m.name, m.array, m.chunk, m.rows, m.offset, m.size, m.crc32c] for m in members]


Members = Annotated[tuple[Placed, ...], Form(_read_members, _write_members)]  # of an index: offsets from its own end


def file_member(name: str, data: bytes) -> Member:
    """A member that is no part of the Zarr group."""
    return Member(name, data, "", 0, 0, checksum(data))


def pack(index: Record, members: Sequence[Member]) -> tuple[list[Any], list[Placed]]:
    """The object's buffers, the index (with the members' offsets) first; and the offset of each member in it."""
    _, placed = packing.pack([file_member(INDEX, b"{}"), *members])
    base = placed[0].offset + placed[0].size
    whole: Any = replace(index, members=tuple([replace(p, offset=p.offset - base) for p in placed[1:]]))  # type: ignore[call-arg]
    line = json.dumps(whole.to_json(), separators=(",", ":")).encode()
    if len(line) > MAX_INDEX_BYTES - 100:
        raise StateError(f"what this rank is to write has {len(members)} members, more than its index has room for")
    text = line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"
    buffers, placed = packing.pack([file_member(INDEX, text), *members])
    return buffers, placed[1:]


def index_span(head: bytes, where: str) -> tuple[int, int]:
    """The index's place in the object, from the object's first bytes."""
    name = head[30:INDEX_AT]
    if head[:4] != b"PK\x03\x04" or name != INDEX.encode() or head[28:30] != b"\0\0":
        raise CorruptStateError(f"{where} is no object of a rank: it does not begin with {INDEX}")
    size = int.from_bytes(head[22:26], "little")
    if size > MAX_INDEX_BYTES:
        raise CorruptStateError(f"{where} says that its index has {size} bytes, which none has; it is damaged")
    return INDEX_AT, INDEX_AT + size


def parse_index(data: bytes, where: str) -> dict[str, Any]:
    """The index as JSON, if it matches its checksum and is of a known format."""
    line, _, digest = data.partition(b"\n")
    if hashlib.sha256(line).hexdigest().encode() != digest.strip():
        raise CorruptStateError(f"the index of {where} does not match its checksum; it is damaged")
    body = records.parse_object(line, what=f"the index of {where}", error=CorruptStateError)
    layout.check_format(body.get("format"), where=where, least=layout.PART_VERSION)
    return body
