"""What a path, a rank and a world size mean to go on from, and the trajectories that are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

import archive
from archive import Archive
from archive.adapters.rlinf import NUMBER
from archive.adapters.rlinf.buffer import committed
from archive.adapters.rlinf.buffer.home import ArchiveHome
from archive.adapters.rlinf.buffer.mapping import ADDED, Weights
from archive.adapters.rlinf.buffer.numbering import distinct_ids, ids_of, metadata_of
from archive.adapters.rlinf.buffer.ranks import Job, Where, part_meant
from archive.adapters.rlinf.buffer.start import Start
from archive.adapters.rlinf.buffer.window import Entry
from archive.base import NotFoundError, NothingThereError, logger
from archive.checkpoint import Checkpoint
from archive.read import Episodes

Homes = Callable[[Callable[[], Episodes]], ArchiveHome]


def find(where: Where, job: Job, part: int | None, world_size: int | None, own: Collection[str] = ()) -> Start:
    """What the rank of a path goes on from: all as it was in a world of the same size, else a part of all.

    The newest checkpoint there has it, with what was journaled since; where none was made, what was committed.
    part: that one of `world_size` parts of what the path means, instead.  own: sessions of this start of the job, whose
    journals are no tails: where one of them is the newest, the others go on from what it went on from.
    """
    world_size = job.world_size if world_size is None else world_size
    arc = _opened(where, job.storage_options)
    _recover(arc, job.run, own)
    ck = _newest(arc, job.run, job.buffer)
    if ck is not None:
        share = _share(ck, where, world_size) if part is None else _part(ck, where, job.buffer, part, world_size)
        return _of_share(arc, ck, share, job.buffer)
    return committed.start(arc, job.run, job.buffer, where, part, world_size)


def _opened(where: Where, storage_options: Mapping[str, Any] | None) -> Archive:
    """The archive that a path means."""
    try:
        return archive.open(where.root, storage_options=where.options(storage_options))
    except NotFoundError as e:
        raise NothingThereError(
            f"{e}. A folder with metadata.json and trajectory files is brought into an archive by "
            "archive.adapters.rlinf.import_checkpoint"
        ) from e


def _recover(arc: Archive, run: str, own: Collection[str]) -> None:
    """Make a checkpoint of what the run's newest session journaled beyond its newest one, if it is another start's."""
    entry = arc.head.runs.get(run)
    if entry is None or not entry.journal or entry.session in own:
        return
    arc.recover(run)


def _newest(arc: Archive, run: str, buffer: str) -> Checkpoint | None:
    """The newest whole checkpoint of a run; None if there is none."""
    found: Checkpoint | None = arc.checkpoints.of(run).newest(replay=True)
    if found is not None and buffer not in found.buffers:
        raise NotFoundError(f"checkpoint {found.name!r} at {arc.url} has no buffer {buffer!r}: {list(found.buffers)}")
    return found


def _share(ck: Checkpoint, where: Where, world_size: int | None) -> Any:
    """What the rank of a path goes on from: all as it was in a world of the same size, else a part by trajectories."""
    import resharding  # built on this package, so not imported with it

    saved = f"checkpoint {ck.name!r} was saved by {ck.world_size}"
    rank, size = part_meant(where, None, world_size, ck.world_size, saved)
    policy = "balanced" if size == ck.world_size else "by_trajectory"
    return resharding.plan(ck, world_size=size, policy=policy, tails="ignore").share(rank)


def _part(ck: Checkpoint, where: Where, buffer: str, part: int, world_size: int | None) -> Any:
    """One of `world_size` contiguous parts, by number, of all trajectories,
    or of those of the rank that a path names."""
    import resharding

    _, size = part_meant(where, part, world_size, 1, "")
    chosen = None if where.rank is None else {"episode_id": held_by(ck, buffer, where.rank)}
    if part and part == where.rank and size > 1:
        logger.warning(
            "rank %d of %d loads its part of the trajectories of rank_%d alone, so that nobody has the rest: with "
            "is_distributed=True all ranks give the same path; without it, each gives its own and all is shared out",
            part,
            size,
            part,
        )
    return resharding.plan(ck, world_size=size, policy="by_trajectory", filter=chosen, tails="ignore").share(part)


def held_by(ck: Checkpoint, buffer: str, rank: int) -> list[str]:
    """Ids of the episodes that one rank of the checkpoint has."""
    import resharding

    ck.staged(rank)  # an error if it has no such rank
    share = resharding.plan(ck, world_size=ck.world_size, tails="ignore").share(rank)
    ids: list[str] = share.buffer(buffer).episodes.table["episode_id"].to_pylist()
    return ids


def _of_share(arc: Archive, ck: Checkpoint, share: Any, buffer: str) -> Start:
    part = share.buffer(buffer)
    renumbered = ck.values.get(NUMBER, {})
    mine = part.episodes if share.plan.is_identity else ck.episodes  # as it was: other ranks' ids do not matter
    numbers = distinct_ids(mine, renumbered)
    taken = [*ids_of(ck.episodes, renumbered), *numbers.values()]
    state, *sources = (dict(s) if isinstance(s, Mapping) else {} for s in (part.state, *part.source_states.values()))
    generator: torch.Generator | None = _generator(state, share.seed)
    added = None
    if ck.record.recovered is not None:
        taken += ids_of(arc.episodes.filter(buffer=buffer))  # some came and left after the counter was saved
        generator = generator if any((state, *sources)) else None  # as it is: none was saved
        added = _added(mine, numbers, state) if share.plan.is_identity else None
    return Start(share, share.rank, share.world_size, part.episodes, numbers, taken, state, sources, generator, added)


def _added(held: Episodes, numbers: Mapping[str, int], state: Mapping[str, Any]) -> int | None:
    """How many trajectories had been added with the newest one; None where the state knows."""
    counts = {numbers[ep]: about.get(ADDED) for ep, about in zip(_names(held), metadata_of(held), strict=True)}
    newest = max(counts, default=-1)
    if not counts or newest < state.get("counter", 0):
        return None if counts else 0
    return counts[newest]


def _names(episodes: Episodes) -> list[str]:
    names: list[str] = episodes.table["episode_id"].to_pylist()
    return names


def _generator(state: Mapping[str, Any], seed: int) -> torch.Generator:
    """The random generator as it was saved; in a new world, one that the plan seeds."""
    saved = state.get("generator", (state.get("live") or {}).get("generator"))
    out = torch.Generator()
    return out.set_state(saved.get_state()) if isinstance(saved, torch.Generator) else out.manual_seed(int(seed))


def entries_of(episodes: Callable[[], Episodes], homes: Homes, numbers: Mapping[str, int] | None = None) -> list[Entry]:
    """Episodes as trajectories that can be read, by id; those that have no envs side by side are of one."""
    found = episodes()
    numbers = distinct_ids(found) if numbers is None else numbers
    home, out = homes(episodes), []
    for ep, about in zip(found, metadata_of(found), strict=True):
        weights = Weights(ep.model_weights_uuid, ep.update_count)
        entry = Entry(numbers[ep.id], ep.length, int(about.get("B", 1)), weights, home, ep.id)
        entry.renumbered = about.get(NUMBER) != entry.trajectory_id
        out.append(entry)
    home.expect(e.name for e in out)
    return sorted((e for e in out if e.samples), key=lambda e: e.trajectory_id)
