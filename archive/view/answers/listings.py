"""Engine: episodes as columns and orders: all of an archive or a checkpoint, and those of them that are meant."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from archive.arrays import Ints
from archive.base import NotFoundError, UsageError
from archive.fields import Bools
from archive.view.answers import orders

if TYPE_CHECKING:
    from archive import Episodes


class Listing:
    """All episodes of an archive, or of a checkpoint. Columns and orders are found when first asked for, and stay."""

    def __init__(self, episodes: Episodes, key: Hashable) -> None:
        self.episodes, self.key = episodes, key
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._orders: dict[str, tuple[Ints, int]] = {}
        self._loading, self._busy = threading.Lock(), threading.Lock()

    def inherit(self, other: Listing) -> None:
        """Take over what was found of the same episodes before something was said of them."""
        self._columns.update({n: column for n, column in other._columns.items() if not n.startswith("label.")})
        self._orders.update({n: order for n, order in other._orders.items() if not n.startswith("label.")})

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def names(self) -> list[str]:
        """Its columns: those of each table of episodes, and one a label."""
        return self.episodes.episode_index.names

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of the table; UsageError for one that there is none of."""
        with self._loading:  # who comes second waits, rather than decoding it beside the first
            if name not in self._columns:
                self._columns[name] = self.episodes.columns([name])[name]
            return self._columns[name]

    def place_of(self, name: str) -> int:
        """The place of an episode, by id; NotFoundError if there is none."""
        found = self.column("episode_id").index(name).as_py()
        if found < 0:
            raise NotFoundError(f"there is no episode {name!r:.80} here")
        return int(found)

    def order(self, name: str) -> tuple[Ints, int]:
        """Places in ascending order of a column, those without a value last; and how many have one."""
        with self._busy:  # who comes second waits, rather than sorting a million beside the first
            if name not in self._orders:
                try:
                    self._orders[name] = orders.ascending(self.column(name))
                except TypeError as e:
                    raise UsageError(f"episodes have no order by {name}: {e}") from e
        return self._orders[name]

    def scope(self, given: Mapping[str, str | None], key: Hashable) -> Scope:
        """Those of a run, a buffer, weights, or that meet a condition; all where none of these is given."""
        if not any(given.values()):
            return Scope(self, None, key)
        found = self.episodes.filter(
            run=given["run"], buffer=given["buffer"], model_weights_uuid=given["weights"], where=given["where"]
        )
        return Scope(self, np.isin(self.episodes.numbers, found.numbers), key)


class Scope:
    """Some episodes of a listing."""

    def __init__(self, listing: Listing, member: Bools | None, key: Hashable) -> None:
        """member: which of the listing's episodes; None for all."""
        self.listing, self.key = listing, key
        self._member = member
        self._count = len(listing) if member is None else int(member.sum())

    def __len__(self) -> int:
        return self._count

    @property
    def places(self) -> Ints:
        """Their places in the listing."""
        return np.arange(len(self.listing)) if self._member is None else np.flatnonzero(self._member)

    def order(self, name: str, *, descending: bool) -> Ints:
        """Their places in the listing, by a column, those without a value last; "" is as they were written."""
        if not name:
            return self.places[::-1] if descending else self.places
        places, known = self.listing.order(name)
        if self._member is not None:
            there = self._member[places]
            places, known = places[there], int(there[:known].sum())
        return np.concatenate([places[:known][::-1], places[known:]]) if descending else places

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of theirs, as they were written."""
        column = self.listing.column(name)
        return column if self._member is None else column.filter(pa.array(self._member))

    def place_of(self, name: str) -> int:
        """The place of an episode in the listing; NotFoundError where it is not among these."""
        found = self.listing.place_of(name)
        if self._member is not None and not self._member[found]:
            raise NotFoundError(f"episode {name!r} is not among those that meet the condition")
        return found
