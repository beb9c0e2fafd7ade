"""Pure, no I/O: wanted steps of episodes, as rows of the segments table; and their fields, with derived columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Steps, ascending, group_of, sums
from archive.arrays import spans as spans_of
from archive.base import CorruptManifestError, cached_property, escape_path, show
from archive.fields import Array, Bools, Cuts, Fetched, FieldSpec, Located, Path, ShardSchema, StepAxis, dtypes
from archive.read.chunks import Segments


class Spans:
    """Steps [lo, hi) of rows of the segments table; those of episode i are [offsets[i], offsets[i + 1]).

    An empty span stays, for fields of its segment beside steps.  begun: mask of spans that were cut off before `lo`.
    """

    def __init__(self, offsets: Ints, rows: Ints, lo: Ints, hi: Ints, begun: Bools | None = None) -> None:
        self.offsets = offsets
        self.rows = rows
        self.lo = lo
        self.hi = hi
        self._begun = begun

    @classmethod
    def of_each(cls, rows: Any, lo: Any, hi: Any) -> Spans:
        """Spans with one for each episode."""
        row, first, stop = (np.asarray(values, np.int64) for values in (rows, lo, hi))
        return cls(np.arange(len(row) + 1), row, first, stop)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def episode(self) -> Ints:
        """The number of each span's episode here."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def lengths(self) -> Ints:
        """Steps of each episode."""
        return sums(self.hi - self.lo, self.offsets)

    @cached_property
    def more(self) -> Bools:
        """Mask of the spans in which fields with more rows than steps go on: after the last step, and in the segments
        after it; if no step is wanted, from where the steps were cut off."""
        at, episode = np.arange(len(self.rows)), self.episode
        last = self.offsets[:-1].copy()
        if self._begun is not None:
            np.maximum.at(last, episode[self._begun], at[self._begun])
        some = self.hi > self.lo
        has_steps = np.bincount(episode[some], minlength=len(self)) > 0
        last[has_steps] = 0
        np.maximum.at(last, episode[some], at[some])
        more: Bools = at >= last[episode]
        return more

    def pick(self, chosen: Ints) -> Spans:
        """The spans of the episodes with these numbers."""
        counts = np.diff(self.offsets)[chosen]
        index = spans_of(self.offsets[:-1][chosen], counts)
        begun = None if self._begun is None else self._begun[index]
        return Spans(np.append(0, np.cumsum(counts)), self.rows[index], self.lo[index], self.hi[index], begun)

    def cut(self, start: Ints, stop: Ints) -> Spans:
        """Steps [start[i], stop[i]) of episode i, counted from its first step here."""
        counts, episode = self.hi - self.lo, self.episode
        total = np.append(0, np.cumsum(counts))
        before = total[:-1] - total[self.offsets[:-1]][episode]
        lo, hi = (np.clip(edge[episode] - before, 0, counts) for edge in (start, stop))
        return Spans(self.offsets, self.rows, self.lo + lo, self.lo + np.maximum(lo, hi), lo > 0)

    def split(self, at: Ints) -> Spans:
        """The same steps in the same order, with no span across any of the steps `at`, counted over all episodes."""
        total = np.append(0, np.cumsum(self.hi - self.lo))
        at = at[(at > 0) & (at < total[-1])]
        span = group_of(total, at)
        inside = at > total[span]
        at, span = at[inside], span[inside]
        order = np.argsort(np.append(np.arange(len(self.rows)), span), kind="stable")
        lo = np.append(self.lo, self.lo[span] + at - total[span])[order]
        hi = np.append(self.hi, self.hi[span])[order]
        again = np.flatnonzero(order >= len(self.rows))
        hi[again - 1] = lo[again]
        added = np.bincount(self.episode[span], minlength=len(self))
        rows = np.append(self.rows, self.rows[span])[order]
        return Spans(self.offsets + np.append(0, np.cumsum(added)), rows, lo, hi)


# -- fields of steps, with derived columns -----------------------------------------------------------------------------


