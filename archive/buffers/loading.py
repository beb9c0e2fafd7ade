"""Engine: what a buffer goes on from: the share of a checkpoint that a path, a rank and a world size mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import archive
from archive import jsontree
from archive.adapters._rlinf_numbers import NUMBER
from archive.buffers.contents import Entry
from archive.buffers.home import ArchiveHome
from archive.buffers.mapping import Weights
from archive.buffers.ranks import Where, job_rank, job_world_size
from archive.checkpoints import Checkpoint
from archive.episodes import Episodes
from archive.errors import NotFoundError, UsageError
from archive.facade import Archive

Homes = Callable[[Callable[[], Episodes]], ArchiveHome]
_log = logging.getLogger("archive")


@dataclass(frozen=True)
class Loaded:
    """What was found: the share, and which rank of which world that is."""

    arc: Archive
    checkpoint: Checkpoint
    share: Any  # resharding.Share
    buffer: str

    @property
    def rank(self) -> int:
        return int(self.share.rank)

    @property
    def world_size(self) -> int:
        return int(self.share.world_size)

    @property
    def state(self) -> dict[str, Any]:
        """Of the same rank, where nothing moves; else {}."""
        return _as_state(self.share.buffer(self.buffer).state)

    @property
    def source_states(self) -> list[dict[str, Any]]:
        return [_as_state(s) for s in self.share.buffer(self.buffer).source_states.values()]

    def episodes(self) -> Episodes:
        found: Episodes = self.share.buffer(self.buffer).episodes
        return found


def _as_state(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def find(where: Where, run: str, buffer: str, storage_options: Mapping[str, Any] | None) -> tuple[Archive, Checkpoint]:
    """The newest whole checkpoint of the archive that a path means."""
    try:
        arc = archive.open(where.root, storage_options=where.options(storage_options))
    except NotFoundError as e:
        raise NotFoundError(
            f"{e}. A folder with metadata.json and trajectory files is brought into an archive by "
            "archive.adapters.rlinf.import_checkpoint"
        ) from e
    found = arc.checkpoints.of(run).newest(replay=True)
    if found is None:
        runs = ", ".join(map(repr, arc.head.runs)) or "none"
        raise NotFoundError(
            f"the archive at {arc.url} (runs: {runs}) has no whole checkpoint of run {run!r}; "
            "save_checkpoint() makes one once all ranks "
            f"have called it (it has {len(arc.episodes)} episodes, which arc.episodes reads)"
        )
    if buffer not in found.buffers:
        raise NotFoundError(f"checkpoint {found.name!r} at {arc.url} has no buffer {buffer!r}: {list(found.buffers)}")
    return arc, found


def share_of(ck: Checkpoint, where: Where, world_size: int | None) -> Any:
    """What the rank of a path goes on from: all as it was in a world of the same size, else a part by trajectories."""
    import resharding  # built on this package, so not imported with it

    world_size = job_world_size() if world_size is None else world_size
    if world_size is None:
        world_size = 1 if where.rank is None else ck.world_size
    rank = where.rank if where.rank is not None else job_rank()
    _check_rank(rank, world_size, f"checkpoint {ck.name!r} was saved by {ck.world_size}")
    policy = "balanced" if world_size == ck.world_size else "by_trajectory"
    return resharding.plan(ck, world_size=world_size, policy=policy).share(rank)


def part_of_list(ck: Checkpoint, where: Where, buffer: str, rank: int, world_size: int | None) -> Any:
    """One of `world_size` contiguous parts, by number, of all trajectories, or of those of the rank that a path names."""
    import resharding

    world_size = (job_world_size() or 1) if world_size is None else world_size
    _check_rank(rank, world_size, "is_distributed=True")
    chosen = None if where.rank is None else {"episode_id": held_by(ck, buffer, where.rank)}
    if rank and rank == where.rank and world_size > 1:
        _log.warning(
            "rank %d of %d loads its part of the trajectories of rank_%d alone, so that nobody has the rest: with "
            "is_distributed=True all ranks give the same path; without it, each gives its own and all is shared out",
            rank, world_size, rank,
        )  # fmt: skip
    return resharding.plan(ck, world_size=world_size, policy="by_trajectory", filter=chosen).share(rank)


def held_by(ck: Checkpoint, buffer: str, rank: int) -> list[str]:
    """Ids of the episodes that one rank of the checkpoint has."""
    import resharding

    ck.staged(rank)  # an error if it has no such rank
    share = resharding.plan(ck, world_size=ck.world_size).share(rank)
    ids: list[str] = share.buffer(buffer).episodes.table["episode_id"].to_pylist()
    return ids


def _check_rank(rank: int, world_size: int, why: str) -> None:
    if world_size <= 0:
        raise UsageError(f"world_size={world_size} must be at least 1")
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of a world of {world_size} ({why}); ranks count from 0")


def next_id(states: Iterable[Mapping[str, Any]], taken: Iterable[int | None]) -> int:
    """An id that nothing has, nor anything behind it."""
    return max((*(int(s.get("counter", 0)) for s in states), *(i + 1 for i in taken if i is not None)), default=0)


def ids_of(episodes: Episodes, renumbered: Mapping[str, int] | None = None) -> list[int | None]:
    """The trajectory ids that episodes were given, at first or later; None for those that were not."""
    table = episodes.table.select(["episode_id", "metadata"])
    texts = table["metadata"].to_pylist()
    found = [jsontree.loads(text).get(NUMBER) if text else None for text in texts]
    if renumbered:
        found = [renumbered.get(n, i) for n, i in zip(table["episode_id"].to_pylist(), found, strict=True)]
    return [i if isinstance(i, int) else None for i in found]


def entries(loaded: Loaded, homes: Homes) -> tuple[list[Entry], int]:
    """The share's trajectories, by id, and the first id that is free."""
    every, renumbered = loaded.checkpoint.episodes, loaded.checkpoint.values.get(NUMBER, {})
    # as it was: another rank's ids are its own affair
    numbers = _told_apart(loaded.episodes() if loaded.share.plan.is_identity else every, renumbered)
    taken = (*ids_of(every, renumbered), *numbers.values())
    return entries_of(loaded.episodes, homes, numbers), next_id((*loaded.source_states, loaded.state), taken)


