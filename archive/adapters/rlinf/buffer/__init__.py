"""RLinf's trajectory buffer on any URL: trajectories come in; batches, and folders as its own code reads them,
go out."""

from __future__ import annotations

from archive.adapters.rlinf.buffer.loading import held_by
from archive.adapters.rlinf.buffer.ranks import Where, where
from archive.adapters.rlinf.buffer.trajectory import TrajectoryReplayBuffer

__all__ = [
    "TrajectoryReplayBuffer",
    "Where",
    "held_by",
    "where",
]
