"""Pure, no I/O: what reading some steps takes: which rows of which stored arrays, and where in memory they go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from operator import mul
from typing import Any

import numpy as np

from archive.arrays import Ints, Pieces, fresh, offsets_of
from archive.base import FieldError, show
from archive.fields import NODES, FieldSpec, Path, dtypes
from archive.fields.axes import Axis, Cuts, Extent, Fetched, Located, Runs, axis_of, empty_rows
from archive.read.chunks import Segments, Want
from archive.read.latesteps import Filled, LateCuts, Shown, cuts_of, shown
from archive.read.selection import Selection
from archive.read.spans import Spans


@dataclass
class Part:
    """How a field is stored in some of the cuts: those at `index` of the field's."""

    axis: Axis[Any]
    index: Any
    cuts: Cuts
    located: Located
    rows: dict[str, Pieces] = field(default_factory=dict)


@dataclass
class FieldRead:
    """One field of the episodes of a group."""

    spec: FieldSpec
    cuts: Cuts
    parts: list[Part]
    rows: Ints  # of each cut
    episodes: Ints  # first cut of each episode, and one past the last of all
    error: FieldError | None  # why these cuts cannot be one field
    at: Ints = field(init=False)  # of each cut: its first row in memory
    own: Pieces | None = None  # memory for its rows

    def __post_init__(self) -> None:
        self.at = np.cumsum(self.rows) - self.rows

    @property
    def ends(self) -> Ints:
        """Where the rows of each episode begin, and where the last one stops, end to end."""
        total = np.append(0, np.cumsum(self.rows))
        out: Ints = total[self.episodes]
        return out

    @property
    def most_bytes(self) -> float:
        """Bytes of its rows, by what tables say: no sum of integers, as rows may be said that cannot be."""
        runs = [one for part in self.parts for one in part.located.runs]
        rows = (float((one.stop - one.start).sum(dtype=np.float64)) for one in runs)
        sizes = (one.like.itemsize * prod(one.like.shape[1:]) for one in runs)
        return sum(map(mul, rows, sizes), 0.0)

    def prepare(self) -> None:
        """Make the memory that the rows go to, but for what was given; FieldError if they cannot be one field."""
        if self.error is not None:
            raise self.error
        if self.own is None:
            self.own = Pieces.new(empty_rows(self.spec), self.ends)
        for part in self.parts:
            part.rows = {"": self.own}
            for runs in part.located.runs:
                if runs.into:
                    count = int((runs.stop - runs.start).sum())
                    part.rows[runs.into] = Pieces.whole(fresh((count, *runs.like.shape[1:]), runs.like.dtype))

    def complete(self) -> Fetched:
        """What was fetched, with all rows in their place."""
        assert self.own is not None
        for part in self.parts:
            part.axis.complete(Fetched(part.cuts, part.located, self.at[part.index], part.rows))
        first = self.parts[0]
        return Fetched(self.cuts, Located(self.rows, first.located.runs), self.at, first.rows)

    def wants(self, shard: Ints) -> Iterator[Want]:
        """What to fetch; `shard` is that of each segment."""
        for part in self.parts:
            yield from wants_of(part.located.runs, part.cuts, shard, part.rows, self.at[part.index])


NOWHERE = Pieces.whole(np.zeros(0, np.uint8))


def wants_of(runs: Iterable[Runs], cuts: Cuts, shard: Ints, rows: Mapping[str, Pieces], at: Ints) -> Iterator[Want]:
    """What to fetch. shard: of each segment; rows: the memory that runs go to; at: the first of the field's own rows of
    each cut. Rows that hold no element have no chunk."""
    for one in runs:
        if 0 in one.like.shape[1:]:
            continue
        place = one.at if one.into else one.at + at[one.cut]
        shards, into = shard[cuts.segment[one.cut]], rows.get(one.into, NOWHERE)
        some = one.stop > one.start
        if some.all() and len(some):
            yield Want(one.array, one.like, shards, one.start, one.stop, place, into)
        elif some.any():
            yield Want(one.array, one.like, shards[some], one.start[some], one.stop[some], place[some], into)


