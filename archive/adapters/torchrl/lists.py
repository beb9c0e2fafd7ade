"""Storages of items, one step each. Tensors with dimensions are ragged fields, so items may differ in length; the kinds
of item are kept once in the state, the number of each item's kind is a column."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from archive.adapters import digests
from archive.adapters.torchrl.cells import StorageCells, TensorCells
from archive.adapters.torchrl.items import Json, Leaves, apart, joined, kind_of, last_numbers, stacked, together
from archive.adapters.torchrl.parts import Parts, module
from archive.arrays import Ints
from archive.fields import Array, Path, flatten, unflatten


class Make:
    """The make of an item: its kind as text, and path, dtype and shape of each leaf that is an array."""

    def __init__(self, kind: str, arrays: Any) -> None:
        leaves = tuple((path, str(dtype), tuple(shape)) for path, dtype, shape in arrays)
        self._own = _digest(repr((kind, leaves)).encode())
        self.signature = kind, tuple((path, dtype, len(shape), shape[1:]) for path, dtype, shape in leaves)

    def hashes(self, fields: Leaves, count: int) -> digests.Digests:
        """A number for each of `count` items of this make, of which all values of each field are given."""
        out = np.full(count, self._own, np.uint64)
        for number, (path, values) in enumerate(fields.items()):
            out += _digests(values) * digests.salt(number, path)
        return out


class ListCells(StorageCells):
    """The cells of a ListStorage, or of a storage derived from it; see `TensorCells`."""

    def __init__(self, storage: Any) -> None:
        super().__init__(storage)
        self._taken: dict[int, tuple[str, Leaves]] = {}
        self._to_set: dict[int, Any] = {}
        self._texts: dict[str, str] = {}  # of kinds, which are few
        self._makes: dict[int, Make] = {}
        self._known_makes: dict[Any, Make] = {}
        self._hashed: dict[int, int] = {}  # digests of items that were put by rows

    @property
    def rows(self) -> int:
        return len(self.storage)

    # -- reading ------------------------------------------------------------------------------------------------

    def _item(self, cell: int) -> tuple[str, Leaves]:
        """Kind as text, and leaves, of an item."""
        if cell not in self._taken:
            leaves: Leaves = {}
            kind = apart(self.storage._get_item(cell), (), leaves)
            short = repr(kind)
            text = self._texts.get(short) or self._texts.setdefault(short, json.dumps(kind))
            self._taken[cell] = text, leaves
        return self._taken[cell]

    def flat(self, path: Path) -> Array | None:
        values = [self._item(cell)[1].get(path) for cell in range(self.rows)]
        return None if not values or any(v is None for v in values) else last_numbers(path, values)

    def has(self, path: Path) -> bool:
        return self.flat(path) is not None

    def read(self, cells: Ints) -> dict[str, Any]:
        items = [self._item(cell)[1] for cell in cells.tolist()]
        return unflatten({path: joined(path, [leaves[path] for leaves in items]) for path in items[0]})

    def signatures(self, cells: Ints) -> Array:
        """(Kind as text, path, dtype and shape without its length of each leaf) of each item."""
        out = np.full(len(cells), None)
        for place, cell in enumerate(cells.tolist()):
            out[place] = self._make(cell).signature
        return out

    def _make(self, cell: int) -> Make:
        if cell not in self._makes:
            self._makes[cell] = self._make_of(*self._item(cell))
        return self._makes[cell]

    def _make_of(self, kind: str, leaves: Leaves) -> Make:
        """The one make of all items that are alike."""
        arrays = ((p, v) for p, v in leaves.items() if isinstance(v, torch.Tensor | np.ndarray))
        key = kind, tuple((path, leaf.dtype, leaf.shape) for path, leaf in arrays)
        return self._known_makes.get(key) or self._known_makes.setdefault(key, Make(*key))

    def json_fields(self, cells: Ints) -> list[Path]:
        return [p for p, v in self._item(int(cells[0]))[1].items() if isinstance(v, Json)]

    def cell_bytes(self) -> int:
        sizes = [sum(getattr(v, "nbytes", 64) for v in self._item(c)[1].values()) for c in range(min(self.rows, 64))]
        return max([64, *sizes])

    def hashes(self, rows: Ints | None = None) -> digests.Digests:
        wanted = np.arange(self.rows) if rows is None else rows
        out = np.array([self._hashed.get(cell, 0) for cell in wanted.tolist()], np.uint64)
        groups: dict[Make, list[int]] = {}
        for place, cell in enumerate(wanted.tolist()):
            if cell not in self._hashed:
                groups.setdefault(self._make(cell), []).append(place)
        for make, places in groups.items():
            items = [self._item(int(wanted[place]))[1] for place in places]
            out[places] = make.hashes({path: [item[path] for item in items] for path in items[0]}, len(places))
        return out

    # -- writing ------------------------------------------------------------------------------------------------

    def put(self, cells: Ints, nest: Mapping[str, Any], kind: Any, kinds: Ints | None) -> None:
        """Make the items of some cells; they are set when all are there."""
        leaves = dict(flatten(nest))
        for number, places in _alike(leaves, len(cells), kinds):
            made: Leaves = {}
            rows = {path: _picked(leaf, places) for path, leaf in leaves.items()}
            items = together(kind_of(kind, leaves, number), (), rows, len(places), made)
            items = [self.storage._to_device(item) for item in items]
            chosen = cells[places].tolist()
            self._to_set.update(zip(chosen, items, strict=True))
            if self._gives_what_it_was_given():
                self._learn(chosen, items[0], made)

    def _gives_what_it_was_given(self) -> bool:
        plain = module("storages").ListStorage
        return all(getattr(type(self.storage), name) is getattr(plain, name) for name in ("_get_item", "_set_item"))

    def _learn(self, cells: list[int], first: Any, made: Leaves) -> None:
        """Remember makes and digests of items while their leaves are there by rows, if the first tells what all are;
        others are looked at one by one when it is asked for."""
        leaves: Leaves = {}
        kind = json.dumps(apart(first, (), leaves))
        if leaves.keys() == made.keys() and all(_tells(leaf, made[path]) for path, leaf in leaves.items()):
            make = self._make_of(kind, leaves)
            hashes = make.hashes({path: made[path] for path in leaves}, len(cells))
            self._makes.update(dict.fromkeys(cells, make))
            self._hashed.update(zip(cells, hashes.tolist(), strict=True))

    def fill(self, path: Path, cells: Ints, values: Any) -> None:
        for cell, value in zip(cells.tolist(), np.asarray(values).tolist(), strict=True):
            item = self._to_set[cell]
            found = item.get(path, None) if hasattr(item, "batch_size") else None
            if isinstance(found, torch.Tensor):
                found[...] = value
                self._hashed.pop(cell, None)

    def finish(self, rows: int) -> None:
        self.storage._empty()
        for cell in range(rows):
            self.storage._set_item(cell, self._to_set[cell])
        self._to_set = {}
        self.storage._bump_mutation_revision()


Cells = TensorCells | ListCells


def cells_of(parts: Parts) -> Cells:
    """The cells of a buffer's storage."""
    return (TensorCells if isinstance(parts.storage, module("storages").TensorStorage) else ListCells)(parts.storage)


