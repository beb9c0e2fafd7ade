"""Pure, no I/O: the steps, windows, episodes and groups that can be drawn, numbered without a list of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from archive.arrays import Ints, Mask, group_of, offsets_of, run_starts, spans
from archive.base import UsageError
from archive.read import Episodes

KINDS = ("step", "window", "episode", "group")
METADATA, ATTRIBUTES, LABEL = "metadata.", "attributes.", "label."


class Units:
    """The units that can be drawn: of some episodes, by number, steps, windows of `length` steps, or the whole.

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

    def index(self, places: Ints) -> Ints:
        """The index that names each of the units at these places."""
        numbers, steps = self.locate(places)
        return numbers if self.kind == "episode" else self._first[numbers] + steps

    def each(self, values: Any, places: Ints) -> Any:
        """The values of the units at these places, one for each index that they have in a batch."""
        return values

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


class EpisodeGroups:
    """The units where each is a group: all its episodes, one after the other. Used as `Units` are.

    A group is drawn if all of its episodes are kept and it has at least `size` of them; its number is its index.
    """

    kind = "group"

    def __init__(self, lengths: Ints, codes: Ints, kept: Mask, size: int = 1) -> None:
        order = np.argsort(codes, kind="stable")
        edges = run_starts(codes[order])
        counts = np.diff(edges, append=len(order))
        whole = np.logical_and.reduceat(kept[order], edges) if len(edges) else np.zeros(0, np.bool_)
        drawn = np.flatnonzero(whole & (counts >= size))
        self._order = order
        self._starts = edges[drawn]
        self._counts = counts[drawn]
        self._codes = codes[order][self._starts]
        self._of_code = {int(code): place for place, code in enumerate(self._codes)}
        self._first = offsets_of(lengths)[:-1]
        self._lengths = lengths
        self.count = len(drawn)

    @property
    def episodes(self) -> Ints:
        """Numbers of the episodes of which something can be drawn."""
        return np.sort(self._members(np.arange(self.count)))

    def _members(self, places: Ints) -> Ints:
        found: Ints = self._order[spans(self._starts[places], self._counts[places])]
        return found

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """(number, first step) of all episodes of the groups at these places."""
        numbers = self._members(places)
        return numbers, np.zeros_like(numbers)

    def index(self, places: Ints) -> Ints:
        """The index of the group of each episode of the groups at these places."""
        found: Ints = np.repeat(self._codes[places], self._counts[places])
        return found

    def each(self, values: Any, places: Ints) -> Any:
        """The values of the groups at these places, one for each of their episodes."""
        return values.repeat_interleave(torch.from_numpy(self._counts[places]))

    def places(self, index: Ints) -> Ints:
        """The places of groups by index; UsageError for one that is none of these."""
        found = [self._of_code.get(int(one), -1) for one in index]
        if -1 in found:
            raise UsageError(
                f"index {int(index[found.index(-1)])} is no group of this sampler; give those of its batches"
            )
        return np.array(found, np.int64)

    def of_steps(self, values: Any) -> Any:
        """One value a group from one a step: the greatest of all steps of its episodes."""
        out = []
        for place in range(self.count):
            numbers = self._members(np.array([place]))
            out.append(values[spans(self._first[numbers], self._lengths[numbers])].max(initial=0))
        return np.array(out)


# -- which of them -----------------------------------------------------------------------------------------------------


def chosen(episodes: Episodes, *, update_count: Any, staleness: int | None, model_weights_uuid: Any) -> Mask:
    """A mask of the episodes that have steps of these update counts and weights, as Episodes.filter says it."""
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


def _newest_first(episodes: Episodes, kept: Mask, recency: int) -> Ints:
    """Numbers of the kept episodes, those written last first."""
    if recency < 1:
        raise UsageError(f"recency={recency} leaves nothing; give at least 1, or None for all")
    order = np.argsort(episodes.table["commit"].to_numpy(), kind="stable")[::-1]
    newest: Ints = order[kept[order]]
    return newest


def newest_groups(episodes: Episodes, kept: Mask, recency: int, codes: Ints) -> Ints:
    """The groups to which the newest episodes belong, `recency` of them."""
    found, first = np.unique(codes[_newest_first(episodes, kept, recency)], return_index=True)
    return found[np.argsort(first)[:recency]]


def recent(episodes: Episodes, lengths: Ints, kept: Mask, recency: int, kind: str) -> tuple[Mask, Ints]:
    """The newest `recency` steps (episodes, if those are drawn): which episodes, and from which step on."""
    order = _newest_first(episodes, kept, recency)
    size = np.ones(len(order), np.int64) if kind == "episode" else lengths[order]
    over = np.maximum(np.cumsum(size) - recency, 0)
    within = order[over < size]
    mask, begin = np.zeros(len(kept), np.bool_), np.zeros(len(kept), np.int64)
    mask[within] = True
    begin[within] = 0 if kind == "episode" else over[over < size]
    return mask, begin


def grouped(episodes: Episodes, by: Any) -> tuple[list[Any], Ints]:
    """(distinct keys in order of first episode, number of the key of each episode).

    by: "metadata.KEY", "attributes.NAME" of a checkpoint, a column of the episodes' table, a function of an episode, or
    one key an episode.
    """
    keys = _keys(episodes, by)
    what = by if isinstance(by, str) else "group"
    known: dict[str, int] = {}
    codes = np.zeros(len(keys), np.int64)
    first: list[Any] = []
    for number, key in enumerate(keys):
        if key is None:
            raise UsageError(
                f"episode {episodes[number].id!r} has no {what}, so that it is in no group; leave such episodes out "
                f"(filter(where=...)), or give a function of an episode as group="
            )
        text = json.dumps(key, sort_keys=True, default=repr)
        if text not in known:
            first.append(key)
        codes[number] = known.setdefault(text, len(known))
    return first, codes


def _keys(episodes: Episodes, by: Any) -> Sequence[Any]:
    if isinstance(by, str):
        return _named(episodes, by)
    if callable(by):
        function: Callable[[Any], Any] = by
        return [_plain(function(episode)) for episode in episodes]
    keys = [_plain(key) for key in by]
    if len(keys) != len(episodes):
        raise UsageError(f"group= has {len(keys)} keys and there are {len(episodes)} episodes; give one for each")
    return keys


def _named(episodes: Episodes, name: str) -> list[Any]:
    for prefix, of in ((METADATA, attrgetter("metadata")), (ATTRIBUTES, attrgetter("attributes"))):
        if name.startswith(prefix):
            return [of(episode).get(name.removeprefix(prefix)) for episode in episodes]
    names = episodes.episode_index.names
    if name not in names:
        raise UsageError(
            f"group={name!r}: give 'metadata.KEY', 'attributes.NAME', 'label.KEY', or one of {', '.join(names)}"
        )
    values: list[Any] = episodes.columns([name])[name].to_pylist()
    return values


def _plain(key: Any) -> Any:
    return key.item() if hasattr(key, "item") else key


def labelled(episodes: Episodes, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The label of each as a number, 0 for those without it; UsageError for a label that has none."""
    import pyarrow as pa

    known = [column for column in episodes.episode_index.names if column.startswith(LABEL)]
    column = episodes.columns([name])[name] if name in known else None
    if column is None or pa.types.is_string(column.type):
        raise UsageError(f"{name!r} has no numbers for these episodes; their labels: {', '.join(known) or 'none'}")
    found: np.ndarray[Any, np.dtype[np.float64]] = column.cast(pa.float64()).fill_null(0.0).to_numpy()
    return found
