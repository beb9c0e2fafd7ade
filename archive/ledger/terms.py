"""Pure, no I/O: the words of a ledger."""

from __future__ import annotations

from typing import NamedTuple

DRAWN, STARTED, SEALED, TRAINED, DROPPED, CURSOR = "drawn", "started", "sealed", "trained", "dropped", "cursor"
WHOLE_KEY = -1  # in place of a sibling: all of them

Key = str | int


class Rollout(NamedTuple):
    """One rollout of a prompt: of its siblings the one of this number."""

    key: Key
    sibling: int
