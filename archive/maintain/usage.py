"""The space that an archive takes on its store, by purpose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import ascending
from archive.base import escape, layout, size, tabulate
from archive.index import EpisodeIndex, Reach, Snapshot, Walk, checkpoint_places
from archive.jobs import Jobs, is_result, job_of
from archive.log import Commit, commits, tablefiles
from archive.maintain.objects import FOLDERS, Watermarks, retained_reach, unit
from archive.store import Storage
from archive.tables import objects_of

if TYPE_CHECKING:
    pass


_COUNTED = {*FOLDERS} - {layout.JOBS}


@dataclass(frozen=True, slots=True)
class Tally:
    """Objects that are there for one reason."""

    bytes: int = 0
    objects: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.bytes + other.bytes, self.objects + other.objects)


@dataclass(frozen=True, slots=True)
class Usage:
    """The space that an archive takes: each object counts once, where it comes first.

    live: objects for the newest checkpoint of each run, journaled since, tables of the newest commit, and results of
    jobs that have not ended.
    checkpoints: objects that only other checkpoints and tags need.  forgettable: episodes that no checkpoint holds;
    forget(episodes="unreferenced") forgets them.  prunable: objects that nothing retained leads to; prune() deletes
    them once they are old enough.  other: commits, claims of sessions and the like, which stay.
    """

    live: Tally
    checkpoints: Tally
    forgettable: Tally
    prunable: Tally
    other: Tally

    @property
    def total(self) -> Tally:
        """The sum of all of these."""
        return sum((getattr(self, name) for name in self.__slots__), Tally())

    def to_json(self) -> dict[str, dict[str, int]]:
        """Bytes and objects, by purpose."""
        return asdict(self) | {"total": asdict(self.total)}

    def __str__(self) -> str:
        rows = [(name, size(one["bytes"]), f"{one['objects']:,} objects") for name, one in self.to_json().items()]
        return "\n".join(tabulate(("", "bytes", "objects"), rows, right=("bytes", "objects"))[1:])


@dataclass(frozen=True)
class ArchiveInfo:
    """A summary of an archive, and the space that it takes."""

    about: Mapping[str, Any]
    usage: Usage

    def to_json(self) -> dict[str, Any]:
        """Both, as one JSON object."""
        return dict(self.about) | {"usage": self.usage.to_json()}

    def __str__(self) -> str:
        return "\n".join([*(f"{name:<12} {value}" for name, value in self.about.items()), str(self.usage)])

    __repr__ = __str__


def usage(storage: Storage, head: Commit) -> Usage:
    """The space that the archive takes as of this commit. Tables and one listing of all objects are read, no data."""
    rounds = Jobs(storage).unfinished()
    going = {escape(one.job) for one in rounds}, {escape(one.session) for one in rounds}
    reach = retained_reach(storage, head, rounds=rounds).keys
    live, held, tails = _live(storage, head), _held(storage, head), Watermarks.of(head)
    out = dict.fromkeys(Usage.__slots__, Tally())
    for found in storage.scan(""):
        key = unit(found.key)
        reason = "other"
        if key in live or tails.awaited(key) or layout.session_of(key) in going[1]:
            reason = "live"
        elif is_result(key):
            reason = "live" if job_of(key) in going[0] else "prunable"
        elif key.partition("/")[0] in _COUNTED and not key.endswith(layout.PRUNED):
            if key in reach:
                reason = "checkpoints" if held.get(key, True) else "forgettable"
            else:  # nothing was forgotten, so each commit can still be opened
                reason = "forgettable" if head.let_go is None else "prunable"
        out[reason] += Tally(found.bytes, 1)
    return Usage(**out)


def _live(storage: Storage, head: Commit) -> set[str]:
    """The objects that the newest checkpoint of each run needs, the tables of the newest commit, and its derived
    columns."""
    out = Reach(manifests={ref.path for ref in head.files_led_to})
    out.add_rows(tablefiles.load(storage, "late", head.files("late"), ["shard", "chunks"]))
    finds = Walk(storage)
    marks = [mark for entry in head.runs.values() for mark in entry.marks.values()]
    for mark in {mark.commit: mark for mark in marks}.values():
        made = commits.read_of(storage, mark.commit, head)
        serving = made if mark.manifest is None else commits.read_of(storage, mark.manifest, head)
        out.add(finds.needs(made, serving, whole=False))
    return out.keys


def _held(storage: Storage, head: Commit) -> dict[str, bool]:
    """Shards and chunk files of the newest segments table -> True if an episode in them is live in some checkpoint."""
    snapshot = Snapshot(storage, head)
    segments = snapshot.columns([*tables.LOCATING, "chunks"])
    saved = commits.read_all(storage, (number for number, _ in checkpoint_places(storage, head)), head)
    live = tablefiles.load(storage, "live", [one.live for one in saved if one.live is not None])
    touched = np.flatnonzero(tables.touched(live, segments))
    index = EpisodeIndex(snapshot, lambda: touched)
    episodes = ascending(index.episode_of_row[touched])
    rows = np.union1d(touched, index.chains.rows_of(episodes[episodes >= 0]))
    return dict.fromkeys(objects_of(segments), False) | dict.fromkeys(objects_of(segments.take(rows)), True)
