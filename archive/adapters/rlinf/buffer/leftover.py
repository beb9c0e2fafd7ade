"""Engine: trajectories that were committed and that no checkpoint has: whose they are, and how a writer goes on from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import Archive
from archive.adapters.rlinf.buffer.loading import check_rank, ids_of, told_apart
from archive.adapters.rlinf.buffer.ranks import Where, job_rank, job_world_size
from archive.arrays import Ints
from archive.base import NothingThereError, cached_property
from archive.checkpoint import resuming
from archive.manifest import NO_ENV, EpisodeIndex, Located, Resume, Snapshot
from archive.read import Episodes

if TYPE_CHECKING:
    import pyarrow as pa

_PLACE = ["session", "rank", "env_id"]


@dataclass(frozen=True)
class Leftover:
    """One rank's part of them."""

    run: str
    buffer: str
    rank: int
    world_size: int
    every: Episodes  # of all ranks
    mine: Episodes
    state: dict[str, Any] = field(default_factory=dict)  # nobody saved one
    source_states: tuple[dict[str, Any], ...] = ()

    @property
    def source(self) -> Leftover:
        """What a writer goes on from."""
        return self

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Episode -> trajectory id."""
        return told_apart(self.mine if len(_ranks(self.every)) == self.world_size else self.every)

    @property
    def taken(self) -> list[int | None]:
        """Ids that are used."""
        return [*ids_of(self.every), *self.numbers.values()]

    def episodes(self) -> Episodes:
        return self.mine

    def generator(self) -> None:
        """Nobody saved one."""

    def to_resume(self, rank: int | None = None) -> Resume:
        """A writer's buffer that holds them, one after the other: they are referred to, not copied."""
        found = self.mine.step_parts()
        places = np.arange(len(found.rows))
        steps = np.maximum(found.hi - found.lo, 1)
        pieces = Located(places, found.rows, found.lo, found.hi, np.cumsum(steps) - steps)
        env: Ints = np.full(len(places), NO_ENV, np.int64)
        source: Any = _Pieces(self.mine, found.rows)
        taken = resuming.take_over(source, pieces, env, pieces.position, {NO_ENV: int(steps.sum())}, {})
        return Resume(self.rank, self.world_size, self.run, {self.buffer: taken})


class _Pieces:
    """Segments of some episodes, as `resuming.take_over` asks for those of a checkpoint."""

    def __init__(self, episodes: Episodes, rows: Ints) -> None:
        self.snapshot: Snapshot = episodes.reader.snapshot
        self.index = EpisodeIndex(self.snapshot)
        self._rows = rows

    @property
    def live(self) -> pa.Table:
        return self.snapshot.take(self._rows, _PLACE).rename_columns(["session", "stream_rank", "stream_env"])


class Rest:
    """All that a run's sessions committed to a buffer of an archive, as a path means it."""

    def __init__(self, arc: Archive, where: Where, run: str, buffer: str) -> None:
        self._url, self._named, self._run, self._buffer = arc.url, where.rank, run, buffer
        self._every = _committed(arc, run, buffer)

    def of_rank(self, world_size: int | None) -> Leftover:
        """What the rank of the path goes on from: what that rank wrote, in a world of as many; else a part of all."""
        writers = max(_ranks(self._every)) + 1
        rank = job_rank() if self._named is None else self._named
        world_size = job_world_size() if world_size is None else world_size
        if world_size is None:
            world_size = 1 if self._named is None else max(writers, rank + 1)
        check_rank(rank, world_size, f"{writers} wrote what is at {self._url}")
        same = writers == world_size
        return self._left(rank, world_size, self._of(rank) if same else _part(self._every, rank, world_size))

    def part_of_list(self, part: int, world_size: int | None) -> Leftover:
        """One of `world_size` contiguous parts, by number, of all, or of those of the rank that the path names."""
        world_size = (job_world_size() or 1) if world_size is None else world_size
        check_rank(part, world_size, "is_distributed=True")
        named = self._every if self._named is None else self._of(self._named)
        return self._left(part, world_size, _part(named, part, world_size))

    def _of(self, rank: int) -> Episodes:
        return self._every.filter(rank=rank)

    def _left(self, rank: int, world_size: int, mine: Episodes) -> Leftover:
        return Leftover(self._run, self._buffer, rank, world_size, self._every, mine)


def _part(episodes: Episodes, rank: int, world_size: int) -> Episodes:
    """A contiguous part by number, as RLinf cuts its list: the first ones have one more."""
    numbers = told_apart(episodes)
    names = episodes.table["episode_id"].to_pylist()
    order = np.array(sorted(range(len(names)), key=lambda i: numbers[names[i]]), np.int64)
    chosen: Episodes = episodes[np.array_split(order, world_size)[rank]]
    return chosen


def _committed(arc: Archive, run: str, buffer: str) -> Episodes:
    """What the sessions of a run committed to a buffer; what other runs did is left out."""
    every = arc.episodes.filter(buffer=buffer)
    other = _sessions(entry for name, entry in arc.head.runs.items() if name != run)
    sessions = {*every.table["session"].to_pylist()}
    if sessions & other:
        every = every.filter(session=sorted(sessions - other))
    if not len(every):
        runs = ", ".join(map(repr, arc.head.runs)) or "none"
        raise NothingThereError(
            f"the archive at {arc.url} (runs: {runs}) has no trajectories of run {run!r} in buffer {buffer!r}: auto_save "
            "commits them, and save_checkpoint() makes a whole checkpoint once all ranks have called it"
        )
    return every


def _sessions(entries: Iterable[dict[str, Any]]) -> set[str]:
    return {name for entry in entries for name in (entry.get("session"), *entry.get("superseded", ())) if name}


def _ranks(episodes: Episodes) -> set[int]:
    return {*episodes.table["rank"].to_pylist()}
