"""Pure, no I/O: steps with the fields that came after them: what fields each has, and where these lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from archive.arrays import Ints
from archive.arrays import spans as runs_of
from archive.base import CorruptManifestError, escape_path, show
from archive.fields import NODES, Array, FieldSpec, Path, ShardSchema, dtypes
from archive.fields.axes import Cuts, Extent, Fetched, Located, StepAxis
from archive.read.chunks import Segments
from archive.read.spans import Spans


class Shown(NamedTuple):
    """Steps, cut so that all of a span have the same fields. code: of each span its schema's number in `schemas`, in
    which late fields are like any; late: which of its fields are late. Spans without steps have schemas of their own.
    """

    spans: Spans
    code: Ints
    schemas: Sequence[ShardSchema]
    late: Sequence[frozenset[Path]]

    def pick(self, episodes: Ints) -> Shown:
        """That of the episodes of these numbers."""
        counts = np.diff(self.spans.offsets)[episodes]
        code = self.code[runs_of(self.spans.offsets[:-1][episodes], counts)]
        return self._replace(spans=self.spans.pick(episodes), code=code)


def shown(spans: Spans, segments: Segments) -> Shown:
    """What fields these steps have. Where none is late, the spans and schemas are as they were."""
    place = segments.places(spans.rows)
    if not segments.late:
        count = len(segments.schemas)
        return Shown(spans, segments.schema[place], segments.schemas, [frozenset()] * count)
    spans = spans.split(_borders(spans, place, segments))
    place = segments.places(spans.rows)
    kinds = [segments.schema[place], (spans.hi > spans.lo).astype(np.int64)]
    kinds += [_kind(path, segments, place, spans) for path in segments.late]
    each, code = np.unique(np.stack(kinds), axis=1, return_inverse=True)
    schemas, late = [], []
    for own, _, *others in each.T.tolist():
        given = {path: other for path, other in zip(segments.late, others, strict=True) if other >= 0}
        late.append(frozenset(given))
        schemas.append(_merged(segments.schemas[own], [(path, segments.schemas[n]) for path, n in given.items()]))
    return Shown(spans, code.reshape(-1), schemas, late)


def _borders(spans: Spans, place: Ints, segments: Segments) -> Ints:
    """The steps, counted over all episodes, before which some field begins or ends."""
    before = np.cumsum(spans.hi - spans.lo) - spans.hi
    found = []
    for cover in segments.late.values():
        number, step = cover.borders(place, spans.lo, spans.hi)
        found.append(before[number] + step)
    return np.unique(np.concatenate(found))


def _kind(path: Path, segments: Segments, place: Ints, spans: Spans) -> Ints:
    """The schema of what gives a late field of each span; -1 where nothing does."""
    other, _ = _at(path, segments, place, spans.lo, spans.hi)
    return np.where(other >= 0, segments.schema[other], -1)


def _at(path: Path, segments: Segments, place: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The segment with the late field of steps [lo, hi), -1 for none, and its first step there. No steps are where the
    step before them is, if nothing is known of the one after."""
    cover = segments.late[path]
    other, step = cover.find(place, lo)
    bare = np.flatnonzero((lo == hi) & (other < 0) & (lo > 0))
    if len(bare):
        other[bare], step[bare] = cover.find(place[bare], lo[bare] - 1)
    return other, step


def _merged(own: ShardSchema, given: Sequence[tuple[Path, ShardSchema]]) -> ShardSchema:
    """A schema with fields of others, in the place of its own of these paths."""
    if not given:
        return own
    specs = {spec.path: spec for spec in own.fields}
    for path, other in given:
        specs[path] = _spec(other, path)
    return replace(own, fields=tuple(specs[path] for path in sorted(specs)))


class LateCuts(NamedTuple):
    """The steps of one late field. specs: by the number of the segments' schema; lacking: the segments that lack it."""

    cuts: Cuts
    specs: Mapping[int, FieldSpec]
    lacking: Ints


def cuts_of(path: Path, view: Shown, segments: Segments) -> LateCuts:
    """Where a field of these steps lies, late or not. Spans without steps and without the field are left out."""
    spans, has = view.spans, np.array([_has(schema, path) for schema in view.schemas])[view.code]
    kept = np.flatnonzero(has | (spans.hi > spans.lo))
    place, lo, hi = segments.places(spans.rows[kept]), spans.lo[kept], spans.hi[kept]
    other, step = _at(path, segments, place, lo, hi)
    moved = other >= 0
    segment, lo, hi = np.where(moved, other, place), np.where(moved, step, lo), np.where(moved, step + hi - lo, hi)
    cuts = Cuts(
        spans.episode[kept], segment, lo, hi, spans.more[kept], segments.start[segment], segments.length[segment],
        Extent(segment, segment),
    )  # fmt: skip
    codes = np.unique(segments.schema[segment[has[kept]]]).tolist()
    specs = {code: segments.schemas[code].by_name[escape_path(path)] for code in codes}
    return LateCuts(cuts, specs, place[~has[kept]])


def _spec(schema: ShardSchema, path: Path) -> FieldSpec:
    found = schema.by_name.get(escape_path(path))
    if found is None or found.axis != "step" or found.next_of:
        raise CorruptManifestError(
            f"the late table gives field {show(path)!r} from a shard that has no such field of one row a step; run "
            "`archive verify`"
        )
    return found


def _has(schema: ShardSchema, path: Path) -> bool:
    return any(spec.path == path and spec.axis not in NODES for spec in schema.fields)


@dataclass(frozen=True)
class Filled(StepAxis):
    """Steps without a field, for which something stands in: `value` makes so many rows of it."""

    value: Callable[[int], Array]

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        return Located(cuts.hi - cuts.lo, [])

    def complete(self, fetched: Fetched) -> None:
        rows = runs_of(fetched.at, fetched.located.rows)
        fetched.rows[""].put(rows, dtypes.to_stored(self.value(len(rows)))[0])
