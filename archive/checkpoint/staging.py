"""Pure, no I/O: the object by which one rank stages its part of a checkpoint.

A ZIP that is also a Zarr group. Its first member, `index.json`, is stored plainly and says where the others lie,
counted from the end of its own bytes, so that whoever knows only the object's name reads it in one or two requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from archive.base import CorruptStateError, StateError, layout, plainjson
from archive.checkpoint.stagedindex import StagedIndex
from archive.shard import Member, checksum, packing

INDEX = "index.json"
INDEX_AT = 30 + len(INDEX)  # after the ZIP's local header, which has no extra field
HEAD_BYTES = 256 * 1024
MAX_INDEX_BYTES = 1 << 28  # a line a member: millions of them


def file_member(name: str, data: bytes) -> Member:
    """A member that is no part of the Zarr group."""
    return Member(name, data, "", 0, 0, checksum(data))


def pack(index: StagedIndex, members: Sequence[Member]) -> list[Any]:
    """The staged object's buffers: the index with the members' places, then the members."""
    _, placed = packing.pack([file_member(INDEX, b"{}"), *members])
    base = placed[0].offset + placed[0].size
    whole = replace(index, members=tuple([replace(p, offset=p.offset - base) for p in placed[1:]]))
    line = json.dumps(whole.to_json(), separators=(",", ":")).encode()
    if len(line) > MAX_INDEX_BYTES - 100:
        raise StateError(
            f"this rank's part of the checkpoint has {len(members)} members, more than its index has room for"
        )
    text = line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"
    buffers, _ = packing.pack([file_member(INDEX, text), *members])
    return buffers


def index_span(head: bytes, where: str) -> tuple[int, int]:
    """Where the index lies in the object, from the object's first bytes."""
    name = head[30:INDEX_AT]
    if head[:4] != b"PK\x03\x04" or name != INDEX.encode() or head[28:30] != b"\0\0":
        raise CorruptStateError(f"{where} is not a staged checkpoint: it does not begin with {INDEX}")
    size = int.from_bytes(head[22:26], "little")
    if size > MAX_INDEX_BYTES:
        raise CorruptStateError(
            f"{where} says that its index has {size} bytes, which none has; this rank's state is damaged"
        )
    return INDEX_AT, INDEX_AT + size


def load_index(data: bytes, where: str) -> StagedIndex:
    """The index, if it matches its checksum."""
    line, _, digest = data.partition(b"\n")
    if hashlib.sha256(line).hexdigest().encode() != digest.strip():
        raise CorruptStateError(f"the index of {where} does not match its checksum; this rank's state is damaged")
    what = f"the index of {where}"
    body = plainjson.parse_object(line, what=what, error=CorruptStateError)
    layout.check_format(body.get("format"), where=where)
    return StagedIndex.from_json(body, what=what, error=CorruptStateError, remedy="resume from another checkpoint")


def check_place(index: StagedIndex, key: str, nonce: str | None, where: str) -> None:
    """Refuse an object that lies where another one should: what it says of itself must be what leads to it.

    nonce: as whoever refers to it says; None where nobody did yet.
    """
    own = layout.state_key(index.session, index.name, index.rank)
    if own != key or nonce not in (None, index.nonce):
        what = f"rank {index.rank} of {index.name!r}, session {index.session!r}"
        raise CorruptStateError(
            f"{where} is not the object that was staged there: it says that it is {what}"
            f"{', staged another time' if own == key else ''}; put the right object back, or resume from another "
            "checkpoint"
        )
