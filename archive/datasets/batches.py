"""Batches of items: a nest of tensors, a TensorDict, or padded to the longest, with a mask of each field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from archive.base import FieldError, UsageError, package
from archive.datasets.items import merged
from archive.fields import Ragged

KINDS = ("dict", "tensordict", "padded", "list")
MASK = "_mask"
SIDES = ("right", "left")
# torch has no masked assignment for these: their bits are moved as those of other dtypes
_SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_SAME_BITS |= {getattr(torch, n): torch.uint8 for n in dir(torch) if n.startswith("float8_")}


def collate(items: Sequence[Any], kind: Any = "dict") -> Any:
    """One batch of some items: a nested "dict" of tensors, a "tensordict", "padded" (or a Padded), or the "list" as it
    is. A DataLoader's collate_fn, too, and faster than its own: items that were read together are not taken apart
    first."""
    if check_kind(kind) == "list":
        return list(items)
    return as_kind(merged(items), len(items), kind)


def as_kind(nest: dict[str, Any], count: int, kind: Any) -> Any:
    """A batch's nest of tensors as it is, padded, or as a TensorDict of `count` items."""
    if isinstance(kind, Padded) or kind == "padded":
        return (kind if isinstance(kind, Padded) else Padded()).batch(nest, count)
    return tensordict_of(nest, count) if kind == "tensordict" else nest


def check_kind(kind: Any) -> Any:
    """One of KINDS, or a Padded."""
    if isinstance(kind, Padded):
        return kind
    if kind not in KINDS:
        raise UsageError(
            f"collate={kind!r}: give one of {', '.join(KINDS)}, a Padded, or a function of the list of items"
        )
    return kind


def tensordict_of(nest: dict[str, Any], count: int) -> Any:
    """A nest of tensors as a TensorDict of `count` items."""
    tensordict = package("tensordict", "collate='tensordict'", "tensordict")
    return tensordict.TensorDict({k: _entry(v, count) for k, v in nest.items()}, batch_size=[count])


def _entry(value: Any, count: int) -> Any:
    from tensordict import NonTensorData, NonTensorStack

    if isinstance(value, dict):
        return tensordict_of(value, count)
    if isinstance(value, Ragged):
        values: Any = value.values
        lengths: Any = value.lengths
        if isinstance(lengths, torch.Tensor) and lengths.ndim == 1:
            ends = torch.cumsum(lengths, 0)
            return torch.nested.nested_tensor_from_jagged(values, torch.cat([ends.new_zeros(1), ends]))
        return NonTensorData(value, batch_size=[count])
    if isinstance(value, list):
        return NonTensorStack(*[NonTensorData(v) for v in value])
    return value


