"""Pure, no I/O: rows of the ledger table, in order, to how things stand. What has ended stays in arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import jsontree
from archive.ledger.cursors import Cursors, Spoken
from archive.ledger.keys import Ended, parsed
from archive.ledger.rounds import DONE, LEFT_RUNNING, LEFT_WAITING, LOST, Round, Rounds
from archive.ledger.terms import CURSOR, DRAWN, DROPPED, SEALED, STARTED, TRAINED, WHOLE_KEY, Key
from archive.steps import codes, places
from archive.tables import among

if TYPE_CHECKING:
    import pyarrow as pa

_WORDS = (DRAWN, STARTED, SEALED, TRAINED, DROPPED, CURSOR)
_FAR = {STARTED: LEFT_RUNNING, SEALED: DONE, DROPPED: LOST}
_OPEN_COLUMNS = ("sibling", "siblings", "episode_id")


class Seen(NamedTuple):
    """The rows of one ledger that a session sees, in order; and those "trained" that do not count for it. worlds: the
    ranks of the sessions that it sees, as far as they are known, oldest first."""

    rows: pa.Table
    undone: pa.Table
    worlds: Mapping[str, Collection[int]] = {}


@dataclass(frozen=True)
class Found:
    """How things stand. `open`: in the order in which they were drawn; `cursors`: where the data set's readers stand;
    `undone`: rounds that were trained and count as sealed again."""

    open: Mapping[Key, Rounds] = field(default_factory=dict)
    ended: Ended = field(default_factory=Ended.none)
    cursors: Cursors = field(default_factory=Cursors)
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
    cursors = _cursors(table.filter(pa.array(word == _WORDS.index(CURSOR))), seen.worlds)
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


def awaited(seen: Seen, only: pa.Table | None = None) -> pa.ChunkedArray:
    """The ids of episodes that are sealed, of rounds that have not ended: finished work that nobody has trained on.
    only: rows of the ledger; of the rounds of these alone."""
    import pyarrow as pa

    table = seen.rows.filter(~among(seen.rows["state"], (CURSOR,)))
    if not table.num_rows:
        return table["episode_id"]
    word, grouped = _word(table), _grouped(table)
    sibling = table["sibling"].to_numpy()
    rollout = grouped.group.astype(np.int64) * (int(sibling.max()) + 2) + sibling + 1
    newest_first = np.unique(rollout[::-1], return_index=True)[1]
    newest = len(rollout) - 1 - newest_first
    is_open = _ended(table, word, grouped) < 0
    if only is not None:
        is_open &= _among(grouped, is_open, only)
    waits = (word == _WORDS.index(SEALED)) & is_open[grouped.group]
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
    key = encoded.indices.to_numpy()
    group = codes(key, rounds)
    first = places(np.arange(int(group.max(initial=-1)) + 1), group)
    return _Grouped(encoded.dictionary, key[first].astype(np.int64), rounds[first], group)


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


def _cursors(rows: pa.Table, worlds: Mapping[str, Collection[int]]) -> Cursors:
    columns = (rows[name].to_pylist() for name in ("session", "rank", "cursor"))
    said: dict[str, dict[int, Any]] = {}
    for session, rank, text in zip(*columns, strict=True):
        if text is not None:
            said.setdefault(session, {})[rank] = jsontree.loads(text, where="cursor")
    order = [*worlds, *(session for session in said if session not in worlds)]
    return Cursors(tuple(Spoken(said[one], worlds.get(one, ())) for one in order if one in said))


def _undone(undone: pa.Table, grouped: _Grouped, ended: Ints) -> int:
    """How many rounds that were trained have not ended now."""
    return int(_among(grouped, ended < 0, undone).sum()) if undone.num_rows else 0


def _among(grouped: _Grouped, groups: Any, rows: pa.Table) -> Any:
    """Which of these groups are rounds of these rows."""
    named = set(zip(rows["key"].to_pylist(), rows["round"].to_pylist(), strict=True))
    out = np.zeros(len(grouped.number), bool)
    at = np.flatnonzero(groups)
    out[at] = [one in named for one in zip(*_those(grouped, at), strict=True)]
    return out


def _those(grouped: _Grouped, groups: Ints) -> tuple[list[str], list[int]]:
    """The keys (as texts) and numbers of some groups."""
    return grouped.key.take(grouped.key_of[groups]).to_pylist(), grouped.number[groups].tolist()


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
