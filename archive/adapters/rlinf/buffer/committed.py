"""Trajectories that were committed and that no checkpoint has: which of them a rank goes on from."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from archive import Archive
from archive.adapters.rlinf.buffer.numbering import distinct_ids, ids_of
from archive.adapters.rlinf.buffer.ranks import Where, part_meant
from archive.adapters.rlinf.buffer.start import Start
from archive.base import NothingThereError, logger
from archive.checkpoint import Holding
from archive.log import RunEntry
from archive.read import Episodes


def start(arc: Archive, run: str, buffer: str, where: Where, part: int | None, world_size: int | None) -> Start:
    """What a rank goes on from: what that rank wrote, in a world of as many; else a contiguous part of all, by number.

    part: that one of as many parts of what the path means. NothingThereError where the run committed nothing.
    """
    every = _committed(arc, run, buffer)
    writers = {*every.table["rank"].to_pylist()}
    count = max(writers) + 1
    at_least = max(count, (where.rank or 0) + 1)
    rank, size = part_meant(where, part, world_size, at_least, f"{count} wrote what is at {arc.url}")
    if part is not None:
        named = every if where.rank is None else every.filter(rank=where.rank)
        mine = _part(named, part, size)
    else:
        mine = every.filter(rank=rank) if count == size else _part(every, rank, size)
    logger.info(
        "%s has no whole checkpoint of run %r: rank %d of %d takes %d of the %d trajectories that were committed there",
        where.name, run, rank, size, len(mine), len(every),
    )  # fmt: skip
    numbers = distinct_ids(mine if len(writers) == size else every)
    source = Holding(mine, buffer, run, rank, size)
    return Start(source, rank, size, mine, numbers, [*ids_of(every), *numbers.values()])


def _part(episodes: Episodes, rank: int, world_size: int) -> Episodes:
    """A contiguous part by number, as RLinf cuts its list: the first ones have one more."""
    numbers = distinct_ids(episodes)
    names = episodes.table["episode_id"].to_pylist()
    order = np.array(sorted(range(len(names)), key=lambda i: numbers[names[i]]), np.int64)
    return episodes.pick(np.array_split(order, world_size)[rank])


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
            f"the archive at {arc.url} (runs: {runs}) has no trajectories of run {run!r} in buffer {buffer!r}: "
            "auto_save commits them, and save_checkpoint() makes a whole checkpoint once all ranks have called it"
        )
    return every


def _sessions(entries: Iterable[RunEntry]) -> set[str]:
    return {name for entry in entries for name in entry.sessions}
