"""Storages of items: TensorDicts, tensors, arrays, numbers, strings and trees of them, one step each.

Tensors with dimensions are ragged fields, so items may differ in length. What an item is made of is its kind: a tree
of ["td" | "dict" | "list" | "tuple" | "tensor" | "array" | "int" | ...], kept once in the state, its number a column.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from archive.adapters.torchrl import digests as digests
from archive.adapters.torchrl.outlines import (
    available,
    is_collection,
    is_lazy_stack,
    made,
    module_tensordict,
    own_outline,
)
from archive.adapters.torchrl.tensors import ROOT
from archive.arrays import Ints
from archive.base import ArchiveError, FieldError, UsageError, jsontree, show
from archive.fields import Path, dtypes, nesting

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_NUMBERS = {"bool": bool, "int": int, "float": float}
Leaves = dict[Path, Any]


class ListCells:
    """The cells of a ListStorage, or of one of its kin."""

    listed = True
    inner: tuple[int, ...] = ()
    columns = 1

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self._taken: dict[int, tuple[str, Leaves]] = {}
        self._texts: dict[str, str] = {}  # of kinds, which are few
        self._makes: dict[int, tuple[str, Any]] = {}

    @property
    def rows(self) -> int:
        return len(self.storage)

    def capacity(self, inner: tuple[int, ...]) -> int:
        return int(self.storage.max_size)

    # -- reading ------------------------------------------------------------------------------------------------

    def _item(self, cell: int) -> tuple[str, Leaves]:
        if cell not in self._taken:
            leaves: Leaves = {}
            kind = _apart(self.storage._get_item(cell), (), leaves)
            short = repr(kind)
            text = self._texts.get(short) or self._texts.setdefault(short, json.dumps(kind))
            self._taken[cell] = text, leaves
        return self._taken[cell]

    def flat(self, path: Path) -> Any:
        values = [self._item(cell)[1].get(path) for cell in range(self.rows)]
        if not values or any(v is None for v in values):
            return None
        stack = _stacked(values)
        if stack is not None and stack.dtype != torch.bfloat16:
            plain = stack.reshape(len(stack), -1)
            return plain[:, -1].cpu().numpy() if plain.shape[1] else np.zeros(len(stack))
        each = [v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for v in values]
        if any(v.dtype.kind not in "biuf" for v in each):
            return np.array([str(v) for v in values], object)
        return np.array([v.reshape(-1)[-1] if v.size else 0 for v in each])

    def read(self, cells: Ints) -> dict[str, Any]:
        """The fields of items of one signature."""
        items = [self._item(cell)[1] for cell in cells.tolist()]
        return nesting.unflatten({path: _joined(path, [leaves[path] for leaves in items]) for path in items[0]})

    def signatures(self, cells: Ints) -> Any:
        """(Kind as text, shapes) of each item; those of the same signature can be appended together."""
        out = np.full(len(cells), None)
        for place, cell in enumerate(cells.tolist()):
            out[place] = self._signature(cell)
        return out

    def _signature(self, cell: int) -> tuple[str, Any]:
        kind, make = self._make(cell)
        return kind, tuple((path, dtype, len(shape), shape[1:]) for path, dtype, shape in make)

    def _make(self, cell: int) -> tuple[str, Any]:
        """Kind as text, dtypes and whole shapes of an item."""
        if cell not in self._makes:
            kind, leaves = self._item(cell)
            arrays = ((p, v) for p, v in leaves.items() if isinstance(v, torch.Tensor | np.ndarray))
            self._makes[cell] = kind, tuple((path, str(leaf.dtype), tuple(leaf.shape)) for path, leaf in arrays)
        return self._makes[cell]

    def form(self) -> None:
        """Nothing: each item has fields of its own, and its signature."""

    def json_fields(self, cells: Ints) -> list[Path]:
        """Fields that hold JSON, in items of one signature."""
        return [p for p, v in self._item(int(cells[0]))[1].items() if isinstance(v, _Json)]

    def next_fields(self) -> dict[Path, Path]:
        return {}

    def cell_bytes(self) -> int:
        sizes = [sum(_nbytes(v) for v in self._item(c)[1].values()) for c in range(min(self.rows, 64))]
        return max([64, *sizes])

    def hashes(self, rows: Ints | None = None) -> np.ndarray[Any, np.dtype[np.uint64]]:
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

    def reserve(self, nest: Mapping[str, Any], kind: Any, inner: tuple[int, ...]) -> None:
        """Nothing: a list grows."""

    def put(self, cells: Ints, nest: Mapping[str, Any], kind: Any, kinds: Ints | None) -> None:
        """Make the items of some cells; they are set when all are there."""
        leaves = dict(nesting.flatten(nest))
        for place, cell in enumerate(cells.tolist()):
            own = _kind_of(kind, leaves, None if kinds is None else int(kinds[place]))
            item = _together(own, (), leaves, place)
            self._taken[cell] = "", {ROOT: self.storage._to_device(item)}

    def fill(self, path: Path, cells: Ints, values: Any) -> None:
        """Set a field of TensorDicts to one number a cell, where there is one."""
        for cell, value in zip(cells.tolist(), np.asarray(values).tolist(), strict=True):
            item = self._taken[cell][1][ROOT]
            found = item.get(path, None) if hasattr(item, "batch_size") else None
            if isinstance(found, torch.Tensor):
                found[...] = value

    def finish(self, rows: int) -> None:
        """Set all items."""
        self.storage._empty()
        for cell in range(rows):
            self.storage._set_item(cell, self._taken[cell][1][ROOT])
        self._taken, self._makes = {}, {}
        self.storage._bump_mutation_revision()


class _Json:
    """A value that is kept as JSON."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _apart(item: Any, path: Path, leaves: Leaves) -> Any:
    """The kind of an item; its leaves are collected."""
    td = module_tensordict()
    here = path or ROOT
    if isinstance(item, td.NonTensorData | td.NonTensorStack):
        return ["nontensor", _apart(item.tolist() if isinstance(item, td.NonTensorStack) else item.data, path, leaves)]
    if is_lazy_stack(item):
        members = {str(i): _apart(v, (*path, str(i)), leaves) for i, v in enumerate(item.tensordicts)}
        return ["stack", members, item.stack_dim]
    if is_collection(item):
        parts = {str(k): _apart(v, (*path, str(k)), leaves) for k, v in item.items()}
        outline = own_outline(item)
        batch = outline.pop("batch")
        if item.device is not None:
            outline["device"] = str(item.device)
        return ["td", parts, item.batch_dims, [] if _has_tensor(item) else batch, *([outline] if outline else [])]
    if isinstance(item, torch.Tensor | np.ndarray):
        leaves[here] = item
        return ["tensor", *(["grad"] if item.requires_grad else [])] if isinstance(item, torch.Tensor) else ["array"]
    if type(item) is dict and all(isinstance(k, str) for k in item) and any(map(_is_array, item.values())):
        return ["dict", {k: _apart(v, (*path, k), leaves) for k, v in item.items()}]
    if type(item) in (list, tuple) and any(map(_is_array, item)):
        parts = {str(i): _apart(v, (*path, str(i)), leaves) for i, v in enumerate(item)}
        return [type(item).__name__, parts]
    if type(item) in (bool, int, float, str):
        leaves[here] = item
        return [type(item).__name__]
    return _as_json(item, here, leaves)


