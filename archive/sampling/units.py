"""On top of the archive, no I/O: the steps, windows or episodes that can be drawn, numbered without a list of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from archive.arrays import Ints, Mask, group_of, offsets_of
from archive.base import UsageError
from archive.read import Episodes

KINDS = ("step", "window", "episode", "group")


class Units:
    """What can be drawn: of some episodes, by number, steps, windows of `length` steps, or the whole.

    A unit's index is the number of its first step over all episodes end to end, which is where its column values are;
    an episode's is its number.
    """

    def __init__(self, lengths: Ints, kind: str, length: int, kept: Mask, begin: Ints) -> None:
        self.kind = kind
        self.length = length
        self._first = offsets_of(lengths)[:-1]
        self._begin = begin
        self._lengths = lengths
        usable = np.maximum(lengths - begin - (length - 1 if kind == "window" else 0), 0)
        counts = np.where(kept, np.minimum(usable, 1) if kind == "episode" else usable, 0)
        self._offsets = offsets_of(counts)
        self._counts = counts
        self.count = int(counts.sum())

    @property
    def episodes(self) -> Ints:
        """Numbers of the episodes of which something can be drawn."""
        return np.flatnonzero(self._counts)

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """(number of the episode, first step) of the units at these places."""
        number = group_of(self._offsets, places)
        step = places - self._offsets[number] + self._begin[number]
        return number, np.zeros_like(step) if self.kind == "episode" else step

    def index(self, numbers: Ints, steps: Ints) -> Ints:
        """What names the units at these episodes and steps."""
        return numbers if self.kind == "episode" else self._first[numbers] + steps

    def places(self, index: Ints) -> Ints:
        """The places of units by index; UsageError for one that is none of these."""
        if self.kind == "episode":
            number, step = index, self._begin[np.clip(index, 0, len(self._begin) - 1)]
        else:
            number = group_of(self._first, index)
            step = index - self._first[np.maximum(number, 0)]
        sound = (number >= 0) & (number < len(self._counts))
        at = np.where(sound, number, 0)
        within = step - self._begin[at]
        bad = np.flatnonzero(~sound | (within < 0) | (within >= self._counts[at]))
        if len(bad):
            raise UsageError(f"index {int(index[bad[0]])} is no {self.kind} of this sampler; give those of its batches")
        found: Ints = self._offsets[at] + within
        return found

    def of_steps(self, values: Any) -> Any:
        """One value a unit from one a step: its first step's, or the greatest of an episode's steps."""
        numbers, steps = self.locate(np.arange(self.count))
        if self.kind != "episode":
            return values[self._first[numbers] + steps]
        edges = np.stack([self._first[numbers], self._first[numbers] + self._lengths[numbers]], 1).reshape(-1)
        return np.maximum.reduceat(np.concatenate([values, values[-1:]]), edges)[::2] if len(edges) else values[:0]


def chosen(episodes: Episodes, *, update_count: Any, staleness: int | None, model_weights_uuid: Any) -> Mask:
    """Which episodes have steps of these update counts and weights, as Episodes.filter says it."""
    if staleness is not None:
        if update_count is not None or staleness < 0:
            raise UsageError("give update_count or staleness, not both, and a staleness of at least 0")
        update_count = (newest_update(episodes) - staleness, None)
    if update_count is None and model_weights_uuid is None:
        return np.ones(len(episodes), np.bool_)
    kept = episodes.filter(update_count=update_count, model_weights_uuid=model_weights_uuid)
    return np.isin(episodes.numbers, kept.numbers)


def newest_update(episodes: Episodes) -> int:
    """The greatest update count of any step of these episodes."""
    import pyarrow.compute as pc

    newest = pc.max(episodes.table["update_count_max"]).as_py()
    if newest is None:
        raise UsageError("staleness needs update counts, and these episodes have none: they were written without")
    return int(newest)


def _newest_first(episodes: Episodes, kept: Mask) -> Ints:
    """Numbers of the kept episodes, those written last first."""
    order = np.argsort(episodes.table["commit"].to_numpy(), kind="stable")[::-1]
    newest: Ints = order[kept[order]]
    return newest


def newest_groups(episodes: Episodes, kept: Mask, recency: int, codes: Ints) -> Ints:
    """The groups to which the newest episodes belong, `recency` of them."""
    if recency < 1:
        raise UsageError(f"recency={recency} leaves nothing; give at least 1, or None for all")
    found, first = np.unique(codes[_newest_first(episodes, kept)], return_index=True)
    return found[np.argsort(first)[:recency]]


def recent(episodes: Episodes, lengths: Ints, kept: Mask, recency: int, kind: str) -> tuple[Mask, Ints]:
    """The newest `recency` steps (episodes, if those are drawn): which episodes, and from which step on."""
    if recency < 1:
        raise UsageError(f"recency={recency} leaves nothing; give at least 1, or None for all")
    order = _newest_first(episodes, kept)
    size = np.ones(len(order), np.int64) if kind == "episode" else lengths[order]
    over = np.maximum(np.cumsum(size) - recency, 0)
    within = over < size
    mask, begin = np.zeros(len(kept), np.bool_), np.zeros(len(kept), np.int64)
    mask[order[within]] = True
    begin[order[within]] = 0 if kind == "episode" else over[within]
    return mask, begin
