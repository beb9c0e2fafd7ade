"""Pure, no I/O: the words of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

DRAWN, STARTED, SEALED, TRAINED, DROPPED, CURSOR = "drawn", "started", "sealed", "trained", "dropped", "cursor"
STATES = (DRAWN, STARTED, SEALED, TRAINED, DROPPED)  # of keys, in the order in which they come
WHOLE_KEY = -1  # in place of a sibling: all of them

Key = str | int
Granularity = Literal["sibling", "group"]


class Rollout(NamedTuple):
    """One rollout of a prompt: of its siblings the one of this number."""

    key: Key
    sibling: int


class Group(NamedTuple):
    """A prompt whose rollouts are all there: the ids of their episodes, by sibling."""

    key: Key
    episodes: Sequence[str]
