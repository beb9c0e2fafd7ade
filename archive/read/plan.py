"""Pure, no I/O: the plan of reading some steps: the rows of stored arrays, and their places in memory.

Both bulk reads and batches of single steps are planned here. A `FieldPlan` says how the segments of each schema store a
field; at some steps it is a `FieldRead`, which gives the rows to fetch, and is completed when they have come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from archive.arrays import Ints, Pieces, ascending, fresh, offsets_of
from archive.base import FieldError, escape_path, show
from archive.fields import (
    NODES,
    Array,
    Axis,
    Cuts,
    Extent,
    Fetched,
    FieldSpec,
    Located,
    Path,
    ShardSchema,
    Slices,
    axis_of,
    dtypes,
    empty_rows,
)
from archive.read.chunks import Segments, Want
from archive.read.selection import Selection
from archive.read.spans import Shown, Spans, StandIn, moved, shown

NOWHERE = Pieces.whole(np.zeros(0, np.uint8))


class FieldKind(NamedTuple):
    """A way in which segments of some schemas, by their numbers, store a field."""

    codes: Sequence[int]
    axis: Axis[Any]
    schema: ShardSchema


@dataclass
class FieldPart:
    """A field in those of its cuts, at `index`, that store it in one way."""

    axis: Axis[Any]
    index: Any
    cuts: Cuts
    schema: ShardSchema
    rows: dict[str, Pieces] = field(default_factory=dict)
    located: Located = field(init=False)


@dataclass
class FieldRead:
    """One field of some steps."""

    spec: FieldSpec
    cuts: Cuts
    parts: list[FieldPart]
    episodes: Ints  # first cut of each episode, and one past the last of all
    error: FieldError | None = None  # why these cuts cannot be one field
    own: Pieces | None = None  # memory for its rows
    rows: Ints = field(init=False)  # of each cut
    at: Ints = field(init=False)  # of each cut: its first row in memory

    def first(self, shard: Ints) -> Iterator[Want]:
        """The rows to fetch before the cuts, each of one step, are located: they give the places of the others."""
        for part in self.parts:
            runs = part.axis.companions(part.cuts)
            part.rows = {one.into: _memory(one) for one in runs}
            yield from _wants(runs, part, shard, part.cuts.lo)

    def locate(self, *, each_step: bool = False) -> FieldRead:
        """Find the rows of each cut. each_step: the rows of `first` have come, and no others are needed."""
        self.rows = np.zeros(len(self.cuts.lo), np.int64)
        for part in self.parts:
            known = {name: pieces.joined() for name, pieces in part.rows.items()} if each_step else None
            part.located = part.axis.locate(part.cuts, part.schema, known)
            self.rows[part.index] = part.located.rows
        if each_step and (self.rows != 1).any():
            raise FieldError(
                f"field {show(self.spec.path)!r} has fewer rows than its episodes have steps; read it by episode"
            )
        self.at = np.cumsum(self.rows) - self.rows
        return self

    @property
    def ends(self) -> Ints:
        """The first row of each episode, and the end of the last one, end to end."""
        total = np.append(0, np.cumsum(self.rows))
        out: Ints = total[self.episodes]
        return out

    @property
    def most_bytes(self) -> float:
        """Bytes of its rows, by the tables: no sum of integers, as a table may claim impossible rows."""
        runs = [one for part in self.parts for one in part.located.runs]
        rows = (float((one.stop - one.start).sum(dtype=np.float64)) for one in runs)
        sizes = (one.like.itemsize * prod(one.like.shape[1:]) for one in runs)
        return sum(map(mul, rows, sizes), 0.0)

    def prepare(self) -> None:
        """Allocate memory for the rows, but for what was given; FieldError if they cannot be one field."""
        if self.error is not None:
            raise self.error
        if self.own is None:
            self.own = Pieces.new(empty_rows(self.spec), self.ends)
        for part in self.parts:
            part.rows = {"": self.own} | {runs.into: _memory(runs) for runs in part.located.runs if runs.into}

    def wants(self, shard: Ints, *, own: bool = False) -> Iterator[Want]:
        """The rows to fetch; `shard` is that of each segment. own: no companions; these may be known, but little."""
        for part in self.parts:
            runs = [one for one in part.located.runs if not (own and one.into)]
            yield from _wants(runs, part, shard, self.at[part.index])

    def complete(self) -> Fetched:
        """The field as it was fetched, with all rows in their place."""
        assert self.own is not None
        for part in self.parts:
            part.axis.complete(Fetched(part.cuts, part.located, self.at[part.index], part.rows))
        first = self.parts[0]
        return Fetched(self.cuts, Located(self.rows, first.located.runs), self.at, first.rows)


def _memory(runs: Slices) -> Pieces:
    return Pieces.whole(fresh((int((runs.stop - runs.start).sum()), *runs.like.shape[1:]), runs.like.dtype))


def _wants(runs: Iterable[Slices], part: FieldPart, shard: Ints, at: Ints) -> Iterator[Want]:
    """The rows of a part to fetch. at: the first of the field's own rows of each cut. Rows without elements have no
    chunk."""
    for one in runs:
        if 0 in one.like.shape[1:]:
            continue
        place = one.at if one.into else one.at + at[one.cut]
        shards, into = shard[part.cuts.segment[one.cut]], part.rows.get(one.into, NOWHERE)
        some = one.stop > one.start
        if some.all() and len(some):
            yield Want(one.array, one.like, shards, one.start, one.stop, place, into)
        elif some.any():
            yield Want(one.array, one.like, shards[some], one.start[some], one.stop[some], place[some], into)


@dataclass
class FieldPlan:
    """One field: how the segments that have it store it, and the stand-in where some lack it, if they may.

    agree: `spec` is that of all of them, but for its next_of.
    """

    spec: FieldSpec
    kinds: list[FieldKind]
    agree: bool
    stand_in: StandIn | None

    def at(self, cuts: Cuts, episodes: Ints, segments: Segments) -> FieldRead:
        """The field in these cuts; not located yet."""
        alone = len(self.kinds) == 1 and self.stand_in is None
        code = segments.schema[cuts.segment]
        parts = []
        for codes, axis, schema in self.kinds:
            index = slice(None) if alone else np.flatnonzero(np.isin(code, codes))
            parts.append(FieldPart(axis, index, cuts if alone else cuts.pick(index), schema))
        if self.stand_in is not None:
            lacking = np.flatnonzero(~np.isin(code, [n for kind in self.kinds for n in kind.codes]))
            if len(lacking):
                parts.append(FieldPart(self.stand_in, lacking, cuts.pick(lacking), segments.schemas[0]))
        return FieldRead(self.spec, cuts, parts, episodes)


def _field(
    specs: Mapping[int, FieldSpec],
    telling: Sequence[FieldSpec],
    segments: Segments,
    selection: Selection,
    *,
    lacking: bool,
) -> FieldPlan:
    """The plan of a field. specs: by the number of the segments' schema; telling: those that decide its kind; lacking:
    some of its steps may be of other segments."""
    spec, first = _agreed(telling), next(iter(specs.values()))
    groups: dict[Any, list[int]] = {}
    for code, one in specs.items():
        if one.axis not in NODES:
            groups.setdefault(one.next_of if spec is not None else one, []).append(code)
    kinds = [
        FieldKind(
            codes,
            axis_of(replace(spec or specs[codes[0]], next_of=specs[codes[0]].next_of)),
            segments.schemas[codes[0]],
        )
        for codes in groups.values()
    ]
    whole = spec or first
    stand_in = StandIn(whole, partial(selection.filled_as, whole, whole.path)) if lacking else None
    return FieldPlan(whole, kinds, spec is not None, stand_in)


def _agreed(specs: Iterable[FieldSpec]) -> FieldSpec | None:
    """The spec that stands for all; they may differ only in next_of and in the width of strings."""
    specs = list(specs)
    if all(s.dtype[1:2] == "U" for s in specs):
        widest = max((s.dtype for s in specs), key=lambda name: dtypes.to_numpy(name).itemsize)
        specs = [replace(s, dtype=widest) for s in specs]
    alike = len({(s.axis, s.dtype, s.shape, s.extra, s.scalar) for s in specs}) == 1
    return specs[0] if alike else None


def _cuts(
    episode: Ints, segment: Ints, lo: Ints, hi: Ints, more: Any, segments: Segments, specs: Iterable[FieldSpec] = ()
) -> Cuts:
    """Steps of segments, with the extents there of a field that has not one row a step, by its specs."""
    extent = Extent(segment, segment)  # not looked at
    for name in {spec.name for spec in specs if not spec.per_step}:
        every = segments.extent(name)
        extent = Extent(every.start[segment], every.rows[segment])
    return Cuts(episode, segment, lo, hi, more, segments.start[segment], segments.length[segment], extent)


def _by_path(schemas: Mapping[int, ShardSchema], selection: Selection) -> dict[Path, dict[int, FieldSpec]]:
    """The fields selected, each by the numbers of the schemas that have it."""
    found: dict[Path, dict[int, FieldSpec]] = {}
    for code, one in schemas.items():
        for path, spec in selection.specs(one).items():
            found.setdefault(path, {})[code] = spec
    return found


# -- ranges of episodes ------------------------------------------------------------------------------------------------


@dataclass
class EpisodeGroup:
    """Episodes whose segments have the same schemas."""

    episodes: Ints  # their numbers in the request
    steps: Ints  # of each
    paths: list[Path]  # of all that follows, in order
    fields: dict[Path, FieldRead]
    nodes: dict[Path, str]
    absent: list[str | Path]


def plan(spans: Spans, selection: Selection, segments: Segments) -> list[EpisodeGroup]:
    """The reads of the selected fields of these steps. FieldError for names that an episode lacks."""
    view = shown(spans, segments)
    out = []
    for episodes, codes in _alike(view, selection):
        whole = len(episodes) == len(spans)
        absent = selection.absent([view.schemas[code] for code in codes])
        part = spans if whole else spans.pick(episodes)
        out.append(_group(part, view, episodes, codes, absent, selection, segments))
    return out


def _alike(view: Shown, selection: Selection) -> list[tuple[Ints, list[int]]]:
    """Episodes (their numbers) whose spans have the same schemas (their numbers, in the order they come in)."""
    spans, code = view.spans, view.code
    every = np.arange(len(spans))
    low, high = np.full(len(spans), len(view.schemas)), np.full(len(spans), -1)
    np.minimum.at(low, spans.episode, code)
    np.maximum.at(high, spans.episode, code)
    out = [(every[(low == n) & (high == n)], [n]) for n in ascending(low[low == high]).tolist()]
    mixed: dict[tuple[int, ...], list[int]] = {}
    for episode in every[low != high].tolist():
        own = code[spans.offsets[episode] : spans.offsets[episode + 1]]
        mixed.setdefault(tuple(dict.fromkeys(own.tolist())), []).append(episode)
    for codes, episodes in mixed.items():
        found = _by_path({code: view.schemas[code] for code in codes}, selection)
        together = all(_agreed(specs.values()) is not None for specs in found.values())
        groups = [episodes] if together else [[episode] for episode in episodes]
        out += [(np.array(group), list(codes)) for group in groups]
    return out


def _group(
    spans: Spans,
    view: Shown,
    episodes: Ints,
    codes: list[int],
    absent: list[str | Path],
    selection: Selection,
    segments: Segments,
) -> EpisodeGroup:
    seen = _by_path({code: view.schemas[code] for code in codes}, selection)
    late = [path for path in seen if any(path in view.late[code] for code in codes)]
    segment = segments.places(spans.rows)
    own = list(dict.fromkeys(segments.schema[segment].tolist())) if segments.late else codes
    found = _by_path({code: segments.schemas[code] for code in own}, selection)
    out = EpisodeGroup(episodes, spans.lengths(), [], {}, {}, absent)
    for path, specs in found.items():
        if path in late:
            continue
        first = next(iter(specs.values()))
        out.paths.append(path)
        if first.axis in NODES:
            out.nodes[path] = first.axis
            continue
        at: Any = slice(None)
        if len(specs) < len(own):
            at = np.flatnonzero(np.isin(segments.schema[segment], list(specs)))
        lo, hi, more = spans.lo[at], spans.hi[at], spans.more[at]
        cuts = _cuts(spans.episode[at], segment[at], lo, hi, more, segments, specs.values())
        out.fields[path] = _read(specs, cuts, len(episodes), segments, selection, lacking=False)
    if late and len(episodes) < len(view.spans):
        view = view.pick(episodes)
    for path in late:
        if (added := _late(path, seen[path], view, segments, selection)) is not None:
            cuts, specs = added
            out.paths.append(path)
            out.fields[path] = _read(specs, cuts, len(episodes), segments, selection, lacking=True)
    return out


def _late(
    path: Path, seen: Mapping[int, FieldSpec], view: Shown, segments: Segments, selection: Selection
) -> tuple[Cuts, dict[int, FieldSpec]] | None:
    """The cuts of a field that is a derived column in some of these steps, and its specs by the numbers of the
    segments' schemas; None if it is left out. FieldError if some lack it. Empty spans without it are left out."""
    spans, has = view.spans, np.isin(view.code, [code for code, spec in seen.items() if spec.axis not in NODES])
    if not has.all() and (lacking := np.flatnonzero(~has & (spans.hi > spans.lo))).size:
        if selection.is_error and not selection.leaves_out:
            episode = segments.episode_id(int(segments.places(spans.rows[lacking[:1]])[0]))
            raise FieldError(
                f"field {show(path)!r} was added to some steps of episode {episode!r} only; pass missing='skip' to "
                "leave it out of such episodes, or missing=VALUE to fill it in"
            )
        if selection.leaves_out:
            return None
    kept = np.flatnonzero(has | (spans.hi > spans.lo))
    segment, lo, hi = moved(path, segments, segments.places(spans.rows[kept]), spans.lo[kept], spans.hi[kept])
    cuts = _cuts(spans.episode[kept], segment, lo, hi, spans.more[kept], segments)
    sources = ascending(segments.schema[segment[has[kept]]]).tolist()
    return cuts, {code: segments.schemas[code].by_name[escape_path(path)] for code in sources}


