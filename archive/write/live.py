"""Pure, no I/O: the live set of one buffer: which steps are in it, in order; which have left it since somebody last
asked, by their permanent addresses; and what a writer takes over of one.

Positions are never used twice, so adding and evicting commute: both are noted, and applied together when somebody
looks. Notes are appended, and what they come to is replaced: so a refused call is cut off again.

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
from archive.write.episodes import EpisodeRecord

Stream = tuple[str, int, int]  # session, rank, env id
OWN = -1
_MAX_NOTES = 4096  # of added steps before they are applied
_MAX_EVICTED = 1 << 14  # rows of notes before they are made one
_NOTHING = Steps.joined([])


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

    def merged(self) -> LiveRuns:
        """Neighbouring steps of one stream as one run, whatever episodes they are of; episodes without steps alone."""
        some = self._replace(episode=np.zeros_like(self.episode)).pick(self.length > 0)
        return LiveRuns.joined([LiveRuns.of(some.standing.merged()), self.pick(self.length == 0)]).ordered()

    @property
    def steps(self) -> int:
        return int(self.length.sum())


class Range(NamedTuple):
    """Steps [lo, hi) of a stream; an episode without steps takes one position."""

    session: str
    rank: int
    env: int
    lo: int
    hi: int


class LiveSet:
    """The live steps of one buffer of a rank, and what has left them."""

    def __init__(self, place: tuple[str, int], *, journaled: bool = False) -> None:
        """place: session and rank.  journaled: what leaves is noted for `take_left`."""
        self._own = place
        self.journaled = journaled
        self._runs = LiveRuns.empty()
        self._added: list[Steps] = []  # env rows by position, each with the number of its episode
        self._evicted: list[Steps] = []  # env rows by position
        self._left: list[Steps] = []  # the same, since `take_left`
        self._left_runs: list[LiveRuns] = []  # what left by episodes, since then
        self._said = _NOTHING  # of env rows all before some position: was taken before
        self.streams: Sequence[Stream] = ()  # of other ranks and sessions that have live steps here
        self._foreign = LiveRuns.empty()  # these, as they were taken over
        self._first: Mapping[int, int] = {}  # env row -> the first position of its own stream

    def resume(self, runs: LiveRuns, streams: Sequence[Stream], next_positions: Mapping[int, int]) -> None:
        """Begin with these steps, which lie in the streams of others."""
        self._runs = self._foreign = runs
        self.streams, self._first = list(streams), next_positions

    def mark(self) -> Any:
        """The state that a call may change."""
        lists = [(notes, len(notes)) for notes in (self._added, self._evicted, self._left, self._left_runs)]
        return self._runs, self._said, lists

    def cut_back(self, mark: Any) -> None:
        """Be as it was."""
        self._runs, self._said, lists = mark
        self._added, self._evicted, self._left, self._left_runs = (notes for notes, _ in lists)
        for notes, length in lists:
            del notes[length:]

    # -- coming and leaving -------------------------------------------------------------------------------------

    def add(self, steps: Steps) -> None:
        """Add steps of env rows, by position, with the column `episode`."""
        self._added.append(steps)
        if len(self._added) > _MAX_NOTES:
            self.runs()

    def evict(self, steps: Steps) -> None:
        """These steps of env rows have left; those that are not live are passed over."""
        self._evicted.append(steps)
        if self.journaled:
            self._left.append(steps)
        for notes in (self._evicted, self._left):
            if len(notes) * len(steps) > _MAX_EVICTED:
                self._join_notes()

    def _join_notes(self) -> None:
        self._evicted, self._left = [Steps.joined(self._evicted).union()], [Steps.joined(self._left).union()]

    def remove(self, episodes: Ints) -> int:
        """All live steps of these episodes have left; how many that were."""
        runs = self.runs()
        gone = np.isin(runs.episode, episodes)
        self._leave(runs.pick(gone))
        self._runs = runs.pick(~gone)
        return int(runs.length[gone].sum())

    def clear(self) -> None:
        self._leave(self.runs())
        self._runs = LiveRuns.empty()

    def _leave(self, runs: LiveRuns) -> None:
        if self.journaled:
            self._left_runs.append(runs)

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def steps_at_most(self) -> int:
        """Live steps; what left since somebody last looked may be counted still."""
        return self._runs.steps + sum(int(added.length.sum()) for added in self._added)

    def runs(self) -> LiveRuns:
        """The runs as they stand, sorted, neighbours merged."""
        if self._added or self._evicted:
            added = Steps.joined(self._added)
            ordered = LiveRuns.joined([self._runs, _own_runs(added)] if self._added else [self._runs]).ordered()
            left = ordered.standing.merged().minus(Steps.joined(self._evicted))
            self._runs, self._added, self._evicted = LiveRuns.of(left), [], []
        return self._runs

    # -- what has left ------------------------------------------------------------------------------------------

    def take_left(self) -> tuple[Range, ...]:
        """The steps that have left since this was last asked. All of an env row before some position may have left:
        that is one range, and no list."""
        out: list[Range] = []
        if self._left:
            left = Steps.joined(self._left).union()
            out += self._at(left.minus(self._said))
            self._said, self._left = Steps.joined([self._said, left.pick(left.lo == 0)]).union(), []
        if self._left_runs:
            out += self.addresses(LiveRuns.joined(self._left_runs).ordered().merged())
            self._left_runs = []
        return tuple(out)

    def addresses(self, runs: LiveRuns) -> list[Range]:
        """The places where the steps of runs were written, run by run."""
        return self._ranges(runs.stream, runs.env, runs.lo, runs.lo + np.maximum(1, runs.length))

    def _at(self, places: Steps) -> list[Range]:
        """Steps at positions of env rows: those of their own streams, and those that were taken over."""
        first = np.array([self._first.get(env, 0) for env in places.stream.tolist()], np.int64)
        own = places.cut(slice(None), np.maximum(places.lo, first), places.hi)
        own = own.pick(own.length > 0)
        met = places.meet(self._foreign.standing.placed)
        old = self._foreign.pick(met.right)
        shift = old.lo - old.position
        own_streams = np.full(len(own), OWN)
        return [
            *self._ranges(own_streams, own.stream, own.lo, own.hi),
            *self._ranges(old.stream, old.env, met.lo + shift, met.hi + shift),
        ]

    def _ranges(self, *columns: Ints) -> list[Range]:
        """Steps [lo, hi) of streams by their numbers and env rows."""
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Range(*self._stream(stream, env), lo, hi) for stream, env, lo, hi in rows]

    def _stream(self, stream: int, env: int) -> Stream:
        return (*self._own, env) if stream == OWN else self.streams[stream]


def _own_runs(added: Steps) -> LiveRuns:
    return LiveRuns(added.stream, added.lo, added.length, added["episode"], np.full(len(added), OWN), added.lo)


# -- what is taken over ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BufferResume:
    """One buffer as a new writer takes it over. `runs.episode` and `runs.stream` index the two lists."""

    runs: LiveRuns
    episodes: Sequence[EpisodeRecord]
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
