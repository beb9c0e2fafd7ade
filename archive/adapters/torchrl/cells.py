"""The cells of a storage: read as fields, compared by digests, written. A cell is one item; cells lie row after row.

Here are those of tensors, [T, B, ...]: one TensorDict, one tensor, or a tree of tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from archive.adapters import digests
from archive.adapters.torchrl.items import (
    ROOT,
    Outline,
    assembled,
    is_collection,
    leaves_of,
    module_tensordict,
    outline_of,
    without_classes,
)
from archive.arrays import Ints
from archive.base import CapacityError, FieldError, UsageError, show
from archive.fields import Array, Path, dtypes, leaves, unflatten

pytree = torch.utils._pytree
INDEX: Path = ("index",)  # the field that some buffers add to what they are given
ADDED = {INDEX, ("policy_version",)}  # by TorchRL itself, the second for a sampler that minds staleness


class StorageCells:
    """The cells of any storage. These are the answers where a storage has one dimension, and items of all kinds."""

    listed = True  # items of any kind, each with fields of its own
    inner: tuple[int, ...] = ()  # the storage's dimensions beside the first

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    @property
    def columns(self) -> int:
        """Cells a row."""
        return math.prod(self.inner)

    def capacity(self, inner: tuple[int, ...]) -> int:
        """Rows that fit, if the other dimensions are `inner`."""
        return int(self.storage.max_size)

    def check_room(self, rows: int, inner: tuple[int, ...]) -> None:
        """Refuse more rows than the storage has."""
        each = math.prod(inner)
        room = self.capacity(inner) * each
        if rows * each > room:
            raise CapacityError(
                f"the share has {rows * each} steps, the storage room for {room}; plan with capacity={room}, which "
                "drops the oldest and counts them"
            )

    def form(self) -> Any:
        """The fields that all cells have, with their dtypes and shapes; None where each has its own."""
        return None

    def next_fields(self) -> dict[Path, Path]:
        """next/x -> x, for all fields of the same kind."""
        return {}

    def reserve(self, nest: Mapping[str, Any], kind: Any, inner: tuple[int, ...]) -> None:
        """Make room for cells like the first of `nest`, where the storage has none yet."""


class TensorCells(StorageCells):
    """The cells of a TensorStorage."""

    listed = False

    def __init__(self, storage: Any) -> None:
        super().__init__(storage)
        self._made = False  # the storage's tensors were made here, of what came first

    @property
    def rows(self) -> int:
        """The number of rows along the first dimension that are in use."""
        return int(self.storage._len_along_dim0 or 0)

    @property
    def inner(self) -> tuple[int, ...]:  # type: ignore[override]
        shape = self.storage._total_shape if self.storage.initialized else None
        return tuple(shape[1:]) if shape is not None else ()

    def capacity(self, inner: tuple[int, ...]) -> int:
        if self.storage.initialized:
            return int(self.storage._total_shape[0])
        return -(-int(self.storage.max_size) // max(1, math.prod(inner)))

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> Any:
        """A description of what the storage is made of: it puts fields together again."""
        held, dims = self.storage._storage, 1 + len(self.inner)
        if held is None:
            return "tensordict"
        if is_collection(held):
            return {"outline": json.dumps(outline_of(held, dims)), "inner_names": list(held.names[1:dims])}
        if isinstance(held, torch.Tensor):
            return "tensor"
        found, spec = pytree.tree_flatten(held)
        return {"tree": pytree.tree_unflatten(list(range(len(found))), spec)}  # each leaf by its number

    def leaves(self) -> dict[Path, Any]:
        """Path -> tensor [T, B, ...], or the list of what a non-tensor field holds."""
        held = self.storage._storage
        if held is None:
            return {}
        if is_collection(held):
            return dict(leaves_of(held))
        return {ROOT: held} if isinstance(held, torch.Tensor) else _tree_leaves(held)

    def flat(self, path: Path) -> Array | None:
        """A field of all cells in use, one entry a cell; None if not all have it."""
        leaf = self.leaves().get(path)
        cells = self.rows * self.columns
        if leaf is None:
            return None
        if isinstance(leaf, list):
            return np.array([str(value) for value in leaf[:cells]], object)
        every = leaf[: self.rows].reshape(cells, *leaf.shape[1 + len(self.inner) :])
        return dtypes.from_torch(every.as_subclass(torch.Tensor), where=show(path))

    def has(self, path: Path) -> bool:
        """True if all cells in use have this field."""
        return path in self.leaves()

    def read(self, cells: Ints) -> dict[str, Any]:
        """The fields of some cells of one signature, copied."""
        index = self._index(cells)
        every = self.leaves().items()
        return unflatten({p: [v[i] for i in cells] if isinstance(v, list) else _taken(v, index) for p, v in every})

    def form(self) -> dict[Path, Any]:
        every = self.leaves().items()
        return {p: "list" if isinstance(leaf, list) else (leaf.dtype, leaf.shape[1:]) for p, leaf in every}

    def json_fields(self, cells: Ints) -> list[Path]:
        """Fields that hold JSON in some of these cells, which are of one signature."""
        lists = [(p, leaf) for p, leaf in self.leaves().items() if isinstance(leaf, list)]
        return [p for p, leaf in lists if not all(isinstance(leaf[i], str) for i in cells.tolist())]

    def next_fields(self) -> dict[Path, Path]:
        plain = {p: kind for p, kind in self.form().items() if kind != "list"}
        return {("next", *path): path for path, kind in plain.items() if plain.get(("next", *path)) == kind}

    def signatures(self, cells: Ints) -> Array:
        """Cells of the same signature have fields of the same kind, and can be appended together."""
        return np.zeros(len(cells), np.int64)

    def cell_bytes(self) -> int:
        """About how many bytes a cell takes."""
        shape = 1 + len(self.inner)
        tensors = (v for v in self.leaves().values() if isinstance(v, torch.Tensor))
        return sum(math.prod(v.shape[shape:]) * v.element_size() for v in tensors) + 64

    def hashes(self, rows: Ints | None = None) -> digests.Digests:
        """A digest of each row in use, or of some."""
        wanted = np.arange(self.rows) if rows is None else rows
        out = np.zeros(len(wanted), np.uint64)
        for number, (path, leaf) in enumerate(sorted(self.leaves().items())):
            if isinstance(leaf, list):
                part = digests.of_texts(leaf[: self.rows * self.columns], self.columns)[wanted]
            else:
                part = digests.of_tensor(leaf[: self.rows], rows)
            out += part * digests.salt(number, path)
        return out

    # -- writing ------------------------------------------------------------------------------------------------

    def reserve(self, nest: Mapping[str, Any], kind: Any, inner: tuple[int, ...]) -> None:
        if self.storage.initialized:
            return
        if not hasattr(self.storage, "_init"):
            raise UsageError(f"a {type(self.storage).__name__} is made with its tensors; use a lazy storage")
        self._made = True
        item = {path: _value(leaf, slice(0, 1), path)[0] for path, leaf in leaves(nest).items()}
        if inner:
            item = {path: value.expand(*inner, *value.shape).clone() for path, value in item.items()}
        names = kind.get("inner_names", []) if isinstance(kind, dict) else []
        self.storage._init(_joined(item, kind, _outline(kind), inner, names if len(names) == len(inner) else None))

    def put(self, cells: Ints, nest: Mapping[str, Any], kind: Any, kinds: Ints | None) -> None:
        """Write the fields of some cells.  kind: the source's.  kinds: number of the kind of each item, of lists."""
        given = {path: _value(leaf, slice(None), path) for path, leaf in leaves(nest).items()}
        self._check(set(given))
        index, held = self._index(cells), self.storage._storage
        values = _joined(given, kind, without_classes(_outline(kind)), [len(cells)])
        try:
            if is_collection(held) or isinstance(held, torch.Tensor):
                held[index] = values
            else:
                pytree.tree_map(lambda target, value: target.__setitem__(index, value), held, values)
        except (RuntimeError, TypeError, ValueError, KeyError) as e:
            raise FieldError(f"the saved steps do not fit into this storage: {e}; give one of the same kind") from e
        for path, leaf in self.leaves().items():
            if path not in given and isinstance(leaf, torch.Tensor):
                leaf[index] = 0  # as TorchRL has it of what was written before the field came

    def fill(self, path: Path, cells: Ints, values: Any) -> None:
        """Set a field of tensors in some cells to one number a cell, where there is such a field."""
        leaf = self.leaves().get(path)
        if not isinstance(leaf, torch.Tensor) or not len(cells):
            return
        extra = leaf.shape[1 + len(self.inner) :]
        numbers = torch.from_numpy(np.asarray(values)).to(leaf.device, leaf.dtype)
        leaf[self._index(cells)] = numbers.reshape(-1, *[1] * len(extra)).expand(-1, *extra)

    def finish(self, rows: int) -> None:
        """Say how many rows are in use, when all is written."""
        self.storage._len = rows * self.columns if self.storage.initialized else 0
        self.storage._bump_mutation_revision()

    def _check(self, given: set[Path]) -> None:
        """Refuse steps of other fields than the storage's, unless it is of our making, or TorchRL would add them."""
        differ = given ^ set(self.leaves())
        held = self.storage._storage
        if is_collection(held) and not held.is_locked:
            differ = set() if self._made else differ - ADDED
        if differ:
            path = min(differ)
            where = "the checkpoint has" if path in given else "the storage has"
            raise FieldError(
                f"only {where} a field {show(path)!r}; restore into a buffer whose storage has the same fields, or "
                "none yet"
            )

    def _index(self, cells: Ints) -> Any:
        """An index that picks cells out of [T, B, ...]: a slice where they follow each other."""
        if not self.inner:
            if len(cells) and int(cells[-1]) - int(cells[0]) == len(cells) - 1 and (np.diff(cells) == 1).all():
                return slice(int(cells[0]), int(cells[-1]) + 1)
            return torch.from_numpy(cells)
        shape = (max(1, self.capacity(self.inner)), *self.inner)
        return tuple(torch.from_numpy(i) for i in np.unravel_index(cells, shape))


