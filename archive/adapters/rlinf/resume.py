"""The start of a TrajectoryReplayBuffer: archive and rank of a path, and the trajectories that it goes on from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

import archive
from archive import Archive
from archive.adapters import planned
from archive.adapters.rlinf.contents import Entry, Home
from archive.adapters.rlinf.trajectory import NUMBER, Weights, distinct_ids, ids_of, metadata_of, next_id
from archive.base import NotFoundError, NothingThereError, UsageError, logger, process_group
from archive.checkpoint import Checkpoint, Holding
from archive.log import place
from archive.read import Episodes
from archive.store import Storage

ADDED = "added"  # metadata of what is journaled: how many trajectories the buffer had been given with this one
_RANK = re.compile(r"(?P<root>.*?)/*(?:^|/)rank_(?P<rank>\d+)/*", re.DOTALL)

Homes = Callable[[Callable[[], Episodes]], Home]


# -- which rank's data a path means -------------------------------------------------------------------------------


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


def where(path: Any) -> Where:
    """The archive and rank of a path; any fsspec URL or UPath, with or without a last folder `rank_N`."""
    if not path:
        raise UsageError("the path is empty; give a folder or any fsspec URL, such as s3://bucket/replay/rank_0")
    text, options = (path, {}) if isinstance(path, str) else Storage.connect(path).spec()
    found = _RANK.fullmatch(text)
    if found is None or found["root"].endswith(":"):
        return Where(text if text.endswith("://") else text.rstrip("/") or "/", None, options)
    root = found["root"] or ("/" if text.startswith("/") else ".")
    return Where(root, int(found["rank"]), options)


@dataclass
class Job:
    """The job that a buffer belongs to. What is None is asked for when it is needed."""

    rank: int | None
    world_size: int | None
    run: str
    session: str | None
    buffer: str
    storage_options: Mapping[str, Any] | None

    @property
    def own_rank(self) -> int:
        """This process's rank: as given, else from torch.distributed or RANK, else 0."""
        return place(None, None, "main", "-").rank if self.rank is None else self.rank

    def open(self, where: Where, *, create: bool = False) -> Archive:
        """The archive of a path; storage options that were given go before the path's own."""
        options = {**where.storage_options, **(self.storage_options or {})}
        return archive.open(where.root, create=create, storage_options=options)

    def writers(self, rank: int) -> int:
        """The number of ranks that write; 1 where nobody says and the rank is 0."""
        world_size = job_world_size() if self.world_size is None else self.world_size
        if world_size is None and rank:
            raise UsageError(
                f"rank {rank} needs to know how many ranks there are: give world_size=, or set WORLD_SIZE, or start "
                "torch.distributed first"
            )
        return _checked(rank, 1 if world_size is None else world_size, "")[1]


def job_world_size() -> int | None:
    """Ranks of this job, from torch.distributed or WORLD_SIZE; None if neither says."""
    if group := process_group():
        return int(group.get_world_size())
    return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None


class Part(NamedTuple):
    """The part that a rank is to load: its own of what a path means, or part `part` of `world_size`."""

    where: Where
    part: int | None
    world_size: int | None

    def meant(self, known_size: int, saved: str) -> tuple[int, int]:
        """(rank, world size): the path's own rank's, else this process's, or the part that is asked for.

        known_size: of the world that a path with a rank means, where neither the caller nor the job says.  saved: who
        wrote it, for the error.
        """
        size, named = job_world_size() if self.world_size is None else self.world_size, self.where.rank
        if self.part is not None:
            return _checked(self.part, 1 if size is None else size, " (is_distributed=True)")
        if size is None:
            size = 1 if named is None else known_size
        return _checked(place(None, None, "main", "-").rank if named is None else named, size, f" ({saved})")


def _checked(rank: int, world_size: int, why: str) -> tuple[int, int]:
    if world_size <= 0:
        raise UsageError(f"world_size={world_size} must be at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of a world of {world_size}{why}; ranks count from 0")
    return rank, world_size


