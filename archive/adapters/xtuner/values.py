"""Pure, no I/O: the classes that values in rollouts may be of.

Values of the standard library, numpy and torch that JSON has no word for are kept as parts it has. A value is kept only
if its class is exactly one of these: what is made again is of the same class and the same value. All other classes come
from the buffer that is restored into and from the caller, never from names in the bucket: those only choose among them.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import sys
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from archive.base import CorruptStateError, FieldError

_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str)} | {"None": None}


class Kept(NamedTuple):
    """A class, how its values are taken apart, and how they are put together again."""

    kind: type
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _zone(value: datetime.timezone) -> list[Any]:
    return list(value.__getinitargs__())  # type: ignore[attr-defined]


def _key(value: zoneinfo.ZoneInfo) -> str:
    if value.key is None:
        raise FieldError("a time zone that was read from a file has no name to find it by: use ZoneInfo(name)")
    return value.key


def _factory(value: collections.defaultdict[Any, Any]) -> list[Any]:
    name = getattr(value.default_factory, "__name__", str(value.default_factory))
    if name not in _FACTORIES or _FACTORIES[name] is not value.default_factory:
        raise FieldError(f"a defaultdict makes its values by {name}, which cannot be stored: store dict(value)")
    return [name, _pairs(value)]


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    return [[k, v] for k, v in value.items()]


def _masked(parts: Any) -> Any:
    return np.ma.MaskedArray(parts[0], mask=parts[1], fill_value=parts[2])


def _dtype_of_torch(name: str) -> Any:
    torch: Any = sys.modules["torch"]
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FieldError(f"torch has no dtype {name!r}")
    return found


def _of_text(kind: type) -> Kept:
    return Kept(kind, str, kind)


def _of_moment(kind: Any) -> Kept:
    def make(parts: Any) -> Any:
        text, zone, fold = parts
        return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)

    return Kept(kind, lambda v: [v.replace(tzinfo=None).isoformat(), v.tzinfo, v.fold], make)


def _of_bounds(kind: Any) -> Kept:
    return Kept(kind, lambda v: [v.start, v.stop, v.step], lambda p: kind(*p))


def _of_duration(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


_KEPT: dict[str, Kept] = {
    "Path": Kept(type(pathlib.Path()), str, pathlib.Path),
    "PurePosixPath": _of_text(pathlib.PurePosixPath),
    "PureWindowsPath": _of_text(pathlib.PureWindowsPath),
    "datetime": _of_moment(datetime.datetime),
    "date": Kept(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": _of_moment(datetime.time),
    "timedelta": Kept(datetime.timedelta, _of_duration, lambda p: datetime.timedelta(*p)),
    "timezone": Kept(datetime.timezone, _zone, lambda p: datetime.timezone(*p)),
    "ZoneInfo": Kept(zoneinfo.ZoneInfo, _key, zoneinfo.ZoneInfo),
    "Decimal": _of_text(decimal.Decimal),
    "Fraction": Kept(fractions.Fraction, lambda v: [v.numerator, v.denominator], lambda p: fractions.Fraction(*p)),
    "UUID": Kept(uuid.UUID, lambda v: v.hex, uuid.UUID),
    "bytearray": Kept(bytearray, bytes, bytearray),
    "range": _of_bounds(range),
    "slice": _of_bounds(slice),
    "deque": Kept(collections.deque, lambda v: [list(v), v.maxlen], lambda p: collections.deque(*p)),
    "OrderedDict": Kept(collections.OrderedDict, _pairs, collections.OrderedDict),
    "Counter": Kept(collections.Counter, _pairs, lambda p: collections.Counter(dict(p))),
    "defaultdict": Kept(
        collections.defaultdict, _factory, lambda p: collections.defaultdict(_FACTORIES[p[0]], map(tuple, p[1]))
    ),
    "SimpleNamespace": Kept(types.SimpleNamespace, vars, lambda p: types.SimpleNamespace(**p)),
    "str_": _of_text(np.str_),
    "bytes_": Kept(np.bytes_, bytes, np.bytes_),
    "MaskedArray": Kept(np.ma.MaskedArray, lambda v: [v.data, np.ma.getmaskarray(v), v.fill_value], _masked),
}


def _of_torch() -> dict[str, Kept]:
    torch: Any = sys.modules["torch"]
    parameter = torch.nn.Parameter
    return {
        "torch.Size": Kept(torch.Size, list, torch.Size),
        "torch.dtype": Kept(torch.dtype, lambda v: str(v).partition(".")[2], _dtype_of_torch),
        "torch.device": Kept(torch.device, str, torch.device),
        "torch.Parameter": Kept(parameter, lambda v: [v.detach(), v.requires_grad], lambda p: parameter(*p)),
    }


@functools.cache
def _known(with_torch: bool) -> tuple[dict[str, Kept], dict[type, str]]:
    """The kept classes by name, and the names by class."""
    found = _KEPT | _of_torch() if with_torch else _KEPT
    return found, {kept.kind: name for name, kept in found.items()}


def parts_of(value: Any) -> tuple[str, Any] | None:
    """The (name, parts) of a value that is kept by its parts; None for any other."""
    kept, names = _known("torch" in sys.modules)
    name = names.get(type(value))
    return None if name is None else (name, kept[name].parts(value))


def made_of(name: str, parts: Any) -> Any:
    """The value of these parts again."""
    kept, _ = _known("torch" in sys.modules)
    if name not in kept:
        needs = "torch, which is not imported" if name.startswith("torch.") else "a newer version of this library"
        raise FieldError(f"a group holds a {name}, which needs {needs}")
    try:
        return kept[name].make(parts)
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CorruptStateError(f"a group holds a {name} that cannot be made of what is there: {error}") from error


# -- the classes of rollouts -------------------------------------------------------------------------------------------


def field_names(kind: type) -> list[str] | None:
    """The public fields of a pydantic model or a dataclass; None for any other class."""
    if hasattr(kind, "model_fields"):
        return list(kind.model_fields)
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


class Classes(NamedTuple):
    """The class of rollouts, by name those that its fields may hold, and the enum of its status."""

    rollout: type
    by_name: Mapping[str, type]
    status: type | None

    def named(self, status: Any) -> Any:
        """The status of that value, or name, in the enum that rollouts have here."""
        if self.status is None or not issubclass(self.status, enum.Enum):
            return status
        for member in self.status:
            if status in (member.value, member.name):
                return member
        listed = ", ".join(m.name for m in self.status)
        raise FieldError(f"{self.status.__name__} has no {status!r}; it has: {listed}")


def classes_of(rollout: type, allowed: Mapping[str, type], modules: Iterable[Any]) -> Classes:
    """The classes that the values of rollouts may be of.

    These are the models, dataclasses, enums and named tuples that the fields of a rollout are declared with, and that
    its module and these others define; and, before all of them, those that are allowed.
    """
    found = dict(allowed)
    for annotation in (rollout, *(part for kind in allowed.values() for part in _annotations(kind).values())):
        _collect(annotation, found)
    for module in (sys.modules.get(rollout.__module__), *modules):
        for kind in list(vars(module).values()) if module is not None else ():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                _collect(kind, found)
    status = _annotations(rollout).get("status")
    kinds = [k for k in _parts(status) if isinstance(k, type) and issubclass(k, enum.Enum)]
    return Classes(rollout, found, kinds[0] if kinds else None)


def _collect(kind: Any, found: dict[str, type]) -> None:
    for part in _parts(kind):
        if _is_record(part) and part.__name__ not in found:
            found[part.__name__] = part
            for annotation in _annotations(part).values():
                _collect(annotation, found)


def _is_record(kind: Any) -> bool:
    """True for a class whose instances are their values: an enum, a model, a dataclass, a named tuple."""
    if not isinstance(kind, type):
        return False
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named_tuple or field_names(kind) is not None or issubclass(kind, enum.Enum)


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and all that it is made of."""
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts(inner)


def _annotations(kind: type) -> dict[str, Any]:
    if hasattr(kind, "model_fields"):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    try:
        return typing.get_type_hints(kind)
    except (NameError, TypeError):  # declared with names that are not there
        return {}
