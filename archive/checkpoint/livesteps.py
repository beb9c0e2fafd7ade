"""The live steps of a checkpoint: which rows of the segments table say where they lie and what episodes they are of.

What is live is what was written last, or nearly, so the newest files of the table mostly have all of it. They are taken
alone if no row of an older file can change anything about a live episode; else the whole table is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Ints, arrow, run_starts
from archive.arrays import numbers as as_array
from archive.base import CorruptManifestError, cached_property
from archive.index import ByWriter, EpisodeIndex, Snapshot
from archive.log import Commit, FileRef, Sequences, tablefiles
from archive.steps import Steps, row_codes

if TYPE_CHECKING:
    import pyarrow as pa

_TAIL = ("session", "rank", "sequence", "commit")
Branch = tuple[str, Sequences | None]  # a session, and how far each of its ranks had got


class LiveSteps:
    """The live steps of a checkpoint, in the tables that serve it."""

    def __init__(self, whole: Snapshot, commit: Commit) -> None:
        """whole: the segments table that it is read with; commit: its own."""
        self._whole = whole
        self._commit = commit

    @property
    def _branch(self) -> Branch:
        record = self._commit.checkpoint
        return self._commit.session, None if record is None else record.sequences

    @cached_property
    def live(self) -> pa.Table:
        """The live table."""
        ref = self._commit.live
        found = tablefiles.load(self._whole.storage, "live", [] if ref is None else [ref])
        self._check_ranks(found)
        return found

    def _check_ranks(self, live: pa.Table) -> None:
        """CorruptManifestError if something is live of a rank that is not in the checkpoint."""
        ref, record = self._commit.live, self._commit.checkpoint
        there = set() if record is None else {one.rank for one in record.ranks}
        strange = set(live["rank"].unique().to_pylist()) - there
        if ref is not None and strange:
            raise CorruptManifestError(
                f"{self._whole.storage.full_url(ref.path)} has live steps of rank {min(strange)}, which is not in the "
                f"checkpoint of commit {self._commit.number}; run `archive verify`"
            )

    @cached_property
    def index(self) -> EpisodeIndex:
        """The episodes of the newest files that have all of what is live, or of the whole table."""
        if not self.live.num_rows:
            return EpisodeIndex(self._whole.newest(0), None, self._branch)
        for count in _counts(self._whole.files, self._steps):
            found = EpisodeIndex(self._whole.newest(count), None, self._branch)
            if _is_enough(found, self.live, self._branch):
                return found
        return self.whole_index

    @property
    def _steps(self) -> int:
        return int((as_array(self.live["hi"]) - as_array(self.live["lo"])).sum())

    @cached_property
    def whole_index(self) -> EpisodeIndex:
        """The episodes of the whole table."""
        return EpisodeIndex(self._whole, self._live_rows, self._branch)  # a method, as functions of here do not pickle

    def _live_rows(self) -> Ints:
        return self._located_in_whole.stream

    @cached_property
    def _located_in_whole(self) -> Steps:
        return tables.locate(self.live, self._whole.columns(tables.LOCATING))

    @cached_property
    def located(self) -> Steps:
        """The places of the live steps, in live order, in the rows of `index`."""
        if self.index is self.whole_index:
            return self._located_in_whole
        return tables.locate(self.live, self.index.snapshot.columns(tables.LOCATING))

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """Live episodes in live order: where the pieces of each begin in `located`, and its number in the index."""
        episode = self.index.episode_of_row[self.located.stream]
        place = row_codes(self.live.select(["rank", "buffer"]))[0][self.located["run"]]
        heads = run_starts(episode, place)
        return heads, episode[heads]

    def __getstate__(self) -> dict[str, Any]:
        return {"_whole": self._whole, "_commit": self._commit}


def _counts(files: Sequence[FileRef], steps: int) -> Iterator[int]:
    """How many of the newest files to try, but for all: as many as have so many steps, then twice the rows each time.

    files: oldest first. One that does not say how many steps it has may have enough.
    """
    rows = wanted = held = 0
    for count, ref in enumerate(reversed(files), 1):
        rows += ref.rows
        held += steps if ref.steps is None else ref.steps
        if held >= steps and rows >= wanted and count < len(files):
            yield count
            wanted = 2 * rows


def _is_enough(index: EpisodeIndex, live: pa.Table, branch: Branch) -> bool:
    """True if the newest files have all of what is live, and no row of an older one changes anything about it.

    So it is if each live step is there, in an episode of its id alone, which begins there, and ends in a row that is
    newer than all in older files and that the checkpoint's session sees: then this row is the episode's newest one in
    the whole table, too, and its chain is the same.
    """
    part = index.snapshot
    located = tables.locate_some(live, part.columns(tables.LOCATING))
    if len(tables.lacking(live, located)):
        return False
    numbers = np.unique(index.episode_of_row[located.stream])
    if (numbers < 0).any() or not _named_once(index, numbers):
        return False
    begins = part.take(index.chains.firsts()[numbers], ["predecessor"])
    tails = part.take(index.chains.lasts()[numbers], _TAIL)
    return (
        begins["predecessor"].null_count == len(numbers)
        and bool((as_array(tails["commit"]) > _newest_commit(part.older)).all())
        and _are_seen(tails, part, branch)
    )


def _named_once(index: EpisodeIndex, numbers: Ints) -> bool:
    """True if no other episode of an index has the id of one of these."""
    import pyarrow.compute as pc

    ids = index.column("episode_id")
    same = pc.is_in(ids, value_set=ids.take(arrow(numbers)).combine_chunks())
    return bool(pc.sum(same, min_count=0).as_py() == len(numbers))


def _newest_commit(files: Sequence[FileRef]) -> float:
    """No row of these files came later; beyond all commits where one does not say it."""
    return max((float("inf") if ref.commit is None else ref.commit[1] for ref in files), default=0)


def _are_seen(rows: pa.Table, part: Snapshot, branch: Branch) -> bool:
    """True if a session sees all of these rows; which it went on from is read only if it did not write them itself."""
    known = ByWriter(rows)
    return bool(known.seen(dict([branch])).all() or known.seen(part.branches.sight(*branch)).all())
