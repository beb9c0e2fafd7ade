"""Pure, no I/O: the object by which one rank stages its part of a checkpoint, and what a rank resumes from.

A ZIP that is also a Zarr group. Its first member, `index.json`, is stored plainly and says where the others lie,
counted from the end of its own bytes, so that whoever knows only the object's name reads it in one or two requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from archive import layout, packing
from archive.errors import CorruptStateError
from archive.live import Runs
from archive.packing import Member, checksum

INDEX = "index.json"
INDEX_AT = 30 + len(INDEX)  # after the ZIP's local header, which has no extra field
HEAD_BYTES = 256 * 1024

Stream = tuple[str, int, int]  # session, rank, env id


@dataclass(frozen=True)
class Unfinished:
    """What the written segments of an episode add up to, so that it can go on, or be closed."""

    predecessor: str
    stored: int
    returned: float | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class KnownEpisode:
    """An episode that a new writer takes over, or finds open."""

    id: str
    env_id: int
    begin: int  # position of its first step in the env row
    headless: bool
    broken: bool
    unfinished: Unfinished | None = None  # set if it is open


@dataclass(frozen=True)
class BufferResume:
    """One buffer as a new writer takes it over. `runs.episode` and `runs.stream` index the two lists."""

    runs: Runs
    episodes: Sequence[KnownEpisode]
    streams: Sequence[Stream]
    next_positions: Mapping[int, int]
    open_episodes: Mapping[int, int]  # env id -> place in `episodes`
    to_close: Sequence[int] = ()  # open ones that the resume's policy ends: each gets a segment row of length 0


@dataclass(frozen=True)
class Resume:
    """What a writer starts from: its place and its buffers."""

    rank: int
    world_size: int
    run: str
    buffers: Mapping[str, BufferResume]
    checkpoint: int | None = None  # the commit that it was read from


def file_member(name: str, data: bytes) -> Member:
    """A member that is no part of the Zarr group."""
    return Member(name, data, "", 0, 0, checksum(data))


def pack(index: Mapping[str, Any], members: Sequence[Member]) -> list[Any]:
    """The staged object's buffers: the index with the members' places, then the members."""
    _, placed = packing.pack([file_member(INDEX, b"{}"), *members])
    base = placed[0].offset + placed[0].size
    places = [[p.name, p.array, p.chunk, p.rows, p.offset - base, p.size, p.crc32c] for p in placed[1:]]
    body = {**index, "format": layout.format_block(), "members": places}
    line = json.dumps(body, separators=(",", ":")).encode()
    text = line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"
    buffers, _ = packing.pack([file_member(INDEX, text), *members])
    return buffers


def index_span(head: bytes, where: str) -> tuple[int, int]:
    """Where the index lies in the object, from the object's first bytes."""
    name = head[30:INDEX_AT]
    if head[:4] != b"PK\x03\x04" or name != INDEX.encode() or head[28:30] != b"\0\0":
        raise CorruptStateError(f"{where} is not a staged checkpoint: it does not begin with {INDEX}")
    return INDEX_AT, INDEX_AT + int.from_bytes(head[22:26], "little")


def load_index(data: bytes, where: str) -> dict[str, Any]:
    """The index, if it matches its checksum."""
    line, _, digest = data.partition(b"\n")
    if hashlib.sha256(line).hexdigest().encode() != digest.strip():
        raise CorruptStateError(f"the index of {where} does not match its checksum; this rank's state is damaged")
    body: dict[str, Any] = json.loads(line)
    layout.check_format(body.get("format"), where=where)
    return body


def digest(array: np.ndarray[Any, Any]) -> str:
    """Tells whether a column has changed."""
    head = f"{array.dtype.str}{array.shape}".encode()
    if array.dtype == object:
        return hashlib.sha256(head + json.dumps(array.tolist()).encode()).hexdigest()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()
