"""Engine: what a path means to go on from: the newest checkpoint there, or where none was made what was committed."""

from __future__ import annotations

import logging

from archive.adapters.rlinf.buffer import leftover, loading
from archive.adapters.rlinf.buffer.loading import Found, Loaded
from archive.adapters.rlinf.buffer.ranks import Where
from archive.adapters.rlinf.buffer.sinks import Job

_log = logging.getLogger("archive")


def find(where: Where, job: Job, part: int | None, world_size: int | None) -> Found:
    """What the rank of a path goes on from: all as it was in a world of the same size, else a part of all.

    part: that one of `world_size` parts of what the path means, instead.
    """
    world_size = job.world_size if world_size is None else world_size
    arc = loading.opened(where, job.storage_options)
    ck = loading.newest(arc, job.run, job.buffer)
    if ck is None:
        rest = leftover.Rest(arc, where, job.run, job.buffer)
        return _told(rest.of_rank(world_size) if part is None else rest.part_of_list(part, world_size), where)
    if part is None:
        return Loaded(ck, loading.share_of(ck, where, world_size), job.buffer)
    return Loaded(ck, loading.part_of_list(ck, where, job.buffer, part, world_size), job.buffer)


def _told(found: leftover.Leftover, where: Where) -> Found:
    _log.info(
        "%s has no whole checkpoint of run %r: rank %d of %d takes %d of the %d trajectories that were committed there",
        where.name, found.run, found.rank, found.world_size, len(found.mine), len(found.every),
    )  # fmt: skip
    return found
