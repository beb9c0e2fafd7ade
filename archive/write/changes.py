"""What one call changes in a writer: all of it or nothing, also where a KeyboardInterrupt ends it;
and what it sends off.

What is ready for the store waits in the outbox until the call's changes are kept, because what was sent off cannot be
taken back. A call of many shards sends earlier, for want of memory: if it is interrupted then,
the writer must be closed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from archive.base import ClosedError, Undo
from archive.shard import SHARD_BYTES
from archive.write.pipeline import Pipeline
from archive.write.works import Work

MAX_HELD_BYTES = 2 * SHARD_BYTES


class Changes:
    """`with changes(wait=True):` a call. `wait`: whether it waits for room when it sends off. Calls are serialised."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.undo = Undo()
        self._pipeline = pipeline
        self._wait = True
        self._ready: list[Work] = []
        self._spilled = False  # a part of the call under way was sent off
        self.kept: Callable[[], None] = lambda: None  # called after each call whose changes are kept

    def __call__(self, *, wait: bool) -> Self:
        self.settle()
        self._wait = wait
        return self

    def __enter__(self) -> None:
        self.undo.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo.__exit__(kind, error, trace)
        if kind is None:
            self._spilled = False
            self.send(wait=self._wait)
            self.kept()

    def settle(self) -> None:
        """Take back what an interrupted call has left. ClosedError if that cannot be done."""
        if self._spilled:
            raise ClosedError(
                "the writer was interrupted in the middle of a large call, of which a part was sent off: close it, and "
                "open another; what was committed stands, what was added since then is not in the archive"
            )
        self.undo.settle()

    @property
    def left_over(self) -> bool:
        """Whether a call is under way, or was interrupted before its changes were kept."""
        return self.undo.holds

    @property
    def broken(self) -> bool:
        """Whether the writer can only be closed."""
        return self._spilled

    @property
    def ready(self) -> list[Work]:
        """What is ready for the store, and not handed in yet."""
        return list(self._ready)

    def add(self, work: Work) -> None:
        """This is ready for the store."""
        self.undo.length(self._ready)
        self._ready.append(work)
        if self._wait and sum(one.nbytes for one in self._ready) > MAX_HELD_BYTES:
            self._spilled = True
            self.undo.keep()
            self.send(wait=True)

    def send(self, *, wait: bool) -> None:
        """Hand on what is ready, in order; what an interrupted call has left comes first."""
        while self._ready:
            self._pipeline.hand_in(self._ready[0], wait=wait)
            del self._ready[0]
