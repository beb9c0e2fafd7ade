"""Pure, no I/O: the runs of a live set, which steps of one rank's buffer are in it, by env row and position, in order;
and what a writer takes over of one.

A run is (env, position, length, episode, stream, lo): `length` consecutive steps of one episode that stand at
`position` of env row `env` and were written to `stream` from `lo` on. OWN stands for the writer's own stream of that
env row, where `lo == position`. Order is (env, position).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.log import CommitLog, ForkedFrom, Origin
from archive.steps import Steps

OWN = -1


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


def looked_at(log: CommitLog, resume: Resume | None) -> int:
    """The number of the newest commit that was known when it was decided to open a session: when its plan was made or
    its checkpoint was looked up; for one that takes nothing of its run over, when the archive was opened."""
    return log.began if resume is None or resume.forked_from is not None else resume.seen
