"""Pure, no I/O: the steps, windows, episodes and groups that can be drawn, numbered without a list of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from archive.arrays import Ints, Mask, group_of, offsets_of, run_starts, spans
from archive.base import UsageError
from archive.read import Episodes

WHOLE = ("episode", "group")  # units of which all steps come
KINDS = ("step", "window", *WHOLE)
METADATA, ATTRIBUTES, LABEL = "metadata.", "attributes.", "label."


class StepUnits:
    """Units that are steps of some episodes, or windows of `length` steps, from step `begin` of each on.

    A unit's index is the number of its first step over all episodes end to end, which is where its column values are.
    """

    def __init__(self, kind: str, lengths: Ints, kept: Mask, begin: Ints, length: int = 1) -> None:
        self._kind = kind
        self._first = offsets_of(lengths)[:-1]
        self._begin = begin
        self._counts = np.where(kept, np.maximum(lengths - begin - (length - 1), 0), 0)
        self._offsets = offsets_of(self._counts)
        self.count = int(self._offsets[-1])

    @property
    def episodes(self) -> Ints:
        """Numbers of the episodes of which something can be drawn."""
        return np.flatnonzero(self._counts)

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """(number of the episode, first step) of the units at these places."""
        number = group_of(self._offsets, places)
        return number, places - self._offsets[number] + self._begin[number]

    def index(self, places: Ints) -> Ints:
        """The index that names each of the units at these places."""
        numbers, steps = self.locate(places)
        return self._first[numbers] + steps

    def each(self, values: Any, places: Ints) -> Any:
        """The values of the units at these places, one for each index that they have in a batch."""
        return values

    def places(self, index: Ints) -> Ints:
        """The places of units by index; UsageError for one that is none of these."""
        number = np.maximum(group_of(self._first, index), 0)
        within = index - self._first[number] - self._begin[number]
        _check_known((within >= 0) & (within < self._counts[number]), index, self._kind)
        found: Ints = self._offsets[number] + within
        return found

    def of_steps(self, values: Any) -> Any:
        """One value a unit from one a step: its first step's."""
        return values[self.index(np.arange(self.count))]


class EpisodeUnits:
    """Units that are groups of episodes, or single episodes. Used like StepUnits.

    A group is drawn if all of its episodes are kept and it has at least `size` of them; its number is its index.
    """

    def __init__(self, kind: str, lengths: Ints, codes: Ints, kept: Mask, size: int = 1) -> None:
        """codes: the number of each episode's group, from 0."""
        order = np.argsort(codes, kind="stable")
        edges = run_starts(codes[order])
        counts = np.diff(edges, append=len(order))
        whole = np.logical_and.reduceat(kept[order], edges) if len(edges) else np.zeros(0, np.bool_)
        drawn = np.flatnonzero(whole & (counts >= size))
        self._kind = kind
        self._lengths = lengths
        self._order = order
        self._starts, self._counts = edges[drawn], counts[drawn]
        self._codes = codes[order][self._starts]
        self._place = np.full(int(codes.max(initial=-1)) + 2, -1)  # by code; the last is that of all others
        self._place[self._codes] = np.arange(len(drawn))
        self.count = len(drawn)

    @property
    def episodes(self) -> Ints:
        """Numbers of the episodes of which something can be drawn."""
        return np.sort(self.locate(np.arange(self.count))[0])

    def locate(self, places: Ints) -> tuple[Ints, Ints]:
        """(number, first step) of all episodes of the groups at these places."""
        numbers: Ints = self._order[spans(self._starts[places], self._counts[places])]
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
        found: Ints = self._place[np.where((index >= 0) & (index < len(self._place)), index, -1)]
        _check_known(found >= 0, index, self._kind)
        return found

    def of_steps(self, values: Any) -> Any:
        """One value a group from one a step: the greatest of all steps of its episodes."""
        greatest, some = np.zeros(len(self._lengths), values.dtype), np.flatnonzero(self._lengths)
        first = offsets_of(self._lengths)[some]
        greatest[some] = np.maximum.reduceat(values, first) if len(some) else 0
        each, edges = greatest[self.locate(np.arange(self.count))[0]], offsets_of(self._counts)[:-1]
        return np.maximum.reduceat(each, edges) if len(edges) else each


