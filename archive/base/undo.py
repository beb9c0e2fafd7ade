"""Pure, no I/O: takes back what a call has changed, if it is left by an exception, at whichever line that is.

A KeyboardInterrupt may come between any two lines. So what is about to change is noted before it changes, and putting a
noted value back twice does no harm. Changes are kept as a whole, at the end of the block, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import Any

_ABSENT = object()


class Undo:
    """`with undo:` a block whose noted changes are kept or taken back together. One thread at a time; does not nest."""

    def __init__(self) -> None:
        self._notes: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._within = False

    def __enter__(self) -> None:
        self.settle()
        self._within = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._notes.clear()
        self.settle()

    @property
    def holds(self) -> bool:
        """Whether there is something that could be taken back."""
        return bool(self._notes)

    def settle(self) -> None:
        """Take back what an interrupted block has left, if any."""
        while self._notes:
            put_back, given = self._notes[-1]
            put_back(*given)
            self._notes.pop()
        self._within = False

    def keep(self) -> None:
        """What was changed so far stays, whatever comes: others have seen it."""
        self._notes.clear()

    def attributes(self, owner: object, *names: str) -> None:
        """These attributes are about to be bound to other values."""
        if self._within:
            for name in names:
                self._notes.append((setattr, (owner, name, getattr(owner, name))))

    def key(self, mapping: dict[Any, Any], key: Hashable) -> None:
        """The value of this key is about to change, or to come or go."""
        if self._within:
            self._notes.append((_put_key, (mapping, key, mapping.get(key, _ABSENT))))

    def keys(self, mapping: dict[Any, Any], keys: Iterable[Hashable]) -> None:
        """The values of these keys are about to change, or to come or go."""
        if self._within:
            self._notes.append((_put_keys, (mapping, {key: mapping.get(key, _ABSENT) for key in keys})))

    def keys_from(self, mapping: dict[int, Any], first: int) -> None:
        """Keys from `first` on are about to come: there are none yet."""
        if self._within:
            self._notes.append((_drop_from, (mapping, first)))

    def length(self, values: list[Any]) -> None:
        """Something is about to be appended."""
        if self._within:
            self._notes.append((_cut, (values, len(values))))

    def content(self, values: list[Any]) -> None:
        """The list is about to change anyhow."""
        if self._within:
            self._notes.append((_refill, (values, list(values))))

    def member(self, values: set[Any], value: Hashable) -> None:
        """The value is about to come or go."""
        if self._within:
            self._notes.append((set.add if value in values else set.discard, (values, value)))

    def rows(self, array: Any, index: Any) -> None:
        """These rows of an array are about to be written."""
        if self._within:
            self._notes.append((array.__setitem__, (index, array[index])))


def _put_key(mapping: dict[Any, Any], key: Hashable, value: Any) -> None:
    if value is _ABSENT:
        mapping.pop(key, None)
    else:
        mapping[key] = value


def _put_keys(mapping: dict[Any, Any], values: dict[Any, Any]) -> None:
    for key, value in values.items():
        _put_key(mapping, key, value)


def _drop_from(mapping: dict[int, Any], first: int) -> None:
    for key in [key for key in list(mapping) if key >= first]:
        mapping.pop(key, None)


def _cut(values: list[Any], length: int) -> None:
    del values[length:]


def _refill(values: list[Any], content: list[Any]) -> None:
    values[:] = content
