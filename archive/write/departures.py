"""Pure, no I/O: which steps have left a live set since somebody last asked, by their permanent addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import Undo
from archive.manifest import OWN, LiveRuns, Stream
from archive.steps import Steps
from archive.write import cut

_MAX_NOTES = 4096  # before they are made one


class Range(NamedTuple):
    """Steps [lo, hi) of a stream; an episode without steps takes one position."""

    session: str
    rank: int
    env: int
    lo: int
    hi: int


class Departures:
    """What has left one buffer. Evicting notes positions only; whose steps these are is found out when they are taken.

    What is said of an env row may have left before: it is a range, and no list.
    """

    def __init__(self, session: str, rank: int, undo: Undo) -> None:
        self._own = (session, rank)
        self._undo = undo
        self._before: list[tuple[Ints, Ints]] = []  # env rows, and the position before which all has left
        self._ranges: list[tuple[int, Ints, Ints]] = []
        self._runs: list[LiveRuns] = []
        self._said: dict[int, int] = {}  # env row -> before which position all was said to have left
        self._foreign = LiveRuns.empty()  # what was taken over from other streams
        self._streams: Sequence[Stream] = ()
        self._first: Mapping[int, int] = {}  # env row -> the first position of its own stream

    def resume(self, runs: LiveRuns, streams: Sequence[Stream], next_positions: Mapping[int, int]) -> None:
        """The buffer began with these steps of other streams."""
        self._foreign, self._streams, self._first = runs, streams, next_positions

    def before(self, envs: Ints, positions: Ints) -> None:
        """All steps of these env rows before these positions have left."""
        self._undo.length(self._before)
        self._before.append((envs, positions))
        if len(self._before) > _MAX_NOTES:
            self._undo.attributes(self, "_before")
            self._before = [_greatest(self._before)]

    def ranges(self, env: int, starts: Ints, stops: Ints) -> None:
        """Steps at these positions of an env row have left."""
        self._undo.length(self._ranges)
        self._ranges.append((env, starts, stops))

    def runs(self, runs: LiveRuns) -> None:
        """These have left."""
        self._undo.length(self._runs)
        self._runs.append(runs)

    def take(self) -> tuple[Range, ...]:
        """What has left since this was last asked."""
        if not (self._before or self._ranges or self._runs):
            return ()
        self._undo.attributes(self, "_before", "_ranges", "_runs", "_said")
        out = [*self._of_rows(), *self._of_ranges(), *self._of_runs()]
        self._before, self._ranges, self._runs = [], [], []
        return tuple(out)

    def addresses(self, runs: LiveRuns) -> list[Range]:
        """Where the steps of runs were written, run by run."""
        columns = (runs.env, runs.lo, runs.length, runs.stream)
        return [
            Range(*self._stream(stream, env), lo, lo + max(1, length))
            for env, lo, length, stream in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _stream(self, stream: int, env: int) -> Stream:
        return (*self._own, env) if stream == OWN else self._streams[stream]

    def _of_rows(self) -> Iterator[Range]:
        if not self._before:
            return
        envs, positions = _greatest(self._before)
        said = self._said
        self._said = said | dict(zip(envs.tolist(), positions.tolist(), strict=True))
        yield from self._at(Steps(envs, np.array([said.get(env, 0) for env in envs.tolist()], np.int64), positions))

    def _of_ranges(self) -> Iterator[Range]:
        noted = [Steps(np.full(len(starts), env), starts, stops) for env, starts, stops in self._ranges]
        yield from self._at(Steps.joined(noted).union())

    def _of_runs(self) -> list[Range]:
        if not self._runs:
            return []
        return self.addresses(cut.joined(LiveRuns.joined(self._runs).ordered()))

    def _at(self, places: Steps) -> Iterator[Range]:
        """Steps at positions of env rows: those of their own streams, and those that were taken over."""
        for env, start, stop in zip(places.stream.tolist(), places.lo.tolist(), places.hi.tolist(), strict=True):
            own = max(start, self._first.get(env, 0))
            if own < stop:
                yield Range(*self._own, env, own, stop)
        met = places.meet(self._foreign.standing.placed)
        old = self._foreign.pick(met.right)
        shift = old.lo - old.position
        found = (old.stream, old.env, met.lo + shift, met.hi + shift)
        for stream, env, lo, hi in zip(*(column.tolist() for column in found), strict=True):
            yield Range(*self._stream(stream, env), lo, hi)


def _greatest(noted: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Each env row once, with the greatest position."""
    envs, positions = (np.concatenate(column) for column in zip(*noted, strict=True))
    before = Steps(envs, np.zeros_like(positions), positions).union()
    return before.stream, before.hi
