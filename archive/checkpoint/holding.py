"""A writer that begins with episodes that are in the archive already: they are referred to, not copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from archive.arrays import Ints
from archive.checkpoint.resuming import take_over
from archive.manifest import EpisodeIndex, Resume, Snapshot
from archive.read import Episodes
from archive.steps import Steps
from archive.tables import NO_ENV

if TYPE_CHECKING:
    import pyarrow as pa

_STREAM = ["session", "rank", "env_id"]


@dataclass(frozen=True)
class Holding:
    """One rank's buffer that holds these episodes, one after the other: `arc.writer(resume=Holding(...))`."""

    episodes: Episodes
    buffer: str  # which they were written to
    run: str
    rank: int = 0
    world_size: int = 1

    def to_resume(self, rank: int | None = None) -> Resume:
        """What the writer goes on from. rank: as of a checkpoint's; this one knows its own."""
        found = self.episodes.step_spans()
        place = np.arange(len(found.rows))
        taken = np.maximum(found.hi - found.lo, 1)  # an episode without steps has a position of its own
        at = np.cumsum(taken) - taken
        pieces = Steps(found.rows, found.lo, found.hi, follows=("position",), run=place, position=at)
        env: Ints = np.full(len(place), NO_ENV, np.int64)
        source = _HeldSegments(self.episodes.episode_index, self.episodes.reader.snapshot, found.rows)
        held = take_over(source, pieces, env, at, {NO_ENV: int(taken.sum())}, {})
        return Resume(
            self.rank, self.world_size, self.run, {self.buffer: held}, self.episodes.reader.snapshot.commit.number
        )


@dataclass(frozen=True)
class _HeldSegments:
    """Rows of the segments table, each a run of its own."""

    index: EpisodeIndex
    snapshot: Snapshot
    rows: Ints

    @property
    def whole_index(self) -> EpisodeIndex:
        return self.index

    @property
    def live(self) -> pa.Table:
        return self.snapshot.take(self.rows, _STREAM).rename_columns(["session", "stream_rank", "stream_env"])
