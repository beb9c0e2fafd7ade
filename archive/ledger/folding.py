"""Pure, no I/O: rows of the ledger table, in order, to how things stand. What has ended stays in arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import jsontree
from archive.ledger.keys import Ended, parsed
from archive.ledger.rounds import DONE, LEFT_RUNNING, LEFT_WAITING, LOST, Round, Rounds
from archive.ledger.terms import CURSOR, DRAWN, DROPPED, SEALED, STARTED, TRAINED, WHOLE_KEY, Key

if TYPE_CHECKING:
    import pyarrow as pa

_WORDS = (DRAWN, STARTED, SEALED, TRAINED, DROPPED, CURSOR)
_FAR = {STARTED: LEFT_RUNNING, SEALED: DONE, DROPPED: LOST}
_OPEN_COLUMNS = ("sibling", "siblings", "episode_id")


class Seen(NamedTuple):
    """The rows of one ledger that a session sees, in order; and those "trained" that do not count for it."""

    rows: pa.Table
    undone: pa.Table


@dataclass(frozen=True)
class Found:
    """How things stand. `open`: in the order in which they were drawn; `cursors`: what each rank said last, the newest
    last; `undone`: rounds that were trained and count as sealed again."""

    open: Mapping[Key, Rounds] = field(default_factory=dict)
    ended: Ended = field(default_factory=Ended.none)
    cursors: Mapping[int, Any] = field(default_factory=dict)
    undone: int = 0


class _Grouped(NamedTuple):
    """Rows by key and round. Groups are in the order of key and round."""

    key: pa.Array  # text of each key
    key_of: Ints  # group -> key
    number: Ints  # group -> round
    group: Ints  # row -> group


def fold(seen: Seen) -> Found:
    """How things stand by these rows."""
    import pyarrow as pa

    release()  # what reading took and these rows do not
    table = seen.rows
    word = _word(table)
    cursors = _cursors(table.filter(pa.array(word == _WORDS.index(CURSOR))))
    said = np.flatnonzero((word >= 0) & (word != _WORDS.index(CURSOR)))
    if not len(said):
        return Found(cursors=cursors)
    if len(said) < len(word):
        table, word = table.take(pa.array(said)), word[said]
    grouped = _grouped(table)
    ended = _ended(table, word, grouped)
    newest = np.append(grouped.key_of[1:] != grouped.key_of[:-1], True)
    is_open = np.zeros(len(grouped.key), bool)
    is_open[grouped.key_of[ended < 0]] = True
    over = np.flatnonzero(newest & ~is_open[grouped.key_of])
    known = Ended(grouped.key.take(pa.array(grouped.key_of[over])), grouped.number[over], _WORDS, ended[over])
    wanted = is_open[grouped.key_of] & ((ended < 0) | newest)
    found = _opened(table, word, grouped, ended, wanted)
    return Found(found, known, cursors, _undone(seen.undone, grouped, ended))


def awaited(seen: Seen) -> pa.ChunkedArray:
    """The ids of episodes that are sealed, of rounds that have not ended: finished work that nobody has trained on."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = seen.rows.filter(pc.not_equal(seen.rows["state"].cast(pa.string()), CURSOR))
    if not table.num_rows:
        return table["episode_id"]
    word, grouped = _word(table), _grouped(table)
    sibling = table["sibling"].to_numpy()
    rollout = grouped.group.astype(np.int64) * (int(sibling.max()) + 2) + sibling + 1
    newest_first = np.unique(rollout[::-1], return_index=True)[1]
    newest = len(rollout) - 1 - newest_first
    waits = (word == _WORDS.index(SEALED)) & (_ended(table, word, grouped) < 0)[grouped.group]
    return table["episode_id"].take(pa.array(newest[waits[newest]]))


