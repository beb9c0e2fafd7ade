"""Pure, no I/O: properties that are computed once, without a lock.

`functools.cached_property` of Python 3.11 holds one lock for all instances of a class while it computes. A process that
is forked meanwhile inherits it locked, by a thread that it does not have, and waits for ever at the first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T", covariant=True)


class cached_property(Generic[T]):  # noqa: N801 (it is used, and looks, as that of functools does)
    """A property computed at its first use and kept in the instance's `__dict__`.

    Threads that come first together may each compute it; all of them get the value of one.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._name = compute, ""
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Self | T:
        if instance is None:
            return self
        value: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value
