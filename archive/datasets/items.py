"""The items of a batch, and all of them as one nest of tensors.

Fields of one shape are stacked. A field whose items differ in length by nature (ragged fields, and every per-step
field of whole episodes) becomes a Ragged of all items' rows end to end and the length of each, whatever the lengths
happen to be; in a TensorDict it is a jagged nested tensor. Strings and JSON become lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from archive.base import FieldError, show
from archive.fields import Path, Ragged, dtypes, mapped, to_tensors


class Collation(NamedTuple):
    """Facts of fields that their values do not show.

    ragged: fields, or nests of such, whose rows differ in number from item to item.  opaque: fields of JSON, which are
    no nests.  varying: whether items differ in their number of steps.
    """

    ragged: frozenset[Path] = frozenset()
    opaque: frozenset[Path] = frozenset()
    varying: bool = False

    def merged(self, values: list[Any], path: Path = ()) -> Any:
        """The items' values of a field, or of all below it, as one."""
        first = values[0]
        if path in self.opaque:
            return values
        if isinstance(first, Mapping):
            _check_alike(values, path)
            return {k: self.merged([v[k] for v in values], (*path, k)) for k in first}
        if isinstance(first, Ragged):
            return self._nested([list(torch.split(v.values, v.lengths.tolist())) for v in values])
        if isinstance(first, torch.Tensor):
            return _end_to_end(values, path) if self._is_ragged(path) else _stacked(values)
        if isinstance(first, list) and self._is_ragged(path):
            return self._nested(values)
        return [v.tolist() for v in values] if isinstance(first, np.ndarray) else values

    def _is_ragged(self, path: Path) -> bool:
        return any(path[:n] in self.ragged for n in range(1, len(path) + 1))

    def _nested(self, items: list[list[Any]]) -> Ragged:
        """Rows of each step of each item: the lengths are [items, steps], or ragged where the steps differ in
        number."""
        lengths = [torch.tensor([len(row) for row in item], dtype=torch.int64) for item in items]
        counts: Any = _end_to_end(lengths, ()) if self.varying else torch.stack(lengths)
        rows = [row for item in items for row in item]
        return Ragged(torch.cat(rows) if rows else torch.zeros(0), counts)  # type: ignore[arg-type]


class Items(Sequence[Any]):
    """The items of a batch: each made when asked for, or all of them stacked in `whole`."""

    def __init__(
        self,
        count: int,
        make: Callable[[int], Any],
        *,
        whole: dict[str, Any] | None = None,
        collation: Collation | None = None,
    ) -> None:
        self._count = count
        self._make = make
        self.whole = whole
        self.collation = collation or Collation()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(self._count)[index]
        return [self._make(i) for i in places] if isinstance(places, range) else self._make(places)

    def part(self, start: int, stop: int) -> Items:
        """Some of them that follow one another; of items that were not stacked."""
        count = len(range(self._count)[start:stop])
        return Items(count, lambda i: self._make(start + i), collation=self.collation)

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, range(self._count))


def merged(items: Sequence[Any]) -> dict[str, Any]:
    """The items of a batch as one nest; those that were read together are not taken apart first."""
    whole = getattr(items, "whole", None)
    out: dict[str, Any] = getattr(items, "collation", Collation()).merged(list(items)) if whole is None else whole
    return out


def _check_alike(values: list[Any], path: Path) -> None:
    for v in values:
        if not isinstance(v, Mapping) or v.keys() != values[0].keys():
            odd = sorted(map(str, set(values[0]) ^ set(v))) if isinstance(v, Mapping) else [type(v).__name__]
            where = f" below {show(path)!r}" if path else ""
            raise FieldError(
                f"the items of a batch differ in their fields{where}: {', '.join(odd)}; choose fields that all "
                "episodes have, or fill them in with missing=VALUE"
            )


