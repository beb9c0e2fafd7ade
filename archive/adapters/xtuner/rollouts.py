"""Pure, no I/O: the episode that a group of rollouts was saved as, made into rollouts again.

Classes come from the buffer that is restored into and from the caller, never from names in the bucket: those only
choose among them. Instances are made without their `__init__`, as by pickle.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from archive.adapters.xtuner import keeping
from archive.adapters.xtuner.encoding import LONG_FIELD, TAG, TEXT_FIELD, Resolve
from archive.base import FieldError, UsageError, jsontree
from archive.fields import Array, dtypes


@dataclasses.dataclass(frozen=True)
class Classes:
    """What rollouts are made of: their own class, and by name those that its fields may hold."""

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
    """The class of rollouts, and by name those that values may be of.

    These are the models, dataclasses, enums and named tuples that its fields are declared with, and that its module
    and these others define; and, before all of them, those that are allowed.
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
    """Whether it is a class whose instances are their values: an enum, a model, a dataclass, a named tuple."""
    if not isinstance(kind, type):
        return False
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named_tuple or _is_model(kind) or issubclass(kind, enum.Enum)


def _is_model(kind: type) -> bool:
    return hasattr(kind, "model_fields") or dataclasses.is_dataclass(kind)


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


@dataclasses.dataclass
class Losses:
    """What did not fit into the classes that there are, counted."""

    fields: Counter[str] = dataclasses.field(default_factory=Counter)  # of a class that has no such field


def decode(
    fields: Mapping[str, Any], metadata: Mapping[str, Any], volatile: Sequence[Sequence[Any]], classes: Classes,
    put: Resolve, losses: Losses,
) -> list[Any]:  # fmt: skip
    """The rollouts of a group; `put` makes a reference of what was one."""
    about = metadata["xtuner"]
    decoder = _Decoder(fields, classes, put, losses)
    long = [jsontree.loads(text, where="group") for text in fields[LONG_FIELD]]
    common = {**about["common"], **(long[0]["common"] if long else {})}
    out = []
    for row, own in enumerate(about["rollouts"]):
        values = decoder.rollout(row, {**common, **own, **long[row]["own"]})
        status, staleness = volatile[row]
        values["status"] = classes.named(status)
        values |= {} if staleness is None else {"seq_staleness": staleness}
        out.append(construct(classes.rollout, values, about["unset"][row], losses))
    return out


