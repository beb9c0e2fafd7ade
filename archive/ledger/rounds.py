"""Pure, no I/O: one round of a prompt, from when it is drawn until it is trained on or dropped. A round is a value: a
change makes a new one, so a call is taken back by putting the old ones in place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

DRAWN, STARTED, SEALED, TRAINED, DROPPED, CURSOR = "drawn", "started", "sealed", "trained", "dropped", "cursor"
STATES = (DRAWN, STARTED, SEALED, TRAINED, DROPPED)  # of keys, in the order in which they come
WHOLE_KEY = -1  # in place of a sibling: all of them

# how far a rollout is; the last two: as an earlier session left it
WAITING, RUNNING, DONE, LOST, LEFT_WAITING, LEFT_RUNNING = range(6)
NAMES = (DRAWN, STARTED, SEALED, DROPPED, DRAWN, STARTED)
_NONE: Mapping[int, str] = {}


class Round(NamedTuple):
    """`rollouts`: a byte a sibling, how far it is; `sealed`: sibling -> id of its episode; `owner`: the rank that has
    it; `ended`: how, or empty. A round that has ended keeps no rollouts."""

    number: int
    rollouts: bytes
    sealed: Mapping[int, str]
    owner: int
    ended: str = ""

    def told(self, sibling: int, far: int, episode_id: str | None = None) -> Round:
        """The round with one rollout that far; one that it did not know of yet is added, as an earlier session's."""
        rollouts = bytearray(self.rollouts.ljust(sibling + 1, bytes([LEFT_WAITING])))
        rollouts[sibling] = far
        sealed = {s: episode for s, episode in self.sealed.items() if s != sibling}
        if episode_id is not None:
            sealed[sibling] = episode_id
        return Round(self.number, bytes(rollouts), sealed, self.owner)

    def moved(self, sibling: int, far: int, owner: int, episode_id: str | None = None) -> Round:
        """The round after `owner` has said that one rollout is that far: dropped, if all of them are."""
        return self.told(sibling, far, episode_id)._replace(owner=owner).unless_given_up()

    def unless_given_up(self) -> Round:
        """The round itself; ended as dropped if all of its rollouts are."""
        given_up = self.rollouts and self.rollouts.count(LOST) == len(self.rollouts)
        return self.end(DROPPED) if given_up else self

    def end(self, state: str) -> Round:
        """The round after it was trained on or dropped."""
        return unsealed(self.number, b"", self.owner, state)[0]

    @property
    def missing(self) -> list[int]:
        """Siblings that are neither sealed nor dropped."""
        return [s for s, far in enumerate(self.rollouts) if far not in (DONE, LOST)]

    @property
    def left(self) -> tuple[int, ...]:
        """Siblings that an earlier session drew or started, and that nobody has taken up since."""
        return _left(self.rollouts)

    @property
    def complete(self) -> bool:
        """True if it can be trained on."""
        done = self.rollouts.count(DONE)
        return bool(done) and done + self.rollouts.count(LOST) == len(self.rollouts)

    @property
    def state(self) -> str:
        """One word for it."""
        if self.ended:
            return self.ended
        if self.complete:
            return SEALED
        return STARTED if self.rollouts.strip(bytes([WAITING, LEFT_WAITING])) else DRAWN

    @property
    def episodes(self) -> list[str]:
        """Ids of the episodes of sealed rollouts, by sibling."""
        return [self.sealed[s] for s in sorted(self.sealed)]


Rounds = tuple[Round, ...]  # of one key: those that have not ended, and the last


@lru_cache(4096)
def unsealed(number: int, rollouts: bytes, owner: int, ended: str = "") -> Rounds:
    """The rounds of a key that has one, of which nothing is sealed: one object for the millions that are alike."""
    return (Round(number, rollouts, _NONE, owner, ended),)


@lru_cache(4096)
def _left(rollouts: bytes) -> tuple[int, ...]:
    return tuple(s for s, far in enumerate(rollouts) if far >= LEFT_WAITING)
