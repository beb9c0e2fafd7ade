"""Pure, no I/O: a trajectory [T, B, ...] as rows [T * B, ...] of transitions,
and what is no transition's kept beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from archive.adapters.rlinf import trajectory as trajectories
from archive.base import FieldError, show
from archive.fields import Path, mapped

Rows = dict[Path, torch.Tensor]  # one row a transition, step by step, envs of a step side by side
Part = tuple[torch.Tensor, Rows]  # places of rows in a batch, and the rows
Signature = frozenset[tuple[Path, torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class _InRows:
    """Stands in a kept tree for a tensor that the rows hold in full."""

    path: Path


@dataclass(frozen=True)
class Flat:
    """A trajectory taken apart: rows of transitions, and the tree with everything that is not in them."""

    steps: int  # T
    envs: int  # B
    rows: Rows
    rest: dict[str, Any]  # the whole tree; tensors that `rows` has in full are left out

    @property
    def count(self) -> int:
        """Number of transitions."""
        return self.steps * self.envs

    @property
    def signature(self) -> Signature:
        return signature(self.rows)


def signature(rows: Mapping[Path, torch.Tensor]) -> Signature:
    """What rows must agree in to lie in one tensor: their names, dtypes and shapes."""
    return frozenset((path, t.dtype, tuple(t.shape[1:])) for path, t in rows.items())


def flatten(tree: Mapping[str, Any], steps: int, envs: int) -> Flat:
    """Take a trajectory's tree apart. The rows may share memory with it; what is kept beside them never does."""
    rows: Rows = {}
    rest = _kept(tree, (), steps, envs, rows)
    return Flat(steps, envs, rows, rest)


def _kept(node: Mapping[Any, Any], path: Path, steps: int, envs: int, rows: Rows) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in node.items():
        here = (*path, str(key))
        if isinstance(value, Mapping):
            out[key] = _kept(value, here, steps, envs, rows)
        elif isinstance(value, torch.Tensor):
            found = _transitions(here, value, steps, envs)
            if found is not None:
                if not isinstance(key, str):
                    kind = type(key).__name__
                    raise FieldError(f"field {show(here)!r}: the key {key!r} is a {kind}; fields are named by text")
                rows[here] = found.reshape(steps * envs, *found.shape[2:])
            whole = found is not None and found.shape == value.shape
            out[key] = _InRows(here) if whole else _copied(value)
        else:
            out[key] = _copied(value)
    return out


def _copied(value: Any) -> Any:
    """Lists and tuples of what never changes, and tensors, as they are now."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v) for v in value) if type(value) in (list, tuple) else value
    return value.copy() if hasattr(value, "copy") else value


def _transitions(path: Path, value: torch.Tensor, steps: int, envs: int) -> torch.Tensor | None:
    """The [T, B, ...] part of a field; None if it has none.

    Extra rows, one an epoch, are left out: of done flags those at the beginning of each epoch, of others (values of
    the state after an epoch) those at its end.
    """
    if value.dim() < 2 or value.shape[1] != envs or value.shape[0] < steps:
        return None
    is_done = path[0] in trajectories.DONES and len(path) == 1
    found = trajectories.one_a_step(value.detach(), steps, leading=is_done)
    if found is None and is_done:
        extra = len(value) - steps
        raise FieldError(
            f"{path[-1]} has {len(value)} rows, {extra} more than the trajectory's {steps} steps, which are not "
            f"{extra} epochs of equal length; give one extra row an epoch, or none"
        )
    return value.detach()[:steps] if found is None else found


def rebuilt(rest: Mapping[str, Any], rows: Rows, steps: int, envs: int) -> dict[str, Any]:
    """The tree that was taken apart."""

    def whole(value: Any) -> Any:
        if not isinstance(value, _InRows):
            return value
        found = rows[value.path]
        return found.reshape(steps, envs, *found.shape[1:])

    out: dict[str, Any] = mapped(rest, whole)
    return out


def joined(parts: list[Part], count: int, missing: Any) -> Rows:
    """One batch of `count` rows from parts of it; a lone part has them all, in order.

    missing: what becomes of a field that not all parts have: "error", "skip", or a value to fill in.
    """
    if len(parts) == 1:
        return parts[0][1]
    out: Rows = {}
    for path in dict.fromkeys(path for _, rows in parts for path in rows):
        lacking = any(path not in rows for _, rows in parts)
        if lacking and missing == "skip":
            continue
        if lacking and missing == "error":
            raise FieldError(
                f"some of the trajectories in the window lack field {show(path)!r}, which others have; make the buffer "
                "with missing='skip' to leave such fields out, or missing=VALUE to fill them in"
            )
        out[path] = _field(path, parts, count, missing)
    return out


def _field(path: Path, parts: list[Part], count: int, missing: Any) -> torch.Tensor:
    first = next(rows[path] for _, rows in parts if path in rows)
    out = torch.empty((count, *first.shape[1:]), dtype=first.dtype)
    for places, rows in parts:
        if path in rows:
            check_alike(path, first, rows[path])
            found = rows[path]
        else:
            found = torch.full((len(places), *out.shape[1:]), missing, dtype=out.dtype)
        _assignable(out)[places] = _assignable(found)
    return out


def gathered(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copies of these rows."""
    return tensor[index] if tensor.dim() == 1 else tensor.index_select(0, index)  # 1-d uint16 has no index_select


def _assignable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype whose rows torch can assign: there are no such kernels for larger unsigned ones."""
    plain = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(tensor.dtype)
    return tensor if plain is None else tensor.view(plain)


def check_alike(path: Path, a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse to put unlike rows into one batch."""
    if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
        raise FieldError(
            f"field {show(path)!r} is {b.dtype}{list(b.shape[1:])} in one trajectory and {a.dtype}{list(a.shape[1:])} "
            "in another, which make no batch; keep them in different buffers"
        )


def check_signature(have: Signature, new: Signature, missing: Any) -> None:
    """Refuse a trajectory whose fields are not those of the others."""
    old = {path: (dtype, shape) for path, dtype, shape in have}
    for path, dtype, shape in sorted(new, key=lambda entry: entry[0]):
        if path in old and old[path] != (dtype, shape):
            raise FieldError(
                f"field {show(path)!r} is {dtype}{list(shape)} here, and {old[path][0]}{list(old[path][1])} in the "
                "trajectories that the buffer has; nothing was added: keep them in different buffers"
            )
    if missing == "error":
        _check_names(old.keys(), {path for path, _, _ in new})


def _check_names(old: Any, new: set[Path]) -> None:
    for paths, what in ((set(old) - new, "lacks"), (new - set(old), "has")):
        if paths:
            raise FieldError(
                f"a trajectory {what} field {show(min(paths))!r}, unlike those that the buffer has; nothing was added. "
                "Make the buffer with missing='skip' to leave such fields out of batches, or missing=VALUE to fill "
                "them in"
            )
