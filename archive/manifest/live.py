"""Pure, no I/O: the live set of one rank's buffer: which steps are in it, by env row and position, in order; and what
a writer takes over of one.

A run is (env, position, length, episode, stream, lo): `length` consecutive steps of one episode that stand at
`position` of env row `env` and were written to `stream` from `lo` on. OWN stands for the writer's own stream of that
env row, where `lo == position`. Order is (env, position). Positions are never used twice, so adding and evicting
commute and are applied together, vectorised, when somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from archive.arrays import Ints
from archive.base import Undo
from archive.manifest.chains import Origin
from archive.manifest.records import ForkedFrom
from archive.steps import Steps

OWN = -1
_MAX_UNMERGED = 4096


class LiveRuns(NamedTuple):
    """Columns of a live set, sorted by (env, position); runs of length 0 are episodes without steps."""

    env: Ints
    position: Ints
    length: Ints
    episode: Ints
    stream: Ints
    lo: Ints

    @classmethod
    def empty(cls) -> LiveRuns:
        return cls(*(np.zeros(0, np.int64) for _ in range(6)))

    @classmethod
    def joined(cls, some: Sequence[LiveRuns]) -> LiveRuns:
        """The rows of all, end to end."""
        return cls(*map(np.concatenate, zip(cls.empty(), *some, strict=True)))

    @classmethod
    def of(cls, some: Steps) -> LiveRuns:
        """From what `standing` gives."""
        return cls(some.stream, some.lo, some.length, some["episode"], some["source"], some["written"])

    def pick(self, index: Any) -> LiveRuns:
        return LiveRuns(*(column[index] for column in self))

    @property
    def standing(self) -> Steps:
        """The steps by env row and position."""
        more = {"episode": self.episode, "source": self.stream, "written": self.lo}
        return Steps(self.env, self.position, self.position + self.length, follows=("written",), **more)

    @property
    def written(self) -> Steps:
        """The steps by stream."""
        more = {"env": self.env, "position": self.position, "episode": self.episode}
        return Steps(self.stream, self.lo, self.lo + self.length, follows=("position",), **more)

    def ordered(self) -> LiveRuns:
        """In live order. Those of an env row mostly stand in it, and sorting by env row is quick."""
        order = np.argsort(self.env, kind="stable")
        env, position = self.env[order], self.position[order]
        later = (env[1:] > env[:-1]) | (position[1:] > position[:-1])
        return self.pick(order if later.all() else np.lexsort((self.length, self.position, self.env)))

    @property
    def steps(self) -> int:
        return int(self.length.sum())


class Departed(Protocol):
    """Somebody who is told what leaves a live set. What leaves of env rows may have left before, or not be there."""

    def before(self, envs: Ints, positions: Ints) -> None: ...
    def ranges(self, env: int, starts: Ints, stops: Ints) -> None: ...
    def runs(self, runs: LiveRuns) -> None: ...


class LiveSet:
    """The live steps of one buffer on one rank."""

    def __init__(
        self, runs: LiveRuns | None = None, undo: Undo | None = None, departed: Departed | None = None
    ) -> None:
        self._undo = undo or Undo()
        self._departed = departed
        self._runs = runs or LiveRuns.empty()
        self._added: list[LiveRuns] = []
        self._before: dict[int, int] = {}
        self._holes: dict[int, list[tuple[Ints, Ints]]] = {}

    def add(
        self, env: Any, position: Ints, length: Any, episode: Ints, stream: int = OWN, lo: Ints | None = None
    ) -> None:
        """Add runs; scalars stand for all of them."""
        n = len(position)
        columns = [env, position, length, episode, stream, position if lo is None else lo]
        self._undo.length(self._added)
        self._added.append(LiveRuns(*(np.broadcast_to(np.asarray(c, np.int64), n) for c in columns)))
        if len(self._added) > _MAX_UNMERGED:
            self.runs()

    def evict_before(self, env: int, position: int) -> None:
        """Steps of an env row before `position` have left."""
        self._undo.key(self._before, env)
        self._before[env] = max(position, self._before.get(env, 0))
        if self._departed is not None:
            self._departed.before(np.array([env], np.int64), np.array([position], np.int64))

    def evict_all_before(self, envs: Ints, positions: Ints) -> None:
        """The same as `evict_before`, for many env rows."""
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
        """Live steps of these episodes have left, all of them; the number of these."""
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
        self._become(LiveRuns.empty())

    def _become(self, runs: LiveRuns) -> None:
        self._undo.attributes(self, "_runs", "_added", "_before", "_holes")
        self._runs, self._added, self._before, self._holes = runs, [], {}, {}

    @property
    def steps_at_most(self) -> int:
        """Live steps; what left since somebody last looked may be counted still."""
        return self._runs.steps + sum(added.steps for added in self._added)

    def runs(self) -> LiveRuns:
        """The runs as they stand, sorted, neighbours merged."""
        if self._added or self._before or self._holes:
            ordered = LiveRuns.joined([self._runs, *self._added]).ordered()
            self._become(LiveRuns.of(ordered.standing.merged().minus(self._gone())))
        return self._runs

    def _gone(self) -> Steps:
        """The steps that have left, by env row and position."""
        holes = [(env, *edges) for env, some in self._holes.items() for edges in some]
        holes += [(env, np.zeros(1, np.int64), np.array([stop])) for env, stop in self._before.items()]
        return Steps.joined([Steps(np.full(len(lo), env), lo, hi) for env, lo, hi in holes])


# -- what is taken over ------------------------------------------------------------------------------------------------

Stream = tuple[str, int, int]  # session, rank, env id


@dataclass(frozen=True)
class Unfinished:
    """The state of an episode by its written segments, so that it can go on, or be closed."""

    predecessor: str
    returned: float | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class KnownEpisode:
    """An episode that a new writer takes over, or finds open."""

    id: str
    env_id: int
    begin: int  # position of its first step in the env row
    stored: int  # how many steps its written segments have
    headless: bool
    broken: bool
    unfinished: Unfinished | None = None  # set if it is open


@dataclass(frozen=True)
class BufferResume:
    """One buffer as a new writer takes it over. `runs.episode` and `runs.stream` index the two lists."""

    runs: LiveRuns
    episodes: Sequence[KnownEpisode]
    streams: Sequence[Stream]
    next_positions: Mapping[int, int]
    open_episodes: Mapping[int, int]  # env id -> place in `episodes`
    to_close: Sequence[int] = ()  # open ones that the resume's policy ends: each gets a segment row of length 0
    dropped: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # reason -> episodes, steps that the plan left behind


@dataclass(frozen=True)
class Resume:
    """A writer's start: its place and its buffers."""

    rank: int
    world_size: int
    run: str
    buffers: Mapping[str, BufferResume]
    seen: int  # number of the newest commit that was known when it was decided on
    checkpoint: int | None = None  # the commit that it was read from
    origin: Origin | None = None  # the branch that its session is part of; None if it takes nothing over
    name: str | None = None  # of that checkpoint
    forked_from: ForkedFrom | None = None  # where a new run begins there
    saved_by: int | None = None  # how many ranks saved it
    holders: Callable[[], Mapping[str, int]] = field(default=dict, compare=False)  # episode -> rank that has it live
