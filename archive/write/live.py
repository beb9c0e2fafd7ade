"""Pure, no I/O: the live set of one buffer: which steps are in it, in order; and which have left it since somebody last
asked, by their permanent addresses.

Positions are never used twice, so adding and evicting commute: both are noted, and applied together when somebody
looks. Notes are appended, and what they come to is replaced: so a refused call is cut off again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.index import OWN, LiveRuns, Stream
from archive.steps import Steps
from archive.write import cut

_MAX_NOTES = 4096  # of added steps before they are applied
_MAX_EVICTED = 1 << 14  # rows of notes before they are made one
_NOTHING = Steps.joined([])


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
            out += self.addresses(cut.joined(LiveRuns.joined(self._left_runs).ordered()))
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
