"""Pure, no I/O: which env row, position and episode the rows of some steps have, said by runs and not row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, offsets_of, run_heads, spans


class EnvRuns(NamedTuple):
    """Steps of distinct env rows, in ascending order, end to end: `length[i]` of `env[i]`, from `position[i]` on."""

    env: Ints
    position: Ints
    length: Ints


class RowRuns(NamedTuple):
    """Rows end to end: `length[i]` steps of one episode, from `position[i]` of env row `env[i]` on."""

    env: Ints
    position: Ints
    length: Ints
    episode: Ints

    @classmethod
    def of(cls, env: Ints, position: Ints, episode: Ints) -> RowRuns:
        """From what each row has."""
        ones = np.ones(len(env), np.int64)
        return cls(env, position, ones, episode).merged()

    @classmethod
    def joined(cls, parts: Sequence[RowRuns]) -> RowRuns:
        """The rows of all parts, end to end."""
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, zip(*parts, strict=True)))

    @property
    def rows(self) -> int:
        return int(self.length.sum())

    @property
    def starts(self) -> Ints:
        """The number of the first row of each run."""
        return offsets_of(self.length)[:-1]

    def pick(self, index: Ints) -> RowRuns:
        return RowRuns(self.env[index], self.position[index], self.length[index], self.episode[index])

    def merged(self) -> RowRuns:
        """The same rows in as few runs as can be."""
        heads = np.flatnonzero(run_heads(self.env, self.episode, self.position - self.starts))
        if len(heads) == len(self.env):
            return self
        return self.pick(heads)._replace(length=np.add.reduceat(self.length, heads))

    def cut(self, lo: int, hi: int) -> RowRuns:
        """Rows [lo, hi)."""
        start = self.starts
        return self._within(np.maximum(lo - start, 0), np.minimum(hi - start, self.length))

    def among(self, steps: EnvRuns) -> RowRuns:
        """Those of the rows that are among some steps."""
        at = np.minimum(np.searchsorted(steps.env, self.env), len(steps.env) - 1)
        skip = np.maximum(steps.position[at] - self.position, 0)
        upto = np.minimum((steps.position + steps.length)[at] - self.position, self.length)
        return self._within(skip, np.where(steps.env[at] == self.env, upto, 0))

    def _within(self, skip: Ints, upto: Ints) -> RowRuns:
        """Of each run the steps [skip, upto), counted from its first."""
        kept = np.flatnonzero(upto > skip)
        skip = skip[kept]
        return RowRuns(self.env[kept], self.position[kept] + skip, upto[kept] - skip, self.episode[kept])

    def by_env(self) -> tuple[Ints | None, RowRuns]:
        """The rows in order of their env rows: where each was (None if they are so already), and their runs."""
        if (self.env[1:] >= self.env[:-1]).all():
            return None, self.merged()
        by = np.argsort(self.env, kind="stable")
        return spans(self.starts[by], self.length[by]), self.pick(by).merged()

    @property
    def positions(self) -> Ints:
        """Of each row."""
        return spans(self.position, self.length)

    @property
    def episodes(self) -> Ints:
        """Of each row."""
        return np.repeat(self.episode, self.length)
