"""TensorDicts and items taken apart and put together again: tensorclasses, tensors, arrays, numbers, strings, and trees
of them.

A collection of many steps has an outline: keys in their order, batch sizes and names of dimensions, of nested ones too,
and the class of a tensorclass, by name: one that this process has imported already; nothing is imported, and nothing
unpickled. The kind of a single item is a tree of ["td" | "dict" | "list" | "tuple" | "tensor" | "int" | ...], as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch

from archive.adapters import common
from archive.adapters.torchrl.parts import INSTALL
from archive.base import ArchiveError, FieldError, UsageError, jsontree, show
from archive.fields import Array, Path, dtypes

ROOT: Path = ("data",)  # the field of a storage that is one tensor, or of items without names
Outline = dict[str, Any]


@cache
def module_tensordict() -> Any:
    """The module tensordict, or what to install."""
    return common.system("tensordict", INSTALL)


def is_collection(value: Any) -> bool:
    """True for a TensorDict or a tensorclass, nested non-tensors among them."""
    return not isinstance(value, type) and bool(module_tensordict().is_tensor_collection(value))


def is_non_tensor(value: Any) -> bool:
    """True for one value, or a stack of values, that are no tensors."""
    td = module_tensordict()
    return isinstance(value, td.NonTensorStack | td.NonTensorData)


def is_lazy_stack(value: Any) -> bool:
    """True for a stack of TensorDicts that stay apart, and may differ in shape and in keys."""
    return isinstance(value, module_tensordict().LazyStackedTensorDict)


def outline_of(held: Any, dims: int) -> Outline:
    """The outline of a collection; its first `dims` dimensions are left out, as the storage says them."""
    if is_lazy_stack(held):
        members = {str(i): outline_of(member, dims) for i, member in enumerate(held.tensordicts)}
        return {"keys": members, "batch": [], "stack": held.stack_dim - dims}
    nested = {
        str(key): outline_of(value, dims) if is_collection(value) and not is_non_tensor(value) else None
        for key, value in held.items()
    }
    return {"keys": nested, **own_outline(held, dims)}


def own_outline(held: Any, dims: int = 0) -> Outline:
    """Batch size, names and class of a collection, without what is in it."""
    out: Outline = {"batch": list(held.batch_size[dims:])}
    names = list(held.names[dims:])
    if any(name is not None for name in names):
        out["names"] = names
    if module_tensordict().is_tensorclass(held):
        out["class"] = [type(held).__module__, type(held).__qualname__]
    return out


def without_classes(outline: Outline) -> Outline:
    """The same of TensorDicts alone."""
    nested = {key: None if inner is None else without_classes(inner) for key, inner in outline["keys"].items()}
    return {**{n: v for n, v in outline.items() if n != "class"}, "keys": nested}


def assembled(
    outline: Outline, found: Mapping[Path, Any], prefix: Sequence[int], path: Path = (), *, names: Any = None
) -> Any:
    """A collection of that outline from its leaves; other leaves come last.

    prefix, names: the leaves' first dimensions, which the outline leaves out, and what they are called.
    """
    parts: dict[str, Any] = {}
    known = outline["keys"]
    others = dict.fromkeys(p[len(path)] for p in found if len(p) > len(path) and p[: len(path)] == path)
    for key in [*known, *(key for key in others if key not in known)]:
        here = (*path, key)
        inner = known.get(key)
        if inner is None and here not in found and key in others:
            inner = {"keys": {}, "batch": []}
        if inner is not None:
            parts[key] = assembled(inner, found, prefix, here, names=names)
        elif here in found:
            parts[key] = found[here]
    if "stack" in outline:
        return module_tensordict().LazyStackedTensorDict(*parts.values(), stack_dim=len(prefix) + outline["stack"])
    return made(parts, outline, prefix, names=names)


def made(
    parts: Mapping[str, Any], outline: Outline, prefix: Sequence[int] = (), device: Any = None, names: Any = None
) -> Any:
    """A TensorDict, or a tensorclass, of these parts."""
    batch = [*prefix, *outline["batch"]]
    every = [*(names or [None] * len(prefix)), *outline.get("names", [None] * len(outline["batch"]))]
    named = any(name is not None for name in every)
    td = module_tensordict().TensorDict(dict(parts), batch_size=batch, device=device, names=every if named else None)
    return td if "class" not in outline else class_named(*outline["class"]).from_tensordict(td)


def available(device: str | None) -> str | None:
    """The device, or None where this process has none such."""
    return None if device is None or (device.startswith("cuda") and not torch.cuda.is_available()) else device


def class_named(module: str, name: str) -> Any:
    """The tensorclass of that name, if this process has it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = None if found is None else getattr(found, part, None)
    if not isinstance(found, type) or not module_tensordict().is_tensorclass(found):
        raise UsageError(
            f"the steps are of class {name.rpartition('.')[2]}, and this process has no {module}.{name}: import it "
            "first; or extend the buffer with one of them, and restore with existing='replace'"
        )
    return found


