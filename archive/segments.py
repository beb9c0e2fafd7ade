"""Pure, no I/O: segments of episodes, and parts of them that somebody wants to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from archive.schema import ShardSchema


class Part(NamedTuple):
    """Steps [lo, hi) of one segment (a row of the segments table); `extra`: offset fields go on beyond hi."""

    row: int
    lo: int
    hi: int
    extra: bool = False


@dataclass(frozen=True)
class Segment:
    """Where the steps of one segment lie. `shard` is None where there are none (a row that only closes an episode)."""

    episode_id: str
    shard: str | None
    start: int
    length: int
    extents: Mapping[str, tuple[int, int]]
    schema: ShardSchema
    chunks: Mapping[str, Any]  # the chunk table's file: path, bytes, crc32c


class Slice(NamedTuple):
    """Rows [start, stop) of one stored array."""

    shard: str
    array: str
    start: int
    stop: int