def _as_json(item: Any, here: Path, leaves: Leaves) -> Any:
    try:
        jsontree.dumps(item, where=show(here))
    except ArchiveError as e:
        raise FieldError(
            f"an item of the storage has a {type(item).__name__} in {show(here)!r}, which cannot be saved without pickle; "
            "store tensors, arrays, numbers, strings, or dicts and lists of them"
        ) from e
    leaves[here] = _Json(item)
    return ["json"]


def _is_array(value: Any) -> bool:
    deep = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return isinstance(value, torch.Tensor | np.ndarray) or hasattr(value, "batch_size") or any(map(_is_array, deep))


def _has_tensor(item: Any) -> bool:
    return any(isinstance(v, torch.Tensor) for v in item.values())


def _joined(path: Path, values: list[Any]) -> Any:
    """The rows of one field."""
    first = values[0]
    if isinstance(first, _Json):
        return [v.value for v in values]
    stack = _stacked(values)
    if stack is not None:
        every = dtypes.from_torch(stack, where=show(path))
        return every if stack.ndim == 1 else list(every)
    if isinstance(first, torch.Tensor):
        plain = [dtypes.from_torch(v.as_subclass(torch.Tensor), where=show(path)) for v in values]
        return [p.copy() for p in plain]
    if isinstance(first, np.ndarray):
        return np.stack(values) if first.ndim == 0 else [v.copy() for v in values]
    if isinstance(first, str):
        return list(values)
    try:
        return np.array(values, np.dtype({bool: "?", int: "<i8", float: "<f8"}[type(first)]))
    except OverflowError as e:
        raise FieldError(f"field {show(path)!r} holds an integer beyond 64 bits; store it as a string") from e


