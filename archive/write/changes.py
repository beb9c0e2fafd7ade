"""What one call of a writer changes: all of it is kept or nothing. Values are replaced, and never changed, or they are
lists and dicts that are only appended to: so a call is taken back by putting the values back, and cutting off the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from archive.base import ClosedError
from archive.shard import SHARD_BYTES
from archive.write.pipeline import Pipeline
from archive.write.works import Work

MAX_HELD_BYTES = 2 * SHARD_BYTES  # by one call, before it sends a part of it off
# a part of what a writer knows: what gives a mark of how it is, and what makes it as it was then (done twice, the same)
Kept = tuple[Callable[[], Any], Callable[[Any], None]]


def kept(of: Any, *replaced: str, grown: Sequence[str] = (), after: Callable[[], None] = lambda: None) -> Kept:
    """The attributes of an object that calls change: those whose values are replaced, and those whose lists and dicts
    are appended to, or replaced. after: makes what follows from them as it was."""
    names, count, state = (*grown, *replaced), len(grown), vars(of)

    def mark() -> Any:
        values = tuple(map(state.__getitem__, names))
        return values, tuple(map(len, values[:count]))

    def cut_back(mark: Any) -> None:
        values, lengths = mark
        for some, length in zip(values, lengths, strict=False):
            while len(some) > length:
                some.popitem() if isinstance(some, dict) else some.pop()
        state.update(zip(names, values, strict=True))
        after()

    return mark, cut_back


class Changes:
    """`with changes.entered(), changes():` a call, of which all is kept or nothing, also where a KeyboardInterrupt ends
    it at whichever line: how far each part was is marked before the first change, and cut back to.

    What is ready for the store waits until the call's changes are kept, because what was sent off cannot be taken back.
    A call of many shards sends earlier, for want of memory: if it is interrupted then, the writer must be closed.
    """

    def __init__(self, pipeline: Pipeline, check: Callable[[], None], surface: Callable[[], None]) -> None:
        """check: raises where the writer may not be used.  surface: raises what failed in the background."""
        self.lock = threading.RLock()
        self.parts: list[Kept] = []  # of what a writer knows
        self.joined = False  # calls within are part of the one under way
        self.kept: Callable[[], None] | None = None  # called after each call whose changes are kept
        self._pipeline = pipeline
        self._check = check
        self._surface = surface
        self._marks: list[tuple[Callable[[Any], None], Any]] = []
        self._wait = True
        self._ready: list[Work] = []
        self._held = 0  # of those that are ready, so many were before the call
        self._spilled = False  # a part of the call under way was sent off

    def entered(self) -> threading.RLock:
        """The lock, if the writer may be used here; calls are serialised by it."""
        self._check()
        if self._marks and not self.lock._is_owned():  # type: ignore[attr-defined]
            with self.lock:  # nobody else is within a call now, so an interrupt has left it
                self.settle()
        return self.lock

    def __call__(self, *, wait: bool = True, surface: bool = False) -> Self:
        """wait: whether it waits for room when it sends off.  surface: whether what failed before ends it."""
        if not self.joined:
            self.settle()
            if surface:
                self._surface()
            self._wait = wait
        return self

    def __enter__(self) -> None:
        if not self.joined:
            self._held = len(self._ready)
            marks = []
            for mark, cut_back in self.parts:
                marks.append((cut_back, mark()))
            self._marks = marks

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.joined:
            return
        if kind is not None:
            self._cut()
            return
        self._marks = []
        self._spilled = False
        self.send(wait=self._wait)
        if self.kept is not None:
            self.kept()

    def _cut(self) -> None:
        """Take back what the call under way has changed."""
        if self._marks:
            del self._ready[self._held :]
        for cut_back, mark in self._marks:
            cut_back(mark)
        self._marks = []
        self.joined = False

    def settle(self) -> None:
        """Take back what an interrupted call has left. ClosedError if that cannot be done."""
        if self._spilled:
            raise ClosedError(
                "the writer was interrupted in the middle of a large call, of which a part was sent off: close it, and "
                "open another; what was committed stands, what was added since then is not in the archive"
            )
        self._cut()

    @property
    def broken(self) -> bool:
        """True if the writer can only be closed."""
        return self._spilled

    @property
    def ready(self) -> list[Work]:
        """The works that are ready for the store, and not handed in yet."""
        return list(self._ready)

    def add(self, work: Work) -> None:
        """Send this off once the call's changes are kept."""
        self._ready.append(work)
        if self._wait and sum(one.nbytes for one in self._ready) > MAX_HELD_BYTES:
            self._spilled = True
            self._marks = []
            self.send(wait=True)

    def send(self, *, wait: bool) -> None:
        """Hand on what is ready, in order; what an interrupted call has left comes first."""
        while self._ready:
            self._pipeline.hand_in(self._ready[0], wait=wait)
            del self._ready[0]
