"""Pure, no I/O: dicts and lists that cannot be changed: what is known of an episode is a copy,
and a change would be lost."""

from __future__ import annotations

from typing import Any, NoReturn

from archive.base.errors import ReadOnlyError


def frozen(value: Any, remedy: str) -> Any:
    """`value` with all its dicts, lists and arrays read-only; `remedy` is what an attempt to change it is told.

    They are equal to plain ones, print like them, go into JSON and pickle. `copy.deepcopy()` gives plain ones.
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