class Shown(NamedTuple):
    """Steps, cut so that all of a span have the same fields. code: the number of each span's schema in `schemas`, where
    derived columns are like any field. Empty spans have schemas of their own.

    own: the number of each among the segments' schemas, without derived columns; late: the derived columns of each,
    with the number of their source among the segments' schemas.
    """

    spans: Spans
    code: Ints
    schemas: Sequence[ShardSchema]
    own: Sequence[int]
    late: Sequence[Mapping[Path, int]]

    def source(self, path: Path, code: int) -> int:
        """The number of the schema of the segments that have a field of steps with this code."""
        return self.late[code].get(path, self.own[code])

    def pick(self, episodes: Ints) -> Shown:
        """The part for the episodes with these numbers."""
        counts = np.diff(self.spans.offsets)[episodes]
        code = self.code[spans_of(self.spans.offsets[:-1][episodes], counts)]
        return self._replace(spans=self.spans.pick(episodes), code=code)


def shown(spans: Spans, segments: Segments) -> Shown:
    """The fields of these steps. Without derived columns, the spans and schemas are unchanged."""
    place = segments.places(spans.rows)
    if not segments.late:
        count = len(segments.schemas)
        return Shown(spans, segments.schema[place], segments.schemas, range(count), [{}] * count)
    spans = spans.split(_borders(spans, place, segments))
    place = segments.places(spans.rows)
    kinds = [segments.schema[place], (spans.hi > spans.lo).astype(np.int64)]
    kinds += [_kind(path, segments, place, spans) for path in segments.late]
    each, code = np.unique(np.stack(kinds), axis=1, return_inverse=True)
    late = [
        {path: giver for path, giver in zip(segments.late, givers, strict=True) if giver >= 0}
        for _, _, *givers in each.T.tolist()
    ]
    own = each[0].tolist()
    schemas = [_merged(one, given, segments) for one, given in zip(own, late, strict=True)]
    return Shown(spans, code.reshape(-1), schemas, own, late)


def _borders(spans: Spans, place: Ints, segments: Segments) -> Ints:
    """The steps, counted over all episodes, before which some field begins or ends."""
    before = np.cumsum(spans.hi - spans.lo) - spans.hi
    mine = Steps(place, spans.lo, spans.hi)
    met = [mine.meet(cover.steps) for cover in segments.late.values()]
    return ascending(np.concatenate([before[one.left] + edge for one in met for edge in (one.lo, one.hi)]))


def _kind(path: Path, segments: Segments, place: Ints, spans: Spans) -> Ints:
    """The schema of the source of a derived column, for each span; -1 without one."""
    other, _ = _at(path, segments, place, spans.lo, spans.hi)
    return np.where(other >= 0, segments.schema[other], -1)


def _at(path: Path, segments: Segments, place: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The segment with the derived column of steps [lo, hi), -1 for none, and its first step there. An empty range is
    where the step before it is, if nothing is known of the one after."""
    cover = segments.late[path]
    other, step = cover.find(place, lo)
    bare = np.flatnonzero((lo == hi) & (other < 0) & (lo > 0))
    if len(bare):
        other[bare], step[bare] = cover.find(place[bare], lo[bare] - 1)
    return other, step


def moved(path: Path, segments: Segments, place: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """The segments that have a field of steps [lo, hi) of others, and the places there; unchanged if not derived."""
    if path not in segments.late:
        return place, lo, hi
    other, step = _at(path, segments, place, lo, hi)
    late = other >= 0
    return np.where(late, other, place), np.where(late, step, lo), np.where(late, step + hi - lo, hi)


def _merged(own: int, given: Mapping[Path, int], segments: Segments) -> ShardSchema:
    """A schema with the fields of others in place of its own of these paths."""
    schema = segments.schemas[own]
    if not given:
        return schema
    specs = {spec.path: spec for spec in schema.fields}
    specs |= {path: _spec(segments.schemas[giver], path) for path, giver in given.items()}
    return replace(schema, fields=tuple(specs[path] for path in sorted(specs)))


def _spec(schema: ShardSchema, path: Path) -> FieldSpec:
    found = schema.by_name.get(escape_path(path))
    if found is None or found.axis != "step" or found.next_of:
        raise CorruptManifestError(
            f"the late table gives field {show(path)!r} from a shard that has no such field of one row a step; run "
            "`archive verify`"
        )
    return found


@dataclass(frozen=True)
class StandIn(StepAxis):
    """Steps without a field, with a stand-in: `value` makes this many rows of it."""

    value: Callable[[int], Array]

    def locate(self, cuts: Cuts, schema: ShardSchema, known: Mapping[str, Array] | None = None) -> Located:
        return Located(cuts.hi - cuts.lo, [])

    def complete(self, fetched: Fetched) -> None:
        rows = spans_of(fetched.at, fetched.located.rows)
        fetched.rows[""].put(rows, dtypes.to_stored(self.value(len(rows)))[0])
