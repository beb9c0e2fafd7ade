"""Pure, no I/O: which rows of which stored arrays make up the fields of a batch of steps, and the batch from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Pieces, fresh
from archive.base import FieldError, show
from archive.fields import NODES, Array, FieldSpec, Path, ShardSchema, dtypes
from archive.fields.axes import Axis, Cuts, Extent, Located, Runs, axis_of, empty_rows
from archive.read.chunks import RowsWanted, Segments, Want
from archive.read.plan import FieldRead, Part, wants_of
from archive.read.selection import Selection
from archive.read.stepmap import Places

Empty = Callable[[tuple[int, ...], Any], Array]  # makes an array of a shape and dtype; what is in it is not defined


@dataclass(frozen=True)
class Kind:
    """How a field is stored in some schemas. late: whether it came after the steps."""

    codes: list[int]
    axis: Axis[Any]
    schema: ShardSchema
    late: bool

    @property
    def by_step(self) -> bool:
        """Whether its rows are those of the steps themselves, and hold anything."""
        spec = self.axis.spec
        return spec.per_step and not self.late and 0 not in spec.shape


@dataclass
class FieldPlan:
    """How one field of a batch is gathered; `whole` if all schemas of the batch store it alike."""

    path: Path
    spec: FieldSpec
    kinds: list[Kind]
    whole: bool
    fill: Callable[[int], Array] = field(default=lambda n: np.zeros(n))
    direct: bool = field(init=False)  # whether steps are rows of one array, wherever they lie

    def __post_init__(self) -> None:
        self.direct = self.whole and self.kinds[0].by_step


class Plans(NamedTuple):
    """The fields of a batch: those gathered from rows, those that are read by episode, and those without data."""

    fields: list[FieldPlan]
    slow: list[Path]
    nodes: dict[Path, Any]


class Piece:
    """A field at those steps of a batch whose segments store it alike. at: which these are."""

    def __init__(self, kind: Kind, at: Any, where: Places, segments: Segments) -> None:
        self.kind = kind
        self.at = at
        spec = kind.axis.spec
        if kind.late:
            segment, step = segments.late[spec.path].find(where.segment, where.step)
            where = where._replace(segment=segment, step=step)
        extent = Extent(where.segment, where.segment)  # not looked at where a step is a row
        if not spec.per_step:
            every = segments.extent(spec.name)
            extent = Extent(every.start[where.segment], every.rows[where.segment])
        self.cuts = Cuts(
            np.arange(len(where.step)), where.segment, where.step, where.step + 1, np.zeros(len(where.step), bool),
            segments.start[where.segment], segments.length[where.segment], extent,
        )  # fmt: skip
        self.companions = kind.axis.companions(self.cuts)
        self._known = {runs.into: Pieces.whole(_memory(runs)) for runs in self.companions}

    def first(self, shard: Ints) -> list[Want]:
        """What to fetch before all else; `shard` is that of each segment."""
        return list(wants_of(self.companions, self.cuts, shard, self._known, np.zeros(len(self.cuts.lo), np.int64)))

    def locate(self, rows: Pieces) -> FieldRead:
        """What to fetch then, into these rows of the whole batch."""
        known = {name: pieces.joined() for name, pieces in self._known.items()}
        located = self.kind.axis.locate(self.cuts, self.kind.schema, known)
        spec = self.kind.axis.spec
        if (located.rows != 1).any():
            raise FieldError(
                f"field {show(spec.path)!r} has fewer rows than its episodes have steps; read it by episode"
            )
        part = Part(self.kind.axis, slice(None), self.cuts, located, {"": rows})
        read = FieldRead(spec, self.cuts, [part], located.rows, self.cuts.episode, None)
        read.at = read.at if isinstance(self.at, slice) else self.at
        return read

    def most(self) -> FieldRead:
        """The rows that make up most of the field, known without fetching anything."""
        located = self.kind.axis.locate(self.cuts, self.kind.schema)
        own = Located(located.rows, [runs for runs in located.runs if not runs.into])
        part = Part(self.kind.axis, slice(None), self.cuts, own)
        return FieldRead(self.kind.axis.spec, self.cuts, [part], located.rows, self.cuts.episode, None)


class StepRows(NamedTuple):
    """Steps of a batch as rows: of which shard, which row."""

    shard: Ints
    row: Ints


def _memory(runs: Runs) -> Array:
    return fresh((int((runs.stop - runs.start).sum()), *runs.like.shape[1:]), runs.like.dtype)


class Batch:
    """One field of a batch: where its steps lie, memory for its rows, and the field once these are there."""

    def __init__(self, plan: FieldPlan, where: Places, segments: Segments) -> None:
        self.plan = plan
        self.count = len(where.step)
        self._shard = segments.shard
        if plan.whole:
            self.pieces = [Piece(plan.kinds[0], slice(None), where, segments)]
        else:
            found = [(kind, np.flatnonzero(np.isin(where.schema, kind.codes))) for kind in plan.kinds]
            self.pieces = [Piece(kind, at, where.pick(at), segments) for kind, at in found]

    def first(self) -> Iterator[Want]:
        """What to fetch before all else."""
        for piece in self.pieces:
            yield from piece.first(self._shard)

    def wants(self, empty: Empty) -> Iterator[Want | RowsWanted]:
        """What to fetch then, into memory for all steps, in stored form, which `empty` makes."""
        self._rows = _rows_of(self.plan, self.count, empty)
        for piece in self.pieces:
            yield from piece.locate(Pieces.whole(self._rows)).wants(self._shard)

    def value(self) -> Array:
        """The field at all steps, from the rows that were fetched."""
        if self.plan.whole:
            return dtypes.from_stored(self._rows, self.plan.spec.dtype)
        out = self.plan.fill(self.count)
        for piece in self.pieces:
            out[piece.at] = dtypes.from_stored(self._rows[piece.at], self.plan.spec.dtype)
        return out


class Direct:
    """The same of a field whose steps are rows of one array; these are found once for all such fields."""

    def __init__(self, plan: FieldPlan, rows: StepRows) -> None:
        self.plan = plan
        self._where = rows

    def first(self) -> Iterator[Want]:
        return iter(())

    def wants(self, empty: Empty) -> Iterator[Want | RowsWanted]:
        shard, rows = self._where
        self._rows = _rows_of(self.plan, len(rows), empty)
        if len(rows):
            yield RowsWanted(self.plan.spec.name, self._rows[:0], shard, rows, self._rows)

    def value(self) -> Array:
        return dtypes.from_stored(self._rows, self.plan.spec.dtype)


def batches_of(plans: Sequence[FieldPlan], where: Places, segments: Segments) -> list[Batch | Direct]:
    """The fields of one batch, at these steps."""
    rows = StepRows(segments.shard[where.segment], segments.start[where.segment] + where.step)
    return [Direct(plan, rows) if plan.direct else Batch(plan, where, segments) for plan in plans]


def _rows_of(plan: FieldPlan, count: int, empty: Empty) -> Array:
    like = empty_rows(plan.spec)
    return empty((count, *like.shape[1:]), like.dtype)


def plan_fields(
    schemas: Mapping[int, ShardSchema], selection: Selection, late: Mapping[int, frozenset[Path]]
) -> Plans:  # fmt: skip
    """How the fields selected are gathered from steps of these schemas (by their codes). late: which fields are."""
    found: dict[Path, dict[int, FieldSpec]] = {}
    for code, one in schemas.items():
        for path, spec in selection.specs(one).items():
            found.setdefault(path, {})[code] = spec
    plans = Plans([], [], {})
    for path, specs in found.items():
        spec = next(iter(specs.values()))
        lacking = len(specs) < len(schemas)
        if spec.axis in NODES:
            plans.nodes[path] = {} if spec.axis == "dict" else None
        elif lacking and selection.missing == "skip" and isinstance(selection.missing, str):
            continue
        elif not _by_rows(spec):
            if spec.axis != "free" or selection.names is not None:
                plans.slow.append(path)
        else:
            plans.fields.append(_field_plan(path, specs, schemas, selection, late))
    for name in selection.absent(schemas.values()):
        path = tuple(name.split("/")) if isinstance(name, str) else tuple(name)
        plans.fields.append(FieldPlan(path, FieldSpec(path, "step"), [], False, partial(selection.filled, name)))
    return plans


def _by_rows(spec: FieldSpec) -> bool:
    """Whether rows of the field are numbers of one shape, one a step."""
    return spec.axis in ("step", "offset") and spec.dtype not in ("str", "json") and spec.dtype[1:2] != "U"


def _field_plan(
    path: Path, specs: Mapping[int, FieldSpec], schemas: Mapping[int, ShardSchema], selection: Selection,
    late: Mapping[int, frozenset[Path]],
) -> FieldPlan:  # fmt: skip
    found = {(s.axis, s.dtype, s.shape) for s in specs.values()}
    if len(found) > 1:
        several = " and ".join(f"{dtype}{list(shape)} {axis}" for axis, dtype, shape in sorted(found))
        raise FieldError(
            f"field {show(path)!r} is {several} in episodes of one batch; filter the episodes, or leave it out"
        )
    lacking = [code for code in schemas if code not in specs]
    if lacking and isinstance(selection.missing, str) and selection.missing == "error":
        raise FieldError(
            f"some of these episodes have no field {show(path)!r}; name the fields to read, or pass missing='skip' or "
            "missing=VALUE"
        )
    groups: dict[tuple[str, bool], list[int]] = {}
    for code, spec in specs.items():
        groups.setdefault((spec.next_of, path in late[code]), []).append(code)
    kinds = [
        Kind(codes, axis_of(specs[codes[0]]), schemas[codes[0]], added) for (_, added), codes in groups.items()
    ]  # fmt: skip
    spec = replace(next(iter(specs.values())), next_of="")

    def fill(count: int) -> Array:
        if lacking:
            return selection.filled_as(spec, path, count)
        return np.empty((count, *spec.shape), dtypes.to_numpy(spec.dtype))

    return FieldPlan(path, spec, kinds, len(kinds) == 1 and not lacking, fill)