def _check_known(known: Mask, index: Ints, kind: str) -> None:
    if not known.all():
        odd = int(index[~known][0])
        raise UsageError(f"index {odd} is no {kind} of this sampler; give those of its batches")


# -- selection -----------------------------------------------------------------------------------------------------


def chosen(episodes: Episodes, *, update_count: Any, staleness: int | None, model_weights_uuid: Any) -> Mask:
    """Mask of the episodes that have steps of these update counts and weights, as for Episodes.filter. staleness: the
    greatest distance of update counts below the greatest of these episodes."""
    if staleness is not None:
        if update_count is not None or staleness < 0:
            raise UsageError("give update_count or staleness, not both, and a staleness of at least 0")
        import pyarrow.compute as pc

        newest = pc.max(episodes.table["update_count_max"]).as_py()
        if newest is None:
            raise UsageError("staleness needs update counts, and these episodes have none: they were written without")
        update_count = (newest - staleness, None)
    if update_count is None and model_weights_uuid is None:
        return np.ones(len(episodes), np.bool_)
    kept = episodes.filter(update_count=update_count, model_weights_uuid=model_weights_uuid)
    return np.isin(episodes.numbers, kept.numbers)


def _newest_first(episodes: Episodes, kept: Mask, recency: int) -> Ints:
    """Numbers of the kept episodes, those written last first."""
    if recency < 1:
        raise UsageError(f"recency={recency} leaves nothing; give at least 1, or None for all")
    order = np.argsort(episodes.table["commit"].to_numpy(), kind="stable")[::-1]
    newest: Ints = order[kept[order]]
    return newest


def of_newest_groups(episodes: Episodes, kept: Mask, recency: int, codes: Ints) -> Mask:
    """A mask of the kept episodes of the `recency` groups to which the newest of them belong."""
    found, first = np.unique(codes[_newest_first(episodes, kept, recency)], return_index=True)
    return kept & np.isin(codes, found[np.argsort(first)[:recency]])


def newest_steps(episodes: Episodes, lengths: Ints, kept: Mask, recency: int) -> tuple[Mask, Ints]:
    """The newest `recency` steps of the kept episodes: a mask of the episodes, and the first such step of each."""
    order = _newest_first(episodes, kept, recency)
    over = np.maximum(np.cumsum(lengths[order]) - recency, 0)
    some = over < lengths[order]
    mask, begin = np.zeros(len(kept), np.bool_), np.zeros(len(kept), np.int64)
    mask[order[some]], begin[order[some]] = True, over[some]
    return mask, begin


def grouped(episodes: Episodes, by: Any) -> tuple[list[Any], Ints]:
    """(distinct keys in order of first episode, number of the key of each episode).

    by: "metadata.KEY", "attributes.NAME" of a checkpoint, a column of the episodes' table, a function of an episode, or
    one key an episode.
    """
    what = by if isinstance(by, str) else "group"
    known: dict[str, int] = {}
    codes = np.zeros(len(episodes), np.int64)
    first: list[Any] = []
    for number, key in enumerate(_keys(episodes, by)):
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
    keys = [key.item() if hasattr(key, "item") else key for key in (map(by, episodes) if callable(by) else by)]
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


def labelled(episodes: Episodes, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The label of each as a number, 0 for those without it; UsageError for a label without numbers."""
    import pyarrow as pa

    known = [column for column in episodes.episode_index.names if column.startswith(LABEL)]
    column = episodes.columns([name])[name] if name in known else None
    if column is None or pa.types.is_string(column.type):
        raise UsageError(f"{name!r} has no numbers for these episodes; their labels: {', '.join(known) or 'none'}")
    found: np.ndarray[Any, np.dtype[np.float64]] = column.cast(pa.float64()).fill_null(0.0).to_numpy()
    return found