def leaves_of(held: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Path and tensor of each leaf, or the list of what a non-tensor field holds."""
    out: list[tuple[Path, Any]] = []
    for key, value in _members(held):
        here = (*path, str(key))
        if is_non_tensor(value):
            out.append((here, _flat_list(value.tolist())))
        elif is_collection(value):
            out += leaves_of(value, here)
        elif isinstance(value, torch.Tensor):
            out.append((here, value))
        else:
            raise FieldError(f"field {show(here)!r} is a {type(value).__name__}, which cannot be saved")
    return out


def _members(held: Any) -> Any:
    return ((str(i), member) for i, member in enumerate(held.tensordicts)) if is_lazy_stack(held) else held.items()


def _flat_list(values: Any) -> list[Any]:
    while values and isinstance(values[0], list):
        values = [v for inner in values for v in inner]
    return list(values)


# -- single items ----------------------------------------------------------------------------------------------------

Leaves = dict[Path, Any]
_NUMBERS = {"bool": bool, "int": int, "float": float}


class Json:
    """A value that is kept as JSON."""

    def __init__(self, value: Any) -> None:
        self.value = value


def apart(item: Any, path: Path, leaves: Leaves) -> Any:
    """The kind of an item; its leaves are collected. What cannot be saved without pickle is refused."""
    here = path or ROOT
    if type(item) is torch.Tensor:  # most values are: first, as an item each makes what comes before count
        leaves[here] = item
        return ["tensor", *(["grad"] if item.requires_grad else [])]
    td = module_tensordict()
    if isinstance(item, td.NonTensorData | td.NonTensorStack):
        return ["nontensor", apart(item.tolist() if isinstance(item, td.NonTensorStack) else item.data, path, leaves)]
    if is_lazy_stack(item):
        return ["stack", _parts(enumerate(item.tensordicts), path, leaves), item.stack_dim]
    if is_collection(item):
        parts = _parts(item.items(), path, leaves)
        outline = own_outline(item)
        batch = outline.pop("batch")
        if item.device is not None:
            outline["device"] = str(item.device)
        measured = any(isinstance(v, torch.Tensor) for v in item.values())  # its tensors tell the batch size
        return ["td", parts, item.batch_dims, [] if measured else batch, *([outline] if outline else [])]
    if isinstance(item, torch.Tensor | np.ndarray):
        leaves[here] = item
        return ["tensor", *(["grad"] if item.requires_grad else [])] if isinstance(item, torch.Tensor) else ["array"]
    if type(item) is dict and all(isinstance(k, str) for k in item) and any(map(_is_array, item.values())):
        return ["dict", _parts(item.items(), path, leaves)]
    if type(item) in (list, tuple) and any(map(_is_array, item)):
        return [type(item).__name__, _parts(enumerate(item), path, leaves)]
    if type(item) in (bool, int, float, str):
        leaves[here] = item
        return [type(item).__name__]
    _check_json(item, here)
    leaves[here] = Json(item)
    return ["json"]


def _check_json(item: Any, here: Path) -> None:
    try:
        jsontree.dumps(item, where=show(here))
    except ArchiveError as e:
        raise FieldError(
            f"an item of the storage has a {type(item).__name__} in {show(here)!r}, which cannot be saved without "
            "pickle; store tensors, arrays, numbers, strings, or dicts and lists of them"
        ) from e


def _parts(entries: Any, path: Path, leaves: Leaves) -> dict[str, Any]:
    return {str(key): apart(value, (*path, str(key)), leaves) for key, value in entries}


def _is_array(value: Any) -> bool:
    deep = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return isinstance(value, torch.Tensor | np.ndarray) or hasattr(value, "batch_size") or any(map(_is_array, deep))


def together(kind: Any, path: Path, rows: Leaves, count: int, made: Leaves) -> list[Any]:
    """`count` items of a kind, each its own memory, from the rows of each leaf, which are of one shape.

    made: where what became of each leaf is collected, all rows of it: tensors as one.
    """
    what, *more = kind
    if what in ("td", "stack", "dict", "list", "tuple"):
        columns = [together(sub, (*path, k), rows, count, made) for k, sub in more[0].items()]
        entries: Any = zip(*columns, strict=True) if columns else ((),) * count
        return _nests(what, (dict(zip(more[0], row, strict=True)) for row in entries), more[1:])
    if what == "nontensor":
        td = module_tensordict()
        inner = together(more[0], path, rows, count, made)
        return [td.NonTensorStack(*v) if isinstance(v, list) else td.NonTensorData(v) for v in inner]
    here = path or ROOT
    if what == "tensor":
        return _tensors(here, rows[here], bool(more), made)
    of_row = _NUMBERS.get(what) or (np.array if what == "array" else None)
    made[here] = list(rows[here]) if of_row is None else [of_row(value) for value in rows[here]]
    return list(made[here])


def _nests(what: str, parts: Iterator[dict[str, Any]], more: list[Any]) -> list[Any]:
    """One by one: collecting garbage among many live objects takes longer than making them."""
    if what == "td":
        return _tensordicts(parts, *more)
    if what == "stack":
        lazy = module_tensordict().LazyStackedTensorDict
        return [lazy(*part.values(), stack_dim=more[0]) for part in parts]
    if what == "dict":
        return list(parts)
    sequence: Any = {"list": list, "tuple": tuple}[what]
    return [sequence(part.values()) for part in parts]


def _tensors(path: Path, rows: Any, grad: bool, made: Leaves) -> list[Any]:
    stack = dtypes.to_torch(np.stack(rows))
    whole = isinstance(stack, torch.Tensor)  # else of a dtype that torch does not have
    unbound: Any = torch.unbind_copy  # which torch's stubs say gives nothing
    every = list(unbound(stack)) if whole else [dtypes.to_torch(np.array(row)) for row in rows]
    made[path] = stack if whole else every
    return [value.requires_grad_() for value in every] if grad else every


def _tensordicts(
    parts: Iterator[dict[str, Any]], dims: int, batch: list[int], more: Mapping[str, Any] | None = None
) -> list[Any]:
    first = next(parts)
    tensors = [v for v in first.values() if isinstance(v, torch.Tensor)]
    outline = {**(more or {}), "batch": list(tensors[0].shape[:dims]) if tensors else batch}
    device = available(outline.get("device"))
    return [made(part, outline, device=device) for part in chain((first,), parts)]


def kind_of(kind: Any, leaves: Mapping[Path, Any], number: int | None) -> Any:
    """The kind of item that a step becomes: as the state says; of steps saved by another system, a TensorDict."""
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
        ragged = isinstance(leaf, list) and bool(leaf) and isinstance(leaf[0], np.ndarray)
        text = not ragged and (isinstance(leaf, list) or leaf.dtype == object)
        inner[path[-1]] = ["nontensor", ["str"]] if text else ["tensor"]
    return ["td", nested, 0, []]


def joined(path: Path, values: list[Any]) -> Any:
    """The rows of one field: an array, or a list where rows have dimensions of their own."""
    first = values[0]
    if isinstance(first, Json):
        return [v.value for v in values]
    stack = stacked(values)
    if stack is not None:
        every = dtypes.from_torch(stack, where=show(path))
        return every if stack.ndim == 1 else list(every)
    if isinstance(first, torch.Tensor):
        return [dtypes.from_torch(v.as_subclass(torch.Tensor), where=show(path)).copy() for v in values]
    if isinstance(first, np.ndarray):
        return np.stack(values) if first.ndim == 0 else [v.copy() for v in values]
    if isinstance(first, str):
        return list(values)
    try:
        return np.array(values, np.dtype({bool: "?", int: "<i8", float: "<f8"}[type(first)]))
    except OverflowError as e:
        raise FieldError(f"field {show(path)!r} holds an integer beyond 64 bits; store it as a string") from e


def stacked(values: list[Any]) -> torch.Tensor | None:
    """Tensors of one dtype and shape as one on the CPU; None if they are not."""
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return None
    if not all(isinstance(v, torch.Tensor) and v.dtype == first.dtype and v.shape == first.shape for v in values):
        return None
    with torch.no_grad():
        return torch.stack(values).as_subclass(torch.Tensor).cpu()


def last_numbers(path: Path, values: list[Any]) -> Array:
    """The last number of each value, 0 of empty ones; as texts if not all are numbers."""
    stack = stacked(values)
    every = None if stack is None else dtypes.from_torch(stack, where=show(path)).reshape(len(values), -1)
    if every is not None and every.dtype.kind in "biuf":
        return every[:, -1] if every.shape[1] else np.zeros(len(values))
    each = [dtypes.from_torch(v, where=show(path)) if isinstance(v, torch.Tensor) else np.asarray(v) for v in values]
    if any(v.dtype.kind not in "biuf" for v in each):
        return np.array([str(v) for v in values], object)
    return np.array([v.reshape(-1)[-1] if v.size else 0 for v in each])


# -- batches that were drawn ahead -------------------------------------------------------------------------------------


def to_state(batch: Any) -> dict[str, Any]:
    """A batch of samples for the state."""
    leaves: Leaves = {}
    kind = apart(batch, (), leaves)
    return {"kind": kind, "leaves": [[list(path), _plain(leaf)] for path, leaf in leaves.items()]}


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().as_subclass(torch.Tensor)
    return leaf.value if isinstance(leaf, Json) else leaf


def from_state(state: Mapping[str, Any]) -> Any:
    """The batch again."""
    rows: Leaves = {}
    for path, leaf in state["leaves"]:
        rows[tuple(path)] = [dtypes.from_torch(leaf, where="batch") if isinstance(leaf, torch.Tensor) else leaf]
    return together(state["kind"], (), rows, 1, {})[0]
