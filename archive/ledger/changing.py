"""Pure, no I/O: what a verb of a ledger changes: looked at first, all of it, and refused with nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from archive.base import NotFoundError, UsageError
from archive.ledger.keys import Ended
from archive.ledger.rounds import DONE, LOST, RUNNING, Round, Rounds
from archive.ledger.terms import DROPPED, TRAINED, Key

_NOTHING = "; nothing was changed"


class Changed(NamedTuple):
    """What becomes of keys; and the round of each that was changed."""

    rounds: dict[Key, Rounds]
    numbers: Sequence[int]


class Held(NamedTuple):
    """How prompts stand, for a rank."""

    rounds: Mapping[Key, Rounds]
    ended: Ended
    rank: int

    def draw(self, keys: Sequence[Key], siblings: int) -> Changed:
        """New rounds; UsageError for a key whose newest one has not ended."""
        fresh = (Round.drawn(0, siblings, self.rank),)
        out: dict[Key, Rounds] = dict.fromkeys(keys, fresh)
        numbers = dict.fromkeys(keys, 0)
        for key in out.keys() & self.rounds.keys():
            rounds = self.rounds[key]
            _check_over(key, rounds[-1])
            numbers[key] = rounds[-1].number + 1
            out[key] = (*(r for r in rounds if not r.ended), Round.drawn(numbers[key], siblings, self.rank))
        again = self.ended.last([key for key in keys if key not in self.rounds])
        for key, (number, _) in again.items():
            numbers[key] = number + 1
            out[key] = (Round.drawn(number + 1, siblings, self.rank),)
        return Changed(out, list(numbers.values()))

    def start(self, keys: Sequence[Key], sibling: int) -> Changed:
        """Under way. Nothing changes where it is already."""
        out: dict[Key, Rounds] = {}
        for key in keys:
            *others, one = self._newest(key, "started")
            _check_sibling(key, one, sibling)
            far = one.rollouts[sibling]
            if far in (DONE, LOST):
                what = "sealed" if far == DONE else "dropped"
                raise UsageError(f"sibling {sibling} of key {key!r:.80} is {what} already{_NOTHING}")
            if far != RUNNING:
                out[key] = (*others, one.moved(sibling, RUNNING, self.rank))
        return Changed(out, [rounds[-1].number for rounds in out.values()])

    def seal(self, keys: Sequence[Key], sibling: int, episodes: Sequence[str]) -> Changed:
        """There. Nothing changes where the same episode is already."""
        out: dict[Key, Rounds] = {}
        for key, episode in zip(keys, episodes, strict=True):
            *others, one = self._newest(key, "sealed")
            _check_sibling(key, one, sibling)
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
        return Changed(out, [rounds[-1].number for rounds in out.values()])

    def reopen(self, keys: Sequence[Key], sibling: int) -> Changed:
        """Under way again. Nothing changes where it is not sealed."""
        out: dict[Key, Rounds] = {}
        for key in keys:
            *others, one = self._newest(key, "reopened")
            _check_sibling(key, one, sibling)
            if one.rollouts[sibling] == DONE:
                out[key] = (*others, one.moved(sibling, RUNNING, self.rank))
        return Changed(out, [rounds[-1].number for rounds in out.values()])

    def train(self, keys: Sequence[Key]) -> Changed:
        """Done with: of each key the oldest round that is complete."""
        return self._end(keys, TRAINED, self._to_train)

    def drop(self, keys: Sequence[Key], sibling: int | None) -> Changed:
        """Given up: as `train`, or the newest round if none is complete; or one of its rollouts."""
        if sibling is None:
            return self._end(keys, DROPPED, self._to_drop)
        out: dict[Key, Rounds] = {}
        for key in keys:
            *others, one = self._newest(key, "dropped")
            _check_sibling(key, one, sibling)
            if one.rollouts[sibling] != LOST:
                out[key] = _without_ended((*others, one.moved(sibling, LOST, self.rank)))
        return Changed(out, [rounds[-1].number for rounds in out.values()])

    def _end(self, keys: Sequence[Key], state: str, which: Callable[[Key], Round]) -> Changed:
        out: dict[Key, Rounds] = {}
        shared: dict[tuple[int, int], Rounds] = {}  # most are alike
        numbers = []
        for key in keys:
            one, rounds = which(key), self.rounds[key]
            numbers.append(one.number)
            if len(rounds) > 1:
                out[key] = _without_ended(tuple(r.end(state) if r is one else r for r in rounds))
                continue
            alike = (one.number, one.owner)
            if alike not in shared:
                shared[alike] = (one.end(state),)
            out[key] = shared[alike]
        return Changed(out, numbers)

    def _to_train(self, key: Key) -> Round:
        found = next((one for one in self.rounds.get(key, ()) if one.complete), None)
        if found is not None:
            return found
        one = self._newest(key, "trained on")[-1]
        missing = ", ".join(map(str, one.missing[:10]))
        raise UsageError(
            f"key {key!r:.80} cannot be trained on: its siblings {missing} of {len(one.rollouts)} are not sealed; seal "
            f"them, or drop(key, reason, sibling=...) those that won't come{_NOTHING}"
        )

    def _to_drop(self, key: Key) -> Round:
        rounds = self._newest(key, "dropped")
        return next((one for one in rounds if one.complete), rounds[-1])

    def _newest(self, key: Key, what: str) -> Rounds:
        """The key's rounds, of which the newest has not ended; else an error."""
        rounds = self.rounds.get(key)
        state = rounds[-1].ended if rounds else self._how_ended(key)
        if state is None:
            raise NotFoundError(f"key {key!r:.80} was never drawn, so it cannot be {what}: draw() it first{_NOTHING}")
        if state:
            raise UsageError(f"key {key!r:.80} is {state} already, so it cannot be {what}{_NOTHING}")
        assert rounds is not None
        return rounds

    def _how_ended(self, key: Key) -> str | None:
        found = self.ended.last([key])
        return found[key][1] if key in found else None


def _check_over(key: Key, newest: Round) -> None:
    if not newest.ended:
        raise UsageError(
            f"key {key!r:.80} is still in flight ({newest.state}): train or drop it before it is drawn again{_NOTHING}"
        )


def _check_sibling(key: Key, one: Round, sibling: int) -> None:
    if not 0 <= sibling < len(one.rollouts):
        raise UsageError(
            f"key {key!r:.80} was drawn with siblings={len(one.rollouts)}, so it has no sibling {sibling}: they count "
            f"from 0{_NOTHING}"
        )


def _without_ended(rounds: Rounds) -> Rounds:
    """Those that have not ended, and the last."""
    return (*(one for one in rounds[:-1] if not one.ended), rounds[-1])
