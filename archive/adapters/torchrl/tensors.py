"""Storages of tensors: what their cells hold, as fields; a cell is one item, row after row of a [T, B, ...] storage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from archive.adapters.torchrl import digests as digests
from archive.adapters.torchrl.outlines import (
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
from archive.fields import Path, dtypes, nesting

ROOT: Path = ("data",)  # the field of a storage that is one tensor
INDEX: Path = ("index",)  # the field that some buffers add to what they are given


class TensorCells:
    """The cells of a TensorStorage."""

    listed = False

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self._made = False  # the storage's tensors were made here, of what came first

    # -- extent -------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """How many rows along the first dimension are in use."""
        return int(self.storage._len_along_dim0 or 0)

    @property
    def inner(self) -> tuple[int, ...]:
        """The storage's dimensions beside the first."""
        shape = self.storage._total_shape if self.storage.initialized else None
        return tuple(shape[1:]) if shape is not None else ()

    @property
    def columns(self) -> int:
        return int(np.prod(self.inner, dtype=np.int64))

    def capacity(self, inner: tuple[int, ...]) -> int:
        """Rows that fit, if the other dimensions are `inner`."""
        if self.storage.initialized:
            return int(self.storage._total_shape[0])
        return -(-int(self.storage.max_size) // max(1, int(np.prod(inner, dtype=np.int64))))

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> Any:
        """What the storage is made of, for the state: how to put fields together again."""
        held = self.storage._storage
        if held is None:
            return "tensordict"
        if is_collection(held):
            names = list(held.names[1 : 1 + len(self.inner)])
            return {"outline": json.dumps(outline_of(held, 1 + len(self.inner))), "inner_names": names}
        if isinstance(held, torch.Tensor):
            return "tensor"
        return {"tree": _numbered(held)}

    def leaves(self) -> dict[Path, Any]:
        """Path -> tensor [T, B, ...], or the list of what a non-tensor field holds."""
        held = self.storage._storage
        if held is None:
            return {}
        if is_collection(held):
            return dict(leaves_of(held))
        if isinstance(held, torch.Tensor):
            return {ROOT: held}
        return dict(_tree_leaves(held))

    def flat(self, path: Path) -> Any:
        """A field of all cells in use, one entry a cell: a tensor or an array; None if there is no such field."""
        leaf = self.leaves().get(path)
        cells = self.rows * self.columns
        if leaf is None:
            return None
        if isinstance(leaf, list):
            return np.array([str(value) for value in leaf[:cells]], object)
        return leaf[: self.rows].reshape(cells, *leaf.shape[1 + len(self.inner) :])

    def read(self, cells: Ints) -> dict[str, Any]:
        """The fields of some cells, copied."""
        index = self._index(cells)
        out: dict[Path, Any] = {}
        for path, leaf in self.leaves().items():
            out[path] = [leaf[i] for i in cells.tolist()] if isinstance(leaf, list) else _taken(leaf, index)
        return nesting.unflatten(out)

    def signatures(self, cells: Ints) -> Ints:
        """Cells of the same signature have fields of the same kind."""
        return np.zeros(len(cells), np.int64)

    def form(self) -> dict[Path, Any]:
        """The fields that all cells have, with their dtypes and shapes."""
        leaves = self.leaves().items()
        return {p: "list" if isinstance(leaf, list) else (leaf.dtype, leaf.shape[1:]) for p, leaf in leaves}

    def json_fields(self, cells: Ints) -> list[Path]:
        """Fields that hold, in some cells, something else than tensors and texts."""
        leaves = [(p, leaf) for p, leaf in self.leaves().items() if isinstance(leaf, list)]
        return [p for p, leaf in leaves if not all(isinstance(leaf[i], str) for i in cells.tolist())]

    def next_fields(self) -> dict[Path, Path]:
        """next/x -> x, for all fields of the same kind."""
        leaves = self.leaves()
        plain = {p: (v.dtype, v.shape) for p, v in leaves.items() if isinstance(v, torch.Tensor)}
        return {("next", *path): path for path, kind in plain.items() if plain.get(("next", *path)) == kind}

    def cell_bytes(self) -> int:
        shape = 1 + len(self.inner)
        tensors = (v for v in self.leaves().values() if isinstance(v, torch.Tensor))
        return sum(int(np.prod(v.shape[shape:], dtype=np.int64)) * v.element_size() for v in tensors) + 64

    def hashes(self, rows: Ints | None = None) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """A digest of each row in use (or of some), made in blocks of 1 MB."""
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
        """Make the storage's tensors, if it has none, for cells like the first of `nest`."""
        if self.storage.initialized:
            return
        if not hasattr(self.storage, "_init"):
            raise UsageError(f"a {type(self.storage).__name__} is made with its tensors; use a lazy storage")
        self._made = True
        first = _values(nesting.flatten(nest), slice(0, 1))
        item = {path: _spread(value[0], inner) for path, value in first.items()}
        names = kind.get("inner_names", []) if isinstance(kind, dict) else []
        outline = _outline(kind)
        self.storage._init(_together(item, kind, outline, inner, names if len(names) == len(inner) else None))

    def put(self, cells: Ints, nest: Mapping[str, Any], kind: Any, kinds: Ints | None) -> None:
        """Write the fields of some cells."""
        given = _values(nesting.flatten(nest), slice(None))
        self._check(set(given))
        index = self._index(cells)
        held = self.storage._storage
        values = _together(given, kind, without_classes(_outline(kind)), [len(cells)])
        try:
            if is_collection(held) or isinstance(held, torch.Tensor):
                held[index] = values
            else:
                _set_tree(held, index, values)
        except (RuntimeError, TypeError, ValueError, KeyError) as e:
            raise FieldError(f"the saved steps do not fit into this storage: {e}; give one of the same kind") from e
        for path, leaf in self.leaves().items():
            if path not in given and isinstance(leaf, torch.Tensor):
                leaf[index] = 0  # as TorchRL has it of what was written before the field came

    def fill(self, path: Path, cells: Ints, values: Any) -> None:
        """Set a field of tensors in some cells to one number a cell, if there is one."""
        leaf = self.leaves().get(path)
        if not isinstance(leaf, torch.Tensor) or not len(cells):
            return
        extra = leaf.shape[1 + len(self.inner) :]
        numbers = torch.from_numpy(np.asarray(values)).to(leaf.device, leaf.dtype)
        leaf[self._index(cells)] = numbers.reshape(-1, *[1] * len(extra)).expand(-1, *extra)

    def finish(self, rows: int) -> None:
        """Say how many rows are in use."""
        self.storage._len = rows * self.columns if self.storage.initialized else 0
        self.storage._bump_mutation_revision()

    def _check(self, given: set[Path]) -> None:
        """Refuse steps of other fields than the storage's, unless it is of our making, or TorchRL would add them."""
        differ = given ^ set(self.leaves())
        held = self.storage._storage
        if is_collection(held) and not held.is_locked:
            differ = set() if self._made else differ - {INDEX}
        if differ:
            path = min(differ)
            where = "the checkpoint has" if path in given else "the storage has"
            raise FieldError(
                f"only {where} a field {show(path)!r}; restore into a buffer whose storage has the same fields, or none yet"
            )

    def _index(self, cells: Ints) -> Any:
        """What picks cells out of [T, B, ...]: a slice where they follow each other."""
        if not self.inner:
            if len(cells) and int(cells[-1]) - int(cells[0]) == len(cells) - 1 and (np.diff(cells) == 1).all():
                return slice(int(cells[0]), int(cells[-1]) + 1)
            return torch.from_numpy(cells)
        shape = (max(1, self.capacity(self.inner)), *self.inner)
        return tuple(torch.from_numpy(i) for i in np.unravel_index(cells, shape))


def check_room(cells: TensorCells | Any, needed: int, inner: tuple[int, ...]) -> None:
    """Refuse more rows than the storage has."""
    room = cells.capacity(inner)
    if needed > room:
        each = int(np.prod(inner, dtype=np.int64)) if inner else 1
        raise CapacityError(
            f"the share has {needed * each} steps, the storage room for {room * each}; plan with capacity={room * each}, which "
            "drops the oldest and counts them"
        )


def _tree_leaves(held: Any) -> list[tuple[Path, Any]]:
    pairs, _ = torch.utils._pytree.tree_flatten_with_path(held)
    return [(_path(keys), leaf) for keys, leaf in pairs]


def _path(keys: Sequence[Any]) -> Path:
    return tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def _numbered(held: Any) -> Any:
    """The same tree with the number of each leaf in its place."""
    leaves, spec = torch.utils._pytree.tree_flatten(held)
    return torch.utils._pytree.tree_unflatten(list(range(len(leaves))), spec)


def _values(leaves: Any, part: slice) -> dict[Path, Any]:
    """The steps' fields as tensors, or as stacks of what is no tensor."""
    return {path: _value(leaf, part, path) for path, leaf in leaves if leaf is not None and not isinstance(leaf, dict)}


def _together(found: dict[Path, Any], kind: Any, outline: Outline, prefix: Sequence[int], names: Any = None) -> Any:
    """What a user would have given: a TensorDict, a tensor or a tree of them."""
    listed = isinstance(kind, dict) and "items" in kind
    if kind == "tensor" or (listed and found.keys() == {ROOT}):
        return found[ROOT]
    if isinstance(kind, dict) and "tree" in kind:
        order, spec = torch.utils._pytree.tree_flatten(kind["tree"])
        numbered = {number: path for path, number in _tree_leaves(kind["tree"])}
        return torch.utils._pytree.tree_unflatten([found[numbered[i]] for i in order], spec)
    return assembled(outline, found, prefix, names=names)


def _outline(kind: Any) -> Outline:
    """The outline that the state has; of steps saved by others, a plain one."""
    if isinstance(kind, dict) and "tensorclass" in kind:
        return {"keys": {}, "batch": [], "class": ["?", kind["tensorclass"]]}  # saved by an earlier version
    known: Outline = json.loads(kind["outline"]) if isinstance(kind, dict) and "outline" in kind else {}
    return known or {"keys": {}, "batch": []}


def _value(leaf: Any, part: slice, path: Path) -> Any:
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


def _spread(value: Any, inner: tuple[int, ...]) -> Any:
    """The same in each cell of a row."""
    return value.expand(*inner, *value.shape).clone() if inner else value


def _set_tree(held: Any, index: Any, values: Any) -> None:
    torch.utils._pytree.tree_map(lambda target, value: target.__setitem__(index, value), held, values)


def _taken(leaf: torch.Tensor, index: Any) -> torch.Tensor:
    """Rows of a tensor as one of its own."""
    if isinstance(index, slice):
        return leaf[index].detach().clone().as_subclass(torch.Tensor)
    index = tuple(i.to(leaf.device) for i in index) if isinstance(index, tuple) else index.to(leaf.device)
    return leaf.detach()[index].as_subclass(torch.Tensor)
