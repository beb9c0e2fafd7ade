"""Pure, no I/O: says whom a wait is for, after seconds and then ever more rarely."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

FIRST_S = 3.0
MOST_S = 60.0


class Patience:
    """When to say once more who is missing."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._gap = FIRST_S
        self._next = self._began + FIRST_S

    def due(self) -> bool:
        """Whether it is time to say it; if so, not again for twice as long as the last time, a minute at most."""
        if time.monotonic() < self._next:
            return False
        self._gap = min(2 * self._gap, MOST_S)
        self._next = time.monotonic() + self._gap
        return True

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began


def ranks(numbers: Iterable[int]) -> str:
    """Ranks for people: "rank 1", "ranks 1, 2"; of many the first ones and how many."""
    listed: Sequence[int] = sorted(numbers)
    shown = ", ".join(map(str, listed[:20])) + (f" and {len(listed) - 20} more" if len(listed) > 20 else "")
    return f"rank{'s' if len(listed) > 1 else ''} {shown}"