def _read(
    specs: Mapping[int, FieldSpec], cuts: Cuts, count: int, segments: Segments, selection: Selection, *, lacking: bool
) -> FieldRead:
    """One field of so many episodes, located."""
    telling = list(specs.values())
    if len(specs) > 1 and telling[0].axis == "ragged":
        telling = _telling(specs, segments.schema[cuts.segment], cuts)
    one = _field(specs, telling, segments, selection, lacking=lacking)
    out = one.at(cuts, offsets_of(np.bincount(cuts.episode, minlength=count)), segments)
    out.error = None if one.agree else _unlike(telling, cuts, segments)
    return out.locate()


def _telling(specs: Mapping[int, FieldSpec], code: Ints, cuts: Cuts) -> list[FieldSpec]:
    """The specs that decide the kind of a ragged field: those with values; else, as the dtype of empty lists is a
    guess, the newest of those with steps."""
    for some, most in ((cuts.extent.rows > 0, len(specs)), (cuts.length > 0, 1)):
        held = set(code[some].tolist())
        found = [spec for n, spec in specs.items() if n in held]
        if found:
            return found[-most:]
    return list(specs.values())[-1:]


def _unlike(specs: Iterable[FieldSpec], cuts: Cuts, segments: Segments) -> FieldError:
    kinds = " and ".join(dict.fromkeys(f"{s.dtype}{list(s.shape)} {s.axis}" for s in specs))
    path = next(iter(specs)).path
    return FieldError(
        f"episode {segments.episode_id(int(cuts.segment[0]))!r} goes on with another kind of field {show(path)!r} "
        f"({kinds}); read its parts one by one with start= and stop=, or leave the field out"
    )


