"""Pure, no I/O: segments of episodes, and parts of them that somebody wants to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from archive.fields import ShardSchema
from archive.manifest import StoredFile


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
    chunks: StoredFile  # the chunk table's file


class Slice(NamedTuple):
    """Rows [start, stop) of one stored array."""

    shard: str
    array: str
    start: int
    stop: int


def cut(whole: Sequence[Part], start: int, stop: int) -> list[Part]:
    """Steps [start, stop) of an episode's segments. Those without any of them stay, for what belongs to the whole episode."""
    out, at = [], 0
    for part in whole:
        count = part.hi - part.lo
        lo, hi = (min(max(edge - at, 0), count) for edge in (start, stop))
        out.append(Part(part.row, part.lo + lo, part.lo + max(lo, hi)))
        at += count
    return with_extra(out, whole)


def with_extra(parts: list[Part], whole: Sequence[Part]) -> list[Part]:
    """Mark where offset fields go on: after the last step read, and in the segments that follow."""
    begun = max((i for i, (p, all_) in enumerate(zip(parts, whole, strict=True)) if p.lo > all_.lo), default=0)
    last = max((i for i, p in enumerate(parts) if p.hi > p.lo), default=begun)
    parts[last:] = [part._replace(extra=True) for part in parts[last:]]
    return parts
