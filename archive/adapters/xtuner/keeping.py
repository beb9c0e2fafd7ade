"""Pure, no I/O: values of the standard library, numpy and torch that JSON has no word for, as parts it has, and back.

A value is kept only if its class is exactly one of these: what is made again is of the same class and the same value.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import pathlib
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from archive.base import CorruptStateError, FieldError

_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str)} | {"None": None}


class Kept(NamedTuple):
    """A class, how its values are taken apart, and how they are put together again."""

    kind: type
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _moment(value: Any) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.tzinfo, value.fold]


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


def _dtype_of_torch(name: str) -> Any:
    torch: Any = sys.modules["torch"]
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FieldError(f"torch has no dtype {name!r}")
    return found


_PATHS: dict[str, type] = {
    "Path": type(pathlib.Path()),
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_KEPT: dict[str, Kept] = {
    **{name: Kept(kind, str, kind) for name, kind in _PATHS.items()},
    "datetime": Kept(datetime.datetime, _moment, lambda p: _at(datetime.datetime, *p)),
    "date": Kept(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": Kept(datetime.time, _moment, lambda p: _at(datetime.time, *p)),
    "timedelta": Kept(
        datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda p: datetime.timedelta(*p)
    ),
    "timezone": Kept(datetime.timezone, _zone, lambda p: datetime.timezone(*p)),
    "ZoneInfo": Kept(zoneinfo.ZoneInfo, _key, zoneinfo.ZoneInfo),
    "Decimal": Kept(decimal.Decimal, str, decimal.Decimal),
    "Fraction": Kept(fractions.Fraction, lambda v: [v.numerator, v.denominator], lambda p: fractions.Fraction(*p)),
    "UUID": Kept(uuid.UUID, lambda v: v.hex, uuid.UUID),
    "bytearray": Kept(bytearray, bytes, bytearray),
    "range": Kept(range, lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    "slice": Kept(slice, lambda v: [v.start, v.stop, v.step], lambda p: slice(*p)),
    "deque": Kept(collections.deque, lambda v: [list(v), v.maxlen], lambda p: collections.deque(*p)),
    "OrderedDict": Kept(collections.OrderedDict, _pairs, collections.OrderedDict),
    "Counter": Kept(collections.Counter, _pairs, lambda p: collections.Counter(dict(p))),
    "defaultdict": Kept(
        collections.defaultdict, _factory, lambda p: collections.defaultdict(_FACTORIES[p[0]], map(tuple, p[1]))
    ),
    "SimpleNamespace": Kept(types.SimpleNamespace, vars, lambda p: types.SimpleNamespace(**p)),
    "str_": Kept(np.str_, str, np.str_),
    "bytes_": Kept(np.bytes_, bytes, np.bytes_),
    "MaskedArray": Kept(
        np.ma.MaskedArray,
        lambda v: [v.data, np.ma.getmaskarray(v), v.fill_value],
        lambda p: np.ma.MaskedArray(p[0], mask=p[1], fill_value=p[2]),
    ),
}


def _at(kind: Any, text: str, zone: Any, fold: int) -> Any:
    return kind.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _of_torch() -> dict[str, Kept]:
    torch: Any = sys.modules["torch"]
    return {
        "torch.Size": Kept(torch.Size, list, torch.Size),
        "torch.dtype": Kept(torch.dtype, lambda v: str(v).partition(".")[2], _dtype_of_torch),
        "torch.device": Kept(torch.device, str, torch.device),
        "torch.Parameter": Kept(
            torch.nn.Parameter, lambda v: [v.detach(), v.requires_grad], lambda p: torch.nn.Parameter(*p)
        ),
    }


@functools.cache
def _known(with_torch: bool) -> dict[str, Kept]:
    return _KEPT | _of_torch() if with_torch else _KEPT


@functools.cache
def _names(with_torch: bool) -> dict[type, str]:
    return {kept.kind: name for name, kept in _known(with_torch).items()}


def parts_of(value: Any) -> tuple[str, Any] | None:
    """(name, parts) of a value that is kept by its parts; None for any other."""
    with_torch = "torch" in sys.modules
    name = _names(with_torch).get(type(value))
    return None if name is None else (name, _known(with_torch)[name].parts(value))


def made_of(name: str, parts: Any) -> Any:
    """The value of these parts again."""
    known = _known("torch" in sys.modules)
    if name not in known:
        needs = "torch, which is not imported" if name.startswith("torch.") else "a newer version of this library"
        raise FieldError(f"a group holds a {name}, which needs {needs}")
    try:
        return known[name].make(parts)
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CorruptStateError(f"a group holds a {name} that cannot be made of what is there: {error}") from error