def in_flight(seen: Seen) -> int:
    """How many keys have a round that has not ended."""
    import pyarrow.compute as pc

    table = seen.rows.filter(pc.not_equal(seen.rows["state"].cast("string"), CURSOR))
    if not table.num_rows:
        return 0
    grouped = _grouped(table)
    return len(np.unique(grouped.key_of[_ended(table, _word(table), grouped) < 0]))


def release() -> None:
    """Give memory back that Arrow keeps for later: after millions of rows that is most of it."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def _word(table: pa.Table) -> Ints:
    """The state of each row, as a place in _WORDS; -1: none of these."""
    column = table["state"].unify_dictionaries()
    parts = [part.indices.to_numpy() for part in column.chunks]
    words = column.chunk(0).dictionary.to_pylist() if parts else []
    places = np.array([_WORDS.index(word) if word in _WORDS else -1 for word in words], np.int8)
    out: Ints = places[np.concatenate([np.zeros(0, np.int32), *parts])]
    return out


def _grouped(table: pa.Table) -> _Grouped:
    encoded = table["key"].combine_chunks().dictionary_encode()
    rounds = table["round"].to_numpy()
    if len(rounds) and rounds.min() == rounds.max():  # mostly: each key is a group
        count = len(encoded.dictionary)
        number = np.full(count, rounds[0])
        return _Grouped(encoded.dictionary, np.arange(count), number, encoded.indices.to_numpy())
    numbers, number = np.unique(rounds, return_inverse=True)
    codes = encoded.indices.to_numpy().astype(np.int64) * len(numbers) + number
    groups, group = np.unique(codes, return_inverse=True)
    return _Grouped(encoded.dictionary, groups // len(numbers), numbers[groups % len(numbers)], group)


def _ended(table: pa.Table, word: Ints, grouped: _Grouped) -> Ints:
    """How each group ended, as a place in _WORDS; -1 for those that have not."""
    out = np.full(len(grouped.number), -1)
    whole = table["sibling"].to_numpy() == WHOLE_KEY
    ends = whole & np.isin(word, [_WORDS.index(TRAINED), _WORDS.index(DROPPED)])
    out[grouped.group[ends]] = word[ends]  # of several the last
    return out


def _opened(table: pa.Table, word: Ints, grouped: _Grouped, ended: Ints, wanted: Any) -> dict[Key, Rounds]:
    """The rounds of keys that have one which has not ended."""
    at = np.flatnonzero((ended < 0)[grouped.group])
    groups, first, count = np.unique(grouped.group[at], return_index=True, return_counts=True)
    alone = (count == 1) & (word[at[first]] == _WORDS.index(DRAWN))  # drawn and no more: most, and quickly made
    rows = at[np.isin(grouped.group[at], groups[~alone])]
    made = _fresh(table, grouped, groups[alone], at[first[alone]]) | _made(table, word, grouped, rows)
    order = groups[np.argsort(first)].tolist()  # as they were drawn
    over = np.flatnonzero(wanted & (ended >= 0)).tolist()
    rounds = [made[group] for group in order]
    rounds += [Round.drawn(int(grouped.number[group]), 0, 0).end(_WORDS[ended[group]]) for group in over]
    return _by_key(grouped, [*order, *over], rounds)


def _fresh(table: pa.Table, grouped: _Grouped, groups: Ints, rows: Ints) -> dict[int, Round]:
    """Rounds of which nothing was started; all that are alike are one."""
    siblings = table["siblings"].fill_null(0).to_numpy()[rows].tolist()
    kinds = list(zip(grouped.number[groups].tolist(), siblings, strict=True))
    alike = {(number, count): Round(number, bytes([LEFT_WAITING]) * count, {}, 0) for number, count in set(kinds)}
    return dict(zip(groups.tolist(), map(alike.__getitem__, kinds), strict=True))


def _made(table: pa.Table, word: Ints, grouped: _Grouped, at: Ints) -> dict[int, Round]:
    """Rounds of which these are the rows."""
    import pyarrow as pa

    rows = table.select(_OPEN_COLUMNS).take(pa.array(at))
    columns = (rows[name].to_pylist() for name in _OPEN_COLUMNS)
    making: dict[int, _Making] = {}
    for group, code, *row in zip(grouped.group[at].tolist(), word[at].tolist(), *columns, strict=True):
        one = making.get(group) or making.setdefault(group, _Making())
        one.add(_WORDS[code], *row)
    numbers = grouped.number
    rounds = {group: Round(int(numbers[group]), one.rollouts, one.sealed, 0) for group, one in making.items()}
    return {group: one.end(DROPPED) if one.given_up else one for group, one in rounds.items()}


class _Making:
    """A round, row by row."""

    __slots__ = ("rollouts", "sealed")

    def __init__(self) -> None:
        self.rollouts = b""
        self.sealed: dict[int, str] = {}

    def add(self, word: str, sibling: int, siblings: int | None, episode: str | None) -> None:
        wide = (siblings or 0) if word == DRAWN else sibling + 1
        if wide > len(self.rollouts):
            self.rollouts += bytes([LEFT_WAITING]) * (wide - len(self.rollouts))
        if sibling < 0 or word not in _FAR:
            return
        self.rollouts = self.rollouts[:sibling] + bytes([_FAR[word]]) + self.rollouts[sibling + 1 :]
        self.sealed.pop(sibling, None)
        if word == SEALED:
            self.sealed[sibling] = episode or ""


def _by_key(grouped: _Grouped, groups: Sequence[int], rounds: Sequence[Round]) -> dict[Key, Rounds]:
    """Each key's rounds in their order; the keys in that of the groups."""
    import pyarrow as pa

    codes = grouped.key_of[np.array(groups, np.int64)]
    keys = parsed(grouped.key.take(pa.array(codes)).to_pylist())
    out: dict[Key, Rounds] = {}
    shared: dict[int, Rounds] = {}  # most are alike
    for key, one in zip(keys, rounds, strict=True):
        before = out.get(key)
        if before is not None:
            out[key] = tuple(sorted((*before, one)))
        else:
            out[key] = shared.get(id(one)) or shared.setdefault(id(one), (one,))
    return out


