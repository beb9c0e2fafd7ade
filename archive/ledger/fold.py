"""Pure, no I/O: rows of the ledger table, in order, to how prompts stand. What has ended stays in arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Mask
from archive.base import jsontree
from archive.ledger.keys import Key, parsed
from archive.ledger.prompts import Cursors, Ended, Prompts
from archive.ledger.rounds import (
    CURSOR,
    DONE,
    DRAWN,
    DROPPED,
    LEFT_RUNNING,
    LEFT_WAITING,
    LOST,
    SEALED,
    STARTED,
    TRAINED,
    WHOLE_KEY,
    Round,
    Rounds,
    unsealed,
)
from archive.steps import codes, places, row_codes

if TYPE_CHECKING:
    import pyarrow as pa

_WORDS = (DRAWN, STARTED, SEALED, TRAINED, DROPPED, CURSOR)
_FAR = {STARTED: LEFT_RUNNING, SEALED: DONE, DROPPED: LOST}


class LedgerRows(NamedTuple):
    """The rows of one ledger that a session sees, in order; and those "trained" that do not count for it. worlds: the
    ranks of the sessions that it sees, as far as they are known, oldest first."""

    rows: pa.Table
    undone: pa.Table
    worlds: Mapping[str, Collection[int]] = {}

    def prompts(self) -> Prompts:
        """The standing of prompts by these rows, for all ranks."""
        release()  # what reading took and these rows do not
        grouped = _Grouped(self.rows)
        return Prompts(grouped.opened(), grouped.over(), self.cursors(), grouped.undone(self.undone))

    def awaited(self, only: pa.Table | None = None) -> pa.ChunkedArray:
        """The ids of episodes that are sealed, of rounds that have not ended: finished work that nobody has trained on.
        only: rows of the ledger; of the rounds of these alone."""
        grouped = _Grouped(self.rows)
        return grouped.awaited(grouped.is_open if only is None else grouped.is_open & grouped.named_by(only))

    @property
    def in_flight(self) -> int:
        """The number of keys that have a round that has not ended."""
        grouped = _Grouped(self.rows)
        return len(np.unique(grouped.key_of[grouped.is_open]))

    def cursors(self) -> Cursors:
        """The cursors of those who read the data set."""
        import pyarrow as pa

        rows = self.rows.filter(pa.array(places_of(self.rows["state"], [CURSOR]) == 0))
        said: dict[str, dict[int, Any]] = {}
        for session, rank, text in zip(*(rows[n].to_pylist() for n in ("session", "rank", "cursor")), strict=True):
            if text is not None:
                said.setdefault(session, {})[rank] = jsontree.loads(text, where="cursor")
        order = [one for one in dict.fromkeys([*self.worlds, *said]) if one in said]
        return Cursors({one: said[one] for one in order}, self.worlds)


class _Grouped:
    """Rows of the ledger but those of cursors, by key and round. Groups are in the order of key and round."""

    def __init__(self, rows: pa.Table) -> None:
        import pyarrow as pa

        word = places_of(rows["state"], _WORDS)
        said = (word >= 0) & (word != _WORDS.index(CURSOR))
        self.rows = rows if said.all() else rows.filter(pa.array(said))
        self.word: Ints = word[said]
        encoded = self.rows["key"].combine_chunks().dictionary_encode()
        self.keys, key, number = encoded.dictionary, encoded.indices.to_numpy(), self.rows["round"].to_numpy()
        self.group = codes(key, number)  # row -> group
        first = places(np.arange(int(self.group.max(initial=-1)) + 1), self.group)
        self.key_of, self.number = key[first].astype(np.int64), number[first]  # group -> place in `keys`, round
        self.ended = np.full(len(first), -1)  # group -> how, as a place in _WORDS; -1: it has not
        whole = self.rows["sibling"].to_numpy() == WHOLE_KEY
        ends = whole & np.isin(self.word, [_WORDS.index(TRAINED), _WORDS.index(DROPPED)])
        self.ended[self.group[ends]] = self.word[ends]  # of several the last
        self.is_open = self.ended < 0
        self.newest = np.append(self.key_of[1:] != self.key_of[:-1], np.ones(min(1, len(first)), bool))
        self._key_is_open = np.zeros(len(self.keys), bool)
        self._key_is_open[self.key_of[self.is_open]] = True

    def over(self) -> Ended:
        """Keys of which no round is open."""
        at = np.flatnonzero(self.newest & ~self._key_is_open[self.key_of])
        return Ended(self.keys.take(self.key_of[at]), self.number[at], _WORDS, self.ended[at])

    def named_by(self, rows: pa.Table) -> Mask:
        """A mask of the groups: other rows of the ledger have their key and round."""
        out = np.zeros(len(self.number), bool)
        own, other = row_codes(self.rows.select(("key", "round")), rows.select(("key", "round")))
        out[self.group[np.isin(own, other)]] = True
        return out

    def undone(self, rows: pa.Table) -> int:
        """The number of rounds that these rows say were trained, and that have not ended."""
        return int((self.is_open & self.named_by(rows)).sum()) if rows.num_rows else 0

    def awaited(self, wanted: Mask) -> pa.ChunkedArray:
        """The episodes of rollouts that are sealed, of some groups."""
        sibling = self.rows["sibling"].to_numpy()
        rollout = codes(self.group, sibling)
        newest = np.full(int(rollout.max(initial=-1)) + 1, -1)
        newest[rollout] = np.arange(len(rollout))
        waits = (self.word == _WORDS.index(SEALED)) & wanted[self.group]
        return self.rows["episode_id"].take(newest[waits[newest]])

    def opened(self) -> dict[Key, Rounds]:
        """The rounds of keys of which one is open, in the order in which they were drawn: those that have not ended,
        and the last."""
        rows = np.flatnonzero(self.is_open[self.group])
        groups, first, count = np.unique(self.group[rows], return_index=True, return_counts=True)
        drawn = (count == 1) & (self.word[rows[first]] == _WORDS.index(DRAWN))  # and no more: most, and quickly made
        told = self._told(rows[~np.isin(self.group[rows], groups[drawn])])
        order = np.argsort(first)
        siblings = self.rows["siblings"].fill_null(0).to_numpy()[rows[first[order]]].tolist()
        out: dict[Key, Rounds] = {}
        for group, key, number, wide in self._each(groups[order], siblings):
            rounds = told.get(group) or unsealed(number, bytes([LEFT_WAITING]) * wide, 0)
            out[key] = rounds if key not in out else tuple(sorted((*out[key], *rounds)))
        over = np.flatnonzero(self.newest & ~self.is_open & self._key_is_open[self.key_of])
        for _, key, number, code in self._each(over, self.ended[over].tolist()):
            out[key] = (*out[key], *unsealed(number, b"", 0, _WORDS[code]))
        return out

    def _each(self, groups: Ints, values: Sequence[int]) -> zip[tuple[int, Key, int, int]]:
        """Number, key and round of groups, and a value of each."""
        keys = parsed(self.keys.take(self.key_of[groups]).to_pylist())
        return zip(groups.tolist(), keys, self.number[groups].tolist(), values, strict=True)

    def _told(self, rows: Ints) -> dict[int, Rounds]:
        """Group -> its round, row by row."""
        columns = (self.rows[name].take(rows).to_pylist() for name in ("sibling", "siblings", "episode_id"))
        groups, words = self.group[rows].tolist(), self.word[rows].tolist()
        out: dict[int, Round] = {}
        for group, code, sibling, siblings, episode in zip(groups, words, *columns, strict=True):
            one, word = out.get(group) or Round(int(self.number[group]), b"", {}, 0), _WORDS[code]
            if word == DRAWN:
                one = one._replace(rollouts=one.rollouts.ljust(siblings or 0, bytes([LEFT_WAITING])))
            elif sibling >= 0 and word in _FAR:
                one = one.told(sibling, _FAR[word], (episode or "") if word == SEALED else None)
            out[group] = one
        return {group: (one.unless_given_up(),) for group, one in out.items()}


def dealt(found: Prompts, rank: int, world_size: int, holder: Callable[[str], int | None]) -> Prompts:
    """The prompts as one of several ranks goes on with them: an open key is of the rank that holds the episode of its
    first sealed sibling, if one does; the others are dealt out, one after the other."""
    if world_size == 1:  # all are of rank 0
        return replace(found, rounds=dict(found.rounds), rank=rank)
    turn = 0
    out: dict[Key, Rounds] = {}
    for key, rounds in found.rounds.items():
        sealed = next((one.episodes[0] for one in rounds if one.sealed), None)
        owner = None if sealed is None else holder(sealed)
        if owner is None:
            owner, turn = turn, (turn + 1) % world_size
        if len(rounds) == 1 and sealed is None:  # most
            out[key] = unsealed(rounds[0].number, rounds[0].rollouts, owner, rounds[0].ended)
        else:
            out[key] = tuple(one._replace(owner=owner) for one in rounds)
    return replace(found, rounds=out, rank=rank)


def far_along(found: Prompts) -> tuple[int, int, int]:
    """Counts of the rollouts that are drawn and not started, started and not sealed, and sealed."""
    kinds = Counter(map(id, found.rounds.values()))  # most are alike
    each = ((rounds, kinds.pop(id(rounds), 0)) for rounds in found.rounds.values())
    far = b"".join(one.rollouts * count for rounds, count in each for one in rounds)
    return far.count(LEFT_WAITING), far.count(LEFT_RUNNING), far.count(DONE)


def release() -> None:
    """Give memory back that Arrow keeps for later: after millions of rows that is most of it."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def places_of(column: pa.ChunkedArray, words: Sequence[str]) -> Ints:
    """The place of each row's word among some, in a column of words that are repeated; -1: it is none of these."""
    column = column.unify_dictionaries()
    known = column.chunk(0).dictionary.to_pylist() if column.num_chunks else []
    code = np.concatenate([np.zeros(0, np.int32), *(part.indices.to_numpy() for part in column.chunks)])
    place = np.array([words.index(word) if word in words else -1 for word in known], np.int64)
    out: Ints = place[code] if len(known) else code.astype(np.int64)
    return out
