"""Pure, no I/O: nests of arrays, flattened to named leaves, and built up again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np

from archive.base import FieldError, show
from archive.fields import dtypes
from archive.fields.schema import FieldSpec, Path

Array = np.ndarray[Any, Any]


class Ragged(NamedTuple):
    """One array a step, end to end: `values` (sum of lengths, ...) and `lengths` (T,)."""

    values: Array
    lengths: Array

    def split(self) -> list[Array]:
        edges = [0, *np.cumsum(self.lengths).tolist()]
        return [self.values[lo:hi] for lo, hi in pairwise(edges)]  # `np.split` takes three times as long


class Fields(NamedTuple):
    """A nest in stored form: number of steps, specs of the fields, and their arrays by zarr path."""

    length: int
    specs: dict[str, FieldSpec]
    data: dict[str, Array | Ragged]
    vague: frozenset[str] = frozenset()  # fields given as empty lists, which have no dtype: it is a guess


def flatten(nest: Any, path: Path = (), stop: frozenset[Path] = frozenset()) -> Iterator[tuple[Path, Any]]:
    """(keys, leaf) of a nest of mappings, TensorDicts, named tuples, dataclasses and pydantic models."""
    entries = None if path in stop else children(nest)
    if entries is None:
        if not path:
            raise FieldError(f"steps must be a nest of named arrays (a dict, say), not {type(nest).__name__}")
        yield path, nest
        return
    if not entries and path:
        yield path, {}
    for key, value in entries:
        if not isinstance(key, str):
            raise FieldError(f"key {key!r} below {show(path)!r} is {type(key).__name__}; field names are strings")
        yield from flatten(value, (*path, key), stop)


def leaves(nest: Any) -> dict[Path, Any]:
    """The leaves of a nest by their paths, without its empty nodes (None, and dicts without a key)."""
    return {path: leaf for path, leaf in flatten(nest) if leaf is not None and not isinstance(leaf, dict)}


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """The named parts of a nest's node, None for a leaf."""
    if isinstance(node, Ragged):
        return None
    if isinstance(node, Mapping):
        return [(key, _plain_entry(value)) for key, value in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, type) or is_tensor(node):
        return None
    if dataclasses.is_dataclass(node) and not hasattr(node, "batch_size"):
        return [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    if hasattr(type(node), "model_fields"):
        return [(name, getattr(node, name)) for name in type(node).model_fields]
    if hasattr(node, "batch_size") and hasattr(node, "items") and hasattr(node, "keys"):
        return [(key, _plain_entry(node.get(key))) for key in node.keys()]  # noqa: SIM118 (it iterates over rows)
    return None


def _plain_entry(value: Any) -> Any:
    """A TensorDict's non-tensor value, which it wraps, as a list of one entry a row; else the value itself."""
    return value.tolist() if getattr(type(value), "_is_non_tensor", False) else value


def unflatten(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The nested dict of named leaves."""
    out: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = out
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return out


def lookup(nest: Any, path: Path, absent: Any = None) -> Any:
    """The field, or nest of fields, at a place of a nest; `absent` where there is none."""
    for key in path:
        if not isinstance(nest, Mapping) or key not in nest:
            return absent
        nest = nest[key]
    return nest


@overload
def mapped(nest: Mapping[Any, Any], change: Callable[[Any], Any]) -> dict[Any, Any]: ...
@overload
def mapped(nest: Any, change: Callable[[Any], Any]) -> Any: ...
def mapped(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest of mappings, each leaf (a Ragged is one) as `change` makes it."""
    return {k: mapped(v, change) for k, v in nest.items()} if isinstance(nest, Mapping) else change(nest)


def to_tensors(nest: Any) -> Any:
    """A nest that was read, with its arrays as tensors: both of a Ragged, each of a list; the rest is unchanged."""
    return mapped(nest, _to_tensor)


def _to_tensor(leaf: Any) -> Any:
    if isinstance(leaf, Ragged):
        return Ragged(*map(dtypes.to_torch, leaf))
    if isinstance(leaf, list):
        return [dtypes.to_torch(row) if isinstance(row, np.ndarray) else row for row in leaf]
    return dtypes.to_torch(leaf) if isinstance(leaf, np.ndarray) else leaf


def unflatten_all(paths: Sequence[Path], columns: Sequence[Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """The nested dicts of `count` rows of leaves; columns[i] has the leaf at paths[i] of each."""
    below: dict[str, list[int]] = {}
    for i, path in enumerate(paths):
        below.setdefault(path[0], []).append(i)
    made = []
    for of in below.values():
        if len(of) == 1 and len(paths[of[0]]) == 1:
            made.append(columns[of[0]])
        elif all(len(paths[i]) > 1 for i in of):
            made.append(unflatten_all([paths[i][1:] for i in of], [columns[i] for i in of], count))
        else:  # a node that is empty in some schemas
            return [unflatten(dict(zip(paths, row, strict=True))) for row in zip(*columns, strict=True)]
    if not made:
        return [{} for _ in range(count)]
    return [dict(zip(below, row, strict=True)) for row in zip(*made, strict=True)]


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(leaf: Any, where: str) -> Array:
    """A leaf as one numpy array; sharing memory where it can."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise FieldError(
            f"field {where} is a masked array; give its data and its mask as two fields, or call .filled()"
        )
    if isinstance(leaf, np.ndarray):
        return np.asarray(leaf)
    if is_tensor(leaf):
        return dtypes.from_torch(leaf, where=where)
    if isinstance(leaf, (str, bytes, tuple, set)) or not (
        np.isscalar(leaf) or hasattr(leaf, "__array__") or isinstance(leaf, list)
    ):
        raise FieldError(
            f"field {where} is a {type(leaf).__name__}, which is no array; give an array, a list of numbers or of "
            "strings, or a dict of them (put values of the whole episode into metadata=)"
        )
    if isinstance(leaf, list) and any(isinstance(x, (str, bytes, dict)) or x is None for x in leaf):
        return _string_list(leaf, where)
    if isinstance(leaf, list) and any(map(is_tensor, leaf)):
        leaf = [dtypes.from_torch(x, where=where) if is_tensor(x) else x for x in leaf]
    try:
        array = np.asarray(leaf)
    except ValueError as e:
        raise FieldError(
            f"field {where} is a list of rows of different shapes; declare Schema(axes={{{where}: 'ragged'}})"
        ) from e
    if array.dtype.kind == "O" and not hasattr(leaf, "__array__"):
        raise FieldError(f"field {where} holds {type(array.flat[0]).__name__} objects; give numbers or strings")
    if array.dtype.kind != "U" or not isinstance(leaf, list):
        return array
    array = np.array(leaf, object)  # as they are: numpy would make strings of numbers, and cut trailing zeros
    _string_list(list(array.flat), where)
    return array


def _string_list(leaf: list[Any], where: str) -> Array:
    bad = [x for x in leaf if not isinstance(x, str)]
    if bad:
        raise FieldError(
            f"field {where} is a list holding a {type(bad[0]).__name__}; declare it in Schema(json=[{where}]) "
            "to store any JSON value a step, or give arrays of numbers"
        )
    out = np.empty(len(leaf), object)
    out[:] = leaf
    return out
