"""Pure, no I/O: which steps have left a live set since somebody last asked, by their permanent addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, merge_runs, run_starts
from archive.base import Undo
from archive.manifest import OWN, Runs, Stream
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
        self._runs: list[Runs] = []
        self._said: dict[int, int] = {}  # env row -> before which position all was said to have left
        self._foreign = Runs.empty()  # what was taken over from other streams
        self._streams: Sequence[Stream] = ()
        self._first: Mapping[int, int] = {}  # env row -> the first position of its own stream

    def resume(self, runs: Runs, streams: Sequence[Stream], next_positions: Mapping[int, int]) -> None:
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

    def runs(self, runs: Runs) -> None:
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

    def addresses(self, runs: Runs) -> list[Range]:
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
        envs, positions = (column.tolist() for column in _greatest(self._before))
        said = self._said
        self._said = said | dict(zip(envs, positions, strict=True))
        for env, position in zip(envs, positions, strict=True):
            yield from self._at(env, said.get(env, 0), position)

    def _of_ranges(self) -> Iterator[Range]:
        by_env: dict[int, list[tuple[Ints, Ints]]] = {}
        for env, *edges in self._ranges:
            by_env.setdefault(env, []).append((edges[0], edges[1]))
        for env, noted in by_env.items():
            starts, stops = merge_runs(*map(np.concatenate, zip(*noted, strict=True)))
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                yield from self._at(env, start, stop)

    def _of_runs(self) -> list[Range]:
        if not self._runs:
            return []
        runs = Runs(*map(np.concatenate, zip(*self._runs, strict=True)))
        return self.addresses(cut.joined(runs.pick(np.lexsort((runs.position, runs.env)))))

    def _at(self, env: int, start: int, stop: int) -> Iterator[Range]:
        """Steps at positions [start, stop) of an env row: those of its own stream, and those that were taken over."""
        own = max(start, self._first.get(env, 0))
        if own < stop:
            yield Range(*self._own, env, own, stop)
        old = self._foreign
        first, last = np.searchsorted(old.env, [env, env + 1]).tolist()
        last = first + int(np.searchsorted(old.position[first:last], stop))
        first += int(np.searchsorted((old.position + np.maximum(old.length, 1))[first:last], start, side="right"))
        for i in range(first, last):
            position, length = int(old.position[i]), max(1, int(old.length[i]))
            lo, hi = max(start, position), min(stop, position + length)
            if lo < hi:
                shift = int(old.lo[i]) - position
                yield Range(*self._stream(int(old.stream[i]), env), lo + shift, hi + shift)


def _greatest(noted: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Each env row once, with the greatest position."""
    envs, positions = (np.concatenate(column) for column in zip(*noted, strict=True))
    order = np.argsort(envs, kind="stable")
    envs, positions = envs[order], positions[order]
    heads = run_starts(envs)
    return envs[heads], np.maximum.reduceat(positions, heads)