def _nbytes(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, torch.Tensor | np.ndarray) else 64


def _stacked(values: list[Any]) -> torch.Tensor | None:
    """Tensors of one dtype and shape as one; None if they are not."""
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return None
    if not all(isinstance(v, torch.Tensor) and v.dtype == first.dtype and v.shape == first.shape for v in values):
        return None
    with torch.no_grad():
        return torch.stack(values).as_subclass(torch.Tensor).cpu()


def _digests(values: list[Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A number for each value of one field."""
    stack = _stacked(values)
    if stack is not None:
        return digests.of_tensor(stack, None)
    plain = [v.value if isinstance(v, _Json) else v for v in values]
    each = (v.tobytes() if isinstance(v, np.ndarray) and v.dtype != object else repr(v).encode() for v in plain)
    return np.array([_digest(v) for v in each], np.uint64)


def _digest(value: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little")


def _kind_of(kind: Any, leaves: Mapping[Path, Any], number: int | None) -> Any:
    """What to make of a step: as the state says; of steps saved by another system, a TensorDict."""
    if isinstance(kind, dict) and "items" in kind and number is not None:
        found = kind["items"][number]
        return json.loads(found) if isinstance(found, str) else found
    if kind == "tensor":
        return ["tensor"]
    if isinstance(kind, dict) and "outline" not in kind:
        raise UsageError("the checkpoint has a tree of tensors; restore it into a tensor storage")
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, ["td", {}, 0, []])[1]
        text = isinstance(leaf, list) or leaf.dtype == object
        inner[path[-1]] = ["nontensor", ["str"]] if text and not _is_ragged(leaf) else ["tensor"]
    return ["td", nested, 0, []]


def _is_ragged(leaf: Any) -> bool:
    return isinstance(leaf, list) and bool(leaf) and isinstance(leaf[0], np.ndarray)


def _together(kind: Any, path: Path, leaves: Mapping[Path, Any], place: int) -> Any:
    """The item of a kind, from the leaves of step `place`."""
    what, *more = kind
    if what in ("td", "stack", "dict", "list", "tuple"):
        parts = {k: _together(sub, (*path, k), leaves, place) for k, sub in more[0].items()}
        if what == "td":
            return _tensordict(parts, *more[1:])
        if what == "stack":
            return module_tensordict().LazyStackedTensorDict(*parts.values(), stack_dim=more[1])
        return parts if what == "dict" else {"list": list, "tuple": tuple}[what](parts.values())
    if what == "nontensor":
        inner = _together(more[0], path, leaves, place)
        td = module_tensordict()
        return td.NonTensorStack(*inner) if isinstance(inner, list) else td.NonTensorData(inner)
    value = leaves[path or ROOT][place]
    if what in _NUMBERS:
        return _NUMBERS[what](value)
    if what == "tensor":
        plain = getattr(value, "dtype", np.dtype(object)).kind in "biu" or getattr(value, "dtype", None) in _FLOATS
        tensor = torch.from_numpy(np.array(value)) if plain else dtypes.to_torch(np.array(value))
        return tensor.requires_grad_() if more else tensor
    return np.array(value) if what == "array" else value


def _tensordict(parts: dict[str, Any], dims: int, batch: list[int], more: Mapping[str, Any] | None = None) -> Any:
    tensors = [v for v in parts.values() if isinstance(v, torch.Tensor)]
    outline = {**(more or {}), "batch": list(tensors[0].shape[:dims]) if tensors else batch}
    return made(parts, outline, device=available(outline.get("device")))
