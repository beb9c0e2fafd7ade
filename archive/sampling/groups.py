"""On top of the archive, no I/O: groups of episodes that are drawn whole, such as all answers to one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from archive.arrays import Ints, Mask, offsets_of, run_starts, spans
from archive.base import UsageError
from archive.read import Episodes

METADATA, ATTRIBUTES, LABEL = "metadata.", "attributes.", "label."


class Groups:
    """What can be drawn where a unit is a group: all its episodes, one after the other. Used as `units.Units` are.

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

    def sizes(self, places: Ints) -> Ints:
        """How many episodes the groups at these places have."""
        found: Ints = self._counts[places]
        return found

    def names(self, places: Ints) -> Ints:
        """The index of the group of each episode of these groups."""
        found: Ints = np.repeat(self._codes[places], self._counts[places])
        return found

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