class _Decoder:
    def __init__(self, fields: Mapping[str, Any], classes: Classes, put: Resolve, losses: Losses) -> None:
        self._fields = fields
        self._classes = classes
        self._put = put
        self._losses = losses
        self._row = 0  # the rollout that is being decoded
        self._taken: dict[str, int] = {}
        self._references: dict[int, Any] = {}
        self._is_dropped = False  # what is decoded is of a field that its class no longer has

    def rollout(self, row: int, values: Mapping[str, Any]) -> dict[str, Any]:
        self._row = row
        self._taken = {}
        return self._fields_of(self._classes.rollout, values)

    def _fields_of(self, kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a record; those that its class has no field for, too, as later ones may refer to them."""
        out, dropped = {}, self._is_dropped
        for name, value in values.items():
            self._is_dropped = dropped or not _has_field(kind, name)
            out[name] = self._value(value)
        self._is_dropped = dropped
        return out

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(v) for v in value]
        if isinstance(value, tuple):
            return tuple(self._value(v) for v in value)
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), None)
        if len(value) == 1 and isinstance(tag, str) and tag.startswith(TAG):
            return self._tagged(tag[len(TAG) :], value[tag])
        return {k: self._value(v) for k, v in value.items()}

    def _tagged(self, tag: str, payload: Any) -> Any:
        simple: dict[str, Callable[[Any], Any]] = {
            "text": lambda _: str(self._fields[TEXT_FIELD][self._row]),
            "dict": lambda pairs: {self._value(k): self._value(v) for k, v in pairs},
            "set": lambda items: set(self._value(items)),
            "frozenset": lambda items: frozenset(self._value(items)),
            "same": lambda number: self._references[number],
            "rows": lambda args: self._rows(*args),
            "inline": lambda args: _inline(*args),
            "enum": lambda args: self._enum(*args),
            "ref": lambda args: self._reference(*args),
            "model": lambda args: self._record(*args),
            "kept": lambda args: keeping.made_of(args[0], self._value(args[1])),
            "like": lambda args: self._like(*args),
        }
        if tag not in simple:
            raise FieldError(f"a group holds a value of kind {tag!r}, which this version does not know: upgrade it")
        return simple[tag](payload)

    def _rows(self, name: str, count: int, kind: str) -> Any:
        start = self._taken.get(name, 0)
        self._taken[name] = start + count
        rows = self._fields[name][self._row][start : start + count]
        return rows.tolist() if kind == "list" else _as_kind(np.array(rows, copy=True), kind)

    def _reference(self, number: int, value: Any) -> Any:
        self._references[number] = self._put(self._value(value))
        return self._references[number]

    def _enum(self, name: str, value: Any) -> Any:
        kind, plain = self._class(name, lambda kind: issubclass(kind, enum.Enum)), self._value(value)
        try:
            return plain if kind is dict else kind(plain)
        except ValueError as error:
            raise FieldError(f"{name} has no {plain!r}: give one that has it by classes={{{name!r}: ...}}") from error

    def _record(self, name: str, fields: Mapping[str, Any], unset: Sequence[str], private: Any = None) -> Any:
        kind = self._class(name, _is_model)
        values = self._fields_of(kind, fields)
        if kind is dict:
            return values
        made = construct(kind, values, unset, self._losses)
        if private is not None and hasattr(made, "__pydantic_private__"):
            object.__setattr__(made, "__pydantic_private__", self._value(private))
        return made

    def _like(self, name: str, value: Any, own: Any = None) -> Any:
        """An instance of a class that is derived from that of the value."""
        plain = self._value(value)
        base: Any = type(plain)
        kind = self._class(name, lambda kind: issubclass(kind, base) and not issubclass(kind, enum.Enum))
        if kind is dict:
            return plain
        made = base.__new__(kind, plain)
        if base in (list, dict, set):
            base.__init__(made, plain)
        if own is not None:
            vars(made).update(self._value(own))
        return made

    def _class(self, name: str, fits: Callable[[type], bool]) -> type:
        """The class of that name; `dict` where nobody wants one."""
        kind = dict if self._is_dropped else self._classes.by_name.get(name)
        if kind is None:
            raise UsageError(
                f"a group holds a {name}, a class that is not known here: give it by classes=[{name}] of restore() or "
                f"follow(), or classes={{{name!r}: dict}} to have what it holds as a plain value"
            )
        if kind is not dict and not fits(kind):
            raise FieldError(f"a group holds a {name} that is no instance of {kind!r}: give its class by classes=")
        return kind


def _inline(kind: str, logical: str, shape: Sequence[int], stored: Array) -> Any:
    return _as_kind(dtypes.from_stored(stored, logical).reshape(tuple(shape)), kind)


def _as_kind(array: Array, kind: str) -> Any:
    if kind == "tensor":
        return dtypes.to_torch(array)
    return array[()] if kind == "scalar" else array


def construct(kind: type, values: Mapping[str, Any], unset: Sequence[str], losses: Losses) -> Any:
    """An instance with these values as they are; what the class has no field for is counted."""
    names = set(_field_names(kind))
    known = {k: v for k, v in values.items() if _has_field(kind, k)}
    losses.fields.update(f"{kind.__name__}.{name}" for name in values if name not in known)
    if not hasattr(kind, "model_construct"):
        return _dataclass(kind, known)
    made = kind.model_construct(set(known) - set(unset), **known)
    made.__dict__.update({k: v for k, v in known.items() if k in names})  # as they were, whatever it derives
    return made


def _has_field(kind: type, name: str) -> bool:
    is_open = kind is dict or getattr(kind, "model_config", {}).get("extra") == "allow"
    return is_open or name in _field_names(kind)


def _dataclass(kind: type, known: Mapping[str, Any]) -> Any:
    """An instance with these values; fields that came later have their defaults."""
    made: Any = object.__new__(kind)
    for field in dataclasses.fields(kind):
        if field.name in known:
            value = known[field.name]
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            value = field.default
        else:
            raise FieldError(f"{kind.__name__} has a field {field.name!r} without a default, which was not saved")
        object.__setattr__(made, field.name, value)
    return made


def _field_names(kind: type) -> Iterator[str]:
    if hasattr(kind, "model_fields"):
        yield from kind.model_fields
    elif dataclasses.is_dataclass(kind):
        yield from (f.name for f in dataclasses.fields(kind))
