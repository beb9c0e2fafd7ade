"""Trajectory ids: which ones episodes have, numbered anew where ranks counted by themselves,
and the next that is free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from archive.adapters.rlinf import NUMBER
from archive.base import jsontree
from archive.read import Episodes


def metadata_of(episodes: Episodes) -> list[dict[str, Any]]:
    """The metadata of each; no data is read."""
    return [jsontree.loads(text) if text else {} for text in episodes.table["metadata"].to_pylist()]


def ids_of(episodes: Episodes, renumbered: Mapping[str, int] | None = None) -> list[int | None]:
    """The trajectory ids that episodes were given, at first or later; None for those that were not."""
    found = [about.get(NUMBER) for about in metadata_of(episodes)]
    if renumbered:
        names = episodes.table["episode_id"].to_pylist()
        found = [renumbered.get(name, i) for name, i in zip(names, found, strict=True)]
    return [i if isinstance(i, int) else None for i in found]


def distinct_ids(episodes: Episodes, renumbered: Mapping[str, int] | None = None) -> dict[str, int]:
    """Episode -> trajectory id. Where several have the same, because each rank counted by itself, all are numbered
    anew: by the ids they had, then by rank; every rank comes to the same numbers."""
    names, given = episodes.table["episode_id"].to_pylist(), ids_of(episodes, renumbered)
    known = [i for i in given if i is not None]
    if len(set(known)) == len(given):
        return dict(zip(names, known, strict=True))
    order = sorted(range(len(names)), key=lambda i: (given[i] is None, given[i] or 0))
    return {names[i]: number for number, i in enumerate(order)}


def next_id(states: Iterable[Mapping[str, Any]], taken: Iterable[int | None]) -> int:
    """An id that nothing has, nor anything behind it."""
    return max((*(int(s.get("counter", 0)) for s in states), *(i + 1 for i in taken if i is not None)), default=0)


def next_of(first: int, rank: int, world_size: int) -> int:
    """The first number from `first` on that is this rank's: ranks take turns, so that no two have the same."""
    return first + (rank - first) % world_size
