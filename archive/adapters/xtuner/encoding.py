"""Pure, no I/O: rollouts taken apart: their arrays as rows of fields, the rest as JSON.

Works on the public fields of whatever the rollouts are (pydantic models or dataclasses). What is not JSON is written as
a dict of one key, its tag, beginning with `TAG`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from archive.adapters.xtuner import keeping
from archive.adapters.xtuner.progress import RestoredStep
from archive.base import FieldError, jsontree
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
_BASES = (str, int, float, complex, bytes, list, tuple, dict, set, frozenset)  # what other classes are made of
_RESERVED = (TEXT_FIELD, LONG_FIELD, ID_FIELD, REWARD_FIELD)

Resolve = Callable[[Any], Any]


def is_reference(value: Any) -> bool:
    """Whether it is a Ray object ref."""
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(value, getattr(ray, "ObjectRef", ()))


def values_of(record: Any) -> dict[str, Any] | None:
    """Public field -> value of a pydantic model or a dataclass; None for anything else."""
    if isinstance(record, type):
        return None
    if hasattr(type(record), "model_fields"):
        own = {name: getattr(record, name) for name in type(record).model_fields}
        return own | dict(getattr(record, "__pydantic_extra__", None) or {})
    if dataclasses.is_dataclass(record):
        return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return None


class Encoder:
    """Encodes the rollouts of one group, collecting their arrays by field."""

    def __init__(self, size: int, resolve: Resolve | None) -> None:  # without it, only for the digest
        self._size = size
        self._resolve = resolve
        self._row = 0  # the rollout that is being encoded
        self._names: dict[tuple[str, str, tuple[int, ...]], str] = {}
        self._arrays: dict[str, list[list[Array]]] = {}
        self._text = [""] * size
        self._references: dict[str, tuple[int, int]] = {}  # ref -> first row that has it, number

    def rollout(self, row: int, rollout: Any) -> tuple[dict[str, Any], list[str]]:
        """(field -> JSON-able value, names of the fields that were not set) of one rollout."""
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
            return self._rows((name,), array, "list")
        return self._value(value, (name,))

    def _value(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            array = _numbers(value) if len(value) >= LIST_FROM else None
            return self._rows(path, array, "list") if array is not None else [self._value(v, path) for v in value]
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
        if is_reference(value):
            return self._reference(value, path)
        if (parts := keeping.parts_of(value)) is not None:
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
        return self._rows(path, array, kind)

    def _rows(self, path: tuple[str, ...], array: Array, kind: str) -> Any:
        """Keep it as rows of a field of its path, dtype and shape of a row."""
        base = ".".join(path)
        key = (base, dtypes.logical_name(array.dtype) if array.dtype.kind != "O" else "str", array.shape[1:])
        if key not in self._names:
            taken = {*_RESERVED, *self._names.values()}
            names = itertools.chain([base], (f"{base}~{again}" for again in itertools.count(2)))
            self._names[key] = next(name for name in names if name not in taken)
        name = self._names[key]
        self._arrays.setdefault(name, [[] for _ in range(self._size)])[self._row].append(array)
        return {TAG + "rows": [name, len(array), kind]}

    def digest(self, rows: Sequence[Any]) -> str:
        """Of everything encoded."""
        out = hashlib.blake2b(jsontree.dumps(list(rows), where="group").encode(), digest_size=16)
        for text in self._text:
            out.update(repr(text).encode())
        for name, kept in sorted(self._arrays.items()):
            out.update(name.encode())
            for array in (a for row in kept for a in row):
                stored, logical = dtypes.to_stored(array)
                out.update(f"{logical}{array.shape}".encode())
                out.update(repr(stored.tolist()).encode() if stored.dtype.kind == "O" else stored.tobytes())
        return out.hexdigest()

    def fields(self, group: Sequence[Any]) -> dict[str, Any]:
        """The fields of the episode, one entry a rollout."""
        out: dict[str, Any] = {TEXT_FIELD: np.array(self._text, object)}
        for name, kept in self._arrays.items():
            lengths = np.array([sum(map(len, row)) for row in kept], np.int64)
            out[name] = Ragged(np.concatenate([a for row in kept for a in row]), lengths)
        ids = [getattr(r, "rollout_id", None) for r in group]
        if group and all(type(i) is int and abs(i) < 2**63 for i in ids):
            out[ID_FIELD] = np.array(ids, np.int64)
        scores = [_score(getattr(r, "reward", None)) for r in group]
        if group and None not in scores:
            out[REWARD_FIELD] = np.array(scores, np.float64)
        return out


def _unset(record: Any, values: Mapping[str, Any]) -> list[str]:
    """Names of a model's fields that nobody has set; none of what does not know."""
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
