"""The changes of one writer's call: all are kept, or none. Values are replaced and never changed, or they are lists and
dicts that are only appended to. So a call is undone by putting the values back, and cutting off the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from archive.base import ClosedError
from archive.shard import SHARD_BYTES
from archive.write.pipeline import Pipeline
from archive.write.works import Work

MAX_HELD_BYTES = 2 * SHARD_BYTES  # held by one call before it sends a part off
# a part of what a writer knows: what gives a mark of how it is, and what makes it as it was then (done twice, the same)
Kept = tuple[Callable[[], Any], Callable[[Any], None]]


def kept(of: Any, *replaced: str, grown: Sequence[str] = (), after: Callable[[], None] = lambda: None) -> Kept:
    """The attributes of an object that calls change: those whose values are replaced, and those whose lists and dicts
    are appended to, or replaced. after: restores what is derived from them."""
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
    """`with changes.entered(), changes():` a transaction: all of a call is kept, or nothing, even if a
    KeyboardInterrupt ends it at any line. The size of each part is marked before the first change, and restored.

    Works for the store wait until the call's changes are kept, because a work that was sent off cannot be undone.
    A call of many shards sends earlier, to save memory: if it is interrupted then, the writer must be closed.
    """

    def __init__(self, pipeline: Pipeline, check: Callable[[], None], surface: Callable[[], None]) -> None:
        """check: raises if the writer may not be used.  surface: raises errors of the background."""
        self.lock = threading.RLock()
        self.parts: list[Kept] = []  # the parts of a writer's state
        self.joined = False  # calls within are part of the one under way
        self.kept: Callable[[], None] | None = None  # called after each call whose changes are kept
        self._pipeline = pipeline
        self._check = check
        self._surface = surface
        self._marks: list[tuple[Callable[[Any], object], Any]] = []
        self._wait = True
        self._ready: list[Work] = []
        self._held = 0  # the number of ready works before the call
        self._spilled = False  # a part of the call under way was sent off

    def entered(self) -> threading.RLock:
        """The lock, if the writer may be used from here. It serialises calls."""
        self._check()
        if self._marks and not self.lock._is_owned():  # type: ignore[attr-defined]
            with self.lock:  # no other thread is within a call, so an interrupt left it
                self.settle()
        return self.lock

    def __call__(self, *, wait: bool = True, surface: bool = False) -> Self:
        """wait: sending off waits for room.  surface: an earlier error ends the call."""
        if not self.joined:
            self.settle()
            if surface:
                self._surface()
            self._wait = wait
        return self

    def __enter__(self) -> None:
        if not self.joined:
            self._held = len(self._ready)
            marks: list[tuple[Callable[[Any], object], Any]] = []
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
        """Undo the changes of the call under way."""
        if self._marks:
            del self._ready[self._held :]
        for cut_back, mark in self._marks:
            cut_back(mark)
        self._marks = []
        self.joined = False

    def also(self, cut_back: Callable[[Any], object], mark: Any) -> None:
        """Call `cut_back(mark)` too if several calls that act as one are undone. It may be called twice."""
        if self.joined:
            self._marks.append((cut_back, mark))

    def settle(self) -> None:
        """Undo what an interrupted call has left. ClosedError if that is impossible."""
        if self._spilled:
            raise ClosedError(
                "the writer was interrupted in a large call, and a part of it was sent off: close it, and "
                "open another; commits stand, later additions are not in the archive"
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
        """Queue `work`; it is handed to the pipeline when the transaction ends."""
        self._ready.append(work)
        if self._wait and sum(one.nbytes for one in self._ready) > MAX_HELD_BYTES:
            self._spilled = True
            self._marks = []
            self.send(wait=True)

    def send(self, *, wait: bool) -> None:
        """Hand in the ready works, in order; those that an interrupted call has left come first."""
        while self._ready:
            self._pipeline.hand_in(self._ready[0], wait=wait)
            del self._ready[0]
