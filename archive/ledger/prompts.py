"""Pure, no I/O: the states of a ledger's prompts, and the changes that a verb makes: all of a call is checked first,
and refused with nothing changed.

A round of a prompt goes from when it is drawn until it is trained on or dropped. It is a value: a change makes a new
one, so a call is undone by putting the old ones back. Ended rounds are kept in arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import NotFoundError, UsageError
from archive.ledger.keys import Key, TextIndex, texts
from archive.tables import among

if TYPE_CHECKING:
    import pyarrow as pa

DRAWN, STARTED, SEALED, TRAINED, DROPPED, CURSOR = "drawn", "started", "sealed", "trained", "dropped", "cursor"
STATES = (DRAWN, STARTED, SEALED, TRAINED, DROPPED)  # of keys, in the order of a round
REOPENED = "reopened"  # not a state: the rollout is started again
WHOLE_KEY = -1  # in place of a sibling: all of them
ALL_RANKS = -1

# how far a rollout is; the last two: as an earlier session left it
WAITING, RUNNING, DONE, LOST, LEFT_WAITING, LEFT_RUNNING = range(6)
FAR_NAMES = (DRAWN, STARTED, SEALED, DROPPED, DRAWN, STARTED)
_NONE: Mapping[int, str] = {}
_NOTHING = "; nothing was changed"


class Round(NamedTuple):
    """`rollouts`: a byte for each sibling, its state; `sealed`: sibling -> id of its episode; `owner`: the rank that
    has it; `ended`: its last state, or empty. A round that has ended keeps no rollouts."""

    number: int
    rollouts: bytes
    sealed: Mapping[int, str]
    owner: int
    ended: str = ""

    def moved(self, sibling: int, far: int, owner: int, episode_id: str | None = None) -> Round:
        """The round after `owner` has moved one rollout to this state; a rollout that it did not know is added, as an
        earlier session's."""
        rollouts = bytearray(self.rollouts.ljust(sibling + 1, bytes([LEFT_WAITING])))
        rollouts[sibling] = far
        sealed = {s: episode for s, episode in self.sealed.items() if s != sibling}
        if episode_id is not None:
            sealed[sibling] = episode_id
        return Round(self.number, bytes(rollouts), sealed, owner)

    def unless_given_up(self) -> Round:
        """The round itself; ended as dropped if all of its rollouts are."""
        given_up = self.rollouts and self.rollouts.count(LOST) == len(self.rollouts)
        return unsealed(self.number, b"", self.owner, DROPPED)[0] if given_up else self

    @property
    def left(self) -> tuple[int, ...]:
        """Siblings that an earlier session drew or started, and that this one has not taken up."""
        return _left(self.rollouts)

    @property
    def complete(self) -> bool:
        """True if it can be trained on."""
        done = self.rollouts.count(DONE)
        return bool(done) and done + self.rollouts.count(LOST) == len(self.rollouts)

    @property
    def state(self) -> str:
        """The state of the round, as one of STATES."""
        if self.ended or self.complete:
            return self.ended or SEALED
        return STARTED if self.rollouts.strip(bytes([WAITING, LEFT_WAITING])) else DRAWN

    @property
    def episodes(self) -> list[str]:
        """Ids of the episodes of sealed rollouts, by sibling."""
        return [self.sealed[s] for s in sorted(self.sealed)]

    def rows(self) -> list[tuple[int, int | None, str, str | None]]:
        """Round, sibling, state and episode of each rollout; one row for all, if the round has ended."""
        if self.ended:
            return [(self.number, None, self.ended, None)]
        return [(self.number, s, FAR_NAMES[far], self.sealed.get(s)) for s, far in enumerate(self.rollouts)]


Rounds = tuple[Round, ...]  # of one key: those that have not ended, and the last one
Changed = tuple[dict[Key, Rounds], Sequence[int]]  # the rounds of keys after a call, and the changed round of each


@lru_cache(4096)
def unsealed(number: int, rollouts: bytes, owner: int, ended: str = "") -> Rounds:
    """The rounds of a key that has one, without a sealed rollout: one object for the millions that are alike."""
    return (Round(number, rollouts, _NONE, owner, ended),)


@lru_cache(4096)
def _left(rollouts: bytes) -> tuple[int, ...]:
    return tuple(s for s, far in enumerate(rollouts) if far >= LEFT_WAITING)


