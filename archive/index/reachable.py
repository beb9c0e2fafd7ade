"""The objects that a commit leads to, from commits and tables alone: data is never read, and nothing is listed.

archive/FORMAT.md, Retention, defines them. Requests and memory are in proportion to the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from archive import tables
from archive.arrays import ascending
from archive.base import CorruptManifestError, layout
from archive.index.episodes import EpisodeIndex
from archive.index.snapshot import Snapshot
from archive.log import Commit, FileRef, commits, tablefiles
from archive.store import Storage, split_key
from archive.tables import SHARDED, distinct

if TYPE_CHECKING:
    import pyarrow as pa

Place = tuple[int, int | None]  # of a checkpoint: its commit, and the one whose tables serve it, if another
_AT_ONCE = 256  # commits read together
_BYTES_AT_ONCE = 64 * 1024 * 1024  # of manifest files


@dataclass(frozen=True)
class Reach:
    """Keys of objects, by kind. A shard that is a directory is there by the key of its folder.

    bases: archive id -> keys in other archives.
    """

    manifests: set[str] = field(default_factory=set)
    shards: set[str] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    bases: dict[str, set[str]] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """The keys within the archive itself."""
        return self.manifests | self.shards | self.states

    def add(self, other: Self) -> None:
        """Add the keys of another Reach."""
        for name in ("manifests", "shards", "states"):
            getattr(self, name).update(getattr(other, name))
        for base, keys in other.bases.items():
            self.bases.setdefault(base, set()).update(keys)

    def add_rows(self, rows: pa.Table) -> None:
        """The shards and chunk files that rows of the segments or late table name."""
        for name, own in (("shard", self.shards), ("chunks", self.manifests)):
            for key in distinct(rows[name]):
                base, rest = split_key(layout.object_of(key))
                (own if base is None else self.bases.setdefault(base, set())).add(rest)


class Walk:
    """A walk from commits to the objects that they lead to. It reads each commit and manifest file once."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._rows: dict[str, Reach] = {}  # path of a file of the segments or late table -> the objects of its rows
        # checkpoint, whether its tables count as a whole -> what it needs, and the files whose rows it needs all
        self._needs: dict[tuple[Place, bool], tuple[Reach, tuple[FileRef, ...]]] = {}

    def know(self, ref: FileRef, rows: pa.Table) -> None:
        """Give the rows of a file of the segments or late table, which is not read then: it may not be there yet."""
        found = Reach()
        found.add_rows(rows)
        self._rows[ref.path] = found

    def reach(self, commit: Commit, places: set[Place] | None = None) -> Reach:
        """The keys that a commit leads to. places: of its checkpoints; None takes them from its tables.

        The commit may still be a draft, if it has its number, and its places and rows are given.
        """
        out = Reach(manifests={ref.path for ref in commit.files_led_to})
        files = {ref.path: ref for ref in commit.files("segments")}
        for needed, whole in self._walk_checkpoints(commit, places):
            out.add(needed)
            files.update((ref.path, ref) for ref in whole)
        self._add_rows(out, "segments", files.values())
        self._add_rows(out, "late", commit.files("late"))
        return out

    def tables(self, commit: Commit, there: Container[str]) -> Reach:
        """The manifest files that a commit names, and the objects in rows of those in `there`; no checkpoints."""
        out = Reach(manifests={ref.path for ref in commit.files_led_to})
        for kind in SHARDED:
            self._add_rows(out, kind, [ref for ref in commit.files(kind) if ref.path in there])
        return out

    def needs(self, commit: Commit, serving: Commit, *, whole: bool) -> Reach:
        """The keys that a checkpoint needs beside its commit. whole: all rows of the tables that serve it count, and
        the caller adds them; else only the rows that hold its steps."""
        record = commit.checkpoint
        if record is None:
            raise CorruptManifestError(f"commit {commit.number} at {self._storage.url} is no checkpoint")
        own = Reach(manifests={sys.intern(ref.path) for ref in serving.files_led_to})
        own.states.update([one.key for one in record.ranks], record.borrowed)
        if commit.live is not None:
            own.manifests.add(commit.live.path)
        if not whole and commit.live is not None:
            snapshot = Snapshot(self._storage, serving)
            own.add_rows(snapshot.take(held_rows(snapshot, commit), ["shard", "chunks"]))
        return own

    def _walk_checkpoints(self, head: Commit, places: set[Place] | None) -> list[tuple[Reach, tuple[FileRef, ...]]]:
        """The needs of a commit's checkpoints, each looked at once, and the files whose rows they need all."""
        places = checkpoint_places(self._storage, head) if places is None else places
        wanted = [(place, head.let_go is None or _tables_of(place) >= head.let_go) for place in places]
        new = sorted((one for one in wanted if one not in self._needs), key=lambda one: one[0][0])
        manifests = {manifest for (_, manifest), _ in new if manifest is not None}
        serving = {one.number: one for one in commits.read_all(self._storage, manifests, head)}
        for at in range(0, len(new), _AT_ONCE):
            some = new[at : at + _AT_ONCE]
            lacking = {number for (number, _), _ in some} - serving.keys()
            found = serving | {one.number: one for one in commits.read_all(self._storage, lacking, head)}
            for place, whole in some:
                tables = found[_tables_of(place)]
                own = self.needs(found[place[0]], tables, whole=whole)
                self._needs[place, whole] = own, tables.files("segments") if whole else ()
        return [self._needs[one] for one in wanted]

    def _add_rows(self, out: Reach, kind: str, refs: Iterable[FileRef]) -> None:
        """Add the keys that rows of these files name; each file is read once."""
        files = list(refs)
        for some in _together([ref for ref in files if ref.path not in self._rows]):
            for ref, data in zip(some, tablefiles.fetch(self._storage, some), strict=True):
                self.know(ref, tablefiles.parsed(self._storage, kind, [ref], [data], ["shard", "chunks"]))
        for ref in files:
            out.add(self._rows[ref.path])


def held_rows(snapshot: Snapshot, commit: Commit) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of a segments table that hold live steps of a checkpoint, and the other rows of their episodes."""
    live = tablefiles.load(snapshot.storage, "live", [] if commit.live is None else [commit.live])
    located = tables.locate(live, snapshot.columns(tables.LOCATING))
    sequences = None if commit.checkpoint is None else commit.checkpoint.sequences
    index = EpisodeIndex(snapshot, lambda: located.stream, (commit.session, sequences))
    numbers = ascending(index.episode_of_row[located.stream])
    return np.union1d(index.chains.rows_of(numbers[numbers >= 0]), located.stream)


def _tables_of(place: Place) -> int:
    """The number of the commit whose tables serve a checkpoint."""
    return place[0] if place[1] is None else place[1]


def checkpoint_places(storage: Storage, head: Commit) -> set[Place]:
    """The places of all checkpoints: of the table, and the newest ones, which a compaction publishes again without a
    row of their own."""
    table = tablefiles.load(storage, "checkpoints", head.files("checkpoints"), ["commit", "manifest"])
    rows = set(zip(table["commit"].to_pylist(), table["manifest"].to_pylist(), strict=True))
    return rows | {(mark.commit, mark.manifest) for entry in head.runs.values() for mark in entry.marks.values()}


def _together(refs: list[FileRef]) -> Iterator[list[FileRef]]:
    """Groups of files to fetch at once: as many as memory allows."""
    some: list[FileRef] = []
    for ref in refs:
        if some and sum(one.bytes for one in some) + ref.bytes > _BYTES_AT_ONCE:
            yield some
            some = []
        some.append(ref)
    if some:
        yield some