# -- padding -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padded:
    """Pads the fields of a batch that differ in length, to the longest of the batch: `collate=Padded(pad_value=0)`.

    In place of a Ragged a field is a tensor [items, longest, ...] (of rows in steps [items, most steps, longest, ...]),
    and below "_mask" a boolean tensor of the same name is true where there is data. Other fields stay as they are.
    pad_value: a number, or a dict of field -> number ("" for all others; 0 where nothing is said).  side: "right" or
    "left", or a dict of field -> side.  kind: "dict" or "tensordict".

    Of `loader`, Sampler and `collate`, and as a DataLoader's collate_fn.
    """

    pad_value: Any = 0
    side: Any = "right"
    kind: str = "dict"

    def __post_init__(self) -> None:
        sides = self.side.values() if isinstance(self.side, Mapping) else (self.side,)
        odd = [side for side in sides if side not in SIDES]
        if odd:
            raise UsageError(f"side={odd[0]!r}: give 'right' or 'left'")
        if self.kind not in ("dict", "tensordict"):
            raise UsageError(f"kind={self.kind!r}: give 'dict' or 'tensordict'")

    def __call__(self, items: Sequence[Any]) -> Any:
        """A batch of some items, padded."""
        return self.batch(merged(items), len(items))

    def batch(self, nest: dict[str, Any], count: int) -> Any:
        """The same of a batch that is a nest of tensors and Ragged."""
        if MASK in nest:
            raise FieldError(f"field {MASK!r} is where the masks go; leave it out, or rename it")
        masks: dict[str, Any] = {}
        out = self._nest(nest, "", masks)
        whole = {**out, MASK: masks}
        return tensordict_of(whole, count) if self.kind == "tensordict" else whole

    def _nest(self, nest: Mapping[str, Any], path: str, masks: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in nest.items():
            if isinstance(value, Mapping):
                below: dict[str, Any] = {}
                out[name] = self._nest(value, f"{path}{name}/", below)
                if below:
                    masks[name] = below
                continue
            ragged = _as_ragged(value)
            if ragged is not None:
                out[name], masks[name] = self._field(ragged, f"{path}{name}")
            else:
                out[name] = _listed(value) if isinstance(value, Ragged) else value
        return out

    def _field(self, ragged: Ragged, path: str) -> tuple[torch.Tensor, torch.Tensor]:
        values: Any = ragged.values
        fill = _fill(_of(self.pad_value, path, 0), values, path)
        left = _of(self.side, path, "right") == "left"
        lengths: Any = ragged.lengths
        if isinstance(lengths, Ragged):  # rows of each step, steps of each item
            rows, known = _padded(values, lengths.values, fill, left)
            steps: Any = lengths.lengths
            whole, _ = _padded(rows, steps, fill, left)
            mask, _ = _padded(known, steps, torch.tensor(False), left)
            return whole, mask
        rows, known = _padded(values, lengths.reshape(-1), fill, left)
        shape = tuple(lengths.shape)
        return rows.reshape(*shape, *rows.shape[1:]), known.reshape(*shape, known.shape[1])


def _listed(text: Ragged) -> list[Any]:
    """Rows that are no numbers, item by item."""
    return [list(rows) for rows in Ragged(text.values, np.asarray(text.lengths)).split()]


def _as_ragged(value: Any) -> Ragged | None:
    """A field that differs in length as a Ragged: also lists of tensors, and of lists of tensors, that differ so."""
    if isinstance(value, Ragged):
        values: Any = value.values
        return value if isinstance(values, torch.Tensor) else None
    if not isinstance(value, list) or not value:
        return None
    nested = all(isinstance(v, list) for v in value)
    rows = [row for v in value for row in v] if nested else value
    if not rows or not all(isinstance(row, torch.Tensor) and row.ndim for row in rows):
        return None
    if len({(row.dtype, row.shape[1:]) for row in rows}) > 1:
        return None
    lengths: Any = torch.tensor([len(row) for row in rows])
    if nested:
        lengths = Ragged(lengths, _counts(value))
    joined: Any = torch.cat(rows)
    return Ragged(joined, lengths)


def _counts(rows: list[Any]) -> Any:
    return torch.tensor([len(row) for row in rows])


def _of(given: Any, path: str, default: Any) -> Any:
    return given.get(path, given.get("", default)) if isinstance(given, Mapping) else given


def _fill(value: Any, values: torch.Tensor, path: str) -> torch.Tensor:
    """The padding as one number of the field's dtype, which must have it."""
    made = torch.tensor(value)
    fill = made.to(values.dtype)
    whole = not (values.dtype.is_floating_point or values.dtype.is_complex)
    if made.ndim or (whole and fill.item() != value):
        raise UsageError(
            f"pad_value={value!r} is no {values.dtype} as field {path!r} has; give pad_value={{{path!r}: ...}}"
        )
    return fill


def _padded(values: torch.Tensor, lengths: Any, fill: torch.Tensor, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows, longest, ...], where there is data) of rows end to end."""
    lengths = torch.as_tensor(lengths).to(values.device)
    longest = int(lengths.max()) if len(lengths) else 0
    place = torch.arange(longest, device=values.device)
    known = place >= longest - lengths[:, None] if left else place < lengths[:, None]
    bits = _SAME_BITS.get(values.dtype, values.dtype)
    out = fill.to(values.device).view(bits).expand(len(lengths), longest, *values.shape[1:]).clone()
    out[known] = values.view(bits)
    return out.view(values.dtype), known
