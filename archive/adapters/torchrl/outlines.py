"""What a TensorDict is beside its leaves, as JSON, and such a one again.

An outline has the keys in their order, batch sizes and names of dimensions, of nested ones too, and the class of a
tensorclass, by name: one that this process has imported already; nothing is imported, and nothing unpickled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from archive.adapters import common
from archive.adapters.torchrl.parts import INSTALL
from archive.base import FieldError, UsageError, show
from archive.fields import Path

Outline = dict[str, Any]


@cache
def module_tensordict() -> Any:
    """The module tensordict, or what to install."""
    return common.system("tensordict", INSTALL)


def is_collection(value: Any) -> bool:
    """Whether it is a TensorDict or a tensorclass, nested non-tensors among them."""
    return not isinstance(value, type) and bool(module_tensordict().is_tensor_collection(value))


def is_non_tensor(value: Any) -> bool:
    """Whether it is one value, or a stack of values, that are no tensors."""
    td = module_tensordict()
    return isinstance(value, td.NonTensorStack | td.NonTensorData)


def is_lazy_stack(value: Any) -> bool:
    """Whether it is a stack of TensorDicts that stay apart, and may differ in shape and in keys."""
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
    for key, value in _parts(held):
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


def _parts(held: Any) -> Any:
    return ((str(i), member) for i, member in enumerate(held.tensordicts)) if is_lazy_stack(held) else held.items()


def _flat_list(values: Any) -> list[Any]:
    while values and isinstance(values[0], list):
        values = [v for inner in values for v in inner]
    return list(values)
