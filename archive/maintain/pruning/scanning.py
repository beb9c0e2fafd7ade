"""Does I/O: what lies in an archive's folders, and how old it is by the store's clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from archive.base import layout
from archive.store import Storage

FOLDERS = ("journal", "manifest", "shards", "states")


class Seen(NamedTuple):
    """An object, or all of a shard that is a directory: its bytes, and when the newest of them was put."""

    bytes: int
    modified: datetime


@dataclass(frozen=True)
class Scan:
    """What there was at a time. `clock` is what the store said before anything was looked at.

    settled: the newest commit that was older than the wait then; 0: none was.
    """

    clock: datetime
    cutoff: datetime
    seen: Mapping[str, Seen]
    settled: int

    def old(self, key: str) -> bool:
        """Whether an object has been there for longer than the wait."""
        return key not in self.seen or self.seen[key].modified <= self.cutoff

    def bytes(self, key: str) -> int:
        """How many bytes it has; 0: it is gone already."""
        return self.seen[key].bytes if key in self.seen else 0


def scan(storage: Storage, clock: datetime, cutoff: datetime) -> Scan:
    """Look at all objects that a prune may delete, and at the commits, a request a thousand."""
    seen: dict[str, Seen] = {}
    for folder in FOLDERS:
        for one in storage.scan(folder):
            key = unit(one.key)
            before = seen.get(key)
            if before is None:
                seen[key] = Seen(one.bytes, one.modified)
            else:
                seen[key] = Seen(before.bytes + one.bytes, max(before.modified, one.modified))
    return Scan(clock, cutoff, seen, _settled(storage, cutoff))


def unit(key: str) -> str:
    """What goes or stays as one: the object or, of a shard that is a directory, its folder."""
    return "/".join(key.split("/")[:2]) if key.startswith("shards/") else key


def _settled(storage: Storage, cutoff: datetime) -> int:
    """The newest commit that is older than that."""
    newest = 0
    for one in storage.scan("commits"):
        number = one.key.rpartition("/")[2].removesuffix(".json")
        if number.isdecimal() and one.key == layout.commit_key(int(number)) and one.modified <= cutoff:
            newest = max(newest, int(number))
    return newest
