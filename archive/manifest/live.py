"""Pure, no I/O: the live set of one rank's buffer: which steps are in it, by env row and position, in order.

A run is (env, position, length, episode, stream, lo): `length` consecutive steps of one episode that stand at
`position` of env row `env` and were written to `stream` from `lo` on. OWN stands for the writer's own stream of that
env row, where `lo == position`. Order is (env, position). Positions are never used twice, so adding and evicting
commute and are applied together, vectorised, when somebody looks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from archive.arrays import merge_runs
from archive.base import Undo

OWN = -1
_MAX_UNMERGED = 4096
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Runs(NamedTuple):
    """Columns of a live set, sorted by (env, position); runs of length 0 are episodes without steps."""

    env: Ints
    position: Ints
    length: Ints
    episode: Ints
    stream: Ints
    lo: Ints

    @classmethod
    def empty(cls) -> Runs:
        return cls(*(np.zeros(0, np.int64) for _ in range(6)))

    def pick(self, index: Any) -> Runs:
        return Runs(*(column[index] for column in self))

    @property
    def steps(self) -> int:
        return int(self.length.sum())


class Departed(Protocol):
    """Who is told what leaves a live set. Of env rows: it may have left before, or not be there."""

    def before(self, envs: Ints, positions: Ints) -> None: ...
    def ranges(self, env: int, starts: Ints, stops: Ints) -> None: ...
    def runs(self, runs: Runs) -> None: ...


class LiveSet:
    """The live steps of one buffer on one rank."""

    def __init__(self, runs: Runs | None = None, undo: Undo | None = None, departed: Departed | None = None) -> None:
        self._undo = undo or Undo()
        self._departed = departed
        self._runs = runs or Runs.empty()
        self._added: list[Runs] = []
        self._before: dict[int, int] = {}
        self._holes: dict[int, list[tuple[Ints, Ints]]] = {}

    def add(
        self, env: Any, position: Ints, length: Any, episode: Ints, stream: int = OWN, lo: Ints | None = None
    ) -> None:
        """Add runs; scalars stand for all of them."""
        n = len(position)
        columns = [env, position, length, episode, stream, position if lo is None else lo]
        self._undo.length(self._added)
        self._added.append(Runs(*(np.broadcast_to(np.asarray(c, np.int64), n) for c in columns)))
        if len(self._added) > _MAX_UNMERGED:
            self.runs()

    def evict_before(self, env: int, position: int) -> None:
        """Steps of an env row before `position` have left."""
        self._undo.key(self._before, env)
        self._before[env] = max(position, self._before.get(env, 0))
        if self._departed is not None:
            self._departed.before(np.array([env], np.int64), np.array([position], np.int64))

    def evict_all_before(self, envs: Ints, positions: Ints) -> None:
        """As `evict_before`, of many env rows."""
        self._undo.attributes(self, "_before")
        before = self._before
        self._before = before | {
            env: max(position, before.get(env, 0))
            for env, position in zip(envs.tolist(), positions.tolist(), strict=True)
        }
        if self._departed is not None:
            self._departed.before(np.array(envs, np.int64), np.array(positions, np.int64))

    def evict(self, env: int, positions: Ints) -> None:
        """The steps at these positions have left; those that are not live are passed over."""
        places = np.array(positions, np.int64)
        self._leave(env, places, places + 1)

    def evict_range(self, env: int, start: int, stop: int) -> None:
        """Steps [start, stop) of an env row have left."""
        self._leave(env, np.array([start], np.int64), np.array([stop], np.int64))

    def _leave(self, env: int, starts: Ints, stops: Ints) -> None:
        holes = self._holes.get(env)
        if holes is None:
            self._undo.key(self._holes, env)
            self._holes[env] = [(starts, stops)]
        else:
            self._undo.length(holes)
            holes.append((starts, stops))
        if self._departed is not None:
            self._departed.ranges(env, starts, stops)

    def remove(self, episodes: Ints) -> int:
        """All live steps of these episodes have left; how many that were."""
        runs = self.runs()
        gone = np.isin(runs.episode, episodes)
        self._undo.attributes(self, "_runs")
        self._runs = runs.pick(~gone)
        if self._departed is not None:
            self._departed.runs(runs.pick(gone))
        return int(runs.length[gone].sum())

    def clear(self) -> None:
        if self._departed is not None:
            self._departed.runs(self.runs())
        self._note()
        self._runs, self._added, self._before, self._holes = Runs.empty(), [], {}, {}

    def _note(self) -> None:
        self._undo.attributes(self, "_runs", "_added", "_before", "_holes")

    @property
    def steps_at_most(self) -> int:
        """Live steps; what left since somebody last looked may be counted still."""
        return self._runs.steps + sum(added.steps for added in self._added)

    def copy(self) -> LiveSet:
        return LiveSet(self.runs())

    def runs(self) -> Runs:
        """The runs as they stand, sorted, neighbours merged."""
        if self._added or self._before or self._holes:
            merged = _merged(Runs(*map(np.concatenate, zip(self._runs, *self._added, strict=True))))
            merged = _cut_before(merged, self._before)
            for env, holes in self._holes.items():
                merged = _without(
                    merged, env, *merge_runs(*(np.concatenate(edges) for edges in zip(*holes, strict=True)))
                )
            self._note()
            self._runs, self._added, self._before, self._holes = merged, [], {}, {}
        return self._runs


def _merged(runs: Runs) -> Runs:
    runs = runs.pick(_order(runs))
    if len(runs.env) == 0:
        return runs
    joined = np.zeros(len(runs.env), bool)
    ends = runs.position + runs.length
    same = (
        (runs.env[1:] == runs.env[:-1])
        & (runs.episode[1:] == runs.episode[:-1])
        & (runs.stream[1:] == runs.stream[:-1])
    )
    joined[1:] = same & (runs.position[1:] == ends[:-1]) & (runs.lo[1:] == (runs.lo + runs.length)[:-1])
    heads = np.flatnonzero(~joined)
    return runs.pick(heads)._replace(length=np.add.reduceat(runs.length, heads))


def _order(runs: Runs) -> Ints:
    """By env row, position and length. Those of an env row mostly stand in order, and sorting by that is quick."""
    order = np.argsort(runs.env, kind="stable")
    env, position = runs.env[order], runs.position[order]
    later = (env[1:] > env[:-1]) | (position[1:] > position[:-1])
    return order if later.all() else np.lexsort((runs.length, runs.position, runs.env))


def _cut_before(runs: Runs, before: dict[int, int]) -> Runs:
    if not before:
        return runs
    envs = np.array(sorted(before), np.int64)
    limits = np.array([before[int(e)] for e in envs], np.int64)
    at = np.clip(np.searchsorted(envs, runs.env), 0, len(envs) - 1)
    limit = np.where(envs[at] == runs.env, limits[at], 0)
    cut = np.clip(limit - runs.position, 0, runs.length)
    gone = (limit > runs.position) & (cut == runs.length)
    return runs._replace(position=runs.position + cut, length=runs.length - cut, lo=runs.lo + cut).pick(~gone)


def _without(runs: Runs, env: int, hole_start: Ints, hole_stop: Ints) -> Runs:
    """Runs of one env row minus ranges of positions (sorted, apart); the other rows untouched."""
    if len(hole_start) == 0:
        return runs
    before = np.searchsorted(hole_start, runs.position, side="right") - 1
    left = (before >= 0) & (runs.position < hole_stop[np.maximum(before, 0)])
    runs = runs.pick((runs.env != env) | (runs.length > 0) | ~left)
    mine = (runs.env == env) & (runs.length > 0)
    own, start, stop = runs.pick(mine), runs.position[mine], (runs.position + runs.length)[mine]
    edges = np.unique(np.concatenate([start, stop, hole_start, hole_stop]))
    if len(edges) < 2:
        return runs
    lo, hi = edges[:-1], edges[1:]
    owner = np.searchsorted(start, lo, side="right") - 1
    inside = (owner >= 0) & (hi <= stop[np.maximum(owner, 0)]) if len(start) else np.zeros(len(lo), bool)
    hole = np.searchsorted(hole_start, lo, side="right") - 1
    in_hole = (hole >= 0) & (lo < hole_stop[np.maximum(hole, 0)])
    keep = inside & ~in_hole
    base = own.pick(owner[keep])
    parts = base._replace(position=lo[keep], length=(hi - lo)[keep], lo=base.lo + lo[keep] - base.position)
    rest = runs.pick(~mine)
    return _merged(Runs(*map(np.concatenate, zip(rest, parts, strict=True))))