@dataclass
class Group:
    """Episodes whose segments have the same schemas."""

    episodes: Ints  # their numbers in the request
    steps: Ints  # of each
    paths: list[Path]  # of all that follows, in order
    fields: dict[Path, FieldRead]
    nodes: dict[Path, str]
    absent: list[str | Path]


def plan(spans: Spans, selection: Selection, segments: Segments) -> list[Group]:
    """How the fields selected of these steps are read, and of which rows.
    FieldError for names that an episode lacks."""
    view = shown(spans, segments)
    out = []
    for episodes, codes in _alike(view, selection):
        whole = len(episodes) == len(spans)
        part = spans if whole else spans.pick(episodes)
        absent = selection.absent([view.schemas[code] for code in codes])
        late: Mapping[Path, LateCuts] = {}
        if segments.late:
            late = _late(view if whole else view.pick(episodes), codes, selection, segments)
            codes = list(dict.fromkeys(segments.schema[segments.places(part.rows)].tolist()))
        out.append(_group(part, episodes, codes, late, absent, selection, segments))
    return out


def _alike(view: Shown, selection: Selection) -> list[tuple[Ints, list[int]]]:
    """Episodes (their numbers) whose spans have the same schemas (their numbers, in the order they come in)."""
    spans, code = view.spans, view.code
    every = np.arange(len(spans))
    low, high = np.full(len(spans), len(view.schemas)), np.full(len(spans), -1)
    np.minimum.at(low, spans.episode, code)
    np.maximum.at(high, spans.episode, code)
    out = [(every[(low == n) & (high == n)], [n]) for n in np.unique(low[low == high]).tolist()]
    mixed: dict[tuple[int, ...], list[int]] = {}
    for episode in every[low != high].tolist():
        own = code[spans.offsets[episode] : spans.offsets[episode + 1]]
        mixed.setdefault(tuple(dict.fromkeys(own.tolist())), []).append(episode)
    for codes, episodes in mixed.items():
        together = _agree([selection.specs(view.schemas[code]) for code in codes])
        groups = [episodes] if together else [[episode] for episode in episodes]
        out += [(np.array(group), list(codes)) for group in groups]
    return out


def _agree(schemas: Sequence[Mapping[Path, FieldSpec]]) -> bool:
    """Whether fields of the same path can be one, whatever their rows."""
    found: dict[Path, list[FieldSpec]] = {}
    for specs in schemas:
        for path, spec in specs.items():
            found.setdefault(path, []).append(spec)
    return all(_agreed(specs) is not None for specs in found.values())


def _agreed(specs: Iterable[FieldSpec]) -> FieldSpec | None:
    """The one that stands for all; they may differ in next_of and in the width of strings, but in nothing else."""
    specs = list(specs)
    if all(s.dtype[1:2] == "U" for s in specs):
        widest = max((s.dtype for s in specs), key=lambda name: dtypes.to_numpy(name).itemsize)
        specs = [replace(s, dtype=widest) for s in specs]
    alike = len({(s.axis, s.dtype, s.shape, s.extra, s.scalar) for s in specs}) == 1
    return specs[0] if alike else None


def _late(view: Shown, codes: list[int], selection: Selection, segments: Segments) -> dict[Path, LateCuts]:
    """The fields selected that are late in some of these steps. FieldError for one that others lack."""
    wanted = {path: None for code in codes for path in selection.specs(view.schemas[code]) if path in view.late[code]}
    found = {path: cuts_of(path, view, segments) for path in wanted}
    for path, late in found.items():
        if len(late.lacking) and selection.is_error and not selection.leaves_out:
            episode = segments.episode_id(int(late.lacking[0]))
            raise FieldError(
                f"field {show(path)!r} was added to some steps of episode {episode!r} only; pass missing='skip' to "
                "leave it out of such episodes, or missing=VALUE to fill it in"
            )
    return found


