"""Storages of tensors: what their cells hold, as fields; a cell is one item, row after row of a [T, B, ...] storage."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from archive import dtypes, tree
from archive.adapters import common
from archive.adapters._torchrl_parts import INSTALL
from archive.errors import CapacityError, FieldError, UsageError
from archive.names import show
from archive.ranges import Ints
from archive.schema import Path

ROOT: Path = ("data",)  # the field of a storage that is one tensor
_HASH_BYTES = 1024 * 1024
_PRIMES = np.random.default_rng().integers(2**62, 2**63, 4096, np.int64).astype(np.uint64) | np.uint64(1)


class TensorCells:
    """The cells of a TensorStorage."""

    listed = False

    def __init__(self, storage: Any) -> None:
        self.storage = storage

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
        if held is not None and module_tensordict().is_tensorclass(held):
            return {"tensorclass": type(held).__name__}
        if held is None or _is_collection(held):
            return "tensordict"
        if isinstance(held, torch.Tensor):
            return "tensor"
        return {"tree": _numbered(held)}

    def leaves(self) -> dict[Path, Any]:
        """Path -> tensor [T, B, ...], or the list of what a non-tensor field holds."""
        held = self.storage._storage
        if held is None:
            return {}
        if _is_collection(held):
            return dict(_collection_leaves(held, ()))
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
        return tree.unflatten(out)

    def signatures(self, cells: Ints) -> Ints:
        """Cells of the same signature have fields of the same kind."""
        return np.zeros(len(cells), np.int64)

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
            salt = int(_PRIMES[number % len(_PRIMES)]) * (zlib.crc32(repr(path).encode()) | 1) % 2**64
            if isinstance(leaf, list):
                texts = np.array([zlib.crc32(repr(v).encode()) for v in leaf[: self.rows * self.columns]], np.uint32)
                part = _row_sums(texts.reshape(self.rows, self.columns)[wanted])
            else:
                part = _tensor_hashes(leaf[: self.rows], rows)
            out += part * np.uint64(salt)
        return out

    # -- writing ------------------------------------------------------------------------------------------------

    def reserve(self, nest: Mapping[str, Any], kind: Any, inner: tuple[int, ...]) -> None:
        """Make the storage's tensors, if it has none, for cells like the first of `nest`."""
        if self.storage.initialized:
            return
        if isinstance(kind, dict) and "tensorclass" in kind:
            raise UsageError(
                f"the steps are of class {kind['tensorclass']}, which can't be made from its name: extend the buffer with one, "
                "and restore with existing='replace'"
            )
        if not hasattr(self.storage, "_init"):
            raise UsageError(f"a {type(self.storage).__name__} is made with its tensors; use a lazy storage")
        first = _assembled(tree.flatten(nest), kind, slice(0, 1))
        item = _mapped(first, lambda x: x[0].expand(*inner, *x.shape[1:]).clone() if inner else x[0], inner)
        self.storage._init(item)

    def put(self, cells: Ints, nest: Mapping[str, Any], kind: Any, kinds: Ints | None) -> None:
        """Write the fields of some cells."""
        leaves = list(tree.flatten(nest))
        self._check({path for path, leaf in leaves if leaf is not None and not isinstance(leaf, dict)})
        index = self._index(cells)
        held = self.storage._storage
        values = _assembled(leaves, kind, slice(None))
        try:
            if _is_collection(held) or isinstance(held, torch.Tensor):
                held[index] = values
            else:
                _set_tree(held, index, values)
        except (RuntimeError, TypeError, ValueError, KeyError) as e:
            raise FieldError(f"the saved steps do not fit into this storage: {e}; give one of the same kind") from e

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
        has = set(self.leaves())
        if given != has:
            path = min(given ^ has)
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


def _is_collection(value: Any) -> bool:
    return bool(module_tensordict().is_tensor_collection(value))


@cache
def module_tensordict() -> Any:
    """The module tensordict, or what to install."""
    return common.system("tensordict", INSTALL)


