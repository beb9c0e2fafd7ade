"""Pure, no I/O: how the prompts of a ledger stand, and what a verb changes of that: looked at first, all of it, and
refused with nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.base import NotFoundError, UsageError
from archive.ledger.keys import Key, TextIndex, texts
from archive.ledger.rounds import DONE, DROPPED, LOST, RUNNING, TRAINED, WAITING, Round, Rounds, unsealed
from archive.tables import among

if TYPE_CHECKING:
    import pyarrow as pa

ALL_RANKS = -1
_NOTHING = "; nothing was changed"


class Ended:
    """Keys of which every round has ended, some 50 bytes each: which round was their last, and how it ended."""

    def __init__(self, keys: pa.Array, rounds: Ints, states: Sequence[str], state: Ints) -> None:
        """keys: JSON texts; state: of each, as its place in `states`."""
        self._keys = keys
        self._rounds = rounds.astype(np.int32)
        self._states = states
        self._state = state.astype(np.int8)
        self._index = TextIndex(keys)

    @classmethod
    def none(cls) -> Ended:
        """No keys."""
        import pyarrow as pa

        return cls(pa.array([], pa.string()), np.zeros(0, np.int64), (), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self._keys)

    def last(self, keys: Sequence[Key]) -> dict[Key, tuple[int, str]]:
        """The last round of those of these keys that are there, and how it ended."""
        if not len(self):
            return {}
        found = ((key, at) for key, at in zip(keys, self._index.of(texts(keys)), strict=True) if at is not None)
        return {key: (int(self._rounds[at]), self._states[self._state[at]]) for key, at in found}

    def columns(self, without: Iterable[Key]) -> tuple[pa.Array, Ints, list[str]]:
        """Key (as text), last round and state of all, but for these keys."""
        left = ~among(self._keys, texts(without))
        state = [self._states[code] for code in self._state[left].tolist()]
        return self._keys.filter(left), self._rounds[left].astype(np.int64), state

    def counts(self) -> dict[str, int]:
        """State -> how many ended so."""
        counts = np.bincount(self._state, minlength=len(self._states)).tolist()
        return {state: count for state, count in zip(self._states, counts, strict=True) if count}


class Cursors(NamedTuple):
    """The places of the ranks that read a data set: session -> rank -> what it said last, of sessions that went on from
    each other, the oldest first. worlds: the ranks of these sessions, as far as they are known."""

    said: Mapping[str, Mapping[int, Any]] = {}
    worlds: Mapping[str, Collection[int]] = {}

    @property
    def by_rank(self) -> dict[int, Any]:
        """The cursor that each rank said last, by rank, those of the newest session last."""
        out: dict[int, Any] = {}
        for said in self.said.values():
            for rank, value in said.items():
                out.pop(rank, None)
                out[rank] = value
        return out

    @property
    def joint(self) -> Any:
        """The lowest that all ranks of the newest session have passed; a rank that has said nothing yet stands where
        the sessions before had come to. None: one stands at the beginning."""
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
        """The cursors after a rank of the newest session, of so many ranks, has said this."""
        return Cursors({**self.said, session: {rank: value}}, {**self.worlds, session: range(world_size)})


def lowest(values: Sequence[Any]) -> Any:
    """The JSON value that is in no part beyond any of these: the least number, part by part of lists and objects; None
    where one is None. UsageError where they cannot be compared."""
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
        f"the ranks' cursors {', '.join(f'{value!r:.40}' for value in values[:4])} have no lowest one: say numbers "
        "that count up, or lists or objects of them; .cursors has what each rank said, undrawn(keys) what none drew"
    )


class Changed(NamedTuple):
    """The rounds that keys have after a call, and the round of each that was changed."""

    rounds: dict[Key, Rounds]
    numbers: Sequence[int]


@dataclass
class Prompts:
    """The standing of prompts. `rounds`: of the keys of which one has not ended, in the order in which they were drawn;
    `undone`: how many that were trained count as sealed again; `rank`: whose part is looked at, and who changes it."""

    rounds: dict[Key, Rounds] = field(default_factory=dict)
    ended: Ended = field(default_factory=Ended.none)
    cursors: Cursors = field(default_factory=Cursors)
    undone: int = 0
    rank: int = ALL_RANKS

    def newest(self, keys: Sequence[Key]) -> dict[Key, tuple[int, str]]:
        """The number of the newest round of those of these keys that were ever drawn, and its state."""
        own = {key: self.rounds[key][-1] for key in keys if key in self.rounds}
        return self.ended.last(keys) | {key: (one.number, one.state) for key, one in own.items()}

    def open(self, rank: int) -> Iterator[tuple[Key, Round]]:
        """The rounds of a rank that have not ended."""
        for key, rounds in list(self.rounds.items()):  # other threads may change it meanwhile
            for one in rounds:
                if not one.ended and rank in (ALL_RANKS, one.owner):
                    yield key, one

    def draw(self, keys: Sequence[Key], siblings: int) -> Changed:
        """New rounds; UsageError for a key whose newest one has not ended."""
        out = dict.fromkeys(keys, self._drawn(0, siblings))
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
            out[key] = (*unended, *self._drawn(number + 1, siblings))
        return Changed(out, list(numbers.values()))

    def _drawn(self, number: int, siblings: int) -> Rounds:
        return unsealed(number, bytes([WAITING]) * siblings, self.rank)

    def start(self, keys: Sequence[Key], sibling: int) -> Changed:
        """Rollouts that are under way from now on. Nothing changes where one is already."""
        out: dict[Key, Rounds] = {}
        for key, others, one in self._each(keys, sibling, "started"):
            far = one.rollouts[sibling]
            if far in (DONE, LOST):
                what = "sealed" if far == DONE else "dropped"
                raise UsageError(f"sibling {sibling} of key {key!r:.80} is {what} already{_NOTHING}")
            if far != RUNNING:
                out[key] = (*others, one.moved(sibling, RUNNING, self.rank))
        return _of_newest(out)

    def seal(self, keys: Sequence[Key], sibling: int, episodes: Sequence[str]) -> Changed:
        """Rollouts that are there from now on. Nothing changes where the same episode is already."""
        out: dict[Key, Rounds] = {}
        for (key, others, one), episode in zip(self._each(keys, sibling, "sealed"), episodes, strict=True):
            known = one.sealed.get(sibling)
            if known is not None and known != episode:
                raise UsageError(
                    f"sibling {sibling} of key {key!r:.80} is sealed with episode {known!r}, so not with {episode!r}, "
                    f"too{_NOTHING}"
                )
            if one.rollouts[sibling] == LOST:
                raise UsageError(f"sibling {sibling} of key {key!r:.80} is dropped already{_NOTHING}")
            if known is None:
                out[key] = (*others, one.moved(sibling, DONE, self.rank, episode))
        return _of_newest(out)

    def reopen(self, keys: Sequence[Key], sibling: int) -> Changed:
        """Rollouts that are under way again. Nothing changes where one is not sealed."""
        each = self._each(keys, sibling, "reopened")
        sealed = ((key, others, one) for key, others, one in each if one.rollouts[sibling] == DONE)
        return _of_newest({key: (*others, one.moved(sibling, RUNNING, self.rank)) for key, others, one in sealed})

    def train(self, keys: Sequence[Key]) -> Changed:
        """Rounds that are done with: of each key the oldest that is complete."""
        return self._end(keys, TRAINED, self._to_train)

    def drop(self, keys: Sequence[Key], sibling: int | None) -> Changed:
        """Rounds that are given up: as in `train`, or the newest one if none is complete; or a rollout of each."""
        if sibling is None:
            return self._end(keys, DROPPED, self._to_drop)
        each = self._each(keys, sibling, "dropped")
        left = ((key, others, one) for key, others, one in each if one.rollouts[sibling] != LOST)
        moved = {key: (*others, one.moved(sibling, LOST, self.rank)) for key, others, one in left}
        return _of_newest({key: _without_ended(rounds) for key, rounds in moved.items()})

    def _each(self, keys: Sequence[Key], sibling: int, what: str) -> Iterator[tuple[Key, Rounds, Round]]:
        """Yield each key, its older rounds and its newest, which has that sibling and has not ended; else an error."""
        for key in keys:
            *others, one = self._unended(key, what)
            if not 0 <= sibling < len(one.rollouts):
                raise UsageError(
                    f"key {key!r:.80} was drawn with siblings={len(one.rollouts)}, so it has no sibling {sibling}: "
                    f"they count from 0{_NOTHING}"
                )
            yield key, tuple(others), one

    def _end(self, keys: Sequence[Key], state: str, which: Callable[[Key], Round]) -> Changed:
        out: dict[Key, Rounds] = {}
        numbers = []
        for key in keys:
            one, rounds = which(key), self.rounds[key]
            numbers.append(one.number)
            ended = unsealed(one.number, b"", one.owner, state)
            out[key] = ended if len(rounds) == 1 else _without_ended(tuple(ended[0] if r is one else r for r in rounds))
        return Changed(out, numbers)

    def _to_train(self, key: Key) -> Round:
        found = next((one for one in self.rounds.get(key, ()) if one.complete), None)
        if found is not None:
            return found
        one = self._unended(key, "trained on")[-1]
        missing = ", ".join(map(str, one.missing[:10]))
        raise UsageError(
            f"key {key!r:.80} cannot be trained on: its siblings {missing} of {len(one.rollouts)} are not sealed; seal "
            f"them, or drop(key, reason, sibling=...) those that won't come{_NOTHING}"
        )

    def _to_drop(self, key: Key) -> Round:
        rounds = self._unended(key, "dropped")
        return next((one for one in rounds if one.complete), rounds[-1])

    def _unended(self, key: Key, what: str) -> Rounds:
        """The key's rounds, of which the newest has not ended; else an error."""
        rounds = self.rounds.get(key)
        if rounds and not rounds[-1].ended:
            return rounds
        newest = self.newest([key])
        if not newest:
            raise NotFoundError(f"key {key!r:.80} was never drawn, so it cannot be {what}: draw() it first{_NOTHING}")
        raise UsageError(f"key {key!r:.80} is {newest[key][1]} already, so it cannot be {what}{_NOTHING}")


def _of_newest(rounds: dict[Key, Rounds]) -> Changed:
    return Changed(rounds, [one[-1].number for one in rounds.values()])


def _without_ended(rounds: Rounds) -> Rounds:
    """The rounds that have not ended, and the last."""
    return (*(one for one in rounds[:-1] if not one.ended), rounds[-1])