def _tree_leaves(held: Any) -> dict[Path, Any]:
    pairs, _ = pytree.tree_flatten_with_path(held)
    return {tuple(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys): leaf for keys, leaf in pairs}


def _joined(found: dict[Path, Any], kind: Any, outline: Outline, prefix: Sequence[int], names: Any = None) -> Any:
    """The storage's own kind of data: a TensorDict, a tensor or a tree of them."""
    about = kind if isinstance(kind, dict) else {}
    if kind == "tensor" or ("items" in about and found.keys() == {ROOT}):
        return found[ROOT]
    if "tree" in about:
        order, spec = pytree.tree_flatten(about["tree"])
        numbered = {number: path for path, number in _tree_leaves(about["tree"]).items()}
        return pytree.tree_unflatten([found[numbered[i]] for i in order], spec)
    return assembled(outline, found, prefix, names=names)


def _outline(kind: Any) -> Outline:
    """The outline that the state has; of steps saved by others, a plain one."""
    about = kind if isinstance(kind, dict) else {}
    if "tensorclass" in about:
        return {"keys": {}, "batch": [], "class": ["?", about["tensorclass"]]}  # saved by an earlier version
    known: Outline = json.loads(about.get("outline", "{}"))
    return known or {"keys": {}, "batch": []}