def _collection_leaves(held: Any, path: Path) -> list[tuple[Path, Any]]:
    td = module_tensordict()
    out: list[tuple[Path, Any]] = []
    for key, value in held.items():
        here = (*path, str(key))
        if isinstance(value, td.NonTensorStack | td.NonTensorData):
            out.append((here, _flat_list(value.tolist())))
        elif _is_collection(value):
            out += _collection_leaves(value, here)
        elif isinstance(value, torch.Tensor):
            out.append((here, value))
        else:
            raise FieldError(f"field {show(here)!r} is a {type(value).__name__}, which cannot be saved")
    return out


def _flat_list(values: Any) -> list[Any]:
    while values and isinstance(values[0], list):
        values = [v for inner in values for v in inner]
    return list(values)


def _tree_leaves(held: Any) -> list[tuple[Path, Any]]:
    pairs, _ = torch.utils._pytree.tree_flatten_with_path(held)
    return [(_path(keys), leaf) for keys, leaf in pairs]


def _path(keys: Sequence[Any]) -> Path:
    return tuple(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def _numbered(held: Any) -> Any:
    """The same tree with the number of each leaf in its place."""
    leaves, spec = torch.utils._pytree.tree_flatten(held)
    return torch.utils._pytree.tree_unflatten(list(range(len(leaves))), spec)


def _assembled(leaves: Any, kind: Any, part: slice) -> Any:
    """What a user would have given: a TensorDict, a tensor or a tree of them."""
    found = {path: _value(leaf, part, path) for path, leaf in leaves if leaf is not None and not isinstance(leaf, dict)}
    listed = isinstance(kind, dict) and "items" in kind
    if kind == "tensor" or (listed and found.keys() == {ROOT}):
        return found[ROOT]
    if isinstance(kind, dict) and "tree" in kind:
        order, spec = torch.utils._pytree.tree_flatten(kind["tree"])
        numbered = {number: path for path, number in _tree_leaves(kind["tree"])}
        return torch.utils._pytree.tree_unflatten([found[numbered[i]] for i in order], spec)
    count = len(next(iter(found.values()))) if found else 0
    return module_tensordict().TensorDict(tree.unflatten(found), batch_size=[count])


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


def _mapped(value: Any, change: Any, inner: tuple[int, ...]) -> Any:
    if _is_collection(value):
        return value[0].expand(*inner).clone() if inner else value[0]
    return torch.utils._pytree.tree_map(change, value)


def _set_tree(held: Any, index: Any, values: Any) -> None:
    torch.utils._pytree.tree_map(lambda target, value: target.__setitem__(index, value), held, values)


def _taken(leaf: torch.Tensor, index: Any) -> torch.Tensor:
    """Rows of a tensor as one of its own."""
    if isinstance(index, slice):
        return leaf[index].detach().clone().as_subclass(torch.Tensor)
    index = tuple(i.to(leaf.device) for i in index) if isinstance(index, tuple) else index.to(leaf.device)
    return leaf.detach()[index].as_subclass(torch.Tensor)


def _tensor_hashes(leaf: torch.Tensor, rows: Ints | None) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A number for the bytes of each row."""
    count = len(leaf) if rows is None else len(rows)
    nbytes = int(np.prod(leaf.shape[1:], dtype=np.int64)) * leaf.element_size()
    out = np.zeros(count, np.uint64)
    step = max(1, _HASH_BYTES // max(1, nbytes))
    for lo in range(0, count if nbytes else 0, step):
        part: Any = slice(lo, lo + step) if rows is None else torch.from_numpy(rows[lo : lo + step]).to(leaf.device)
        block = leaf.detach()[part].contiguous().cpu()
        raw = block.reshape(len(block), -1).view(torch.uint8).numpy()
        wide = raw if raw.shape[1] % 4 == 0 else np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4)))
        out[lo : lo + step] = _row_sums(np.ascontiguousarray(wide).view(np.uint32))
    return out


def _row_sums(words: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Each row's words times numbers that are drawn once a process, summed: rows that differ hardly ever agree."""
    out = np.zeros(len(words), np.uint64)
    for number, lo in enumerate(range(0, words.shape[1], len(_PRIMES))):
        part = words[:, lo : lo + len(_PRIMES)]
        one = np.einsum("ij,j->i", part, _PRIMES[: part.shape[1]], dtype=np.uint64, casting="unsafe")
        out += (one ^ (one >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15 + 2 * number)
    return out
