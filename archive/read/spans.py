"""Pure, no I/O: which steps of which episodes somebody wants, as rows of the segments table."""

from __future__ import annotations

from typing import Any

import numpy as np

from archive.arrays import Ints, group_of, spans, sums
from archive.base import cached_property
from archive.fields import Bools


class Spans:
    """Steps [lo, hi) of rows of the segments table; those of episode i are [offsets[i], offsets[i + 1]).

    A span without steps stays, for what its segment has beside steps.  begun: where steps before `lo` were cut off.
    """

    def __init__(self, offsets: Ints, rows: Ints, lo: Ints, hi: Ints, begun: Bools | None = None) -> None:
        self.offsets = offsets
        self.rows = rows
        self.lo = lo
        self.hi = hi
        self._begun = begun

    @classmethod
    def of_each(cls, rows: Any, lo: Any, hi: Any) -> Spans:
        """One span an episode."""
        row, first, stop = (np.asarray(values, np.int64) for values in (rows, lo, hi))
        return cls(np.arange(len(row) + 1), row, first, stop)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def episode(self) -> Ints:
        """Of each span the number of its episode here."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def lengths(self) -> Ints:
        """Steps of each episode."""
        return sums(self.hi - self.lo, self.offsets)

    @cached_property
    def more(self) -> Bools:
        """Of each span, whether fields of more rows than steps go on there: after the last step, and in the segments
        that follow it; where no step is wanted, from where the steps were cut off."""
        at, episode = np.arange(len(self.rows)), self.episode
        last = self.offsets[:-1].copy()
        if self._begun is not None:
            np.maximum.at(last, episode[self._begun], at[self._begun])
        some = self.hi > self.lo
        has_steps = np.bincount(episode[some], minlength=len(self)) > 0
        last[has_steps] = 0
        np.maximum.at(last, episode[some], at[some])
        more: Bools = at >= last[episode]
        return more

    def pick(self, chosen: Ints) -> Spans:
        """Those of the episodes of these numbers."""
        counts = np.diff(self.offsets)[chosen]
        index = spans(self.offsets[:-1][chosen], counts)
        begun = None if self._begun is None else self._begun[index]
        return Spans(np.append(0, np.cumsum(counts)), self.rows[index], self.lo[index], self.hi[index], begun)

    def one(self, episode: int) -> Spans:
        """Those of one episode."""
        start, stop = self.offsets[episode : episode + 2].tolist()
        mine = slice(start, stop)
        begun = None if self._begun is None else self._begun[mine]
        return Spans(np.array([0, stop - start]), self.rows[mine], self.lo[mine], self.hi[mine], begun)

    def cut(self, start: Ints, stop: Ints) -> Spans:
        """Steps [start[i], stop[i]) of episode i, counted from its first step here."""
        counts, episode = self.hi - self.lo, self.episode
        total = np.append(0, np.cumsum(counts))
        before = total[:-1] - total[self.offsets[:-1]][episode]
        lo, hi = (np.clip(edge[episode] - before, 0, counts) for edge in (start, stop))
        return Spans(self.offsets, self.rows, self.lo + lo, self.lo + np.maximum(lo, hi), lo > 0)

    def split(self, at: Ints) -> Spans:
        """The same steps in the same order, with no span across any of the steps `at`, counted over all episodes."""
        total = np.append(0, np.cumsum(self.hi - self.lo))
        at = at[(at > 0) & (at < total[-1])]
        span = group_of(total, at)
        inside = at > total[span]
        at, span = at[inside], span[inside]
        order = np.argsort(np.append(np.arange(len(self.rows)), span), kind="stable")
        lo = np.append(self.lo, self.lo[span] + at - total[span])[order]
        hi = np.append(self.hi, self.hi[span])[order]
        again = np.flatnonzero(order >= len(self.rows))
        hi[again - 1] = lo[again]
        added = np.bincount(self.episode[span], minlength=len(self))
        rows = np.append(self.rows, self.rows[span])[order]
        return Spans(self.offsets + np.append(0, np.cumsum(added)), rows, lo, hi)
