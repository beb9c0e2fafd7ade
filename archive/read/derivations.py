"""Reading steps with fields derived from them: the steps around a window that a derivation needs,
and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, group_of, numbers, spans
from archive.base import UsageError
from archive.fields import Bools, Derivation, Rows, parse, put
from archive.read.chosen import Chosen
from archive.read.selection import Selection


class Bounds:
    """The surroundings of each step of some episodes: the steps around it without a gap in time, and the end of its
    episode.

    An episode has no gaps, except in a checkpoint, where some steps may have been evicted.
    """

    def __init__(self, episodes: Chosen) -> None:
        lengths = episodes.lengths()
        self.first = np.cumsum(lengths) - lengths  # of each episode, among all steps
        starts, self.ended = _runs(episodes, lengths)
        self.run_starts = starts
        self.run_stops = np.append(starts[1:], lengths.sum())
        flags = episodes.columns(("terminated", "truncated"))
        self.terminated, self.truncated = (numbers(flags[name], False) for name in ("terminated", "truncated"))
        self.lengths = lengths

    def around(self, numbers: Ints, steps: Ints) -> tuple[Ints, Ints]:
        """The steps [begin, stop) of the episode around step steps[i] of episode numbers[i], without a gap."""
        first = self.first[numbers]
        run = group_of(self.run_starts, first + steps)
        return self.run_starts[run] - first, self.run_stops[run] - first

    def reach(self, derivation: Derivation, numbers: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
        """The steps [lo, hi) that deriving for steps [starts, stops) needs."""
        some = stops > starts
        lo, hi = starts.copy(), stops.copy()
        n, a, b = numbers[some], starts[some], stops[some]
        lo[some] = np.maximum(self.around(n, a)[0], a - derivation.before)
        end = self.around(n, b - 1)[1]
        hi[some] = end if derivation.after is None else np.minimum(end, b + derivation.after)
        return lo, hi

    def rows(self, numbers: Ints, starts: Ints, stops: Ints, lo: Ints, hi: Ints) -> Rows:
        """Steps [starts, stops) of each episode, among the rows of its steps [lo, hi), all of them end to end."""
        counts = stops - starts
        number, step = np.repeat(numbers, counts), spans(starts, counts)
        begin, stop = self.around(number, step)
        lo, hi, base = (np.repeat(x, counts) for x in (lo, hi, np.cumsum(hi - lo) - (hi - lo) - lo))
        whole = (stop == self.lengths[number]) & self.ended[number] & (stop <= hi)
        return Rows(
            step + base,
            np.maximum(begin, lo) + base,
            np.minimum(stop, hi) + base,
            whole,
            self.terminated[number],
            self.truncated[number],
        )


def read(
    episodes: Chosen,
    numbers: Ints,
    starts: Ints,
    stops: Ints,
    selection: Selection,
    derive: Sequence[Derivation],
    bounds: Bounds | None = None,
) -> list[dict[str, Any]]:
    """Steps [starts, stops) of episodes, with derived fields; fetched together, each chunk once."""
    whole = episodes.pick(numbers).spans()
    if not derive:
        return episodes.reader.read(whole.cut(starts, stops), selection)
    around = bounds or Bounds(episodes)
    reaches = [around.reach(one, numbers, starts, stops) for one in derive]
    requests = [(whole.cut(starts, stops), selection)]
    for derivation, (lo, hi) in zip(derive, reaches, strict=True):
        if derivation.fields:
            requests.append((whole.cut(lo, hi), Selection(derivation.fields)))
    out, *others = episodes.reader.read_each(requests)
    rest = iter(others)
    for derivation, (lo, hi) in zip(derive, reaches, strict=True):
        found: Sequence[dict[str, Any]] = next(rest) if derivation.fields else [{}] * len(out)
        for i in range(len(out)):
            one = slice(i, i + 1)
            rows = around.rows(numbers[one], starts[one], stops[one], lo[one], hi[one])
            out[i] = put(out[i], derivation, derivation.of(found[i], rows))
    return out


def read_all(
    episodes: Chosen, selection: Selection, derive: Any, out: Any = None, start: int = 0, stop: int | None = None
) -> list[dict[str, Any]]:
    """Read steps [start, stop) of each episode, like a slice, with derived fields. UsageError with memory of the
    caller's."""
    if out is not None:
        raise UsageError(
            "out= is for fields as they are stored; read with out= first, and derive= in a call of its own"
        )
    steps = slice(start, stop)
    edges = np.array([steps.indices(n)[:2] for n in episodes.lengths().tolist()], np.int64).reshape(-1, 2)
    return read(episodes, np.arange(len(edges)), edges[:, 0], edges.max(axis=1), selection, parse(derive))


def _runs(episodes: Chosen, lengths: Ints) -> tuple[Ints, Bools]:
    """The starts of ranges without a gap, among all steps; a mask of the episodes that have their last step."""
    live, first = episodes._live, np.cumsum(lengths) - lengths
    if live is None:
        return first[lengths > 0], np.ones(len(lengths), bool)
    before = numbers(episodes.reader.snapshot.columns(["episode_start"])["episode_start"])[live.rows]
    number = np.repeat(np.arange(len(lengths)), np.diff(live.offsets))
    some = live.hi > live.lo
    number, lo, hi = number[some], (before + live.lo)[some], (before + live.hi)[some]
    heads = np.ones(len(lo), bool)
    heads[1:] = (number[1:] != number[:-1]) | (lo[1:] != hi[:-1])
    ended = np.zeros(len(lengths), np.int64)
    np.maximum.at(ended, number, hi)
    total = numbers(episodes.episode_index.column("length"))[episodes.numbers]
    return (np.cumsum(hi - lo) - (hi - lo))[heads], ended == total
