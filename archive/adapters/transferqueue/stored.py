"""Pure, no I/O: a sample of TransferQueue's as an episode of one step, its controller as a tree of arrays and JSON, and
both back. Nothing is pickled.

Tensors of numbers of any dtype are ragged fields of one entry, single numbers fields of one row, texts fields of text.
All else is a tree of JSON, whose arrays and tensors are ragged fields of their own. The controller's tree is made of
the public attributes of its partitions. Keys and tags are no part of it: they are attributes of the samples' episodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from archive.adapters import reading
from archive.base import CorruptStateError, FieldError, StateError, UpgradeError, UsageError, jsontree
from archive.fields import Array, Ragged, Schema, dtypes, trees

FORMAT = 1
SYSTEM = "transferqueue"  # the key of the metadata, and of the fields that are none of the user's
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
    if SYSTEM in fields:
        raise FieldError(
            f"{where} has a field {SYSTEM!r}, which is what the archive keeps its own fields under: rename it"
        )
    fields |= {SYSTEM: inner} if inner else {}
    schema = Schema(json=[(name,) for name, kind in kinds.items() if kind == "json"])
    digest = _digest(kinds, fields)
    return Encoded(f"{_PREFIX}{index}-{digest}", fields, schema, {SYSTEM: {"format": FORMAT, "kinds": kinds}})


def decode(fields: Mapping[str, Any], metadata: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The values of a sample's fields, types and bits included."""
    about = metadata.get(SYSTEM)
    if about is None:
        raise CorruptStateError(f"{where} is no sample that was saved with archive.adapters.{SYSTEM}")
    with reading(where, "sample"):
        if about["format"] > FORMAT:
            raise UpgradeError(
                f"{where} was saved in format {about['format']}, known is {FORMAT}: upgrade this library"
            )
        inner = fields.get(SYSTEM, {})
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


# -- the controller ----------------------------------------------------------------------------------------------------


_FIELD = {"global_indexes", "dtype", "shape", "is_nested", "is_non_tensor", "per_sample_shapes"}
_PLAIN = ("created_at", "production_status", "consumption_status", "field_name_mapping", "field_custom_backend_meta")
_SETS = ("global_indexes", "pre_allocated_global_indexes")
_KEYS = ("keys_mapping", "revert_keys_mapping")
_PARTITION = {"partition_id", "field_metadata", "custom_meta", *_KEYS, *_PLAIN, *_SETS}


@dataclass(frozen=True)
class Sample:
    """One global index of a partition: who it is, and which of its fields are there."""

    index: int
    partition: str
    created_at: float  # of the partition: another one may get its name
    key: str | None
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name in messages."""
        who = f"sample {self.index}" if self.key is None else f"sample {self.key!r}"
        return f"{who} of partition {self.partition!r}"


class Classes(NamedTuple):
    """The classes of TransferQueue's controller that partitions are made of."""

    partition: Any
    field: Any


@dataclass(frozen=True)
class Cut:
    """The controller at one moment: its partitions as they are, the index manager's and the sampler's state."""

    partitions: Mapping[str, Any]
    index_manager: Mapping[str, Any]
    sampler: Mapping[str, Any]
    sampler_class: str

    @property
    def samples(self) -> list[Sample]:
        """The samples of all partitions, by partition and index."""
        return [sample for name, partition in self.partitions.items() for sample in _samples(name, partition)]

    @property
    def bound(self) -> int:
        """One more than the largest index that may ever have been given out."""
        return int(self.index_manager["global_index_counter"])


def _samples(name: str, partition: Any) -> Iterable[Sample]:
    known = {*partition.global_indexes, *partition.keys_mapping.values(), *partition.custom_meta}
    status = partition.production_status.numpy()
    columns = {field: column for field, column in partition.field_name_mapping.items() if column < status.shape[1]}
    for index in sorted(known):
        row = status[index] if index < len(status) else ()
        there = tuple(field for field, column in columns.items() if len(row) and row[column])
        yield Sample(index, name, partition.created_at, partition.revert_keys_mapping.get(index), there)


# -- to a tree --------------------------------------------------------------------------------------------------------


def to_tree(cut: Cut, *, storage_saved: bool) -> dict[str, Any]:
    """The state of a checkpoint."""
    manager = cut.index_manager
    return {
        "system": SYSTEM,
        "format": FORMAT,
        "storage_saved": storage_saved,
        "sampler_class": cut.sampler_class,
        "sampler": dict(cut.sampler),
        "partitions": {name: _partition_tree(partition) for name, partition in cut.partitions.items()},
        "index_manager": {
            "partition_to_indexes": {n: _indexes(sorted(s)) for n, s in manager["partition_to_indexes"].items()},
            "reusable_indexes": _indexes(manager["reusable_indexes"]),
            "global_index_counter": int(manager["global_index_counter"]),
            "allocated_indexes": _indexes(sorted(manager["allocated_indexes"])),
        },
    }


def _partition_tree(partition: Any) -> dict[str, Any]:
    _check_known(partition, _PARTITION)
    plain = {name: getattr(partition, name) for name in _PLAIN}
    sets = {name: _indexes(sorted(getattr(partition, name))) for name in _SETS}
    fields = {name: _field_tree(field) for name, field in partition.field_metadata.items()}
    return plain | sets | {"field_metadata": fields, "keyed": _indexes(partition.keys_mapping.values())}


