"""Merge and split as RLinf's tool does, but as a new checkpoint of the same data: nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.adapters.rlinf.numbers import NUMBER, SYSTEM, listed_at
from archive.arrays import Ints
from archive.base import UsageError
from archive.checkpoint import resuming
from archive.manifest import NO_ENV, Located, Resume

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
    for group, (run, ep) in enumerate(zip(ck.located.run[heads].tolist(), ck.episodes, strict=True)):
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


def checkpoint(
    ck: Checkpoint, arc: Archive, buffer: str, chosen: Sequence[Place], name: str, session: str
) -> Checkpoint:
    """A checkpoint of one rank that has these trajectories in this order, numbered from 0."""
    states = [ck.state(rank, buffer) for rank in sorted(ck.ranks, key=lambda rank: f"rank_{rank}")]
    seeds = map(_seed, states)
    kind = "pkl" if any(map(_pickled, states)) else "pt"
    state = {
        "system": SYSTEM, "seed": next((s for s in seeds if s is not None), None), "trajectory_format": kind,
        "counter": len(chosen), "ids": np.arange(len(chosen)),
    }  # fmt: skip
    given = {"state": state, "attributes": {NUMBER: {p.episode_id: i for i, p in enumerate(chosen)}}}
    source = _Chosen(ck, buffer, tuple(p.group for p in chosen))
    with arc.writer(resume=source, session=session) as w:
        whole = {**given, "buffers": None} if w.name == buffer else {"buffers": {buffer: given}}
        return w.checkpoint(ck.step, name, progress=ck.progress, **whole).result()


def _pickled(state: Any) -> bool:
    return isinstance(state, dict) and state.get("trajectory_format") == "pkl"


def _seed(state: Any) -> Any:
    return state.get("seed") if isinstance(state, dict) else None


@dataclass(frozen=True)
class _Chosen:
    """Some live episodes of a checkpoint, in an order of one's own, as a writer goes on from them."""

    ck: Checkpoint
    buffer: str
    groups: tuple[int, ...]

    def to_resume(self, rank: int | None = None) -> Resume:
        pieces, position, end = self._pieces()
        env: Ints = np.full(len(position), NO_ENV, np.int64)
        taken = resuming.take_over(self.ck, pieces, env, position, {NO_ENV: end}, {})
        return Resume(0, 1, self.ck.run, {self.buffer: taken})

    def _pieces(self) -> tuple[Located, Ints, int]:
        """Their pieces, where each stands now, and where the next step goes."""
        heads, _ = self.ck.groups
        ends = np.append(heads, len(self.ck.located.row))
        ranges = [np.arange(ends[g], ends[g + 1]) for g in self.groups]
        chosen = np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
        pieces = self.ck.located.pick(chosen)
        taken = np.maximum(pieces.hi - pieces.lo, 1)  # an episode without steps has a position of its own
        total = int(taken.sum())
        return pieces, np.cumsum(taken) - taken, total