# -- batches of single steps -------------------------------------------------------------------------------------------


class BatchPlan(NamedTuple):
    """The fields of a batch: those gathered row by row (direct: a step is a row of one array), those that are read by
    episode, those without data, and those that no step has."""

    direct: list[tuple[FieldPlan, str, Array]]  # with the array's name, and no rows of it
    fields: list[FieldPlan]
    slow: list[Path]
    nodes: dict[Path, Any]
    absent: list[str | Path]


def plan_batch(codes: Sequence[int], view: Shown, selection: Selection, segments: Segments) -> BatchPlan:
    """The plan of a batch of steps of these schemas, by their numbers."""
    schemas = {code: view.schemas[code] for code in codes}
    out = BatchPlan([], [], [], {}, selection.absent(schemas.values()))
    for path, specs in _by_path(schemas, selection).items():
        spec = next(iter(specs.values()))
        lacking = len(specs) < len(schemas)
        if spec.axis in NODES:
            out.nodes[path] = {} if spec.axis == "dict" else None
        elif lacking and selection.is_skip:
            continue
        elif not _is_rows(spec):
            if spec.axis != "free" or selection.names is not None:
                out.slow.append(path)
        else:
            one = _batch_field(path, specs, lacking, view, selection, segments)
            late = any(path in view.late[code] for code in specs)
            plain = len(one.kinds) == 1 and one.kinds[0].axis.spec.per_step and 0 not in spec.shape
            if plain and not late and not lacking:
                out.direct.append((one, spec.name, empty_rows(one.spec)))
            else:
                out.fields.append(one)
    return out


