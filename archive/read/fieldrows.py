"""Pure, no I/O: which rows of which stored arrays make up a field at many steps of many episodes, and the field from them.

A field is gathered in two rounds, for what `next_of` left out of the rows says in the first round where the second looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from archive.arrays import Ints, spans
from archive.base import CorruptManifestError, FieldError, show
from archive.fields import NODES, PLACES, FieldSpec, Path, ShardSchema, dtypes
from archive.read.fieldparts import Selection, empty_rows
from archive.read.rowpool import Array, RowPool
from archive.read.stepmap import Places, Segments


class Rows(NamedTuple):
    """Rows wanted of one array: `rows[i]` of shard number `shards[i]`."""

    pool: RowPool
    shards: Ints
    rows: Ints


class Source(Protocol):
    """What plans ask of whoever holds the tables."""

    segments: Segments

    def pool(self, array: str, dtype: np.dtype[Any], trailing: tuple[int, ...]) -> RowPool: ...

    def extents(self, array: str, segments: Ints) -> tuple[Ints, Ints]: ...


class Round(NamedTuple):
    """What a round wants, and what the plan remembers of it."""

    rows: Sequence[Rows] = ()
    memory: Any = None


class StepRows:
    """A field of one row a step."""

    def __init__(self, spec: FieldSpec, source: Source) -> None:
        self.spec, self.source = spec, source
        self.pool = _pool(spec, source)

    def first(self, where: Places) -> Round:
        return Round([Rows(self.pool, where.shard, self.source.segments.start[where.segment] + where.step)])

    def second(self, where: Places, round_: Round, taken: Sequence[Array]) -> Round:
        return Round()

    def most(self, where: Places) -> Sequence[Rows]:
        """The rows that make up most of the field, known without a round."""
        return self.first(where).rows

    def finish(self, count: int, taken: Sequence[Array], later: Sequence[Array], memory: Any) -> Array:
        return taken[0]


class OffsetRows(StepRows):
    """A field of more rows than steps: row t is step t's."""

    def first(self, where: Places) -> Round:
        first, rows = self.source.extents(self.spec.name, where.segment)
        if (where.step >= rows).any():
            raise FieldError(
                f"field {show(self.spec.path)!r} has fewer rows than its episodes have steps; read it by episode"
            )
        return Round([Rows(self.pool, where.shard, first + where.step)])


class NoRows(StepRows):
    """A field whose rows hold no element: no chunk of it exists."""

    def __init__(self, spec: FieldSpec, source: Source) -> None:
        self.spec, self.empty = spec, empty_rows(spec)

    def first(self, where: Places) -> Round:
        return Round()

    def finish(self, count: int, taken: Sequence[Array], later: Sequence[Array], memory: Any) -> Array:
        return np.zeros((count, *self.empty.shape[1:]), self.empty.dtype)


class NextRows(StepRows):
    """A field declared in next_of: the next row of the field it follows, but for the rows that were kept."""

    def __init__(self, spec: FieldSpec, followed: FieldSpec, source: Source) -> None:
        super().__init__(spec, source)
        self.places = source.pool(spec.name + PLACES, np.dtype(np.int64), ())
        self.followed = _pool(followed, source)

    def first(self, where: Places) -> Round:
        """The places of the rows kept, of all segments touched."""
        segments, owner = np.unique(where.segment, return_inverse=True)
        first, rows = self.source.extents(self.spec.name, segments)
        shards = np.repeat(self.source.segments.shard[segments], rows)
        return Round([Rows(self.places, shards, spans(first, rows))], (segments, owner, first, rows))

    def second(self, where: Places, round_: Round, taken: Sequence[Array]) -> Round:
        segments, owner, first, rows = round_.memory
        length = self.source.segments.length[where.segment]
        span = int(length.max(initial=0)) + 1
        keys = np.repeat(np.arange(len(segments)), rows) * span + taken[0]
        wanted = owner * span + where.step
        at = np.searchsorted(keys, wanted)
        kept = keys[np.minimum(at, len(keys) - 1)] == wanted if len(keys) else np.zeros(len(wanted), bool)
        if (where.step[~kept] + 1 >= length[~kept]).any() or (not kept.all() and self.followed is not self._alike()):
            raise CorruptManifestError(
                f"field {show(self.spec.path)!r} lacks rows that the field it follows does not hold; run `archive verify`"
            )
        within = at - (np.cumsum(rows) - rows)[owner]
        own = Rows(self.pool, where.shard[kept], (first[owner] + within)[kept])
        following = self.source.segments.start[where.segment] + where.step + 1
        return Round([own, Rows(self.followed, where.shard[~kept], following[~kept])], kept)

    def most(self, where: Places) -> Sequence[Rows]:
        known = self.source.segments
        inner = where.pick(where.step + 1 < known.length[where.segment])
        return [Rows(self.followed, inner.shard, known.start[inner.segment] + inner.step + 1)]

    def _alike(self) -> RowPool | None:
        """The followed rows, if they can stand for this field's."""
        same = self.followed.dtype == self.pool.dtype and self.followed.trailing == self.pool.trailing
        return self.followed if same else None

    def finish(self, count: int, taken: Sequence[Array], later: Sequence[Array], memory: Any) -> Array:
        kept, following = later
        if not len(kept):
            return following
        out = np.empty((count, *self.pool.trailing), self.pool.dtype)
        out[memory], out[~memory] = kept, following if len(following) else 0
        return out