def _value(leaf: Any, part: slice, path: Path) -> Any:
    """Steps [part] of a field as a tensor, or as a stack of what is no tensor."""
    if isinstance(leaf, list) and leaf and isinstance(leaf[0], np.ndarray):
        if len({(row.dtype, row.shape) for row in leaf}) > 1:
            raise FieldError(
                f"field {show(path)!r} differs in length from item to item; restore into a LazyStackStorage"
            )
        leaf = np.stack(leaf)
    if isinstance(leaf, list) or (isinstance(leaf, np.ndarray) and leaf.dtype == object):
        return module_tensordict().NonTensorStack(*leaf[part])
    value = dtypes.to_torch(leaf[part])
    if not isinstance(value, torch.Tensor):
        raise FieldError(f"field {show(path)!r} of dtype {leaf.dtype} has no tensor; restore into a ListStorage")
    return value


def _taken(leaf: torch.Tensor, index: Any) -> torch.Tensor:
    """Rows of a tensor as one of its own."""
    if isinstance(index, slice):
        return leaf[index].detach().clone().as_subclass(torch.Tensor)
    index = tuple(i.to(leaf.device) for i in index) if isinstance(index, tuple) else index.to(leaf.device)
    return leaf.detach()[index].as_subclass(torch.Tensor)
