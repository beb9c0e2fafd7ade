"""Pure, no I/O: a fold of rows of the ledger table, in order, to the states of prompts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, Mask, codes, places, row_codes
from archive.base import jsontree
from archive.ledger.keys import Key, parsed
from archive.ledger.prompts import (
    CURSOR,
    DONE,
    DRAWN,
    DROPPED,
    LEFT_RUNNING,
    LEFT_WAITING,
    LOST,
    SEALED,
    STARTED,
    STATES,
    TRAINED,
    WHOLE_KEY,
    Cursors,
    Ended,
    Prompts,
    Round,
    Rounds,
    unsealed,
)

if TYPE_CHECKING:
    import pyarrow as pa

_FAR = {STARTED: LEFT_RUNNING, SEALED: DONE, DROPPED: LOST}


class LedgerRows:
    """The rows of one ledger that a session sees, in order, by key and round. Groups are in the order of the rows."""

    def __init__(self, rows: pa.Table, undone: pa.Table, worlds: Mapping[str, Collection[int]]) -> None:
        """undone: the rows "trained" that do not count for the session.  worlds: the ranks of the sessions that it
        sees, as far as they are known, oldest first."""
        import pyarrow as pa

        word = places_of(rows["state"], (*STATES, CURSOR))
        said = (word >= 0) & (word < len(STATES))
        self._undone, self._worlds = undone, worlds
        self._of_cursors = rows.filter(pa.array(word == len(STATES)))
        self._rows = rows if said.all() else rows.filter(pa.array(said))
        self._word: Ints = word[said]
        encoded = self._rows["key"].combine_chunks().dictionary_encode()
        self._keys, key, number = encoded.dictionary, encoded.indices.to_numpy(), self._rows["round"].to_numpy()
        self._group = codes(key, number)  # row -> group
        first = places(np.arange(int(self._group.max(initial=-1)) + 1), self._group)
        self._key_of, self._number = key[first].astype(np.int64), number[first]  # group -> place in `_keys`, round
        self._ended = np.full(len(first), -1)  # group -> its last state, as a place in STATES; -1: open
        whole = self._rows["sibling"].to_numpy() == WHOLE_KEY
        ends = whole & np.isin(self._word, [STATES.index(TRAINED), STATES.index(DROPPED)])
        self._ended[self._group[ends]] = self._word[ends]  # the last one counts
        self._open = self._ended < 0
        self._key_open = np.zeros(len(self._keys), bool)
        self._key_open[self._key_of[self._open]] = True
        newest = np.append(self._key_of[1:] != self._key_of[:-1], np.ones(min(1, len(first)), bool))
        self._newest_ended = newest & ~self._open

    def prompts(self) -> Prompts:
        """The states of prompts by these rows, for all ranks."""
        at = np.flatnonzero(self._newest_ended & ~self._key_open[self._key_of])
        ended = Ended(self._keys.take(self._key_of[at]), self._number[at], self._ended[at])
        undone = int((self._open & self._named_by(self._undone)).sum()) if self._undone.num_rows else 0
        return Prompts(self._opened(), ended, self._cursors(), undone)

    def awaited(self, only: pa.Table | None = None) -> pa.ChunkedArray:
        """The ids of sealed episodes in rounds that have not ended: finished work that no step has trained on. only:
        rows of the ledger; only their rounds count."""
        wanted = self._open if only is None else self._open & self._named_by(only)
        rollout = codes(self._group, self._rows["sibling"].to_numpy())
        newest = np.full(int(rollout.max(initial=-1)) + 1, -1)
        newest[rollout] = np.arange(len(rollout))
        waits = (self._word == STATES.index(SEALED)) & wanted[self._group]
        return self._rows["episode_id"].take(newest[waits[newest]])

    @property
    def in_flight(self) -> int:
        """The number of keys that have a round that has not ended."""
        return int(self._key_open.sum())

    def _named_by(self, rows: pa.Table) -> Mask:
        """A mask of the groups whose key and round these rows of the ledger have."""
        out = np.zeros(len(self._number), bool)
        own, other = row_codes(self._rows.select(("key", "round")), rows.select(("key", "round")))
        out[self._group[np.isin(own, other)]] = True
        return out

    def _cursors(self) -> Cursors:
        """The cursors of the readers of the data set."""
        rows = self._of_cursors
        said: dict[str, dict[int, Any]] = {}
        for session, rank, text in zip(*(rows[n].to_pylist() for n in ("session", "rank", "cursor")), strict=True):
            if text is not None:
                said.setdefault(session, {})[rank] = jsontree.loads(text, where="cursor")
        order = [one for one in dict.fromkeys([*self._worlds, *said]) if one in said]
        return Cursors({one: said[one] for one in order}, self._worlds)

    def _opened(self) -> dict[Key, Rounds]:
        """The rounds of keys with an open one, in the order in which they were drawn: those that have not ended, and
        the last."""
        rows = np.flatnonzero(self._open[self._group])
        groups, first, count = np.unique(self._group[rows], return_index=True, return_counts=True)
        drawn = (count == 1) & (self._word[rows[first]] == STATES.index(DRAWN))  # only drawn: the common case
        told = self._told(rows[~np.isin(self._group[rows], groups[drawn])])
        order = np.argsort(first)
        siblings = self._rows["siblings"].fill_null(0).to_numpy()[rows[first[order]]].tolist()
        out: dict[Key, Rounds] = {}
        for group, key, number, wide in self._each(groups[order], siblings):
            rounds = told.get(group) or unsealed(number, bytes([LEFT_WAITING]) * wide, 0)
            out[key] = rounds if key not in out else tuple(sorted((*out[key], *rounds)))
        over = np.flatnonzero(self._newest_ended & self._key_open[self._key_of])
        for _, key, number, code in self._each(over, self._ended[over].tolist()):
            out[key] = (*out[key], *unsealed(number, b"", 0, STATES[code]))
        return out

    def _each(self, groups: Ints, values: Sequence[int]) -> zip[tuple[int, Key, int, int]]:
        """Number, key and round of groups, each with one of the values."""
        keys = parsed(self._keys.take(self._key_of[groups]).to_pylist())
        return zip(groups.tolist(), keys, self._number[groups].tolist(), values, strict=True)

    def _told(self, rows: Ints) -> dict[int, Rounds]:
        """Group -> its round, row by row."""
        columns = (self._rows[name].take(rows).to_pylist() for name in ("sibling", "siblings", "episode_id"))
        groups, words = self._group[rows].tolist(), self._word[rows].tolist()
        out: dict[int, Round] = {}
        for group, code, sibling, siblings, episode in zip(groups, words, *columns, strict=True):
            one, word = out.get(group) or Round(int(self._number[group]), b"", {}, 0), STATES[code]
            if word == DRAWN:
                one = one._replace(rollouts=one.rollouts.ljust(siblings or 0, bytes([LEFT_WAITING])))
            elif sibling >= 0 and word in _FAR:
                one = one.moved(sibling, _FAR[word], 0, (episode or "") if word == SEALED else None)
            out[group] = one
        return {group: (one.unless_given_up(),) for group, one in out.items()}


def places_of(column: pa.ChunkedArray, words: Sequence[str]) -> Ints:
    """The place of each row's word among `words`, for a column of repeated words; -1 if it is none of these."""
    column = column.unify_dictionaries()
    known = column.chunk(0).dictionary.to_pylist() if column.num_chunks else []
    code = np.concatenate([np.zeros(0, np.int32), *(part.indices.to_numpy() for part in column.chunks)])
    place = np.array([words.index(word) if word in words else -1 for word in known], np.int64)
    out: Ints = place[code] if len(known) else code.astype(np.int64)
    return out