def _field_tree(field: Any) -> dict[str, Any]:
    _check_known(field, _FIELD)
    plain = {name: getattr(field, name) for name in ("dtype", "shape", "is_nested", "is_non_tensor")}
    shapes = field.per_sample_shapes
    return plain | {
        "global_indexes": _indexes(sorted(field.global_indexes)),
        "shaped": _indexes(shapes),
        "dimensions": _indexes(len(shape) for shape in shapes.values()),
        "sizes": _indexes(size for shape in shapes.values() for size in shape),
        "tuples": np.array([isinstance(shape, tuple) for shape in shapes.values()], bool),
    }


def _check_known(record: Any, known: set[str]) -> None:
    strange = set(vars(record)) ^ known
    if strange:
        raise UsageError(
            f"TransferQueue's {type(record).__name__} is another than that of 0.1.11, in {', '.join(sorted(strange))}: "
            "upgrade this library, or install 'TransferQueue>=0.1.11,<0.2'"
        )


def _indexes(values: Iterable[Any]) -> Array:
    return np.fromiter(values, np.int64)


# -- from a tree ------------------------------------------------------------------------------------------------------


def check_tree(tree: Any, *, where: str) -> Mapping[str, Any]:
    """The tree as it is, if `to_tree` made it and this version reads it."""
    if not isinstance(tree, dict) or not isinstance(tree.get("system"), str) or tree["system"] != SYSTEM:
        raise UsageError(f"{where} was not saved with archive.adapters.{SYSTEM}; say which was by buffer= or run=")
    with reading(where, "state of a TransferQueue"):
        if tree["format"] > FORMAT:
            raise UpgradeError(f"{where} was saved in format {tree['format']}, known is {FORMAT}: upgrade this library")
        expected(tree), manager_of(tree)
    return tree


def expected(tree: Mapping[str, Any]) -> dict[int, str]:
    """Global index -> partition of the samples that the controller has been told of."""
    parts = tree["partitions"].items()
    return {i: n for n, part in parts for i in [*part["global_indexes"].tolist(), *part["keyed"].tolist()]}


def partition_of(
    name: str, tree: Mapping[str, Any], keys: Mapping[int, str], tags: Mapping[int, Any], of: Classes
) -> Any:
    """A partition as it was. keys, tags: those of its samples by global index."""
    plain = {one: tree[one] for one in _PLAIN}
    sets = {one: set(tree[one].tolist()) for one in _SETS}
    mapping = {keys[index]: index for index in tree["keyed"].tolist()}
    mappings = (mapping, {index: key for key, index in mapping.items()})
    fields = {field: _field_of(one, of) for field, one in tree["field_metadata"].items()}
    known = dict(zip(_KEYS, mappings, strict=True)) | {"custom_meta": dict(tags), "field_metadata": fields}
    return of.partition(partition_id=name, **plain, **sets, **known)


def _field_of(tree: Mapping[str, Any], of: Classes) -> Any:
    edges = np.cumsum([0, *tree["dimensions"].tolist()])
    sizes = [tree["sizes"][lo:hi].tolist() for lo, hi in pairwise(edges)]
    kinds = [tuple if is_tuple else list for is_tuple in tree["tuples"].tolist()]
    shapes = [kind(shape) for kind, shape in zip(kinds, sizes, strict=True)]
    plain = {name: tree[name] for name in ("dtype", "shape", "is_nested", "is_non_tensor")}
    shaped = dict(zip(tree["shaped"].tolist(), shapes, strict=True))
    return of.field(global_indexes=set(tree["global_indexes"].tolist()), per_sample_shapes=shaped, **plain)


def manager_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The index manager's state as its controller loads it."""
    saved = tree["index_manager"]
    return {
        "partition_to_indexes": {name: set(part.tolist()) for name, part in saved["partition_to_indexes"].items()},
        "reusable_indexes": saved["reusable_indexes"].tolist(),
        "global_index_counter": saved["global_index_counter"],
        "allocated_indexes": set(saved["allocated_indexes"].tolist()),
    }


def check_whole(tree: Mapping[str, Any], found: Mapping[int, Sample], where: str) -> None:
    """Refuse a checkpoint whose controller and samples do not speak of the same."""
    wanted = expected(tree)
    if lacking := sorted(wanted.keys() - found.keys()):
        raise CorruptStateError(f"{where}: samples {lacking[:5]} of {len(wanted)} are not in it: load another one")
    if strange := [i for i, partition in wanted.items() if found[i].partition != partition]:
        raise CorruptStateError(f"{where}: samples {strange[:5]} are in two partitions: load another one")


def check_sampler(tree: Mapping[str, Any], now: Cut) -> None:
    """Refuse the state of a sampler that keeps other things than the running one."""
    if tree["sampler"].keys() != now.sampler.keys():
        raise UsageError(
            f"the checkpoint has the state of a {tree['sampler_class']} ({', '.join(tree['sampler'])}), the running "
            f"sampler is a {now.sampler_class} ({', '.join(now.sampler)}): start TransferQueue with the one that was "
            "saved"
        )
