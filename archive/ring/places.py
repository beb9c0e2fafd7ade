"""Pure, no I/O: where each step of a share stands in a ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from archive.arrays import Ints, Mask
from archive.base import CapacityError, UsageError


class Layout(Protocol):
    """Where the steps of each live episode stand, one entry an episode, in live order (env row, then position)."""

    env_id: Ints
    position: Ints
    length: Ints
    open: Mask  # it has not ended
    headless: Mask  # its first steps are gone


class HasLayout(Protocol):
    """What says where a share's steps stand."""

    @property
    def layout(self) -> Layout: ...
    @property
    def next_positions(self) -> Mapping[int, int]: ...


@dataclass(frozen=True)
class Places:
    """Where each episode's steps stand; `rows` and `slots` are the ring's size."""

    env: Ints
    position: Ints
    length: Ints
    open: Mask
    headless: Mask
    rows: int
    slots: int

    def of(self, lo: int, hi: int) -> Ints:
        """Row and slot, as one number, of each step of episodes [lo, hi)."""
        length = self.length[lo:hi]
        ends = np.cumsum(length)
        position = np.arange(int(length.sum())) + np.repeat(self.position[lo:hi] - (ends - length), length)
        places: Ints = np.repeat(self.env[lo:hi] * self.slots, length) + position % self.slots
        return places

    def runs(self) -> tuple[Ints, Ints]:
        """Steps, counted over all episodes, from which on they stand end to end, and the row and slot of each."""
        full = np.flatnonzero(self.length > 0)
        length, slot = self.length[full], self.position[full] % self.slots
        first = np.cumsum(length) - length
        around = np.flatnonzero(slot + length > self.slots)  # the rest stands at the beginning of the same row
        starts = np.append(first, first[around] + self.slots - slot[around])
        row = self.env[full] * self.slots
        order = np.argsort(starts, kind="stable")
        return starts[order], np.append(row + slot, row[around])[order]


def places_of(share: HasLayout, num_envs: int, max_length: int) -> Places:
    if num_envs < 1 or max_length < 1:
        raise UsageError(f"num_envs={num_envs}, max_length={max_length}: a ring has one or more of both")
    layout = share.layout
    env, position, length = (np.asarray(v, np.int64) for v in (layout.env_id, layout.position, layout.length))
    opened, headless = (np.asarray(v, bool) & (length > 0) for v in (layout.open, layout.headless))
    places = Places(env, position, length, opened, headless, num_envs, max_length)
    _check_room(places)
    _check_contiguous(places, share.next_positions)
    return places


def _check_room(places: Places) -> None:
    if (places.env < 0).any():
        raise UsageError("the share has episodes without an env row; plan with num_envs= to deal them out to rows")
    if int(places.env.max(initial=0)) >= places.rows:
        raise CapacityError(
            f"the share has steps in env row {int(places.env.max())}, the ring has {places.rows} rows; plan with "
            f"num_envs={places.rows}"
        )
    total = np.bincount(places.env, weights=places.length, minlength=places.rows).astype(np.int64)
    longest = int(total.argmax())
    if total[longest] > places.slots:
        over = np.maximum(total - places.slots, 0)
        raise CapacityError(
            f"env row {longest} of the share has {total[longest]} steps, the ring {places.slots} slots a row "
            f"({int(over.sum())} steps too many in {int((over > 0).sum())} rows); plan with max_length={places.slots}, "
            "which drops the oldest and counts them"
        )


def _check_contiguous(places: Places, next_positions: Mapping[int, int]) -> None:
    """A ring has no holes: each row's steps follow each other, up to the position that comes next."""
    full = np.flatnonzero(places.length > 0)
    env, start = places.env[full], places.position[full]
    if not len(full):
        return
    row_ends = np.r_[env[1:] != env[:-1], True]
    following = np.r_[start[1:], 0]
    following[row_ends] = [next_positions.get(e, -1) for e in env[row_ends].tolist()]
    holes = np.flatnonzero(start + places.length[full] != following)
    if len(holes) or len(np.unique(env)) != int(row_ends.sum()):
        where = (
            f"env row {env[holes[0]]} has a hole before position {following[holes[0]]}" if len(holes) else "no order"
        )
        raise UsageError(
            f"the steps of the share don't follow each other without holes, as a ring's do ({where}); plan with "
            f"num_envs={places.rows}, which puts what is left end to end"
        )
