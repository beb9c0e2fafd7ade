"""Pure, no I/O: nests of arrays as users have them, flattened to named fields in stored form, and built up again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from archive.base import FieldError, escape_path, jsontree, show
from archive.fields import dtypes
from archive.fields.schema import NODES, FieldSpec, Path, Schema

Array = np.ndarray[Any, Any]
MAX_NDIM = 8  # of what zarr stores; other dtypes than its own take one more for their bytes


class Ragged(NamedTuple):
    """One array a step, end to end: `values` (sum of lengths, ...) and `lengths` (T,)."""

    values: Array
    lengths: Array

    def split(self) -> list[Array]:
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


class Fields(NamedTuple):
    """A nest in stored form: number of steps, what the fields are, and their arrays by zarr path."""

    length: int
    specs: dict[str, FieldSpec]
    data: dict[str, Array | Ragged]
    vague: frozenset[str] = frozenset()  # fields given as empty lists, which have no dtype: it is a guess


def normalise(nest: Any, schema: Schema) -> Fields:
    """The stored form of a nest of steps; raises FieldError, naming the field, for what cannot be stored."""
    leaves = dict(flatten(nest, stop=frozenset(schema.json)))
    missing = [p for n, p in schema.next_of.items() if n in leaves and p not in leaves]
    if missing:
        raise FieldError(f"next_of names field {show(missing[0])!r}, which these steps do not have")
    specs: dict[str, FieldSpec] = {}
    data: dict[str, Array | Ragged] = {}
    for path, leaf in leaves.items():
        name = escape_path(path)
        specs[name], value = _field(path, leaf, schema)
        if value is not None:
            data[name] = value
    _check_next_of(specs, schema)
    vague = {escape_path(p) for p, leaf in leaves.items() if p not in schema.json and _has_no_dtype(leaf)}
    return Fields(_length(specs, data), specs, data, frozenset(vague))


def _has_no_dtype(leaf: Any) -> bool:
    """Whether it is a list of empty lists, or of nothing."""
    return isinstance(leaf, list) and all(isinstance(x, (list, tuple)) and not len(x) for x in leaf)


def _check_next_of(specs: Mapping[str, FieldSpec], schema: Schema) -> None:
    """Fields that repeat each other's next rows are one row a step, both."""
    for pair in schema.next_of.items():
        if escape_path(pair[0]) not in specs or specs[escape_path(pair[0])].axis in NODES:
            continue
        for path in pair:
            spec = specs[escape_path(path)]
            if spec.axis != "step":
                raise FieldError(
                    f"field {show(path)!r} is in Schema(next_of=...) and on axis {spec.axis!r}; only fields of one row a step "
                    "repeat each other's next rows: leave it out of next_of"
                )


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
    """What a TensorDict wraps of other values than tensors is a list, one entry a row."""
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


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _field(path: Path, leaf: Any, schema: Schema) -> tuple[FieldSpec, Array | Ragged | None]:
    where = repr(show(path))
    try:
        if leaf is None:
            return FieldSpec(path, "none"), None
        if isinstance(leaf, dict) and not leaf:
            return FieldSpec(path, "dict"), None
        axis, extra = schema.axis_of(path)
        if path in schema.json:
            if axis == "ragged":
                raise FieldError("a field of JSON values is not 'ragged': each step's value may be a list as it is")
            return FieldSpec(path, axis or "step", "json", extra=extra), _json_rows(leaf, where)
        if axis == "ragged" or (axis is None and (isinstance(leaf, Ragged) or _is_list_of_rows(leaf))):
            return _ragged(path, leaf, where)
        array = as_array(leaf, where)
    except FieldError as e:
        raise e if where in str(e) else FieldError(f"field {where}: {e}") from e
    return _plain(path, array, axis or "step", extra, schema)


def _plain(path: Path, array: Array, axis: str, extra: int, schema: Schema) -> tuple[FieldSpec, Array]:
    where = repr(show(path))
    scalar = array.ndim == 0
    if scalar and axis != "free":
        raise FieldError(
            f"field {where} has no step axis (it is 0-d); give one row a step, or declare "
            f"Schema(axes={{{where}: 'free'}}) for a value that belongs to the whole episode"
        )
    try:
        stored, logical = dtypes.to_stored(array[None] if scalar else array)
    except FieldError as e:
        raise FieldError(f"field {where}: {e}") from e
    if stored.ndim > MAX_NDIM:
        raise FieldError(f"field {where} has {stored.ndim} dimensions; at most {MAX_NDIM} can be stored: reshape it")
    follows = schema.next_of.get(path)
    shape = array.shape[1:]
    spec = FieldSpec(path, axis, logical, shape, extra, scalar, escape_path(follows) if follows else "")
    return spec, stored


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


