"""Pure, no I/O: appended rows by env row, and the rows among them at which an episode may begin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from archive.arrays import Ints, Mask
from archive.write.episoderecords import NONE

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
    group = np.searchsorted(groups.offset, row, side="right") - 1
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
    found[np.searchsorted(row, some)] = True
    return found
