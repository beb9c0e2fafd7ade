"""Several datasets as one, several batches as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from archive.arrays import Ints, group_of, offsets_of
from archive.base import FieldError, UsageError, show
from archive.datasets.datasets import checked
from archive.datasets.items import Collation, Items
from archive.datasets.iterable import fetch
from archive.fields import Path, Ragged, mapped


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


class JoinedDataset(Dataset[Any]):
    """Several map-style datasets as one: the items of the first, then those of the next. Made by `join(...)`."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = list(datasets)
        self._offsets = offsets_of(np.array([len(d) for d in self.datasets], np.int64))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    @property
    def steps_per_item(self) -> float:
        steps = sum(len(d) * float(getattr(d, "steps_per_item", 1)) for d in self.datasets)
        return steps / max(1, len(self))

    def keeping(self, steps: float) -> JoinedDataset:
        """As that of the datasets, for each."""
        return JoinedDataset([d.keeping(steps) if hasattr(d, "keeping") else d for d in self.datasets])

    @property
    def keeps_chunks(self) -> bool:
        return all(getattr(d, "keeps_chunks", False) for d in self.datasets)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """The items of a batch: one read for each dataset that has some of them."""
        items = checked(indices, len(self))
        owner = group_of(self._offsets, items)
        places = [np.flatnonzero(owner == i) for i in range(len(self.datasets))]
        some = [(i, where) for i, where in enumerate(places) if len(where)]
        parts = [fetch(self.datasets[i], items[where] - self._offsets[i]) for i, where in some]
        back = np.argsort(np.concatenate([where for _, where in some]), kind="stable") if some else items
        return _joined(parts, back)


def join(*datasets: Any) -> JoinedDataset:
    """Several datasets, of several archives say, as one: for a DataLoader, `archive.torch.loader` or a stream."""
    if not datasets:
        raise UsageError("join needs at least one dataset")
    return JoinedDataset(datasets)


def _joined(parts: Sequence[Sequence[Any]], back: Ints) -> Sequence[Any]:
    """The items of several reads, in the order asked for."""
    every = [(part, i) for part in parts for i in range(len(part))]
    wholes = [getattr(part, "whole", None) for part in parts]
    whole = None
    if wholes and all(w is not None for w in wholes):
        index = torch.from_numpy(back)
        whole = mapped(concatenated(wholes), lambda rows: rows[index])
    collations = [part.collation for part in parts if isinstance(part, Items)]
    ragged = frozenset[Path]().union(*(one.ragged for one in collations))
    opaque = frozenset[Path]().union(*(one.opaque for one in collations))
    joined = Collation(ragged, opaque, any(one.varying for one in collations))
    order = [every[i] for i in back.tolist()]
    return Items(len(order), lambda i: order[i][0][order[i][1]], whole=whole, collation=joined)
