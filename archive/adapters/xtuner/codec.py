"""Pure, no I/O: rollouts as rows of fields and JSON, and again as rollouts.

Works on the public fields of whatever the rollouts are (pydantic models or dataclasses). What is not JSON is written as
a dict of one key, its tag, beginning with `TAG`. Instances are made without their `__init__`, as by pickle.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from archive.adapters.xtuner.values import Classes, field_names, made_of, parts_of
from archive.base import FieldError, UsageError, jsontree
from archive.fields import Array, Ragged, dtypes, is_tensor

TOKEN_FIELDS = frozenset(
    {"prompt_ids", "tokens", "response_ids", "logprobs", "response_mask", "response_model_steps", "input_ids", "labels"}
)
VOLATILE = ("status", "seq_staleness")  # change after insertion: attributes, no part of the content
TEXT_FIELD, LONG_FIELD, ID_FIELD, REWARD_FIELD = "response", "long", "rollout_id", "reward"
LIST_FROM = 64  # numbers in a list that is a field of its own, outside TOKEN_FIELDS
INLINE_BYTES = 1024
TAG = "$xt."
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_BASES = (str, int, float, complex, bytes, list, tuple, dict, set, frozenset)  # of which other classes are derived

Resolve = Callable[[Any], Any]


class RestoredStep(int):
    """The model step at which a manager was saved; `report` says what came back."""

    report: Any


def values_of(record: Any) -> dict[str, Any] | None:
    """The public fields of a pydantic model or a dataclass with their values; None for anything else."""
    names = None if isinstance(record, type) else field_names(type(record))
    if names is None:
        return None
    own = {name: getattr(record, name) for name in names}
    return own | dict(getattr(record, "__pydantic_extra__", None) or {})


# -- taken apart -------------------------------------------------------------------------------------------------------


class Encoder:
    """The rollouts of one group, taken apart: `rows` has a (field -> JSON-able value, names of unset fields) of each.

    Without `resolve` object refs stand for what they refer to, which is enough for a digest.
    """

    def __init__(self, group: Sequence[Any], resolve: Resolve | None) -> None:
        self._group = group
        self._resolve = resolve
        self._row = 0  # the rollout that is being encoded
        self._names: dict[tuple[str, str, tuple[int, ...]], str] = {}
        self._arrays: dict[str, list[list[Array]]] = {}
        self._text = [""] * len(group)
        self._references: dict[str, tuple[int, int]] = {}  # ref -> first row that has it, number
        self.rows = [self._rollout(row, rollout) for row, rollout in enumerate(group)]

    def _rollout(self, row: int, rollout: Any) -> tuple[dict[str, Any], list[str]]:
        values = values_of(rollout)
        if values is None:
            raise FieldError(f"rollout {row} of a group is a {type(rollout).__name__}: it has no fields to save")
        self._row = row
        try:
            taken = {k: self._field(k, v) for k, v in values.items() if k not in VOLATILE}
        except RecursionError as error:
            raise FieldError(f"rollout {row} of a group holds a value that contains itself") from error
        return taken, _unset(rollout, values)

    def _field(self, name: str, value: Any) -> Any:
        if name == TEXT_FIELD and type(value) is str and _is_text(value):
            self._text[self._row] = value
            return {TAG + "text": True}
        if name in TOKEN_FIELDS and type(value) is list and (array := _numbers(value)) is not None:
            return self._in_field((name,), array, "list")
        return self._value(value, (name,))

    def _value(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            array = _numbers(value) if len(value) >= LIST_FROM else None
            return [self._value(v, path) for v in value] if array is None else self._in_field(path, array, "list")
        if kind is tuple:
            return tuple(self._value(v, path) for v in value)
        if kind is dict:
            return self._dict(value, path)
        if kind in (set, frozenset):
            return {TAG + kind.__name__: [self._value(v, path) for v in sorted(value, key=repr)]}
        if kind is RestoredStep:
            return int(value)
        if isinstance(value, enum.Enum):
            return {TAG + "enum": [kind.__name__, self._value(value.value, path)]}
        if _is_reference(value):
            return self._reference(value, path)
        if (parts := parts_of(value)) is not None:
            return {TAG + "kept": [parts[0], self._value(parts[1], path)]}
        if isinstance(value, (np.ndarray, np.generic)) or is_tensor(value):
            return self._array(value, path)
        return self._record(value, path)

    def _dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        entries = [(k, self._value(v, (*path, str(k)))) for k, v in value.items()]
        if any(k.startswith(TAG) if type(k) is str else type(k) not in _PLAIN for k in value):
            return {TAG + "dict": [[self._value(k, path), v] for k, v in entries]}
        return dict(entries)

    def _record(self, value: Any, path: tuple[str, ...]) -> Any:
        """A value of a class that is not known here, by the name of the class and what it holds."""
        values, name = values_of(value), type(value).__name__
        if values is not None:
            fields = {k: self._value(v, (*path, k)) for k, v in values.items()}
            private = self._dict(getattr(value, "__pydantic_private__", None) or {}, path)
            return {TAG + "model": [name, fields, _unset(value, values), *([private] if private else [])]}
        base = next((plain for plain in _BASES if isinstance(value, plain)), None)
        if base is None:
            return value  # refused by name when it is written
        own = self._dict(getattr(value, "__dict__", {}), path)
        return {TAG + "like": [name, self._value(base(value), path), *([own] if own else [])]}

    def _reference(self, value: Any, path: tuple[str, ...]) -> Any:
        key = value.hex()
        if self._resolve is None:
            return {TAG + "ref": key}
        first, number = self._references.setdefault(key, (self._row, len(self._references)))
        if first < self._row:  # rollouts of one prompt share what it brings
            return {TAG + "same": number}
        return {TAG + "ref": [number, self._value(self._resolve(value), path)]}

    def _array(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = "numpy" if isinstance(value, np.ndarray) else "scalar" if isinstance(value, np.generic) else "tensor"
        where = ".".join(path)
        array = dtypes.from_torch(value, where=where) if kind == "tensor" else np.asarray(value)
        if array.dtype.kind == "O" and not all(isinstance(one, str) for one in array.flat):
            raise FieldError(
                f"{where} of a group is an array of Python objects that are not all strings; make it a list"
            )
        if array.ndim == 0 or (array.nbytes <= INLINE_BYTES and array.dtype.kind in "biufc"):
            stored, logical = dtypes.to_stored(array[None])
            return {TAG + "inline": [kind, logical, list(array.shape), stored]}
        return self._in_field(path, array, kind)

    def _in_field(self, path: tuple[str, ...], array: Array, kind: str) -> Any:
        """Keep it as rows of a field of its path, dtype and shape of a row."""
        base = ".".join(path)
        key = (base, dtypes.logical_name(array.dtype) if array.dtype.kind != "O" else "str", array.shape[1:])
        if key not in self._names:
            taken = {TEXT_FIELD, LONG_FIELD, ID_FIELD, REWARD_FIELD, *self._names.values()}
            names = itertools.chain([base], (f"{base}~{again}" for again in itertools.count(2)))
            self._names[key] = next(name for name in names if name not in taken)
        name = self._names[key]
        self._arrays.setdefault(name, [[] for _ in self._group])[self._row].append(array)
        return {TAG + "rows": [name, len(array), kind]}

    def digest(self) -> str:
        """A digest of everything encoded."""
        out = hashlib.blake2b(jsontree.dumps(self.rows, where="group").encode(), digest_size=16)
        for text in self._text:
            out.update(repr(text).encode())
        for name, kept in sorted(self._arrays.items()):
            out.update(name.encode())
            for array in (a for row in kept for a in row):
                stored, logical = dtypes.to_stored(array)
                out.update(f"{logical}{array.shape}".encode())
                out.update(repr(stored.tolist()).encode() if stored.dtype.kind == "O" else stored.tobytes())
        return out.hexdigest()

    def fields(self) -> dict[str, Any]:
        """The fields of the episode, one entry a rollout."""
        out: dict[str, Any] = {TEXT_FIELD: np.array(self._text, object)}
        for name, kept in self._arrays.items():
            lengths = np.array([sum(map(len, row)) for row in kept], np.int64)
            out[name] = Ragged(np.concatenate([a for row in kept for a in row]), lengths)
        ids = [getattr(r, "rollout_id", None) for r in self._group]
        if ids and all(type(i) is int and abs(i) < 2**63 for i in ids):
            out[ID_FIELD] = np.array(ids, np.int64)
        scores = [_score(getattr(r, "reward", None)) for r in self._group]
        if scores and None not in scores:
            out[REWARD_FIELD] = np.array(scores, np.float64)
        return out


def _is_reference(value: Any) -> bool:
    """True for a Ray object ref."""
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(value, getattr(ray, "ObjectRef", ()))


def _unset(record: Any, values: Mapping[str, Any]) -> list[str]:
    """The names of a model's fields that nobody has set; none for a class that does not know."""
    given = getattr(record, "model_fields_set", None)
    return [] if given is None else sorted(set(values) - set(given))


