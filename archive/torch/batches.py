"""The items of a batch, and all of them as one nest: of tensors, padded to the longest with a mask of each field, or as
a TensorDict.

Fields of one shape are stacked. A field whose items differ in length by nature (ragged fields, and every per-step
field of whole episodes) becomes a Ragged of all items' rows end to end and the length of each, whatever the lengths
happen to be; in a TensorDict it is a jagged nested tensor. Strings and JSON become lists.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

import numpy as np
import torch

from archive.base import FieldError, UsageError, package, show
from archive.fields import Path, Ragged, dtypes, is_tensor, mapped, to_tensors

KINDS = ("dict", "tensordict", "padded", "list")
MASK = "_mask"
SIDES = ("right", "left")
# torch has no masked assignment for these: their bits are moved as those of other dtypes
_SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_SAME_BITS |= {getattr(torch, n): torch.uint8 for n in dir(torch) if n.startswith("float8_")}


class Items(Sequence[Any]):
    """The items of a batch: each made on demand, or all of them stacked in `whole`.

    Facts that their values do not show: `ragged` are fields, or nests of such, whose rows differ in number from
    item to item; `opaque` are fields of JSON, which are no nests; `varying` items differ in their number of steps.
    """

    def __init__(
        self,
        count: int,
        make: Callable[[int], Any],
        *,
        whole: dict[str, Any] | None = None,
        ragged: frozenset[Path] = frozenset(),
        opaque: frozenset[Path] = frozenset(),
        varying: bool = False,
    ) -> None:
        self._count = count
        self._make = make
        self.whole = whole
        self.ragged, self.opaque, self.varying = ragged, opaque, varying

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(self._count)[index]
        return [self._make(i) for i in places] if isinstance(places, range) else self._make(places)

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, range(self._count))

    def part(self, start: int, stop: int) -> Self:
        """A contiguous part of items that were not stacked."""
        other, make = copy.copy(self), self._make
        other._count, other._make = len(range(self._count)[start:stop]), lambda i: make(start + i)
        return other

    def merged(self, values: list[Any], path: Path = ()) -> Any:
        """The items' values of a field, or of all below it, merged into one."""
        first = values[0]
        if path in self.opaque:
            return values
        if isinstance(first, Mapping):
            _check_alike(values, path)
            return {k: self.merged([v[k] for v in values], (*path, k)) for k in first}
        if isinstance(first, Ragged):
            return self._end_to_end([list(torch.split(v.values, v.lengths.tolist())) for v in values], path)
        if isinstance(first, (torch.Tensor, list)) and any(path[:n] in self.ragged for n in range(1, len(path) + 1)):
            return self._end_to_end(values, path)
        if isinstance(first, torch.Tensor):  # those of the whole episode may differ, and stay a list
            return torch.stack(values) if len({v.shape for v in values}) == 1 else values
        return [v.tolist() for v in values] if isinstance(first, np.ndarray) else values

    def _end_to_end(self, values: list[Any], path: Path) -> Ragged:
        found = ragged(values, varying=self.varying)
        if found is not None:
            return found
        rows = [row for v in values for row in (v if isinstance(v, list) else [v])]
        if rows:
            shapes = " and ".join(dict.fromkeys(str(list(row.shape)) for row in rows))
            raise FieldError(f"items of shapes {shapes} of field {show(path)!r} make no batch; leave the field out")
        counts = [torch.zeros(len(v), dtype=torch.int64) for v in values]  # no item has a row
        return Ragged(torch.zeros(0), ragged(counts) if self.varying else torch.stack(counts))  # type: ignore[arg-type]


def ragged(items: Sequence[Any], *, varying: bool = False) -> Ragged | None:
    """Items' rows end to end, and the length of each; items of rows of their own, as lists, have lengths [items, rows],
    or a Ragged of lengths if they differ in number (or `varying`). None for unlike rows, and for items without any."""
    nested = set(map(type, items)) == {list}
    rows: list[Any] = [row for item in items for row in item] if nested else list(items)
    kinds = set(map(type, rows))
    if len(kinds) != 1 or not isinstance(rows[0], (torch.Tensor, np.ndarray)):
        return None
    if len({row.shape[1:] for row in rows}) > 1 or 0 in {row.ndim for row in rows}:
        return None
    lengths: Any = torch.tensor([len(row) for row in rows])
    if nested:
        counts = [len(item) for item in items]
        alike = len(set(counts)) == 1 and not varying
        lengths = lengths.reshape(len(items), -1) if alike else Ragged(lengths, torch.tensor(counts))  # type: ignore[arg-type]
    values: Any = torch.cat(rows) if isinstance(rows[0], torch.Tensor) else np.concatenate(rows)
    return Ragged(values, lengths)


def _check_alike(values: list[Any], path: Path) -> None:
    for v in values:
        if not isinstance(v, Mapping) or v.keys() != values[0].keys():
            odd = sorted(map(str, set(values[0]) ^ set(v))) if isinstance(v, Mapping) else [type(v).__name__]
            where = f" below {show(path)!r}" if path else ""
            raise FieldError(
                f"the items of a batch differ in their fields{where}: {', '.join(odd)}; choose fields that all "
                "episodes have, or fill them in with missing=VALUE"
            )


def tensors(gathered: Any) -> Any:
    """A gathered batch as tensors: rows of arrays that differ in length are a Ragged, text and JSON stay lists."""
    return mapped(gathered, _tensors)


