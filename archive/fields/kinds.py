"""Pure, no I/O: the one list of the kinds of axis, and the conversion of a nest of steps to fields in stored form.

A new kind is a class of its own and a line here (and its name in `archive.fields.schema.AXES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from archive.arrays import Ints, Pieces, offsets_of, spans
from archive.base import CorruptManifestError, FieldError, escape_path, show
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
from archive.fields.nests import Array, Fields, Ragged, flatten, is_tensor
from archive.fields.rows import FreeAxis, OffsetAxis, StepAxis
from archive.fields.schema import LENGTHS, NODES, PLACES, FieldSpec, Path, Schema, ShardSchema

_KEPT = "kept"


class NextOfAxis(StepAxis):
    """Row t is row t + 1 of the field followed, `spec.next_of`, but for the rows that are kept.

    Of each segment the last row is kept, and those whose bits differ. The companion `PLACES` has the step of each.
    """

    def lay_out(self, parts: Sequence[Array], layout: Layout, arrays: Mapping[str, Array]) -> Stored:
        name = self.spec.name
        rows = super().lay_out(parts, layout, arrays)[0][name]
        start, stop = layout.start, layout.start + layout.length
        keep = _differ_from_next(rows, arrays[self.spec.next_of])
        keep[(stop - 1)[layout.length > 0]] = True
        kept = np.flatnonzero(keep)
        before = offsets_of(keep)
        first, count = before[start], before[stop] - before[start]
        return {name: rows[kept], name + PLACES: kept - np.repeat(start, count)}, Extent(first, count)

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        """The next rows of the field followed; of each segment all rows that were kept, and their places."""
        if known is not None:
            return self._of_steps(cuts, schema, known[PLACES])
        first, rows = cuts.extent
        rows = np.where(cuts.hi > cuts.lo, rows, 0)
        every, nowhere = np.arange(len(cuts.lo)), np.zeros(len(cuts.lo), np.int64)
        stop = np.minimum(cuts.hi + 1, cuts.length) if self._is_like(schema) else cuts.lo
        following = np.maximum(0, stop - cuts.lo - 1)
        begin = cuts.start + cuts.lo + 1
        like = empty_rows(self.spec)
        kept = Slices(self.spec.name, like, _KEPT, every, first, first + rows, nowhere)
        places = kept._replace(array=self.spec.name + PLACES, like=np.zeros(0, np.int64), into=PLACES)
        next_rows = Slices(self.spec.next_of, like, "", every, begin, begin + following, nowhere)
        return Located(cuts.hi - cuts.lo, [next_rows, end_to_end(kept), end_to_end(places)])

    def companions(self, cuts: Cuts) -> Sequence[Slices]:
        """The places of the rows kept, of all segments touched."""
        _, head = np.unique(cuts.segment, return_index=True)
        first, rows = cuts.extent.start[head], cuts.extent.rows[head]
        name = self.spec.name + PLACES
        return [end_to_end(Slices(name, np.zeros(0, np.int64), PLACES, head, first, first + rows, first))]

    def _of_steps(self, cuts: Cuts, schema: ShardSchema, places: Array) -> Located:
        """The row kept of each step, or else the next row of the field followed."""
        _, head, owner = np.unique(cuts.segment, return_index=True, return_inverse=True)
        first, rows = cuts.extent.start[head], cuts.extent.rows[head]
        span = int(cuts.length.max(initial=0)) + 1
        keys = np.repeat(np.arange(len(head)), rows) * span + places
        wanted = owner * span + cuts.lo
        found = np.searchsorted(keys, wanted)
        kept = keys[np.minimum(found, len(keys) - 1)] == wanted if len(keys) else np.zeros(len(wanted), bool)
        held = cuts.lo + 1 < cuts.length
        if not (kept | held).all() or not (kept.all() or self._is_like(schema)):
            raise self._lacking()
        own = first[owner] + found - (np.cumsum(rows) - rows)[owner]
        runs = [
            self._single(self.spec.name, np.flatnonzero(kept), own),
            self._single(self.spec.next_of, np.flatnonzero(~kept), cuts.start + cuts.lo + 1),
        ]
        return Located(np.ones(len(wanted), np.int64), runs)

    def _single(self, array: str, cut: Ints, row: Ints) -> Slices:
        """One row of an array for each of these cuts."""
        return Slices(array, empty_rows(self.spec), "", cut, row[cut], row[cut] + 1, np.zeros(len(cut), np.int64))

    def _is_like(self, schema: ShardSchema) -> bool:
        """True if rows of the field followed can stand for this one's; where they can't, all rows were kept."""
        own, followed = empty_rows(self.spec), empty_rows(schema.by_name[self.spec.next_of])
        return bool(own.dtype == followed.dtype and own.shape == followed.shape)

    def _lacking(self) -> CorruptManifestError:
        return CorruptManifestError(
            f"field {show(self.spec.path)!r} lacks rows that the field it follows does not hold; run `archive verify`"
        )

    def complete(self, fetched: Fetched) -> None:
        """Put the rows kept where they belong, over those that follow."""
        cuts = fetched.cuts
        if _KEPT not in fetched.rows:
            return
        next_rows, kept, _ = fetched.located.runs
        places = fetched.rows[PLACES].joined()
        cut = np.repeat(kept.cut, kept.stop - kept.start)
        inside = np.flatnonzero((places >= cuts.lo[cut]) & (places < cuts.hi[cut]))
        within = places[inside] - cuts.lo[cut[inside]]
        self._check_complete(fetched, next_rows, cut[inside], within)
        fetched.rows[""].put(fetched.at[cut[inside]] + within, fetched.rows[_KEPT].joined()[inside])

    def _check_complete(self, fetched: Fetched, next_rows: Slices, cut: Ints, within: Ints) -> None:
        """CorruptManifestError if a row comes neither from the field followed nor from those kept."""
        following = next_rows.stop - next_rows.start
        beyond = within >= following[cut]
        found = following + np.bincount(cut[beyond], minlength=len(following))
        if (found < fetched.located.rows).any():
            raise self._lacking()


def _differ_from_next(rows: Array, followed: Array) -> Any:
    """The mask of the rows that are not the next row of the field followed."""
    differ = np.ones(len(rows), bool)
    if len(rows) > 1 and rows.dtype == followed.dtype and rows.shape == followed.shape:
        differ[:-1] = _bits_differ(rows[:-1], followed[1:])
    return differ


def _bits_differ(a: Array, b: Array) -> Any:
    """Mask of the rows whose bits differ (so that NaN equals itself and -0.0 is not 0.0)."""
    if a.dtype == object:
        return (a != b).reshape(len(a), -1).any(axis=1)
    if a[0:1].nbytes == 0:
        return np.zeros(len(a), bool)
    bits = [np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (a, b)]
    return (bits[0] != bits[1]).any(axis=1)


class RaggedAxis(Axis[Ragged]):
    """A list of one array a step. The companion `LENGTHS` has one number a step."""

    kind = "ragged"

    @classmethod
    def claims(cls, leaf: Any) -> bool:
        """True for a list of one array, or of one list, a step: equal lengths are chance."""
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
        """The rows and lengths of whole segments, for the lengths divide the rows."""
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
    """The lists of numbers with one dtype that holds all of them, as in one list."""
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


KINDS: dict[str, type[Axis[Any]]] = {
    "step": StepAxis,
    "offset": OffsetAxis,
    "ragged": RaggedAxis,
    "free": FreeAxis,
}


def axis_of(spec: FieldSpec) -> Axis[Any]:
    """A field that has data on its axis; CorruptManifestError for an axis that this library does not know."""
    if spec.next_of:
        return NextOfAxis(spec)
    kind = KINDS.get(spec.axis)
    if kind is None:
        raise CorruptManifestError(
            f"field {show(spec.path)!r} is on axis {spec.axis!r}, which holds no data that this library can read; a "
            "newer one may know it"
        )
    return kind(spec)


def normalise(nest: Any, schema: Schema) -> Fields:
    """The stored form of a nest of steps; raises FieldError, naming the field, for what cannot be stored."""
    leaves = dict(flatten(nest, stop=frozenset(schema.json)))
    missing = [p for n, p in schema.next_of.items() if n in leaves and p not in leaves]
    if missing:
        raise FieldError(f"next_of names field {show(missing[0])!r}, which these steps do not have")
    specs: dict[str, FieldSpec] = {}
    data: dict[str, Value] = {}
    for path, leaf in leaves.items():
        name = escape_path(path)
        specs[name], value = _field(path, leaf, schema)
        if value is not None:
            data[name] = value
    _check_next_of(specs, schema)
    vague = {escape_path(p) for p, leaf in leaves.items() if p not in schema.json and _has_no_dtype(leaf)}
    return Fields(_steps(specs, data), specs, data, frozenset(vague))


def _has_no_dtype(leaf: Any) -> bool:
    """True for a list of empty lists, or of nothing."""
    return isinstance(leaf, list) and all(isinstance(x, (list, tuple)) and not len(x) for x in leaf)


def _field(path: Path, leaf: Any, schema: Schema) -> tuple[FieldSpec, Value | None]:
    if leaf is None:
        return FieldSpec(path, "none"), None
    if isinstance(leaf, dict) and not leaf:
        return FieldSpec(path, "dict"), None
    where = repr(show(path))
    try:
        return _on_its_axis(path, leaf, schema)
    except FieldError as e:
        raise e if where in str(e) else FieldError(f"field {where}: {e}") from e


def _on_its_axis(path: Path, leaf: Any, schema: Schema) -> tuple[FieldSpec, Value]:
    declared, extra = schema.axis_of(path)
    if path in schema.json:
        return KINDS[declared or "step"].json(path, leaf, extra)
    kind = declared or next((kind for kind, axis in KINDS.items() if axis.claims(leaf)), "step")
    spec, value = KINDS[kind].normalised(path, leaf, extra)
    follows = schema.next_of.get(path)
    return (replace(spec, next_of=escape_path(follows)) if follows else spec), value


def _check_next_of(specs: Mapping[str, FieldSpec], schema: Schema) -> None:
    """Fields that repeat each other's next rows are one row a step, both."""
    for pair in schema.next_of.items():
        if escape_path(pair[0]) not in specs or specs[escape_path(pair[0])].axis in NODES:
            continue
        for path in pair:
            spec = specs[escape_path(path)]
            if spec.axis != "step":
                raise FieldError(
                    f"field {show(path)!r} is in Schema(next_of=...) and on axis {spec.axis!r}; only fields of one row "
                    "a step repeat each other's next rows: leave it out of next_of"
                )


def _steps(specs: Mapping[str, FieldSpec], data: Mapping[str, Value]) -> int:
    """Number of steps, on which all fields that have it must agree."""
    axes = {name: axis_of(specs[name]) for name in data}
    said = {name: steps for name, axis in axes.items() if (steps := axis.steps(data[name])) is not None}
    counts = set(said.values())
    if len(counts) > 1:
        listed = ", ".join(f"{show(specs[n].path)}: {k}" for n, k in sorted(said.items()))
        raise FieldError(
            f"fields differ in their number of steps ({listed}); declare the axis of those that are not one row a "
            "step, "
            "as in Schema(axes={'obs': 'offset'}) for T+1 observations or 'free'"
        )
    if not counts:
        guesses = (axis.steps_at_a_guess(data[name]) for name, axis in axes.items())
        counts = {steps for steps in guesses if steps is not None}
    return counts.pop() if len(counts) == 1 else 0
