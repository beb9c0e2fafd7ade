"""Pure, no I/O: any number of rows a step, stored end to end beside how many each step has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from archive.arrays import Ints, Pieces, spans
from archive.base import CorruptManifestError, FieldError, show
from archive.fields import nests
from archive.fields.axis import (
    Axis,
    Cuts,
    Extent,
    Fetched,
    Layout,
    Located,
    Slices,
    Stored,
    Value,
    empty_rows,
    end_to_end,
    own_runs,
    stored,
)
from archive.fields.nests import Array, Ragged, is_tensor
from archive.fields.schema import LENGTHS, FieldSpec, Path, ShardSchema


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
        return {self.spec.name: values, self.spec.name + LENGTHS: lengths}, extent

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        """The rows and lengths of whole segments, for the lengths say which rows are whose."""
        some = cuts.hi > cuts.lo
        first, rows = cuts.extent
        located = own_runs(self.spec, first, first + np.where(some, rows, 0))
        stop = cuts.start + np.where(some, cuts.length, 0)
        like, every = np.zeros(0, np.int64), located.runs[0].cut
        lengths = end_to_end(Slices(self.spec.name + LENGTHS, like, LENGTHS, every, cuts.start, stop, every))
        return Located(located.rows, [*located.runs, lengths])

    def build(self, fetched: Fetched, episodes: Ints, convert: Callable[[Array], Array]) -> list[Ragged]:
        """Values and lengths of each episode; a view of the values where they lie end to end."""
        cuts, lengths = fetched.cuts, fetched.rows[LENGTHS].joined()
        counts = fetched.located.runs[1].stop - fetched.located.runs[1].start
        first = np.cumsum(counts) - counts
        ends = np.append(0, np.cumsum(lengths))
        most = int(fetched.located.rows.sum())  # none has more values than all: sums that wrap round need such
        strange = len(lengths) and (lengths.min() < 0 or lengths.max() > most)
        if strange or (ends[first + counts] - ends[first] != fetched.located.rows).any():
            raise CorruptManifestError(
                f"lengths of ragged field {show(self.spec.path)!r} do not add up; run `archive verify`"
            )
        some = counts > 0
        lo, hi = (first + np.where(some, edge, 0) for edge in (cuts.lo, cuts.hi))
        shift = fetched.at - ends[first]
        start, stop = (ends[edge] + shift for edge in (lo, hi))
        values = fetched.rows[""].converted(convert)
        return [
            Ragged(
                _values(values, start[a:b], stop[a:b]),
                np.concatenate([lengths[i:j] for i, j in _pairs(lo[a:b], hi[a:b])]),
            )
            for a, b in pairwise(episodes.tolist())
        ]


def _checked(given: Ragged, where: str) -> Ragged:
    values = nests.as_array(given.values, where)
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
        return nests.as_array(list(x) if isinstance(x, tuple) else x, where)
    except FieldError as e:
        if not isinstance(e.__cause__, ValueError):
            raise
        raise FieldError(
            f"field {where} is ragged, and so are the rows within a step: only one axis may be. Give a step's values "
            f"end to end and their lengths as another field, or declare Schema(json=[{where}])"
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


def _pairs(start: Ints, stop: Ints) -> list[tuple[int, int]]:
    return list(zip(start.tolist(), stop.tolist(), strict=True))


def _values(values: Pieces, start: Ints, stop: Ints) -> Array:
    """Rows [start[i], stop[i]) end to end; a view where nothing lies between them."""
    full = np.flatnonzero(stop > start)
    if not len(full):
        return values.arrays[0][:0]
    start, stop = start[full], stop[full]
    heads = np.flatnonzero(np.append(True, start[1:] != stop[:-1]))
    runs = _pairs(start[heads], stop[np.append(heads[1:], len(stop)) - 1])
    found = [values.cut(np.array(run))[0] for run in runs]
    return found[0] if len(found) == 1 else np.concatenate(found)