def _pool(spec: FieldSpec, source: Source) -> RowPool:
    rows = empty_rows(spec)
    return source.pool(spec.name, rows.dtype, rows.shape[1:])


@dataclass
class Part:
    """How a field is stored in some schemas."""

    codes: list[int]
    rows: StepRows


@dataclass
class FieldPlan:
    """How one field of a batch is gathered; `whole` if all schemas of the batch store it alike."""

    path: Path
    spec: FieldSpec
    parts: list[Part]
    whole: bool
    fill: Callable[[int], Array] = field(default=lambda n: np.zeros(n))

    def pieces(self, where: Places) -> list[tuple[StepRows, Any, Places]]:
        """Per part: which steps of the batch are its own, and where they lie."""
        if self.whole:
            return [(self.parts[0].rows, slice(None), where)]
        found = [(part.rows, np.flatnonzero(np.isin(where.schema, part.codes))) for part in self.parts]
        return [(rows, at, where.pick(at)) for rows, at in found]

    def joined(self, count: int, pieces: Sequence[tuple[Any, Array]]) -> Array:
        """The field at all steps, from the stored rows of its parts."""
        if self.whole:
            return dtypes.from_stored(pieces[0][1], self.spec.dtype)
        out = self.fill(count)
        for at, rows in pieces:
            out[at] = dtypes.from_stored(rows, self.spec.dtype)
        return out


class Plans(NamedTuple):
    """The fields of a batch: those gathered from rows, those that are read by episode, and those without data."""

    fields: list[FieldPlan]
    slow: list[Path]
    nodes: dict[Path, Any]


def plan_fields(schemas: dict[int, ShardSchema], selection: Selection, source: Source) -> Plans:
    """How the fields selected are gathered from segments of these schemas (by their codes)."""
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
            plans.fields.append(_field_plan(path, specs, schemas, selection, source))
    for name in selection.absent(schemas.values()):
        path = tuple(name.split("/")) if isinstance(name, str) else tuple(name)
        plans.fields.append(FieldPlan(path, FieldSpec(path, "step"), [], False, partial(selection.filled, name)))
    return plans


def _by_rows(spec: FieldSpec) -> bool:
    """Whether rows of the field are numbers of one shape, one a step."""
    return spec.axis in ("step", "offset") and spec.dtype not in ("str", "json") and spec.dtype[1:2] != "U"


def _field_plan(
    path: Path, specs: dict[int, FieldSpec], schemas: dict[int, ShardSchema], selection: Selection, source: Source
) -> FieldPlan:
    kinds = {(s.axis, s.dtype, s.shape) for s in specs.values()}
    if len(kinds) > 1:
        told = " and ".join(f"{dtype}{list(shape)} {axis}" for axis, dtype, shape in sorted(kinds))
        raise FieldError(
            f"field {show(path)!r} is {told} in episodes of one batch; filter the episodes, or leave it out"
        )
    lacking = [code for code in schemas if code not in specs]
    if lacking and isinstance(selection.missing, str) and selection.missing == "error":
        raise FieldError(
            f"some of these episodes have no field {show(path)!r}; name the fields to read, or pass missing='skip' or "
            "missing=VALUE"
        )
    groups: dict[str, list[int]] = {}
    for code, spec in specs.items():
        groups.setdefault(spec.next_of, []).append(code)
    parts = [Part(codes, _step_rows(specs[codes[0]], schemas[codes[0]], source)) for codes in groups.values()]
    spec = replace(next(iter(specs.values())), next_of="")

    def fill(count: int) -> Array:
        if lacking:
            return selection.filled(path, count)
        return np.empty((count, *spec.shape), dtypes.to_numpy(spec.dtype))

    return FieldPlan(path, spec, parts, len(parts) == 1 and not lacking, fill)


def _step_rows(spec: FieldSpec, of: ShardSchema, source: Source) -> StepRows:
    if 0 in spec.shape:
        return NoRows(spec, source)
    if spec.axis == "offset":
        return OffsetRows(spec, source)
    return NextRows(spec, of.by_name[spec.next_of], source) if spec.next_of else StepRows(spec, source)
