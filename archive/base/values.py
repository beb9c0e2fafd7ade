"""Pure, no I/O: byte ranges, properties that are computed once, dicts and lists that cannot be changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Self, TypeVar, overload

from archive.base.errors import ReadOnlyError

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, stop) of one object."""

    key: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class cached_property(Generic[T]):  # noqa: N801 (it is used, and looks, as that of functools does)
    """A property computed at its first use and kept in the instance's `__dict__`.

    Threads that come first together may each compute it; all of them get the value of one. No lock is held meanwhile:
    `functools.cached_property` of Python 3.11 has one for all instances of a class, and a process that is forked while
    a thread holds it waits for ever at the first use.
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


def frozen(value: Any, remedy: str) -> Any:
    """`value` with all its dicts, lists and arrays read-only; an attempt to change it raises an error with `remedy`.

    The facts of an episode are copies, so that a change would be lost. They are equal to plain ones, print like
    them, go into JSON and pickle. `copy.deepcopy()` gives plain ones.
    """
    if isinstance(value, dict):
        mapping = ReadOnlyDict({key: frozen(one, remedy) for key, one in value.items()})
        mapping.remedy = remedy
        return mapping
    if isinstance(value, list):
        listed = ReadOnlyList(frozen(one, remedy) for one in value)
        listed.remedy = remedy
        return listed
    if type(value) is tuple:
        return tuple(frozen(one, remedy) for one in value)
    if hasattr(value, "setflags"):  # a numpy array
        value.setflags(write=False)
    return value


def plain(value: Any) -> Any:
    """The same value in dicts and lists that may be changed."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if type(value) is tuple:
        return tuple(map(plain, value))
    return value.copy() if hasattr(value, "setflags") and hasattr(value, "copy") else value


class _ReadOnly:
    """Refuses every change."""

    remedy = ""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ReadOnlyError(f"this is read-only, as a change would be lost; {self.remedy}".rstrip("; "))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return plain(self)


class ReadOnlyDict(_ReadOnly, dict[Any, Any]):
    """A dict that refuses changes; see `frozen`."""

    __setitem__ = __delitem__ = __ior__ = _ReadOnly._refuse
    clear = pop = popitem = setdefault = update = _ReadOnly._refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return frozen, (plain(self), self.remedy)


class ReadOnlyList(_ReadOnly, list[Any]):
    """A list that refuses changes; see `frozen`."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _ReadOnly._refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _ReadOnly._refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return frozen, (plain(self), self.remedy)
