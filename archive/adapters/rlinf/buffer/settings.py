"""Pure, no I/O: what a buffer is made with, checked; and its random generator."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from archive.adapters import check_option
from archive.base import UsageError
from archive.journal import seconds

FORMATS = ("pt", "pkl")


def check(counts: Mapping[str, int], max_trajectories: int | None, trajectory_format: str, missing: Any) -> None:
    """Refuse what makes no sense. counts: what must be at least 0, by name."""
    for name, value in counts.items():
        if int(value) < 0:
            raise UsageError(f"{name}={value} must be at least 0")
    if max_trajectories is not None and max_trajectories < 1:
        raise UsageError(f"max_trajectories={max_trajectories} must be at least 1, or None")
    check_option("trajectory_format", trajectory_format, FORMATS)
    if missing not in ("error", "skip") and not isinstance(missing, (bool, int, float)):
        raise UsageError(f"missing={missing!r}: give 'error', 'skip' or a number to fill in")


def check_auto_save(auto_save: bool, path: Any, journal_s: float | None) -> float | None:
    """Seconds of the journal, None for none. Refuse what lacks what it needs."""
    if auto_save and not path:
        raise UsageError("auto_save=True needs auto_save_path=: a folder or any fsspec URL")
    if journal_s is not None and not auto_save:
        raise UsageError(
            "journal_s= needs auto_save=True and auto_save_path=: without them nothing is written before "
            "save_checkpoint()"
        )
    return seconds(journal_s)


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
