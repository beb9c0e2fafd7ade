"""Frameworks: replay buffers whose data lies in an archive, with the interfaces that training code knows."""

from __future__ import annotations

from archive.buffers.trajectory import TrajectoryReplayBuffer

__all__ = ["TrajectoryReplayBuffer"]
