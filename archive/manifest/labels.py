"""Pure, no I/O: what is said of episodes after they were written: which rows of the labels table apply, as columns.

A row names the episode's newest segment when it was said, and applies where that segment is in the episode's chain as
the reader sees it. Of the rows of an episode and key that apply, the last one counts; without a value it takes the
label back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints
from archive.base import UsageError, cached_property, jsontree

if TYPE_CHECKING:
    import pyarrow as pa

PREFIX = "label."  # of columns
ADDRESS = ("session", "rank", "sequence")
TOLD = ("episode_id", "key", "value", "by", "created_at", "commit")
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$"
_INTEGER = r"^-?[0-9]{1,18}$"


def segments_of(said: pa.Table, segments: pa.Table) -> Ints:
    """The row of the segments table that each row of another one names; -1 where there is none. Both have ADDRESS."""
    import pyarrow as pa
    import pyarrow.compute as pc

    keys = _keys(pa.concat_tables([said.select(ADDRESS), segments.select(ADDRESS)]).unify_dictionaries())
    found = pc.index_in(pa.array(keys[: said.num_rows]), value_set=pa.array(keys[said.num_rows :]))
    out: Ints = pc.fill_null(found, -1).to_numpy().astype(np.int64)
    return out


def _keys(addresses: pa.Table) -> Ints:
    """A number for each address; -1 for those of pieces that a compaction cut, which nothing is said of."""
    if not addresses.num_rows:
        return np.zeros(0, np.int64)
    session = addresses["session"].combine_chunks().indices.to_numpy().astype(np.int64)
    rank, sequence = (addresses[name].to_numpy().astype(np.int64) for name in ADDRESS[1:])
    writer = session * (int(rank.max()) + 1) + rank
    out, span = writer, int(sequence.max()) + 1
    if (int(writer.max()) + 1) * span >= 2**62:  # no library numbers its segments like that
        out, dense = (np.unique(column, return_inverse=True)[1].reshape(-1) for column in (writer, sequence))
        return np.where(sequence < 0, -1, out * (int(dense.max()) + 1) + dense)
    return np.where(sequence < 0, -1, writer * span + sequence)


class Labels:
    """The labels of the episodes of an index."""

    def __init__(self, said: pa.Table, episode: Ints, count: int) -> None:
        """said: rows of the labels table; episode: the number of the episode that each applies to, -1 for none;
        count: how many episodes there are."""
        applies = np.flatnonzero(episode >= 0)
        self._said = said if len(applies) == len(episode) else said.take(applies)
        self._episode = episode[applies]
        self._count = count
        self._columns: dict[str, pa.Array | None] = {}

    @cached_property
    def _rows(self) -> dict[str, Ints]:
        """Key -> its rows, oldest first; of keys that some episode has."""
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
        """The columns of labels, sorted: of keys that some episode has a value for."""
        return [PREFIX + key for key in self._rows if self.texts(key).null_count < self._count]

    def texts(self, key: str) -> pa.Array:
        """The JSON text of the label that counts, one an episode; null where there is none."""
        import pyarrow as pa

        last = np.full(self._count, -1, np.int64)
        rows = self._rows.get(key, np.zeros(0, np.int64))
        last[self._episode[rows]] = rows  # the last one of an episode stays
        found = self._said["value"].take(pa.array(last, mask=last < 0))
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found

    def column(self, name: str) -> pa.ChunkedArray:
        """One value an episode, of the type that all of them are of; JSON text where they are of several, or lists."""
        import pyarrow as pa

        key = name.removeprefix(PREFIX)
        found = self._typed(key)
        return pa.chunked_array([self.texts(key) if found is None else found])

    def check_comparable(self, name: str) -> None:
        """UsageError for a label whose values are scalars of several types."""
        key = name.removeprefix(PREFIX)
        if self._typed(key) is None and not _are_nested(self.texts(key)):
            raise UsageError(f"{name} has values of several types and cannot be compared")

    def _typed(self, key: str) -> pa.Array | None:
        if key not in self._columns:
            self._columns[key] = typed(self.texts(key))
        return self._columns[key]

    @cached_property
    def _by_episode(self) -> tuple[Ints, Ints]:
        """Rows in order of their episodes, and these."""
        order = np.argsort(self._episode, kind="stable")
        return order, self._episode[order]

    def history(self, episode: int) -> list[dict[str, Any]]:
        """All that was said of an episode, oldest first: key, value, by, created_at, commit."""
        order, episodes = self._by_episode
        start, stop = np.searchsorted(episodes, [episode, episode + 1])
        rows = self._said.select(TOLD[1:]).take(order[start:stop]).to_pylist()
        return [row | {"value": _value(row["value"])} for row in rows]

    def of(self, episode: int) -> dict[str, Any]:
        """Key -> value of one episode."""
        newest = {row["key"]: row["value"] for row in self.history(episode)}
        return {key: value for key, value in sorted(newest.items()) if value is not None}


def typed(texts: pa.Array) -> pa.Array | None:
    """The values of JSON texts as bool, int64, double or strings; None if they are of several types, or nested."""

    import pyarrow as pa

    if texts.null_count == len(texts):
        return pa.nulls(len(texts))
    coded = texts.dictionary_encode()
    distinct = coded.dictionary
    kinds: tuple[Callable[[pa.Array], pa.Array | None], ...] = (_bools, _integers, _doubles, _strings)
    for kind in kinds:
        if (found := kind(distinct)) is not None:
            return found.take(coded.indices)
    return None


def _bools(texts: pa.Array) -> pa.Array | None:
    import pyarrow.compute as pc

    known = {"true", "false"} >= set(texts.to_pylist()) if len(texts) <= 2 else False
    return pc.equal(texts, "true") if known else None


def _integers(texts: pa.Array) -> pa.Array | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    return texts.cast(pa.int64()) if pc.all(pc.match_substring_regex(texts, _INTEGER)).as_py() else None


def _doubles(texts: pa.Array) -> pa.Array | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    odd = pc.invert(pc.match_substring_regex(texts, _NUMBER))
    values = {text: _value(text) for text in texts.filter(odd).to_pylist()[:4]}  # nan, inf, -inf
    if any(type(value) is not float for value in values.values()) or len(values) > 3:
        return None
    for text, value in values.items():
        texts = pc.if_else(pc.equal(texts, text), str(value), texts)
    return texts.cast(pa.float64())


def _strings(texts: pa.Array) -> pa.Array | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pc.all(pc.starts_with(texts, '"')).as_py():
        return None
    if pc.any(pc.match_substring(texts, "\\")).as_py():
        return pa.array([_value(text) for text in texts.to_pylist()], pa.string())
    return pc.utf8_slice_codeunits(texts, 1, -1)


def _are_nested(texts: pa.Array) -> bool:
    import pyarrow.compute as pc

    nested: bool = pc.all(pc.match_substring_regex(texts, r"^[\[{]")).as_py()
    return nested


def _value(text: str | None) -> Any:
    return None if text is None else jsontree.loads(text, where="a label's value")


def text_of(value: Any, where: str) -> str | None:
    """The JSON text of a value that somebody gives; None takes a label back. StateError for what JSON has no word
    for."""
    kind = type(value)
    if value is None:
        return None
    if kind is bool:
        return "true" if value else "false"
    if (kind is int and -(2**63) <= value < 2**63) or (kind is float and value - value == 0):
        return repr(value)
    return jsontree.dumps(value, where=where)


def newer(theirs: pa.Table, ours: pa.Table) -> pa.Table:
    """Rows of a labels table that are newer than all that another one has of the same segment and key."""
    import pyarrow as pa

    if not theirs.num_rows or not ours.num_rows:
        return theirs
    both = pa.concat_tables([ours, theirs]).unify_dictionaries()
    keys = both["key"].combine_chunks()
    address = np.unique(_keys(both), return_inverse=True)[1].reshape(-1)
    place = address * len(keys.dictionary) + keys.indices.to_numpy()
    place = np.unique(place, return_inverse=True)[1].reshape(-1)
    at = both["created_at"].cast(pa.int64()).to_numpy()
    newest = np.full(int(place.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(newest, place[: ours.num_rows], at[: ours.num_rows])
    return theirs.filter(pa.array((at > newest[place])[ours.num_rows :]))
