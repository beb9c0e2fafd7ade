"""Pure, no I/O: the episode that a group of rollouts was saved as, made into rollouts again.

Classes come from the buffer that is restored into, never from names in the bucket: those only choose among them.
"""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from archive.adapters.xtuner.encoding import LONG_FIELD, TAG, TEXT_FIELD, Resolve
from archive.base import FieldError, jsontree
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


def classes_of(rollout: type) -> Classes:
    """The class of rollouts, and the models, dataclasses and enums that its fields are declared with."""
    found: dict[str, type] = {}
    _collect(rollout, found)
    status = _annotations(rollout).get("status")
    kinds = [k for k in _parts(status) if isinstance(k, type) and issubclass(k, enum.Enum)]
    return Classes(rollout, found, kinds[0] if kinds else None)


def _collect(kind: Any, found: dict[str, type]) -> None:
    for part in _parts(kind):
        known = isinstance(part, type) and (issubclass(part, enum.Enum) or any(True for _ in _field_names(part)))
        if known and part.__name__ not in found:
            found[part.__name__] = part
            for annotation in _annotations(part).values():
                _collect(annotation, found)


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and all that it is made of."""
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts(inner)


def _annotations(kind: type) -> dict[str, Any]:
    if hasattr(kind, "model_fields"):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return {f.name: f.type for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}


@dataclasses.dataclass
class Losses:
    """What did not fit into the classes that there are, counted."""

    fields: Counter[str] = dataclasses.field(default_factory=Counter)  # of a class that has no such field
    classes: Counter[str] = dataclasses.field(default_factory=Counter)  # that are not known: left as dicts


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

    def rollout(self, row: int, values: Mapping[str, Any]) -> dict[str, Any]:
        self._row = row
        self._taken = {}
        return {name: self._value(value) for name, value in values.items()}

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
            "dict": lambda pairs: {k: self._value(v) for k, v in pairs},
            "set": lambda items: set(self._value(items)),
            "frozenset": lambda items: frozenset(self._value(items)),
            "same": lambda number: self._references[number],
            "rows": lambda args: self._rows(*args),
            "inline": lambda args: _inline(*args),
            "enum": lambda args: self._enum(*args),
            "ref": lambda args: self._reference(*args),
            "model": lambda args: self._record(*args),
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
        kind, plain = self._class(name), self._value(value)
        return plain if kind is None else kind(plain)

    def _record(self, name: str, fields: Mapping[str, Any], unset: Sequence[str]) -> Any:
        kind, values = self._class(name), {k: self._value(v) for k, v in fields.items()}
        return values if kind is None else construct(kind, values, unset, self._losses)

    def _class(self, name: str) -> type | None:
        """The class of that name; None, and counted, where there is none."""
        if name not in self._classes.by_name:
            self._losses.classes[name] += 1
        return self._classes.by_name.get(name)


def _inline(kind: str, logical: str, shape: Sequence[int], stored: Array) -> Any:
    return _as_kind(dtypes.from_stored(stored, logical).reshape(tuple(shape)), kind)


def _as_kind(array: Array, kind: str) -> Any:
    if kind == "tensor":
        return dtypes.to_torch(array)
    return array[()] if kind == "scalar" else array


def construct(kind: type, values: Mapping[str, Any], unset: Sequence[str], losses: Losses) -> Any:
    """An instance with these values as they are; what the class has no field for is counted."""
    names = set(_field_names(kind))
    extra = hasattr(kind, "model_config") and kind.model_config.get("extra") == "allow"
    if not extra:
        losses.fields.update(f"{kind.__name__}.{name}" for name in values if name not in names)
    known = {k: v for k, v in values.items() if extra or k in names}
    if not hasattr(kind, "model_construct"):
        return kind(**known)
    made = kind.model_construct(set(known) - set(unset), **known)
    made.__dict__.update({k: v for k, v in known.items() if k in names})  # as they were, whatever it derives
    return made


def _field_names(kind: type) -> Iterator[str]:
    if hasattr(kind, "model_fields"):
        yield from kind.model_fields
    elif dataclasses.is_dataclass(kind):
        yield from (f.name for f in dataclasses.fields(kind))
