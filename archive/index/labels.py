"""Pure, no I/O: labels of episodes, set after they were written; the rows of their table that apply, as columns.

A row names the episode's newest segment at that time, and applies where that segment is in the episode's chain as
the reader sees it. Of the rows of an episode and key that apply, the last one counts; without a value it removes the
label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, offsets_of
from archive.base import cached_property, jsontree
from archive.fields import are_nested, typed

if TYPE_CHECKING:
    import pyarrow as pa

PREFIX = "label."  # of columns
HISTORY_COLUMNS = ("episode_id", "key", "value", "by", "created_at", "commit")


class Labels:
    """The labels of the episodes of an index."""

    def __init__(self, said: pa.Table, episode: Ints, count: int) -> None:
        """said: rows of the labels table; episode: number of the episode that each applies to, -1 for none; count: the
        number of episodes."""
        applies = np.flatnonzero(episode >= 0)
        self._said = said if len(applies) == len(episode) else said.take(applies)
        self._episode = episode[applies]
        self._count = count
        self._columns: dict[str, pa.Array | None] = {}

    @cached_property
    def _rows(self) -> dict[str, Ints]:
        """Key -> its rows, oldest first, for keys that some episode has."""
        if not self._said.num_rows:
            return {}
        keys = self._said["key"].combine_chunks()
        codes = keys.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        ends = np.cumsum(np.bincount(codes, minlength=len(keys.dictionary)))
        parts = zip(keys.dictionary.to_pylist(), np.split(order, ends[:-1]), strict=True)
        return {key: rows for key, rows in sorted(parts) if len(rows)}

    @cached_property
    def names(self) -> list[str]:
        """The columns of labels, sorted, for keys that some episode has a value for."""
        return [PREFIX + key for key in self._rows if self.texts(key).null_count < self._count]

    def texts(self, key: str) -> pa.Array:
        """The JSON text of the label that applies, one for each episode; null where there is none."""
        import pyarrow as pa

        last = np.full(self._count, -1, np.int64)
        rows = self._rows.get(key, np.zeros(0, np.int64))
        last[self._episode[rows]] = rows  # the last one of an episode stays
        found = self._said["value"].take(pa.array(last, mask=last < 0))
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found

    def column(self, name: str) -> pa.ChunkedArray:
        """One value for each episode, of their common type; JSON text where there are several types, or lists."""
        import pyarrow as pa

        key = name.removeprefix(PREFIX)
        found = self._typed(key)
        return pa.chunked_array([self.texts(key) if found is None else found])

    def is_comparable(self, name: str) -> bool:
        """True if a label has values of one type."""
        key = name.removeprefix(PREFIX)
        return self._typed(key) is not None or are_nested(self.texts(key))

    def _typed(self, key: str) -> pa.Array | None:
        if key not in self._columns:
            self._columns[key] = typed(self.texts(key))
        return self._columns[key]

    @cached_property
    def _by_episode(self) -> tuple[Ints, Ints]:
        """Rows in the order of their episodes, and the start of each episode."""
        return np.argsort(self._episode, kind="stable"), offsets_of(np.bincount(self._episode, minlength=self._count))

    def history(self, episode: int) -> list[dict[str, Any]]:
        """The labels of an episode, also outdated ones, oldest first: key, value, by, created_at, commit."""
        order, offsets = self._by_episode
        start, stop = offsets[episode : episode + 2]
        rows = self._said.select(HISTORY_COLUMNS[1:]).take(order[start:stop]).to_pylist()
        return [row | {"value": _value(row["value"])} for row in rows]

    def of(self, episode: int) -> dict[str, Any]:
        """Key -> value, for one episode."""
        newest = {row["key"]: row["value"] for row in self.history(episode)}
        return {key: value for key, value in sorted(newest.items()) if value is not None}


def _value(text: str | None) -> Any:
    return None if text is None else jsontree.loads(text, where="a label's value")


def text_of(value: Any, where: str) -> str | None:
    """The JSON text of a value that a user gives; None removes a label. StateError if JSON cannot express it."""
    kind = type(value)
    if value is None:
        return None
    if kind is bool:
        return "true" if value else "false"
    if (kind is int and -(2**63) <= value < 2**63) or (kind is float and value - value == 0):
        return repr(value)
    return jsontree.dumps(value, where=where)