def _alike(leaves: Leaves, count: int, kinds: Ints | None) -> list[tuple[int | None, Ints]]:
    """(number of the kind, places) of the items that can be made together: of one kind, each leaf of one shape."""
    numbers = [None] * count if kinds is None else kinds.tolist()
    ragged = [leaf for leaf in leaves.values() if isinstance(leaf, list) and isinstance(leaf[0], np.ndarray)]
    groups: dict[Any, list[int]] = {}
    for place, (number, *rows) in enumerate(zip(numbers, *ragged, strict=True)):
        groups.setdefault((number, *[(row.dtype, row.shape) for row in rows]), []).append(place)
    return [(key[0], np.array(places)) for key, places in groups.items()]


def _picked(leaf: Any, places: Ints) -> Any:
    if len(places) == len(leaf):
        return leaf
    return [leaf[place] for place in places] if isinstance(leaf, list) else leaf[places]


def _tells(leaf: Any, rows: Any) -> bool:
    """True if all rows of a field are of the type, dtype and shape of that of the first item."""
    if isinstance(leaf, torch.Tensor):
        return isinstance(rows, torch.Tensor) and (leaf.dtype, leaf.shape) == (rows.dtype, rows.shape[1:])
    if isinstance(leaf, np.ndarray):
        return all(isinstance(row, np.ndarray) and (row.dtype, row.shape) == (leaf.dtype, leaf.shape) for row in rows)
    return not isinstance(leaf, Json) and all(type(row) is type(leaf) for row in rows)


def _digests(values: Any) -> digests.Digests:
    """A number for each value of one field, of tensors also as one."""
    stack = values if isinstance(values, torch.Tensor) else stacked(values)
    if stack is not None:
        return digests.of_tensor(stack, None)
    plain = [v.value if isinstance(v, Json) else v for v in values]
    each = (v.tobytes() if isinstance(v, np.ndarray) and v.dtype != object else repr(v).encode() for v in plain)
    return np.array([_digest(v) for v in each], np.uint64)


def _digest(value: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")