def _tensors(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return dtypes.to_torch(leaf)
    if not isinstance(leaf, list) or not leaf:
        return to_tensors(leaf)
    made = [to_tensors(rows) for rows in leaf] if isinstance(leaf[0], list) else to_tensors(leaf)
    found = ragged(made)
    return made if found is None or isinstance(found.lengths, Ragged) else found


def collate(items: Sequence[Any], kind: Any = "dict") -> Any:
    """One batch of some items: a nested "dict" of tensors, a "tensordict", "padded" (or a Padded), or the "list" as it
    is. A DataLoader's collate_fn, too, and faster than its own: items that were read together are not taken apart
    first."""
    if check_kind(kind) == "list":
        return list(items)
    return as_kind(_merged(items), len(items), kind)


def _merged(items: Sequence[Any]) -> dict[str, Any]:
    """The items of a batch as one nest; those that were read together are not taken apart first."""
    whole: dict[str, Any] | None = getattr(items, "whole", None)
    if whole is None:
        own = items if isinstance(items, Items) else Items(len(items), items.__getitem__)
        whole = own.merged(list(items))
    return whole


def as_kind(nest: dict[str, Any], count: int, kind: Any) -> Any:
    """A batch's nest of tensors: plain, padded, or as a TensorDict of `count` items."""
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
    pad_value: a number, or a dict of field -> number ("" for all others; 0 by default).  side: "right" or
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
        return self.batch(_merged(items), len(items))

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
            found = ragged(value) if isinstance(value, list) else value
            rows, lengths = found if isinstance(found, Ragged) else (None, None)
            if is_tensor(rows):
                out[name], masks[name] = self._field(rows, lengths, f"{path}{name}")
            elif isinstance(value, Ragged):  # rows that are no numbers
                out[name] = [list(rows) for rows in Ragged(value.values, np.asarray(value.lengths)).split()]
            else:
                out[name] = value
        return out

    def _field(self, values: Any, lengths: Any, path: str) -> tuple[torch.Tensor, torch.Tensor]:
        fill = _fill(_of(self.pad_value, path, 0), values, path)
        left = _of(self.side, path, "right") == "left"
        if isinstance(lengths, Ragged):  # rows of each step, steps of each item
            rows, known = _padded(values, lengths.values, fill, left)
            steps: Any = lengths.lengths
            whole, _ = _padded(rows, steps, fill, left)
            mask, _ = _padded(known, steps, torch.tensor(False), left)
            return whole, mask
        rows, known = _padded(values, lengths.reshape(-1), fill, left)
        shape = tuple(lengths.shape)
        return rows.reshape(*shape, *rows.shape[1:]), known.reshape(*shape, known.shape[1])


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
    return spread(values, known, fill), known


def spread(rows: Any, known: torch.Tensor, fill: torch.Tensor | None = None) -> Any:
    """Rows put where `known` is true, and zeros (strings: "") or the fill elsewhere."""
    if not isinstance(rows, torch.Tensor):
        plain = np.full((*known.shape, *rows.shape[1:]), "" if rows.dtype == object else 0, rows.dtype)
        plain[known.numpy()] = rows
        return plain
    fill = rows.new_zeros(()) if fill is None else fill.to(rows.device)
    bits = _SAME_BITS.get(rows.dtype, rows.dtype)
    out = fill.view(bits).expand(*known.shape, *rows.shape[1:]).clone()
    out[known] = rows.view(bits)
    return out.view(rows.dtype)


def filled(leaf: Any, steps: int, length: int) -> Any:
    """Rows of `steps` steps made `length` long; what has another number of rows belongs to the whole episode."""
    scalar = isinstance(leaf, (torch.Tensor, np.ndarray)) and not leaf.ndim
    if scalar or not isinstance(leaf, (torch.Tensor, np.ndarray, list)) or len(leaf) != steps or steps == length:
        return leaf
    if isinstance(leaf, list):
        empty = leaf[0][:0] if leaf and isinstance(leaf[0], torch.Tensor) else None
        return leaf + [empty] * (length - steps)
    return spread(leaf, torch.arange(length) < steps)


# -- batches of batches ------------------------------------------------------------------------------------------------


def concatenated(parts: Sequence[Any], names: Sequence[str] = (), path: Path = ()) -> Any:
    """Nests of tensors end to end; they must have the same fields, dtypes and shapes."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        for i, other in enumerate(parts):
            if not isinstance(other, dict) or other.keys() != first.keys():
                raise _unlike(names, i, path, set(first) ^ set(other) if isinstance(other, dict) else {"a nest"})
        return {k: concatenated([p[k] for p in parts], names, (*path, k)) for k in first}
    if isinstance(first, Ragged):
        values, lengths = (concatenated([p[j] for p in parts], names, path) for j in (0, 1))
        return Ragged(values, lengths)
    if isinstance(first, torch.Tensor):
        for i, other in enumerate(parts):
            if not isinstance(other, torch.Tensor) or (other.dtype, other.shape[1:]) != (first.dtype, first.shape[1:]):
                raise _unlike(names, i, path, {f"{_kind(first)} and {_kind(other)}"})
        return torch.cat(list(parts))
    return [value for part in parts for value in part]


def _kind(value: Any) -> str:
    return f"{value.dtype}{list(value.shape[1:])}" if isinstance(value, torch.Tensor) else type(value).__name__


def _unlike(names: Sequence[str], i: int, path: Path, what: set[str]) -> FieldError:
    who = f"sources {names[0]!r} and {names[i]!r}" if names else "the parts"
    return FieldError(
        f"{who} differ{f' in {show(path)!r}' if path else ''}: {', '.join(sorted(map(str, what)))}; choose the fields "
        "that all have (fields=), fill in what is missing (missing=), or convert with transform="
    )