# -- what a rank goes on from -------------------------------------------------------------------------------------


class Start(NamedTuple):
    """One rank's part of a checkpoint, or of what was committed without one."""

    source: Any  # for arc.writer(resume=source)
    rank: int
    world_size: int
    episodes: Episodes
    numbers: Mapping[str, int]  # episode -> trajectory id
    next_id: int  # which nothing here or elsewhere has
    seeds: Sequence[int | None] = ()  # of the states that were saved
    added: int | None = None  # trajectories so far; None: as many as there are
    generator: torch.Generator | None = None


def find(job: Job, asked: Part, own: Collection[str] = ()) -> Start:
    """The start of the rank that a path means: all as it was in a world of the same size, else a part of all.

    The newest checkpoint there has it, with what was journaled since; where none was made, what was committed.
    own: sessions of this start of the job, whose journals are no tails: where one of them is the newest, the others go
    on from what it went on from.
    """
    asked = asked._replace(world_size=job.world_size if asked.world_size is None else asked.world_size)
    try:
        arc = job.open(asked.where)
    except NotFoundError as e:
        raise NothingThereError(
            f"{e}. A folder with metadata.json and trajectory files is brought into an archive by "
            "archive.adapters.rlinf.import_checkpoint"
        ) from e
    entry = arc.head.runs.get(job.run)
    if entry is not None and entry.journal and entry.session not in own:
        arc.recover(job.run)  # the run's newest session journaled it beyond its newest checkpoint
    ck = arc.checkpoints.of(job.run).newest(replay=True)
    if ck is None:
        return _of_commits(arc, job, asked)
    if job.buffer not in ck.buffers:
        raise NotFoundError(f"checkpoint {ck.name!r} at {arc.url} has no buffer {job.buffer!r}: {list(ck.buffers)}")
    return _of_share(arc, ck, _share(ck, job.buffer, asked), job.buffer)


def _share(ck: Checkpoint, buffer: str, asked: Part) -> Any:
    """The share with all as it was in a world of the same size, else with a part by trajectories; where a part is asked
    for, that one of what the path's rank had, or all ranks."""
    index, named = asked.part, asked.where.rank
    if index is None:
        rank, size = asked.meant(ck.world_size, f"checkpoint {ck.name!r} was saved by {ck.world_size}")
        policy = "balanced" if size == ck.world_size else "by_trajectory"
        return planned(ck, world_size=size, policy=policy, tails="ignore").share(rank)
    _, size = asked.meant(1, "")
    chosen = None if named is None else {"episode_id": held_by(ck, buffer, named)}
    if index and index == named and size > 1:
        logger.warning(
            "rank %d of %d loads its part of the trajectories of rank_%d alone, so that nobody has the rest: with "
            "is_distributed=True all ranks give the same path; without it, each gives its own and all is shared out",
            index,
            size,
            index,
        )
    return planned(ck, world_size=size, policy="by_trajectory", filter=chosen, tails="ignore").share(index)


def held_by(ck: Checkpoint, buffer: str, rank: int) -> list[str]:
    """Ids of the episodes that one rank of the checkpoint has."""
    ck.staged(rank)  # an error if it has no such rank
    share = planned(ck, world_size=ck.world_size, tails="ignore").share(rank)
    ids: list[str] = share.buffer(buffer).episodes.table["episode_id"].to_pylist()
    return ids