def _cursors(rows: pa.Table) -> dict[int, Any]:
    texts: dict[int, str] = {}
    for rank, text in zip(rows["rank"].to_pylist(), rows["cursor"].to_pylist(), strict=True):
        texts.pop(rank, None)
        texts[rank] = text
    return {rank: jsontree.loads(text, where="cursor") for rank, text in texts.items() if text is not None}


def _undone(undone: pa.Table, grouped: _Grouped, ended: Ints) -> int:
    """How many rounds that were trained have not ended now."""
    if not undone.num_rows:
        return 0
    keys = {(grouped.key[k].as_py(), n) for k, n in zip(*_those(grouped, ended < 0), strict=True)}
    return len(keys.intersection(zip(undone["key"].to_pylist(), undone["round"].to_pylist(), strict=True)))


def _those(grouped: _Grouped, groups: Any) -> tuple[list[int], list[int]]:
    return grouped.key_of[groups].tolist(), grouped.number[groups].tolist()


def dealt(found: Found, world_size: int, holder: Callable[[str], int | None]) -> dict[Key, Rounds]:
    """The open keys, each with the rank that it goes to: the one that holds the episode of its first sealed sibling, if
    some does; the others one after the other."""
    if world_size == 1:  # all are of rank 0
        return dict(found.open)
    turn = 0
    out: dict[Key, Rounds] = {}
    shared: dict[tuple[int, int, int], Rounds] = {}
    for key, rounds in found.open.items():
        first = next((one.episodes[0] for one in rounds if one.sealed), None)
        rank = None if first is None else holder(first)
        if rank is None:
            rank, turn = turn, (turn + 1) % world_size
        same = (id(rounds[0]), rank, len(rounds))
        out[key] = shared.get(same) or tuple(one._replace(owner=rank) for one in rounds)
        if len(rounds) == 1:
            shared.setdefault(same, out[key])
    return out