def _is_rows(spec: FieldSpec) -> bool:
    """True if rows of the field are numbers of one shape, one a step."""
    return spec.axis in ("step", "offset") and spec.dtype not in ("str", "json") and spec.dtype[1:2] != "U"


def _batch_field(
    path: Path, specs: Mapping[int, FieldSpec], lacking: bool, view: Shown, selection: Selection, segments: Segments
) -> FieldPlan:
    alone = [replace(spec, extra=0) for spec in specs.values()]  # a step has one row, whatever comes last
    by_source = {view.source(path, code): spec for code, spec in zip(specs, alone, strict=True)}
    out = _field(by_source, alone, segments, selection, lacking=lacking)
    if not out.agree:
        kinds = sorted({(s.axis, s.dtype, s.shape) for s in alone})
        several = " and ".join(f"{dtype}{list(shape)} {axis}" for axis, dtype, shape in kinds)
        raise FieldError(
            f"field {show(path)!r} is {several} in episodes of one batch; filter the episodes, or leave it out"
        )
    if lacking and selection.is_error:
        raise FieldError(
            f"some of these episodes have no field {show(path)!r}; name the fields to read, or pass missing='skip' or "
            "missing=VALUE"
        )
    return replace(out, spec=replace(out.spec, next_of=""))


def at_steps(one: FieldPlan, segment: Ints, step: Ints, segments: Segments) -> FieldRead:
    """A field at single steps of segments; not located yet."""
    every = np.arange(len(step))
    segment, lo, hi = moved(one.spec.path, segments, segment, step, step + 1)
    specs = [kind.axis.spec for kind in one.kinds]
    cuts = _cuts(every, segment, lo, hi, np.zeros(len(step), bool), segments, specs)
    return one.at(cuts, np.append(every, len(every)), segments)