def _stacked(values: list[Any]) -> Any:
    """Fields of one shape stacked; those of the whole episode may differ, and stay a list."""
    return torch.stack(values) if len({v.shape for v in values}) == 1 else values


def _end_to_end(values: list[Any], path: Path) -> Ragged:
    if any(not v.ndim or v.shape[1:] != values[0].shape[1:] for v in values):
        shapes = " and ".join(dict.fromkeys(str(list(v.shape)) for v in values))
        raise FieldError(f"items of shapes {shapes} of field {show(path)!r} make no batch; leave the field out")
    return Ragged(torch.cat(values), torch.tensor([len(v) for v in values]))  # type: ignore[arg-type]


def tensors(gathered: Any) -> Any:
    """A gathered batch as tensors: rows of arrays that differ in length are a Ragged, text and JSON stay lists."""
    return mapped(gathered, _tensors)


def _tensors(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return dtypes.to_torch(leaf)
    if not isinstance(leaf, list) or not leaf:
        return to_tensors(leaf)
    if isinstance(leaf[0], np.ndarray):
        return _ragged(leaf, (len(leaf),))
    if isinstance(leaf[0], list) and _are_arrays(leaf):
        if len({len(rows) for rows in leaf}) == 1:
            return _ragged([row for rows in leaf for row in rows], (len(leaf), len(leaf[0])))
        return [to_tensors(rows) for rows in leaf]
    return leaf


def _are_arrays(leaf: list[Any]) -> bool:
    return all(isinstance(row, np.ndarray) for rows in leaf for row in rows) and any(map(len, leaf))


def _ragged(rows: list[Any], shape: tuple[int, ...]) -> Any:
    if len({row.shape[1:] for row in rows}) > 1 or not all(row.ndim for row in rows):
        return to_tensors(rows)
    lengths = np.array([len(row) for row in rows], np.int64).reshape(shape)
    return to_tensors(Ragged(np.concatenate(rows), lengths))


# -- rows of one field of a batch --------------------------------------------------------------------------------------


def row_of(nest: Any, i: int) -> Any:
    """One item of a batch's nest."""
    return mapped(nest, lambda leaf: _row(leaf, i))


def _row(leaf: Any, i: int) -> Any:
    """An array that torch has no dtype for, and lists, are indexed as tensors are."""
    if not isinstance(leaf, Ragged):
        return leaf[i]
    stop = int(leaf.lengths[: i + 1].sum())
    return leaf.values[stop - int(leaf.lengths[i]) : stop]


def first_row(leaf: Any) -> Any:
    """The first row of a leaf that has rows, else the leaf."""
    rows = isinstance(leaf, list) or (isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim)
    return leaf[0] if rows and len(leaf) else leaf


def spread(rows: Any, mask: torch.Tensor) -> Any:
    """Rows put where the mask is set, zeros elsewhere."""
    if isinstance(rows, torch.Tensor):
        out = rows.new_zeros((*mask.shape, *rows.shape[1:]))
        out[mask] = rows
        return out
    plain = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    plain[mask.numpy()] = rows
    return plain


def filled(leaf: Any, steps: int, length: int) -> Any:
    """Rows of `steps` steps made `length` long; what has another number of rows belongs to the whole episode."""
    scalar = isinstance(leaf, (torch.Tensor, np.ndarray)) and not leaf.ndim
    if scalar or not isinstance(leaf, (torch.Tensor, np.ndarray, list)) or len(leaf) != steps or steps == length:
        return leaf
    if isinstance(leaf, torch.Tensor):
        return torch.cat([leaf, leaf.new_zeros((length - steps, *leaf.shape[1:]))])
    if isinstance(leaf, list):
        empty = leaf[0][:0] if leaf and isinstance(leaf[0], torch.Tensor) else None
        return leaf + [empty] * (length - steps)
    tail = np.full((length - steps, *leaf.shape[1:]), "" if leaf.dtype == object else 0, leaf.dtype)
    return np.concatenate([leaf, tail])