def _is_list_of_rows(leaf: Any) -> bool:
    """A list of one array, or of one list, a step is ragged: that all of them are as long for once is chance."""
    if not isinstance(leaf, list) or any(isinstance(x, (str, bytes, dict)) or x is None for x in leaf):
        return False
    return any(
        isinstance(x, (list, tuple)) or ((isinstance(x, np.ndarray) or is_tensor(x)) and x.ndim > 0) for x in leaf
    )


def _ragged(path: Path, leaf: Any, where: str) -> tuple[FieldSpec, Ragged]:
    if isinstance(leaf, Ragged):
        values, lengths = as_array(leaf.values, where), np.asarray(leaf.lengths, np.int64)
        if lengths.sum() != len(values) or (lengths < 0).any():
            raise FieldError(f"field {where}: lengths add up to {lengths.sum()}, but there are {len(values)} values")
    else:
        if not isinstance(leaf, (Sequence, np.ndarray)) and not is_tensor(leaf):
            raise FieldError(f"field {where} is ragged: give a list of one array a step, not {type(leaf).__name__}")
        pieces = [_row(x, where) for x in leaf]
        if all(isinstance(x, (list, tuple)) for x in leaf):
            pieces = _of_one_dtype(pieces)
        values, lengths = (
            _concatenated(pieces, where),
            np.array([p.shape[:1] or 0 for p in pieces], np.int64).reshape(-1),
        )
    stored, logical = dtypes.to_stored(values)
    if stored.ndim > MAX_NDIM:
        raise FieldError(f"field {where} has {stored.ndim} dimensions; at most {MAX_NDIM} can be stored: reshape it")
    return FieldSpec(path, "ragged", logical, values.shape[1:]), Ragged(stored, lengths)


def _row(x: Any, where: str) -> Array:
    try:
        return as_array(list(x) if isinstance(x, tuple) else x, where)
    except FieldError as e:
        if not isinstance(e.__cause__, ValueError):
            raise
        raise FieldError(
            f"field {where} is ragged, and so are the rows within a step: only one axis may be. Give a step's values end to end "
            f"and their lengths as another field, or declare Schema(json=[{where}])"
        ) from e


def _of_one_dtype(pieces: list[Array]) -> list[Array]:
    """Lists of numbers have no dtype of their own: all of them get the one that holds them all, as in one list."""
    kinds = {p.dtype for p in pieces if p.size}
    if len(kinds) < 2 or any(k.kind not in "biuf" for k in kinds):
        return pieces
    dtype = np.result_type(*kinds)
    return [p.astype(dtype) for p in pieces]


def _concatenated(pieces: list[Array], where: str) -> Array:
    if any(p.ndim == 0 for p in pieces):
        raise FieldError(f"field {where} is ragged: each step is an array of one or more dimensions, got a number")
    full = [p for p in pieces if p.size or p.dtype != np.float64] or pieces[:1]  # [] is float64 to numpy
    kinds = {(p.dtype, p.shape[1:]) for p in full}
    if len(kinds) > 1:
        raise FieldError(f"field {where} is ragged: its steps differ in dtype or in all but the first axis: {kinds}")
    return np.concatenate(full, dtype=full[0].dtype) if full else np.zeros(0)


def _json_rows(leaf: Any, where: str) -> Array:
    if not isinstance(leaf, (list, tuple, np.ndarray)):
        raise FieldError(f"field {where} is JSON: give a list of one value a step, not {type(leaf).__name__}")
    out = np.empty(len(leaf), object)
    for i, value in enumerate(leaf):
        out[i] = jsontree.dumps(value, where=f"{where}[{i}]")
    return out


def _length(specs: Mapping[str, FieldSpec], data: Mapping[str, Array | Ragged]) -> int:
    """Number of steps, on which all step, ragged and offset fields must agree."""
    found: dict[str, int] = {}
    for name, spec in specs.items():
        value = data.get(name)
        if isinstance(value, Ragged):
            found[name] = len(value.lengths)
        elif value is not None and spec.axis == "step":
            found[name] = len(value)
    lengths = set(found.values())
    if len(lengths) > 1:
        listed = ", ".join(f"{show(specs[n].path)}: {k}" for n, k in sorted(found.items()))
        raise FieldError(
            f"fields differ in their number of steps ({listed}); declare the axis of those that are not one row a step, "
            "as in Schema(axes={'obs': 'offset'}) for T+1 observations or 'free'"
        )
    if lengths:
        return lengths.pop()
    rows = {len(data[n]) - s.extra for n, s in specs.items() if s.axis == "offset"}
    return max(0, rows.pop()) if len(rows) == 1 else 0
