"""Pure, no I/O: any number of rows a step, stored end to end beside how many each step has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from archive.arrays import spans
from archive.base import FieldError, show
from archive.fields import LENGTHS, Array, FieldSpec, Path, Ragged, is_tensor, nesting
from archive.fields.axes.axis import Axis, Extent, Layout, Stored, Value, empty_rows, stored


class RaggedAxis(Axis[Ragged]):
    """A list of one array a step. The companion `LENGTHS` has one number a step."""

    kind = "ragged"

    @classmethod
    def claims(cls, leaf: Any) -> bool:
        """A list of one array, or of one list, a step is ragged: that all of them are as long for once is chance."""
        if isinstance(leaf, Ragged):
            return True
        if not isinstance(leaf, list) or any(isinstance(x, (str, bytes, dict)) or x is None for x in leaf):
            return False
        return any(
            isinstance(x, (list, tuple)) or ((isinstance(x, np.ndarray) or is_tensor(x)) and x.ndim > 0) for x in leaf
        )

    @classmethod
    def normalised(cls, path: Path, leaf: Any, extra: int) -> tuple[FieldSpec, Ragged]:
        where = repr(show(path))
        values, lengths = _checked(leaf, where) if isinstance(leaf, Ragged) else _joined(leaf, where)
        plain, dtype = stored(path, values)
        return FieldSpec(path, cls.kind, dtype, values.shape[1:]), Ragged(plain, lengths)

    def steps(self, value: Ragged) -> int:
        return len(value.lengths)

    def takes_none_of(self, given: Value) -> bool:
        return True

    def nothing(self, steps: int) -> Ragged:
        return Ragged(empty_rows(self.spec), np.zeros(steps, np.int64))

    def cut(self, value: Ragged, lo: int, hi: int, steps: int) -> Ragged:
        ends = np.concatenate([[0], np.cumsum(value.lengths)])
        return Ragged(value.values[ends[lo] : ends[hi]], value.lengths[lo:hi])

    def lay_out(self, parts: Sequence[Ragged], layout: Layout, arrays: Mapping[str, Array]) -> Stored:
        values = np.concatenate([p.values for p in parts])
        lengths = np.concatenate([p.lengths for p in parts])
        if layout.order is not None:
            starts = np.cumsum(lengths) - lengths
            lengths = lengths[layout.order]
            values = values[spans(starts[layout.order], lengths)]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        first = ends[layout.start]
        extent = Extent(first, ends[layout.start + layout.length] - first)
        return Stored({self.spec.name: values, self.spec.name + LENGTHS: lengths}, extent)


def _checked(given: Ragged, where: str) -> Ragged:
    values = nesting.as_array(given.values, where)
    lengths = np.asarray(given.lengths, np.int64)
    if lengths.sum() != len(values) or (lengths < 0).any():
        raise FieldError(f"field {where}: lengths add up to {lengths.sum()}, but there are {len(values)} values")
    return Ragged(values, lengths)


def _joined(leaf: Any, where: str) -> Ragged:
    """One array a step, end to end."""
    if not isinstance(leaf, (Sequence, np.ndarray)) and not is_tensor(leaf):
        raise FieldError(f"field {where} is ragged: give a list of one array a step, not {type(leaf).__name__}")
    pieces = [_row(x, where) for x in leaf]
    if all(isinstance(x, (list, tuple)) for x in leaf):
        pieces = _of_one_dtype(pieces)
    values = _end_to_end(pieces, where)
    return Ragged(values, np.array([len(p) for p in pieces], np.int64))


def _row(x: Any, where: str) -> Array:
    try:
        return nesting.as_array(list(x) if isinstance(x, tuple) else x, where)
    except FieldError as e:
        if not isinstance(e.__cause__, ValueError):
            raise
        raise FieldError(
            f"field {where} is ragged, and so are the rows within a step: only one axis may be. Give a step's values end to end "
            f"and their lengths as another field, or declare Schema(json=[{where}])"
        ) from e


def _of_one_dtype(pieces: list[Array]) -> list[Array]:
    """Lists of numbers have no dtype of their own: all of them get the one that holds them all, as in one list."""
    kinds = {p.dtype for p in pieces if p.size}
    if len(kinds) < 2 or any(k.kind not in "biuf" for k in kinds):
        return pieces
    dtype = np.result_type(*kinds)
    return [p.astype(dtype) for p in pieces]


def _end_to_end(pieces: list[Array], where: str) -> Array:
    if any(p.ndim == 0 for p in pieces):
        raise FieldError(f"field {where} is ragged: each step is an array of one or more dimensions, got a number")
    full = [p for p in pieces if p.size or p.dtype != np.float64] or pieces[:1]  # [] is float64 to numpy
    kinds = {(p.dtype, p.shape[1:]) for p in full}
    if len(kinds) > 1:
        raise FieldError(f"field {where} is ragged: its steps differ in dtype or in all but the first axis: {kinds}")
    return np.concatenate(full, dtype=full[0].dtype) if full else np.zeros(0)
