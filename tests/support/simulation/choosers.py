"""Pure: who goes on at a point. By default the strand that runs does; where it waits, the first of those that can."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

NEVER = 1 << 62
REQUESTS = ("get", "put", "create", "head", "delete", "list")
Ready = Mapping[int, Any]  # the number of a strand -> the strand


class Chooser:
    """The default: nobody is preempted. next: the point from which on it is to be asked."""

    next = NEVER

    def at(self, point: int, what: str, running: Any, ready: Ready) -> Any:
        """The strand that goes on at a point where the running one could."""
        return running

    def pick(self, point: int, ready: Ready) -> Any:
        """The strand that goes on where the running one waits."""
        return ready[min(ready)]

    def woke(self) -> None:
        """A strand became ready."""


class Given(Chooser):
    """The deviations from the default that were found in another run: point -> strand."""

    def __init__(self, deviations: Mapping[int, int]) -> None:
        self._given = deviations
        self._left = sorted(deviations, reverse=True)
        self.next = self._left[-1] if self._left else NEVER

    def at(self, point: int, what: str, running: Any, ready: Ready) -> Any:
        while self._left and self._left[-1] <= point:
            self._left.pop()
        self.next = self._left[-1] if self._left else NEVER
        return ready.get(self._given.get(point, -1), running)

    def pick(self, point: int, ready: Ready) -> Any:
        return ready.get(self._given.get(point, -1)) or ready[min(ready)]


class Turns(Given):
    """The deviations given; and, as `others`, where another one could have gone on than did: the point, the strand, and
    whether that is a preemption. Strands are preempted before requests alone."""

    def __init__(self, deviations: Mapping[int, int]) -> None:
        super().__init__(deviations)
        self.next = 0
        self.others: list[tuple[int, int, bool]] = []

    def at(self, point: int, what: str, running: Any, ready: Ready) -> Any:
        if what.partition(" ")[0] in REQUESTS:
            self.others += [(point, number, True) for number in ready if number != running.number]
        return ready.get(self._given.get(point, -1), running)

    def pick(self, point: int, ready: Ready) -> Any:
        default = min(ready)
        self.others += [(point, number, False) for number in ready if number != default]
        return ready.get(self._given.get(point, -1)) or ready[default]


class Random(Chooser):
    """At a part of the points anyone goes on; so does anyone where the running one waits."""

    def __init__(self, rng: random.Random, part: float) -> None:
        self._rng, self._part = rng, part
        self.next = 0
        self._draw(0)

    def _draw(self, point: int) -> None:
        self.next = point + 1 + int(self._rng.expovariate(self._part))

    def at(self, point: int, what: str, running: Any, ready: Ready) -> Any:
        self._draw(point)
        return self.pick(point, ready)

    def pick(self, point: int, ready: Ready) -> Any:
        return ready[self._rng.choice(list(ready))]


class Priorities(Chooser):
    """PCT: each strand has a priority, the highest that is ready goes on, and at `changes` points of about `length` the
    running one gets the lowest of all."""

    def __init__(self, rng: random.Random, changes: int, length: int) -> None:
        self._rng = rng
        self._priority: dict[int, float] = {}
        self._changes = sorted((rng.randrange(1, length) for _ in range(changes)), reverse=True)
        self._lowest = 0.0
        self.next = 0

    def at(self, point: int, what: str, running: Any, ready: Ready) -> Any:
        if self._changes and point >= self._changes[-1]:
            self._changes.pop()
            self._lowest -= 1.0
            self._priority[running.number] = self._lowest
        self.next = self._changes[-1] if self._changes else NEVER
        return self.pick(point, ready)

    def pick(self, point: int, ready: Ready) -> Any:
        for number in ready:
            if number not in self._priority:
                self._priority[number] = self._rng.random()
        return ready[max(ready, key=self._priority.__getitem__)]

    def woke(self) -> None:
        self.next = 0
