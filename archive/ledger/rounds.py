"""Pure, no I/O: one round of a key, from when it was drawn until it is trained on or dropped. A value: changes make new
ones, so that what a call has changed is taken back by putting the old ones in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from archive.ledger.terms import DRAWN, DROPPED, SEALED, STARTED

# how far a rollout is; the last two: as an earlier session left it
WAITING, RUNNING, DONE, LOST, LEFT_WAITING, LEFT_RUNNING = range(6)
NAMES = (DRAWN, STARTED, SEALED, DROPPED, DRAWN, STARTED)
_NONE: Mapping[int, str] = {}


class Round(NamedTuple):
    """`rollouts`: a byte a sibling, how far it is; `sealed`: sibling -> id of its episode; `owner`: the rank that has
    it; `ended`: how, or empty. What has ended keeps no rollouts."""

    number: int
    rollouts: bytes
    sealed: Mapping[int, str]
    owner: int
    ended: str = ""

    @classmethod
    def drawn(cls, number: int, siblings: int, owner: int) -> Round:
        """So many rollouts, none of which was started."""
        return cls(number, bytes(siblings), _NONE, owner)

    def end(self, state: str) -> Round:
        """Trained, or dropped."""
        return Round(self.number, b"", _NONE, self.owner, state)

    def moved(self, sibling: int, to: int, owner: int, episode_id: str | None = None) -> Round:
        """One rollout is this far now; it is of the rank that says so."""
        rollouts = bytearray(self.rollouts)
        rollouts[sibling] = to
        sealed = self.sealed if episode_id is None else {**self.sealed, sibling: episode_id}
        if to != DONE:
            sealed = {s: episode for s, episode in sealed.items() if s != sibling}
        made = Round(self.number, bytes(rollouts), sealed, owner)
        return made.end(DROPPED) if made.given_up else made

    @property
    def missing(self) -> list[int]:
        """Siblings that are neither sealed nor dropped."""
        return [s for s, far in enumerate(self.rollouts) if far not in (DONE, LOST)]

    @property
    def left(self) -> list[int]:
        """Siblings that an earlier session drew or started, and that nobody has taken up since."""
        return [s for s, far in enumerate(self.rollouts) if far >= LEFT_WAITING]

    @property
    def given_up(self) -> bool:
        """Whether all rollouts are dropped."""
        return bool(self.rollouts) and self.rollouts.count(LOST) == len(self.rollouts)

    @property
    def complete(self) -> bool:
        """Whether it can be trained on."""
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
