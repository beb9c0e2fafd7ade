"""Pure, no I/O: memory of the caller's, which fields are decoded straight into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, Pieces, group_of
from archive.base import FieldError, show
from archive.fields import Array, FieldSpec, Path, dtypes, flatten, is_tensor
from archive.read.plan import FieldRead, Group


class Destination:
    """Arrays or tensors by the names of fields, for the rows of all episodes, end to end in the order of the episodes.

    starts, places: row `starts[i]`, and those after it up to starts[i + 1], go to row places[i] and on, instead.
    """

    def __init__(self, out: Any, starts: Ints | None = None, places: Ints | None = None) -> None:
        self.starts = starts
        self._places = places
        self._arrays = {path: _array(leaf, show(path)) for path, leaf in flatten(out)}

    def take(self, groups: Sequence[Group]) -> None:
        """Let the fields of these episodes go here; FieldError for an array that they do not fit."""
        for path, array in self._arrays.items():
            lacking = [group for group in groups if path not in group.fields]
            if lacking or not groups:
                raise FieldError(
                    f"out has an array for field {show(path)!r}, which these episodes do not all have, or which is not "
                    "among those that are read; leave it out of out="
                )
            fields = [group.fields[path] for group in groups]
            rows = [_rows(field.spec, array) for field in fields]
            first = self._firsts(groups, fields, path, array)
            for group, field, own in zip(groups, fields, rows, strict=True):
                field.own = Pieces.whole(own)
                episode = field.cuts.episode
                field.at = self._placed(field.at - field.ends[episode] + first[group.episodes][episode])

    def _firsts(self, groups: Sequence[Group], fields: Sequence[FieldRead], path: Path, array: Array) -> Ints:
        """The first row of each episode, end to end."""
        counts = np.zeros(sum(len(group.episodes) for group in groups), np.int64)
        for group, field in zip(groups, fields, strict=True):
            counts[group.episodes] = np.diff(field.ends)
        if self._places is None and len(array) != counts.sum():
            raise FieldError(
                f"out[{show(path)!r}] has {len(array)} rows, the episodes have {int(counts.sum())}; give an array of "
                "as many"
            )
        return np.cumsum(counts) - counts

    def _placed(self, rows: Ints) -> Ints:
        if self.starts is None or self._places is None:
            return rows
        run = group_of(self.starts, rows)
        placed: Ints = self._places[run] + rows - self.starts[run]
        return placed


def _array(leaf: Any, name: str) -> Array:
    if is_tensor(leaf):
        if leaf.device.type != "cpu" or not leaf.is_contiguous():
            raise FieldError(
                f"out[{name!r}] is not contiguous in the memory of the CPU; give such a tensor, and move it after"
            )
        leaf = dtypes.from_torch(leaf, where=f"out[{name!r}]")
    if not isinstance(leaf, np.ndarray) or leaf.ndim == 0 or not leaf.flags.writeable:
        raise FieldError(f"out[{name!r}] is no array that can be written to (or no tensor); give one of a row a step")
    return leaf


def _rows(spec: FieldSpec, array: Array) -> Array:
    """The array as rows in stored form; FieldError if it is not what the field's rows are."""
    name, dtype = show(spec.path), dtypes.to_numpy(spec.dtype)
    if spec.axis == "ragged" or spec.scalar or dtype.kind in "OU":
        raise FieldError(
            f"out has an array for field {name!r}, which is not rows of numbers ({spec.dtype} on axis {spec.axis!r}); "
            "leave it out of out=, and take it from what is returned"
        )
    if array.dtype != dtype or array.shape[1:] != spec.shape:
        raise FieldError(
            f"out[{name!r}] is {array.dtype}{list(array.shape[1:])}, the field {dtype}{list(spec.shape)}; give an "
            "array of that dtype and shape"
        )
    rows = dtypes.as_stored(array, spec.dtype)
    if rows is None:
        raise FieldError(
            f"field {name!r} of dtype {dtype} is stored in another order of bytes than it has in memory, or out is not "
            "contiguous; leave it out of out="
        )
    return rows