def _group(
    spans: Spans, episodes: Ints, codes: list[int], late: Mapping[Path, LateCuts], absent: list[str | Path],
    selection: Selection, segments: Segments,
) -> Group:  # fmt: skip
    schemas = [segments.schemas[code] for code in codes]
    where = segments.places(spans.rows)
    cuts = Cuts(
        spans.episode, where, spans.lo, spans.hi, spans.more, segments.start[where], segments.length[where],
        Extent(where, where),
    )  # fmt: skip
    found: dict[Path, dict[int, FieldSpec]] = {}
    for code, one in zip(codes, schemas, strict=True):
        for path, spec in selection.specs(one).items():
            found.setdefault(path, {})[code] = spec
    found = {path: specs for path, specs in found.items() if path not in late}
    given = {path: one for path, one in late.items() if not (len(one.lacking) and selection.leaves_out)}
    out = Group(episodes, spans.lengths(), [*found, *given], {}, {}, absent)
    for path, added in given.items():
        out.fields[path] = _field(added.specs, added.cuts, len(episodes), segments, selection)
    for path, specs in found.items():
        first = next(iter(specs.values()))
        if first.axis in NODES:
            out.nodes[path] = first.axis
        else:
            own = cuts
            if len(specs) < len(codes):
                own = cuts.pick(np.flatnonzero(np.isin(segments.schema[where], list(specs))))
            out.fields[path] = _field(specs, own, len(episodes), segments, selection)
    return out


def _field(
    specs: Mapping[int, FieldSpec], cuts: Cuts, count: int, segments: Segments, selection: Selection
) -> FieldRead:  # fmt: skip
    """One field, located in its cuts; where its segment has it not, something stands in."""
    first = next(iter(specs.values()))
    code = segments.schema[cuts.segment]
    if not all(spec.per_step for spec in specs.values()):
        extent = segments.extent(first.name)
        cuts = cuts._replace(extent=Extent(extent.start[cuts.segment], extent.rows[cuts.segment]))
    telling = list(specs.values())
    if len(specs) > 1 and first.axis == "ragged":
        telling = _telling(specs, code, cuts)
    spec = _agreed(telling)
    error = None if spec is not None else _unlike(telling, cuts, segments)
    kinds: dict[Any, list[int]] = {}
    for n, one in specs.items():
        if one.axis in NODES:
            continue
        kinds.setdefault(one.next_of if spec is not None else one, []).append(n)
    lacking = np.flatnonzero(~np.isin(code, list(specs))) if segments.late else code[:0]
    alone = len(kinds) == 1 and not len(lacking)
    parts, rows = [], np.zeros(len(cuts.lo), np.int64)
    for codes in kinds.values():
        index = slice(None) if alone else np.flatnonzero(np.isin(code, codes))
        own = cuts if alone else cuts.pick(index)
        axis = axis_of(replace(spec or specs[codes[0]], next_of=specs[codes[0]].next_of))
        parts.append(Part(axis, index, own, axis.locate(own, segments.schemas[codes[0]])))
        rows[index] = parts[-1].located.rows
    if len(lacking):
        own = cuts.pick(lacking)
        filled = Filled(spec or first, partial(selection.filled_as, spec or first, first.path))
        parts.append(Part(filled, lacking, own, filled.locate(own, segments.schemas[0])))
        rows[lacking] = parts[-1].located.rows
    return FieldRead(spec or first, cuts, parts, rows, offsets_of(np.bincount(cuts.episode, minlength=count)), error)


def _telling(specs: Mapping[int, FieldSpec], code: Ints, cuts: Cuts) -> list[FieldSpec]:
    """What says of what kind a ragged field is: where it has values; else, as of empty lists the dtype is a guess, the
    newest of those with steps."""
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
