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
from archive.adapters.torchrl.cells import ROOT, Cells
from archive.adapters.torchrl.items import Json, Leaves, apart, joined, kind_of, last_numbers, stacked, together
from archive.arrays import Ints
from archive.fields import Array, Path, flatten, unflatten


class ListCells(Cells):
    """The cells of a ListStorage, or of a storage derived from it."""

    listed = True

    def __init__(self, storage: Any) -> None:
        super().__init__(storage)
        self._taken: dict[int, tuple[str, Leaves]] = {}
        self._texts: dict[str, str] = {}  # of kinds, which are few
        self._makes: dict[int, tuple[str, Any]] = {}

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

    def read(self, cells: Ints) -> dict[str, Any]:
        items = [self._item(cell)[1] for cell in cells.tolist()]
        return unflatten({path: joined(path, [leaves[path] for leaves in items]) for path in items[0]})

    def signatures(self, cells: Ints) -> Array:
        """(Kind as text, path, dtype and shape without its length of each leaf) of each item."""
        out = np.full(len(cells), None)
        for place, cell in enumerate(cells.tolist()):
            kind, make = self._make(cell)
            out[place] = kind, tuple((path, dtype, len(shape), shape[1:]) for path, dtype, shape in make)
        return out

    def _make(self, cell: int) -> tuple[str, Any]:
        """Kind as text, and path, dtype and whole shape of each leaf."""
        if cell not in self._makes:
            kind, leaves = self._item(cell)
            arrays = ((p, v) for p, v in leaves.items() if isinstance(v, torch.Tensor | np.ndarray))
            self._makes[cell] = kind, tuple((path, str(leaf.dtype), tuple(leaf.shape)) for path, leaf in arrays)
        return self._makes[cell]

    def json_fields(self, cells: Ints) -> list[Path]:
        return [p for p, v in self._item(int(cells[0]))[1].items() if isinstance(v, Json)]

    def cell_bytes(self) -> int:
        sizes = [sum(getattr(v, "nbytes", 64) for v in self._item(c)[1].values()) for c in range(min(self.rows, 64))]
        return max([64, *sizes])

    def hashes(self, rows: Ints | None = None) -> digests.Digests:
        wanted = np.arange(self.rows) if rows is None else rows
        out = np.zeros(len(wanted), np.uint64)
        groups: dict[Any, list[int]] = {}
        for place, cell in enumerate(wanted.tolist()):
            groups.setdefault(self._make(cell), []).append(place)
        for make, places in groups.items():
            items = [self._item(int(wanted[place]))[1] for place in places]
            own = np.full(len(places), _digest(repr(make).encode()), np.uint64)
            for number, path in enumerate(items[0]):
                own += _digests([item[path] for item in items]) * digests.salt(number, path)
            out[places] = own
        return out

    # -- writing ------------------------------------------------------------------------------------------------

    def put(self, cells: Ints, nest: Mapping[str, Any], kind: Any, kinds: Ints | None) -> None:
        """Make the items of some cells; they are set when all are there."""
        leaves = dict(flatten(nest))
        for place, cell in enumerate(cells.tolist()):
            own = kind_of(kind, leaves, None if kinds is None else int(kinds[place]))
            self._taken[cell] = "", {ROOT: self.storage._to_device(together(own, (), leaves, place))}

    def fill(self, path: Path, cells: Ints, values: Any) -> None:
        for cell, value in zip(cells.tolist(), np.asarray(values).tolist(), strict=True):
            item = self._taken[cell][1][ROOT]
            found = item.get(path, None) if hasattr(item, "batch_size") else None
            if isinstance(found, torch.Tensor):
                found[...] = value

    def finish(self, rows: int) -> None:
        self.storage._empty()
        for cell in range(rows):
            self.storage._set_item(cell, self._taken[cell][1][ROOT])
        self._taken, self._makes = {}, {}
        self.storage._bump_mutation_revision()


def _digests(values: list[Any]) -> digests.Digests:
    """A number for each value of one field."""
    stack = stacked(values)
    if stack is not None:
        return digests.of_tensor(stack, None)
    plain = [v.value if isinstance(v, Json) else v for v in values]
    each = (v.tobytes() if isinstance(v, np.ndarray) and v.dtype != object else repr(v).encode() for v in plain)
    return np.array([_digest(v) for v in each], np.uint64)


def _digest(value: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")
