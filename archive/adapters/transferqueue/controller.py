"""Pure, no I/O: what TransferQueue's controller knows as a tree of arrays and JSON, and back; never pickle.

Works on the public attributes of its partitions. Keys and tags are no part of the tree: they are attributes of the
samples' episodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from archive.adapters import reading
from archive.base import UpgradeError, UsageError
from archive.fields import Array

FORMAT = 1
SYSTEM = "transferqueue"
_PARTITION = {
    "partition_id", "created_at", "production_status", "consumption_status", "global_indexes",
    "pre_allocated_global_indexes", "field_name_mapping", "field_metadata", "field_custom_backend_meta", "custom_meta",
    "keys_mapping", "revert_keys_mapping",
}  # fmt: skip
_FIELD = {"global_indexes", "dtype", "shape", "is_nested", "is_non_tensor", "per_sample_shapes"}
_PLAIN = ("created_at", "production_status", "consumption_status", "field_name_mapping", "field_custom_backend_meta")
_SETS = ("global_indexes", "pre_allocated_global_indexes")


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
        """What messages call it."""
        who = f"sample {self.index}" if self.key is None else f"sample {self.key!r}"
        return f"{who} of partition {self.partition!r}"


class Classes(NamedTuple):
    """Those of TransferQueue's controller that partitions are made of."""

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
        """All of all partitions, by partition and index."""
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


# -- to a tree ---------------------------------------------------------------------------------------------------------


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


# -- from a tree -------------------------------------------------------------------------------------------------------


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
    return of.partition(
        partition_id=name, **plain, **sets, custom_meta=dict(tags), keys_mapping=mapping,
        revert_keys_mapping={index: key for key, index in mapping.items()},
        field_metadata={field: _field_of(one, of) for field, one in tree["field_metadata"].items()},
    )  # fmt: skip


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
