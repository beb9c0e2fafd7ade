"""Finding splices: segments that go on from one which their session has never seen, as another branch wrote it.

What a session goes on from is recorded when it is opened. Of sessions that an earlier version opened, their checkpoints
say it: each staged object names the commit that its writer resumed from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from archive.checkpoint import Checkpoint, StagedIndex
from archive.manifest import Branches, Origin, Rows, Snapshot, chains


class Splice(NamedTuple):
    """A segment, the one that it goes on from, and what its session went on from instead."""

    episode_id: str
    segment: str
    predecessor: str
    origin: Origin | None

    def __str__(self) -> str:
        where = "began by itself" if self.origin is None else f"resumed from commit {self.origin.commit}"
        return (
            f"episode {self.episode_id!r} is spliced: segment {self.segment!r} goes on from {self.predecessor!r}, "
            f"which is of a branch that its session, which {where}, does not have"
        )


class Resumes:
    """Who went on from what, as the commits of an archive say, from the oldest to the newest."""

    def __init__(self) -> None:
        self._checkpoints: dict[int, Origin] = {}
        self._said: dict[str, tuple[str, Origin]] = {}  # session -> its run, and what its checkpoints say

    def add(self, checkpoint: Checkpoint, index: StagedIndex) -> None:
        """A checkpoint, and the index of an object that was staged for it."""
        if checkpoint.origin is not None:
            self._checkpoints[checkpoint.number] = checkpoint.origin
        found = self._checkpoints.get(index.resumed_from or 0)
        if found is not None and found.run == checkpoint.run and found.session != checkpoint.session:
            self._said.setdefault(checkpoint.session, (checkpoint.run, found))

    def branches(self, recorded: Branches) -> Branches:
        """What is recorded, and what checkpoints say of sessions of which nothing is."""
        said = {name: pair for name, pair in self._said.items() if name not in recorded.origins}
        origins = {name: origin for name, (_, origin) in said.items()}
        return Branches({**origins, **recorded.origins}, {name: run for name, (run, _) in said.items()} | recorded.runs)


def find(snapshot: Snapshot, resumes: Resumes) -> Iterator[Splice]:
    """All splices in a segments table."""
    known = resumes.branches(snapshot.branches)
    if not known:
        return
    table = snapshot.columns(chains.DETAIL)
    before = chains.predecessors(table)
    for row in np.sort(known.spliced(Rows.of(table), before)).tolist():
        (mine, other) = snapshot.take(np.array([row, before[row]]), chains.DETAIL).to_pylist()
        names = [chains.address(r["session"], r["rank"], r["sequence"]) for r in (mine, other)]
        yield Splice(mine["episode_id"], names[0], names[1], known.origins.get(mine["session"]))