class Ended:
    """Keys without an open round, some 50 bytes each: their last round, and its state."""

    def __init__(self, keys: pa.Array, rounds: Ints, state: Ints) -> None:
        """keys: JSON texts; state: of each, as its place in STATES."""
        self._keys = keys
        self._rounds = rounds.astype(np.int32)
        self._state = state.astype(np.int8)
        self._index = TextIndex(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def last(self, keys: Sequence[Key]) -> dict[Key, tuple[int, str]]:
        """The last round and its state, for those of these keys that are there."""
        if not len(self):
            return {}
        found = ((key, at) for key, at in zip(keys, self._index.of(texts(keys)), strict=True) if at is not None)
        return {key: (int(self._rounds[at]), STATES[self._state[at]]) for key, at in found}

    def columns(self, without: Iterable[Key]) -> tuple[pa.Array, list[int], list[str]]:
        """Key (as text), last round and state of all but these keys."""
        left = ~among(self._keys, texts(without))
        return (
            self._keys.filter(left),
            self._rounds[left].tolist(),
            [STATES[code] for code in self._state[left].tolist()],
        )

    def counts(self) -> dict[str, int]:
        """State -> the number of keys whose last round ended so."""
        return dict(zip(STATES, np.bincount(self._state, minlength=len(STATES)).tolist(), strict=True))


class Cursors(NamedTuple):
    """The places of the ranks that read a data set: session -> rank -> its last cursor, for sessions that went on from
    each other, oldest first. worlds: the ranks of these sessions, as far as they are known."""

    said: Mapping[str, Mapping[int, Any]]
    worlds: Mapping[str, Collection[int]]

    @property
    def by_rank(self) -> dict[int, Any]:
        """The last cursor of each rank, by rank, those of the newest session last."""
        out: dict[int, Any] = {}
        for said in self.said.values():
            for rank, value in said.items():
                out.pop(rank, None)
                out[rank] = value
        return out

    @property
    def joint(self) -> Any:
        """The lowest cursor that all ranks of the newest session have passed; a rank without one stands at the joint
        cursor of the sessions before. None: one stands at the beginning."""
        return self._joint([*self.said])

    def _joint(self, sessions: Sequence[str]) -> Any:
        if not sessions:
            return None
        *before, newest = sessions
        values = list(self.said[newest].values())
        if set(self.worlds.get(newest, ())) - self.said[newest].keys():
            values.append(self._joint(before))
        return lowest(values)

    def saying(self, session: str, rank: int, value: Any, world_size: int) -> Cursors:
        """The cursors after a rank of the newest session, of this world size, has moved to this one."""
        return Cursors({**self.said, session: {rank: value}}, {**self.worlds, session: range(world_size)})


def lowest(values: Sequence[Any]) -> Any:
    """The JSON value that is in no part beyond any of these: the least number, part by part of lists and objects; None
    if one is None. UsageError if they cannot be compared."""
    first: Any = values[0]
    if any(value is None for value in values):
        return None
    if all(value == first and type(value) is type(first) for value in values):
        return first
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return min(values)
    if all(isinstance(value, (list, tuple)) and len(value) == len(first) for value in values):
        return type(first)(lowest(parts) for parts in zip(*values, strict=True))
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: lowest([value[key] for value in values if key in value]) for key in keys}
    raise UsageError(
        f"the ranks' cursors {', '.join(f'{value!r:.40}' for value in values[:4])} have no lowest one: give numbers "
        "that count up, or lists or objects of them; .cursors has each rank's, undrawn(keys) the keys that none drew"
    )


