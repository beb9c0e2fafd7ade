"""Which rank's data a path means. A path that ends in `rank_3` is rank 3 of the archive above it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from archive.base import UsageError, process_group
from archive.log import place
from archive.store import Storage

_RANK = re.compile(r"(?P<root>.*?)/*(?:^|/)rank_(?P<rank>\d+)/*", re.DOTALL)


@dataclass(frozen=True)
class Where:
    """An archive's URL, and the rank that a path names, if it names one."""

    root: str
    rank: int | None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of a path that brings its own

    @property
    def name(self) -> str:
        """The same however the root is written: with or without a scheme, relative, with slashes at the end."""
        return Storage.connect(self.root, self.storage_options).url

    def options(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Storage options: those that are given, before the path's own."""
        return {**self.storage_options, **(given or {})}


@dataclass
class Job:
    """Who writes. What is None is asked for when it is needed."""

    rank: int | None
    world_size: int | None
    run: str
    session: str | None
    buffer: str
    storage_options: Mapping[str, Any] | None

    @property
    def own_rank(self) -> int:
        return job_rank() if self.rank is None else self.rank

    def rank_of(self, where: Where) -> int:
        if where.rank is not None:
            return where.rank
        return self.own_rank


def where(path: Any) -> Where:
    """What a path means; any fsspec URL or UPath, with or without a last folder `rank_N`."""
    if not path:
        raise UsageError("the path is empty; give a folder or any fsspec URL, such as s3://bucket/replay/rank_0")
    text, options = (path, {}) if isinstance(path, str) else Storage.connect(path).spec()
    found = _RANK.fullmatch(text)
    if found is None or found["root"].endswith(":"):
        return Where(text if text.endswith("://") else text.rstrip("/") or "/", None, options)
    root = found["root"] or ("/" if text.startswith("/") else ".")
    return Where(root, int(found["rank"]), options)


def job_world_size() -> int | None:
    """Ranks of this job, from torch.distributed or WORLD_SIZE; None if neither says."""
    if group := process_group():
        return int(group.get_world_size())
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


def job_rank() -> int:
    """This process's rank, from torch.distributed or RANK, else 0."""
    return place(None, None, "main", "-").rank


def writer_world_size(rank: int, given: int | None) -> int:
    """Ranks of the world that writes; 1 where nobody says and the rank is 0."""
    world_size = job_world_size() if given is None else given
    if world_size is None and rank:
        raise UsageError(
            f"rank {rank} needs to know how many ranks there are: give world_size=, or set WORLD_SIZE, or start "
            "torch.distributed first"
        )
    return _checked(rank, 1 if world_size is None else world_size, "")[1]


def part_meant(where: Where, part: int | None, world_size: int | None, known_size: int, saved: str) -> tuple[int, int]:
    """(rank, world size) of what a path means: its own rank's, else this process's, or the part that is asked for.

    known_size: of the world that a path with a rank means, where neither the caller nor the job says.  saved: what is
    known of those who wrote it, for the error.
    """
    size = job_world_size() if world_size is None else world_size
    if part is not None:
        return _checked(part, 1 if size is None else size, " (is_distributed=True)")
    if size is None:
        size = 1 if where.rank is None else known_size
    return _checked(job_rank() if where.rank is None else where.rank, size, f" ({saved})")


def _checked(rank: int, world_size: int, why: str) -> tuple[int, int]:
    if world_size <= 0:
        raise UsageError(f"world_size={world_size} must be at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of a world of {world_size}{why}; ranks count from 0")
    return rank, world_size