def _score(reward: Any) -> float | None:
    score = reward.get("score") if isinstance(reward, Mapping) else reward
    return float(score) if isinstance(score, (int, float)) else None


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _numbers(value: list[Any]) -> Array | None:
    """A list of Python ints or floats as an array that gives the same list back; None for any other."""
    kinds = set(map(type, value))
    if kinds == {float}:
        return np.array(value, np.float64)
    if not kinds or not kinds <= {int, RestoredStep}:
        return None
    try:
        array = np.array(value, np.int64)
    except OverflowError:
        return None
    small = array.astype(np.int32)
    return small if (small == array).all() else array


# -- made again --------------------------------------------------------------------------------------------------------


class Decoder:
    """Makes rollouts of these classes.

    put: makes a reference of what was one.  lost: counts the values that the classes here have no field for.
    """

    def __init__(self, classes: Classes, put: Resolve) -> None:
        self.classes = classes
        self.lost: Counter[str] = Counter()
        self._put = put
        self._fields: Mapping[str, Any] = {}
        self._row = 0  # the rollout that is being decoded
        self._taken: Counter[str] = Counter()  # rows of each field that it has used
        self._references: dict[int, Any] = {}
        self._is_dropped = False  # what is decoded is of a field that its class no longer has

    def group(self, fields: Mapping[str, Any], metadata: Mapping[str, Any], volatile: Any) -> list[Any]:
        """The rollouts of an episode.  volatile: status and staleness of each."""
        about = metadata["xtuner"]
        self._fields, self._references, self._is_dropped = fields, {}, False
        long = [jsontree.loads(text, where="group") for text in fields[LONG_FIELD]]
        common = {**about["common"], **(long[0]["common"] if long else {})}
        out = []
        for self._row, own in enumerate(about["rollouts"]):
            self._taken.clear()
            values = self._fields_of(self.classes.rollout, {**common, **own, **long[self._row]["own"]})
            status, staleness = volatile[self._row]
            values["status"] = self.classes.named(status)
            values |= {} if staleness is None else {"seq_staleness": staleness}
            out.append(construct(self.classes.rollout, values, about["unset"][self._row], self.lost))
        return out

    def _fields_of(self, kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a record; those that its class has no field for, too, as later ones may refer to them."""
        out, dropped, names = {}, self._is_dropped, field_names(kind) or ()
        for name, value in values.items():
            self._is_dropped = dropped or not (name in names or _is_open(kind))
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
            "kept": lambda args: made_of(args[0], self._value(args[1])),
            "like": lambda args: self._like(*args),
        }
        if tag not in simple:
            raise FieldError(f"a group holds a value of kind {tag!r}, which this version does not know: upgrade it")
        return simple[tag](payload)

    def _rows(self, name: str, count: int, kind: str) -> Any:
        start = self._taken[name]
        self._taken[name] += count
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
        kind = self._class(name, lambda kind: field_names(kind) is not None)
        values = self._fields_of(kind, fields)
        if kind is dict:
            return values
        made = construct(kind, values, unset, self.lost)
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
        kind = dict if self._is_dropped else self.classes.by_name.get(name)
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


def construct(
    kind: type, values: Mapping[str, Any], unset: Sequence[str] = (), lost: Counter[str] | None = None
) -> Any:
    """An instance with these values as they are.  lost: counts those that the class has no field for."""
    names = field_names(kind) or ()
    known = {k: v for k, v in values.items() if k in names or _is_open(kind)}
    if lost is not None:
        lost.update(f"{kind.__name__}.{name}" for name in values if name not in known)
    if not hasattr(kind, "model_construct"):
        return _dataclass(kind, known)
    made = kind.model_construct(set(known) - set(unset), **known)
    made.__dict__.update({k: v for k, v in known.items() if k in names})  # as they were, whatever it derives
    return made


def _is_open(kind: type) -> bool:
    """True for a class that takes any field."""
    return kind is dict or getattr(kind, "model_config", {}).get("extra") == "allow"


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