@dataclass
class Prompts:
    """The states of prompts. `rounds`: of the keys with an open one, in the order in which they were drawn; `undone`:
    the number of trained ones that count as sealed again; `rank`: the one whose part this is, and that changes it."""

    rounds: dict[Key, Rounds]
    ended: Ended
    cursors: Cursors
    undone: int
    rank: int = ALL_RANKS

    def newest(self, keys: Sequence[Key]) -> dict[Key, tuple[int, str]]:
        """The number and state of the newest round of those of these keys that were ever drawn."""
        own = {key: self.rounds[key][-1] for key in keys if key in self.rounds}
        return self.ended.last(keys) | {key: (one.number, one.state) for key, one in own.items()}

    def open(self, rank: int) -> Iterator[tuple[Key, Round]]:
        """The rounds of a rank that have not ended."""
        for key, rounds in list(self.rounds.items()):  # other threads may change it meanwhile
            for one in rounds:
                if not one.ended and rank in (ALL_RANKS, one.owner):
                    yield key, one

    def far_along(self) -> tuple[int, int, int]:
        """Counts of rollouts that earlier sessions left: drawn and not started, started and not sealed, and sealed."""
        kinds = Counter(map(id, self.rounds.values()))  # most are one object
        each = ((rounds, kinds.pop(id(rounds), 0)) for rounds in self.rounds.values())
        far = b"".join(one.rollouts * count for rounds, count in each for one in rounds)
        return far.count(LEFT_WAITING), far.count(LEFT_RUNNING), far.count(DONE)

    def dealt(self, rank: int, world_size: int, holder: Callable[[str], int | None]) -> Prompts:
        """The prompts of one of several ranks that go on: an open key belongs to the rank that holds the episode of its
        first sealed sibling; the others are dealt out in turn."""
        if world_size == 1:  # all belong to rank 0
            return replace(self, rounds=dict(self.rounds), rank=rank)
        turn = 0
        out: dict[Key, Rounds] = {}
        for key, rounds in self.rounds.items():
            sealed = next((one.episodes[0] for one in rounds if one.sealed), None)
            owner = None if sealed is None else holder(sealed)
            if owner is None:
                owner, turn = turn, (turn + 1) % world_size
            if len(rounds) == 1 and sealed is None:  # the common case
                out[key] = unsealed(rounds[0].number, rounds[0].rollouts, owner, rounds[0].ended)
            else:
                out[key] = tuple(one._replace(owner=owner) for one in rounds)
        return replace(self, rounds=out, rank=rank)

    def draw(self, keys: Sequence[Key], siblings: int) -> Changed:
        """New rounds; UsageError for a key whose newest one has not ended."""
        waiting = bytes([WAITING]) * siblings
        out = dict.fromkeys(keys, unsealed(0, waiting, self.rank))
        numbers = dict.fromkeys(keys, 0)
        for key in out.keys() & self.rounds.keys():
            newest = self.rounds[key][-1]
            if not newest.ended:
                raise UsageError(
                    f"key {key!r:.80} is still in flight ({newest.state}): train or drop it before it is drawn again"
                    f"{_NOTHING}"
                )
        for key, (number, _) in self.newest([key for key in keys if key in self.rounds or len(self.ended)]).items():
            numbers[key] = number + 1
            unended = (one for one in self.rounds.get(key, ()) if not one.ended)
            out[key] = (*unended, *unsealed(number + 1, waiting, self.rank))
        return out, list(numbers.values())

    def move(self, keys: Sequence[Key], sibling: int, verb: str, far: int, episodes: Sequence[str] = ()) -> Changed:
        """The change that moves rollouts of the newest round of each key to this state. Nothing changes where one has
        it already, or is to be reopened and is not sealed."""
        out: dict[Key, Rounds] = {}
        for key, episode in zip_longest(keys, episodes):
            *others, one = self._unended(key, verb)
            if not 0 <= sibling < len(one.rollouts):
                raise UsageError(
                    f"key {key!r:.80} was drawn with siblings={len(one.rollouts)}, so it has no sibling {sibling}: "
                    f"they count from 0{_NOTHING}"
                )
            before, known = one.rollouts[sibling], one.sealed.get(sibling)
            if verb == SEALED and known not in (None, episode):
                raise UsageError(
                    f"sibling {sibling} of key {key!r:.80} is sealed with episode {known!r}, so not with {episode!r}, "
                    f"too{_NOTHING}"
                )
            if (verb == STARTED and before in (DONE, LOST)) or (verb == SEALED and before == LOST):
                raise UsageError(f"sibling {sibling} of key {key!r:.80} is {FAR_NAMES[before]} already{_NOTHING}")
            if before == far or (verb == REOPENED and before != DONE):
                continue
            out[key] = (*others, one.moved(sibling, far, self.rank, episode).unless_given_up())
        return out, [rounds[-1].number for rounds in out.values()]

    def end(self, keys: Sequence[Key], state: str) -> Changed:
        """The change that ends rounds: trained, of each key the oldest complete one; dropped, that one, or the newest
        if none is complete."""
        out: dict[Key, Rounds] = {}
        numbers = []
        for key in keys:
            one = next((one for one in self.rounds.get(key, ()) if one.complete), None)
            if one is None or state == DROPPED:
                newest = self._unended(key, state if state == DROPPED else "trained on")[-1]
                if state == TRAINED:
                    missing = ", ".join([str(s) for s, at in enumerate(newest.rollouts) if at not in (DONE, LOST)][:10])
                    raise UsageError(
                        f"key {key!r:.80} cannot be trained on: its siblings {missing} of {len(newest.rollouts)} are "
                        f"not sealed; seal them, or drop(key, reason, sibling=...) the missing ones{_NOTHING}"
                    )
                one = one or newest
            *others, last = self.rounds[key]
            ended = unsealed(one.number, b"", one.owner, state)
            if others:
                ended = (*(r for r in others if r is not one), ended[0] if one is last else last)
            out[key] = ended
            numbers.append(one.number)
        return out, numbers

    def _unended(self, key: Key, what: str) -> Rounds:
        """The key's rounds, of which the newest has not ended; else an error."""
        rounds = self.rounds.get(key)
        if rounds and not rounds[-1].ended:
            return rounds
        newest = self.newest([key])
        if not newest:
            raise NotFoundError(f"key {key!r:.80} was never drawn, so it cannot be {what}: draw() it first{_NOTHING}")
        raise UsageError(f"key {key!r:.80} is {newest[key][1]} already, so it cannot be {what}{_NOTHING}")