def entries_of(episodes: Callable[[], Episodes], homes: Homes, numbers: Mapping[str, int] | None = None) -> list[Entry]:
    """Episodes as trajectories that can be read, by id; those that have no envs side by side are of one."""
    found = episodes()
    numbers = _told_apart(found) if numbers is None else numbers
    home, out = homes(episodes), []
    table = found.table.select(["episode_id", "length", "metadata", "model_weights_uuids", "update_count_max"])
    for name, length, text, uuids, count in zip(*(table[c].to_pylist() for c in table.column_names), strict=True):
        about = jsontree.loads(text) if text else {}
        weights = Weights(uuids[-1] if uuids else None, count)
        entry = Entry(numbers[name], int(length), int(about.get("B", 1)), weights, home, name)
        entry.renumbered = about.get(NUMBER) != entry.trajectory_id
        out.append(entry)
    home.expect(e.name for e in out)
    return sorted((e for e in out if e.samples), key=lambda e: e.trajectory_id)


def _told_apart(episodes: Episodes, renumbered: Mapping[str, int] | None = None) -> dict[str, int]:
    """Episode -> trajectory id. Where several have the same, for their ranks counted apart, all are numbered anew: by
    the ids they had, then by rank; every rank comes to the same numbers."""
    names, given = episodes.table["episode_id"].to_pylist(), ids_of(episodes, renumbered)
    known = [i for i in given if i is not None]
    if len(set(known)) == len(given):
        return dict(zip(names, known, strict=True))
    order = sorted(range(len(names)), key=lambda i: (given[i] is None, given[i] or 0))
    return {names[i]: number for number, i in enumerate(order)}


def generator(loaded: Loaded) -> torch.Generator:
    """The random generator as it was saved; in a new world, one that the plan seeds."""
    saved = loaded.state.get("generator", (loaded.state.get("live") or {}).get("generator"))
    out = torch.Generator()
    if isinstance(saved, torch.Generator):
        return out.set_state(saved.get_state())
    return out.manual_seed(int(loaded.share.seed))
