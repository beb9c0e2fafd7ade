"""Engine: a buffer goes on from a checkpoint: the share that a path, a rank and a world size mean, and its trajectories."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import archive
from archive import Archive
from archive.adapters.rlinf import NUMBER
from archive.adapters.rlinf.buffer.contents import Entry
from archive.adapters.rlinf.buffer.home import ArchiveHome
from archive.adapters.rlinf.buffer.mapping import Weights
from archive.adapters.rlinf.buffer.ranks import Where, job_rank, job_world_size
from archive.base import NotFoundError, NothingThereError, UsageError, cached_property, jsontree
from archive.checkpoint import Checkpoint
from archive.read import Episodes

Homes = Callable[[Callable[[], Episodes]], ArchiveHome]
_log = logging.getLogger("archive")


class Found(Protocol):
    """What a buffer goes on from: a part of a checkpoint, or of what is there without one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def state(self) -> dict[str, Any]: ...
    @property
    def source_states(self) -> Sequence[dict[str, Any]]: ...
    @property
    def source(self) -> Any: ...
    @property
    def numbers(self) -> Mapping[str, int]: ...
    @property
    def taken(self) -> Iterable[int | None]: ...
    def episodes(self) -> Episodes: ...
    def generator(self) -> torch.Generator | None: ...


@dataclass(frozen=True)
class Loaded:
    """A part of a checkpoint: the share, and which rank of which world that is."""

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

    @property
    def source(self) -> Any:
        """What a writer goes on from."""
        return self.share

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Episode -> trajectory id."""
        # as it was: another rank's ids are its own affair
        mine = self.episodes() if self.share.plan.is_identity else self.checkpoint.episodes
        return told_apart(mine, self._renumbered)

    @property
    def taken(self) -> list[int | None]:
        """Ids that are used."""
        return [*ids_of(self.checkpoint.episodes, self._renumbered), *self.numbers.values()]

    @property
    def _renumbered(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self.checkpoint.values.get(NUMBER, {})
        return found

    def episodes(self) -> Episodes:
        found: Episodes = self.share.buffer(self.buffer).episodes
        return found

    def generator(self) -> torch.Generator:
        """The random generator as it was saved; in a new world, one that the plan seeds."""
        saved = self.state.get("generator", (self.state.get("live") or {}).get("generator"))
        out = torch.Generator()
        if isinstance(saved, torch.Generator):
            return out.set_state(saved.get_state())
        return out.manual_seed(int(self.share.seed))


def _as_state(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def opened(where: Where, storage_options: Mapping[str, Any] | None) -> Archive:
    """The archive that a path means."""
    try:
        return archive.open(where.root, storage_options=where.options(storage_options))
    except NotFoundError as e:
        raise NothingThereError(
            f"{e}. A folder with metadata.json and trajectory files is brought into an archive by "
            "archive.adapters.rlinf.import_checkpoint"
        ) from e


def newest(arc: Archive, run: str, buffer: str) -> Checkpoint | None:
    """The newest whole checkpoint of a run; None if there is none."""
    found: Checkpoint | None = arc.checkpoints.of(run).newest(replay=True)
    if found is not None and buffer not in found.buffers:
        raise NotFoundError(f"checkpoint {found.name!r} at {arc.url} has no buffer {buffer!r}: {list(found.buffers)}")
    return found


def share_of(ck: Checkpoint, where: Where, world_size: int | None) -> Any:
    """What the rank of a path goes on from: all as it was in a world of the same size, else a part by trajectories."""
    import resharding  # built on this package, so not imported with it

    world_size = job_world_size() if world_size is None else world_size
    if world_size is None:
        world_size = 1 if where.rank is None else ck.world_size
    rank = where.rank if where.rank is not None else job_rank()
    check_rank(rank, world_size, f"checkpoint {ck.name!r} was saved by {ck.world_size}")
    policy = "balanced" if world_size == ck.world_size else "by_trajectory"
    return resharding.plan(ck, world_size=world_size, policy=policy).share(rank)


def part_of_list(ck: Checkpoint, where: Where, buffer: str, rank: int, world_size: int | None) -> Any:
    """One of `world_size` contiguous parts, by number, of all trajectories, or of those of the rank that a path names."""
    import resharding

    world_size = (job_world_size() or 1) if world_size is None else world_size
    check_rank(rank, world_size, "is_distributed=True")
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


def check_rank(rank: int, world_size: int, why: str) -> None:
    """Refuse a rank that a world does not have."""
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


def entries(found: Found, homes: Homes) -> tuple[list[Entry], int]:
    """The trajectories that were found, by id, and the first id that is free."""
    free = next_id((*found.source_states, found.state), found.taken)
    return entries_of(found.episodes, homes, found.numbers), free


def entries_of(episodes: Callable[[], Episodes], homes: Homes, numbers: Mapping[str, int] | None = None) -> list[Entry]:
    """Episodes as trajectories that can be read, by id; those that have no envs side by side are of one."""
    found = episodes()
    numbers = told_apart(found) if numbers is None else numbers
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


def told_apart(episodes: Episodes, renumbered: Mapping[str, int] | None = None) -> dict[str, int]:
    """Episode -> trajectory id. Where several have the same, for their ranks counted apart, all are numbered anew: by
    the ids they had, then by rank; every rank comes to the same numbers."""
    names, given = episodes.table["episode_id"].to_pylist(), ids_of(episodes, renumbered)
    known = [i for i in given if i is not None]
    if len(set(known)) == len(given):
        return dict(zip(names, known, strict=True))
    order = sorted(range(len(names)), key=lambda i: (given[i] is None, given[i] or 0))
    return {names[i]: number for number, i in enumerate(order)}
