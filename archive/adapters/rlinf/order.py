"""Merge and split as RLinf's tool does, but as a new checkpoint of the same data: nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.adapters import Saved, checkpoint
from archive.adapters.rlinf.numbers import NUMBER, SYSTEM, file_kind, listed_at
from archive.base import UsageError
from archive.checkpoint import Holding

if TYPE_CHECKING:
    from archive import Archive
    from archive.checkpoint import Checkpoint


@dataclass(frozen=True)
class Place:
    """Where a trajectory of a checkpoint is: its place among the live episodes, rank, number and id."""

    group: int
    rank: int
    number: int
    episode_id: str


def places(ck: Checkpoint, buffer: str) -> list[Place]:
    """The trajectories of one buffer of all ranks, in live order."""
    heads, _ = ck.groups
    rows = ck.live.select(["rank", "buffer"]).to_pylist()
    out = []
    for group, (run, ep) in enumerate(zip(ck.located["run"][heads].tolist(), ck.episodes, strict=True)):
        if rows[run]["buffer"] != buffer:
            continue
        number = ep.attributes.get(NUMBER, ep.metadata.get(NUMBER))
        if number is None:
            raise UsageError(f"episode {ep.id!r} of buffer {buffer!r} is no numbered trajectory of RLinf")
        out.append(Place(group, int(rows[run]["rank"]), int(number), ep.id))
    return out


def merged(found: Sequence[Place]) -> list[Place]:
    """RLinf's order: number ascending, then the rank folders as their names sort (rank_10 before rank_2)."""
    return sorted(found, key=lambda p: (p.number, f"rank_{p.rank}"))


def first(found: Sequence[Place], count: int, rank: int, state: Any) -> list[Place]:
    """The first `count` of one rank's list."""
    mine = [p for p in found if p.rank == rank]
    if not 1 <= count <= len(mine):
        raise UsageError(f"count={count}: rank {rank} has {len(mine)} trajectories; give 1 to {len(mine)}")
    place = listed_at(state)
    return sorted(mine, key=lambda p: place(p.number))[:count]


def saved_as(ck: Checkpoint, arc: Archive, buffer: str, chosen: Sequence[Place], name: str, session: str) -> Checkpoint:
    """A checkpoint of one rank that has these trajectories in this order, numbered from 0."""
    states = [ck.state(rank, buffer) for rank in sorted(ck.ranks, key=lambda rank: f"rank_{rank}")]
    seeds = [state.get("seed") for state in states if isinstance(state, dict)]
    state = {
        "system": SYSTEM,
        "seed": next((s for s in seeds if s is not None), None),
        "trajectory_format": file_kind(states),
        "counter": len(chosen),
        "ids": np.arange(len(chosen)),
    }
    saved = Saved(attributes={NUMBER: {p.episode_id: i for i, p in enumerate(chosen)}}, state=state)
    held = Holding(ck.episodes[np.array([p.group for p in chosen], np.int64)], buffer, ck.run)
    with arc.writer(resume=held, session=session) as w:
        return checkpoint(w, ck.step, {buffer: saved}, name=name, progress=ck.progress).result()
