"""Pure, no I/O: what a buffer is made with, checked; and its random generator."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from archive.adapters.rlinf.buffer import flatten
from archive.base import UsageError

FORMATS = ("pt", "pkl")


def check(
    cache_size: int, sample_window_size: int, max_trajectories: int | None, trajectory_format: str, missing: Any
) -> None:
    """Refuse what makes no sense."""
    for name, value in (("cache_size", cache_size), ("sample_window_size", sample_window_size)):
        if int(value) < 0:
            raise UsageError(f"{name}={value} must be at least 0")
    if max_trajectories is not None and max_trajectories < 1:
        raise UsageError(f"max_trajectories={max_trajectories} must be at least 1, or None")
    if trajectory_format not in FORMATS:
        raise UsageError(f"trajectory_format={trajectory_format!r}: give {' or '.join(map(repr, FORMATS))}")
    flatten.check_missing(missing)


def check_path(auto_save: bool, auto_save_path: Any) -> None:
    """What is saved must have a place."""
    if auto_save and not auto_save_path:
        raise UsageError("auto_save=True needs auto_save_path=: a folder or any fsspec URL")


def seeded(seed: int | None, rank: int) -> torch.Generator:
    """A rank's generator: rank 0's is that of the seed itself, the others' differ. None: from the system."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
        return generator
    if rank:
        digest = hashlib.sha256(f"{seed}/{rank}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
    return generator.manual_seed(seed)
