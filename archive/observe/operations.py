"""Pure, no I/O: something that takes a while, timed, counted and, where somebody traces, a span."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from archive.observe import tracing
from archive.observe.sums import add, add_time

P = ParamSpec("P")
T = TypeVar("T")


class Operation:
    """`with operation("checkpoint", run="main") as done:`; `seconds` is how long it has taken."""

    __slots__ = ("_began", "_current", "_name", "_span")

    def __init__(self, name: str, about: dict[str, tracing.Value], current: bool) -> None:
        self._current = current
        self._name = name
        self._span = tracing.begin(name, about)
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def note(self, **about: tracing.Value) -> None:
        """Say more of it to who traces: counts and names, nothing secret."""
        if self._span is not None:
            self._span.note(about)

    def __enter__(self) -> Self:
        if self._span is not None and self._current:
            self._span.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self.seconds
        error = None if kind is GeneratorExit else error  # who needs no more of it
        add_time(self._name, seconds)
        if error is not None:
            add("archive.operation.failures", 1, operation=self._name)
        if self._span is not None:
            self._span.end(error)
        tracing.record(self._name, seconds)


def operation(operation_name: str, /, *, current: bool = True, **about: tracing.Value) -> Operation:
    """Something that begins now, and ends with the block that it is used for. `about` is for who traces.

    current: what begins within the block is a part of it; False for a block that a generator leaves and enters.
    """
    return Operation(operation_name, about, current)


def timed(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function, each call of which is an operation of this name."""

    def wrap(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def run(*args: P.args, **given: P.kwargs) -> T:
            with operation(name):
                return call(*args, **given)

        return run

    return wrap
