"""Pure, no I/O: a sample of TransferQueue's as an episode of one step, and back.

Tensors of numbers of any dtype are ragged fields of one entry, single numbers fields of one row, texts fields of text.
All else is a tree of JSON, whose arrays and tensors are ragged fields of their own. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from archive.adapters import reading
from archive.base import CorruptStateError, FieldError, StateError, UpgradeError, jsontree
from archive.fields import Array, Ragged, Schema, dtypes, trees

FORMAT = 1
OWN = "transferqueue"  # the key of the metadata, and of the fields that are none of the user's
ATTRIBUTES = ("index", "partition", "key", "tag", "consumed")  # what may change of a sample, saved anew
_PREFIX = "tq-"
EMPTY = f"{_PREFIX}empty"  # the episode of a queue without samples, at which a journal keeps its state
_INDEX = "index"


class Encoded(NamedTuple):
    """A sample as an episode. Its id says what it holds, so that what is there already is known by it."""

    episode_id: str
    fields: dict[str, Any]
    schema: Schema
    metadata: dict[str, Any]


def is_ours(episode_id: str) -> bool:
    """True for an id that `encode` gives, and for `EMPTY`."""
    return episode_id.startswith(_PREFIX)


def encode(index: int, values: Mapping[str, Any], *, where: str) -> Encoded:
    """The sample of a global index; what cannot be kept is a FieldError or StateError that names the field."""
    kinds: dict[str, str] = {}
    fields: dict[str, Any] = {}
    inner: dict[str, Any] = {} if values else {_INDEX: np.array([index], np.int64)}
    for name, value in values.items():
        kinds[name], fields[name], arrays = _encoded(value, where=f"field {name!r} of {where}")
        inner |= {name: {key: _rows(array) for key, array in arrays.items()}} if arrays else {}
    if OWN in fields:
        raise FieldError(
            f"{where} has a field {OWN!r}, which is what the archive keeps its own fields under: rename it"
        )
    fields |= {OWN: inner} if inner else {}
    schema = Schema(json=[(name,) for name, kind in kinds.items() if kind == "json"])
    digest = _digest(kinds, fields)
    return Encoded(f"{_PREFIX}{index}-{digest}", fields, schema, {OWN: {"format": FORMAT, "kinds": kinds}})


def decode(fields: Mapping[str, Any], metadata: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The values of a sample's fields, types and bits included."""
    about = metadata.get(OWN)
    if about is None:
        raise CorruptStateError(f"{where} is no sample that was saved with archive.adapters.{OWN}")
    with reading(where, "sample"):
        if about["format"] > FORMAT:
            raise UpgradeError(
                f"{where} was saved in format {about['format']}, known is {FORMAT}: upgrade this library"
            )
        inner = fields.get(OWN, {})
        return {
            name: _decoded(kind, fields[name], inner.get(name, {}), where=f"field {name!r} of {where}")
            for name, kind in about["kinds"].items()
        }


def check_tag(tag: Any, *, where: str) -> Any:
    """The tag as it will come back; a StateError that names the place if it is no JSON."""
    return jsontree.loads(jsontree.dumps(tag, where=f"tag of {where}"))


def _encoded(value: Any, *, where: str) -> tuple[str, Any, dict[str, Array]]:
    """(kind, field, arrays beside it) of one value."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise FieldError(f"{where}: a nested tensor cannot be stored; store list(value.unbind())")
        return "tensor", _rows(dtypes.from_torch(value, where=where)), {}
    if type(value) is str and _is_text(value):
        return "text", np.array([value], object), {}
    try:
        skeleton, arrays = trees.flatten(value, where=where, copy=False)
    except StateError as e:
        e.add_note("values of fields are kept without pickle: tensors, arrays, JSON, and nests of these")
        raise
    return "json", [skeleton["tree"]], arrays


def _rows(array: Array) -> Any:
    """An array as the one step's value: whole, or of one number."""
    return array.reshape(1) if array.ndim == 0 else Ragged(array, np.array([len(array)]))


def _decoded(kind: str, leaf: Any, arrays: Mapping[str, Any], *, where: str) -> Any:
    if kind == "tensor":
        return _strided(dtypes.to_torch(_whole(leaf)))
    if kind == "text":
        return str(leaf[0])
    if kind != "json":
        raise CorruptStateError(f"{where} is of the kind {kind!r}, which is not known: it is damaged")
    skeleton = {"format": 1, "tree": leaf[0]}
    return trees.unflatten(skeleton, {key: _whole(array) for key, array in arrays.items()}, where=where)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """With the strides of a new one, which TransferQueue counts on: a dimension of size 1 or 0 may have any."""
    odd = tensor.ndim > 0 and tensor.stride(-1) != 1
    return tensor.clone(memory_format=torch.contiguous_format) if odd else tensor


def _whole(leaf: Any) -> Array:
    """The array that `_rows` was given."""
    array: Array = leaf[0] if isinstance(leaf, list) else np.asarray(leaf).reshape(())
    return array


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _digest(kinds: Mapping[str, str], fields: Mapping[str, Any]) -> str:
    """A digest of everything in a sample."""
    out = hashlib.blake2b(repr(sorted(kinds.items())).encode(), digest_size=16)
    for name, leaf in sorted(fields.items()):
        out.update(repr(name).encode())
        for part, value in sorted(leaf.items()) if isinstance(leaf, dict) else [("", leaf)]:
            _add(out, part, value)
    return out.hexdigest()


def _add(out: Any, name: str, value: Any) -> None:
    out.update(repr(name).encode())
    if isinstance(value, dict):
        for key, array in sorted(value.items()):
            _add(out, key, array)
    elif isinstance(value, list):
        out.update(jsontree.dumps(value, where=name).encode())
    else:
        array = value.values if isinstance(value, Ragged) else value
        stored, logical = dtypes.to_stored(array)
        out.update(f"{type(value).__name__}{logical}{array.shape}".encode())
        out.update(repr(stored.tolist()).encode() if stored.dtype.kind == "O" else stored.tobytes())
