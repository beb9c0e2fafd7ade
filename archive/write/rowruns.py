"""Pure, no I/O: which env row, position and episode the rows of some steps have, said by runs and not row by row;
and the rows at which an episode may begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, Mask, group_of, offsets_of, run_heads, spans
from archive.write.episodes import NONE


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
        at = group_of(steps.env, self.env)
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


# -- appended rows by env row ------------------------------------------------------------------------------------------

NO_ROWS: Ints = np.zeros(0, np.int64)


class Groups(NamedTuple):
    """Rows in order of their env rows: group i, of one env row, is rows [offset[i], offset[i + 1])."""

    order: Ints | None  # the place of each row among those that were given; None if it is the same
    env: Ints
    offset: Ints
    slot: Ints
    next: Ints  # position that comes next in the env row, before these rows
    opened: Ints  # the episode that is open there, or NONE
    position: Ints  # of the group's first row

    def sorted(self, values: Ints) -> Ints:
        """What each row was given, in this order."""
        return values.copy() if self.order is None else values[self.order]

    def flagged(self, mask: Mask | None) -> Ints:
        """The rows that were given True."""
        if mask is None:
            return NO_ROWS
        return np.flatnonzero(mask if self.order is None else mask[self.order])


class Cuts(NamedTuple):
    """Rows at which an episode may begin, in order: the first of each group among them. A run is what lies between."""

    row: Ints
    group: Ints
    position: Ints
    head: Mask  # the first of its group
    fresh: Mask  # nothing is open before it
    first: Mask  # it was said to be the first
    jump: Mask  # its position is not the next one
    changed: Mask  # it has another id than the one before

    @property
    def starts(self) -> Mask:
        """Whether an episode begins here; else the open one goes on."""
        starts: Mask = self.fresh | self.first | self.jump | self.changed
        return starts


def cuts_at(
    groups: Groups, positions: Ints | None, first: Ints, last: Ints, jump: Ints, changed: Ints = NO_ROWS
) -> Cuts:
    """Rows by number, in order. last: those that end an episode.  positions: of each row, where they are not the next
    ones in each group."""
    after = last[last < groups.offset[-1] - 1] + 1
    heads = groups.offset[:-1]
    row = np.unique(np.concatenate([heads, first, after, jump, changed]))
    group = group_of(groups.offset, row)
    head = row == heads[group]
    position = groups.position[group] + row - heads[group] if positions is None else positions[row]
    following = groups.next[group]
    return Cuts(
        row, group, position, head,
        fresh=np.where(head, groups.opened[group] == NONE, _among(row, after)),
        first=_among(row, first),
        jump=np.where(head, (position != following) & (following != 0), _among(row, jump)),
        changed=_among(row, changed),
    )  # fmt: skip


def _among(row: Ints, some: Ints) -> Mask:
    """Which of the rows are among some of them."""
    found = np.zeros(len(row), bool)
    found[group_of(row, some)] = True
    return found