def _of_share(arc: Archive, ck: Checkpoint, share: Any, buffer: str) -> Start:
    part = share.buffer(buffer)
    renumbered = ck.values.get(NUMBER, {})
    mine = part.episodes if share.plan.is_identity else ck.episodes  # as it was: other ranks' ids do not matter
    numbers = distinct_ids(mine, renumbered)
    taken = [*ids_of(ck.episodes, renumbered), *numbers.values()]
    states = [dict(s) if isinstance(s, Mapping) else {} for s in (part.state, *part.source_states.values())]
    state, generator, added = states[0], torch.Generator(), states[0].get("added")
    saved = state.get("generator", (state.get("live") or {}).get("generator"))
    if isinstance(saved, torch.Generator):
        generator.set_state(saved.get_state())
    else:
        generator.manual_seed(int(share.seed))  # of a new world
    if ck.record.recovered is not None:
        taken += ids_of(arc.episodes.filter(buffer=buffer))  # some came and left after the counter was saved
        if share.plan.is_identity:
            added = _added(mine, numbers, state)
    seeds = [s["seed"] for s in states if "seed" in s]
    found = Start(share, share.rank, share.world_size, part.episodes, numbers, next_id(states, taken), seeds, added)
    unsaved = ck.record.recovered is not None and not any(states)
    return found if unsaved else found._replace(generator=generator)


def _added(held: Episodes, numbers: Mapping[str, int], state: Mapping[str, Any]) -> int | None:
    """The number of trajectories that had been added with the newest one: its episode says it, or a newer state."""
    names: list[str] = held.table["episode_id"].to_pylist()
    counts = {numbers[name]: about.get(ADDED) for name, about in zip(names, metadata_of(held), strict=True)}
    newest = max(counts, default=-1)
    if counts and newest < state.get("counter", 0):
        return state.get("added")
    return counts[newest] if counts else 0


def _of_commits(arc: Archive, job: Job, asked: Part) -> Start:
    """The start where auto_save committed and nobody made a checkpoint: the trajectories that a rank wrote, in a world
    of as many; else a contiguous part of all, by number. NothingThereError where nothing was committed."""
    every = arc.episodes.filter(buffer=job.buffer)
    other = {name for run, entry in arc.head.runs.items() if run != job.run for name in entry.sessions}
    if (sessions := {*every.table["session"].to_pylist()}) & other:
        every = every.filter(session=sorted(sessions - other))
    if not len(every):
        runs = ", ".join(map(repr, arc.head.runs)) or "none"
        raise NothingThereError(
            f"the archive at {arc.url} (runs: {runs}) has no trajectories of run {job.run!r} in buffer {job.buffer!r}: "
            "auto_save commits them, and save_checkpoint() makes a whole checkpoint once all ranks have called it"
        )
    writers, named = {*every.table["rank"].to_pylist()}, asked.where.rank
    count = max(writers) + 1
    rank, size = asked.meant(max(count, (named or 0) + 1), f"{count} wrote what is at {arc.url}")
    chosen = every.filter(rank=named) if asked.part is not None and named is not None else every
    if asked.part is None and count == size:
        mine = every.filter(rank=rank)
    else:  # as RLinf cuts its list: the first parts have one more
        ids, names = distinct_ids(chosen), chosen.table["episode_id"].to_pylist()
        order = np.argsort(np.array([ids[name] for name in names], np.int64), kind="stable")
        mine = chosen.pick(np.array_split(order, size)[rank])
    logger.info(
        "%s has no whole checkpoint of run %r: rank %d of %d takes %d of the %d trajectories that were committed there",
        *(asked.where.name, job.run, rank, size, len(mine), len(every)),
    )
    numbers = distinct_ids(mine if len(writers) == size else every)
    following = next_id((), [*ids_of(every), *numbers.values()])
    return Start(Holding(mine, job.buffer, job.run, rank, size), rank, size, mine, numbers, following)


def entries_of(episodes: Callable[[], Episodes], homes: Homes, numbers: Mapping[str, int] | None = None) -> list[Entry]:
    """Episodes as trajectories that can be read, by id; those that have no envs side by side are of one."""
    found = episodes()
    numbers = distinct_ids(found) if numbers is None else numbers
    home, out = homes(episodes), []
    for ep, about in zip(found, metadata_of(found), strict=True):
        weights = Weights(ep.model_weights_uuid, ep.update_count)
        entry = Entry(numbers[ep.id], ep.length, int(about.get("B", 1)), weights, home, ep.id, about.get(NUMBER))
        out.append(entry)
    return sorted((e for e in out if e.samples), key=lambda e: e.trajectory_id)
