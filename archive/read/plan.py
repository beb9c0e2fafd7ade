"""Pure, no I/O: what reading some steps takes: which rows of which stored arrays, and where in memory they go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from archive.arrays import Ints, Pieces, fresh
from archive.base import FieldError, show
from archive.fields import NODES, FieldSpec, Path, dtypes
from archive.fields.axes import Axis, Cuts, Extent, Fetched, Located, Runs, axis_of, empty_rows
from archive.read.chunks import Segments, Want
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
    where = segments.places(spans.rows)
    return [
        _group(spans if len(episodes) == len(spans) else spans.pick(episodes), episodes, codes, selection, segments)
        for episodes, codes in _alike(spans, segments.schema[where], selection, segments)
    ]


def _alike(spans: Spans, code: Ints, selection: Selection, segments: Segments) -> list[tuple[Ints, list[int]]]:
    """Episodes (their numbers) whose segments have the same schemas (their numbers, in the order they come in)."""
    every = np.arange(len(spans))
    low, high = np.full(len(spans), len(segments.schemas)), np.full(len(spans), -1)
    np.minimum.at(low, spans.episode, code)
    np.maximum.at(high, spans.episode, code)
    out = [(every[(low == n) & (high == n)], [n]) for n in np.unique(low[low == high]).tolist()]
    mixed: dict[tuple[int, ...], list[int]] = {}
    for episode in every[low != high].tolist():
        own = code[spans.offsets[episode] : spans.offsets[episode + 1]]
        mixed.setdefault(tuple(dict.fromkeys(own.tolist())), []).append(episode)
    for codes, episodes in mixed.items():
        together = _agree([selection.specs(segments.schemas[code]) for code in codes])
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


def _group(spans: Spans, episodes: Ints, codes: list[int], selection: Selection, segments: Segments) -> Group:
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
    out = Group(episodes, spans.lengths(), list(found), {}, {}, selection.absent(schemas))
    for path, specs in found.items():
        first = next(iter(specs.values()))
        if first.axis in NODES:
            out.nodes[path] = first.axis
        else:
            own = cuts
            if len(specs) < len(codes):
                own = cuts.pick(np.flatnonzero(np.isin(segments.schema[where], list(specs))))
            out.fields[path] = _field(specs, own, len(episodes), segments)
    return out


def _field(specs: Mapping[int, FieldSpec], cuts: Cuts, count: int, segments: Segments) -> FieldRead:
    """One field, located in its cuts."""
    first = next(iter(specs.values()))
    code = segments.schema[cuts.segment]
    if not all(spec.per_step for spec in specs.values()):
        extent = segments.extent(first.name)
        cuts = cuts._replace(extent=Extent(extent.start[cuts.segment], extent.rows[cuts.segment]))
    telling = list(specs.values())
    if len(specs) > 1 and first.axis == "ragged":  # of empty lists the dtype is a guess
        held = set(code[cuts.extent.rows > 0].tolist())
        telling = [spec for n, spec in specs.items() if n in held] or telling
    spec = _agreed(telling)
    error = None if spec is not None else _unlike(telling, cuts, segments)
    kinds: dict[Any, list[int]] = {}
    for n, one in specs.items():
        if one.axis in NODES:
            continue
        kinds.setdefault(one.next_of if spec is not None else one, []).append(n)
    parts, rows = [], np.zeros(len(cuts.lo), np.int64)
    for codes in kinds.values():
        index = slice(None) if len(kinds) == 1 else np.flatnonzero(np.isin(code, codes))
        own = cuts if len(kinds) == 1 else cuts.pick(index)
        axis = axis_of(replace(spec or specs[codes[0]], next_of=specs[codes[0]].next_of))
        parts.append(Part(axis, index, own, axis.locate(own, segments.schemas[codes[0]])))
        rows[index] = parts[-1].located.rows
    return FieldRead(spec or first, cuts, parts, rows, np.searchsorted(cuts.episode, np.arange(count + 1)), error)


def _unlike(specs: Iterable[FieldSpec], cuts: Cuts, segments: Segments) -> FieldError:
    kinds = " and ".join(dict.fromkeys(f"{s.dtype}{list(s.shape)} {s.axis}" for s in specs))
    path = next(iter(specs)).path
    return FieldError(
        f"episode {segments.episode_id(int(cuts.segment[0]))!r} goes on with another kind of field {show(path)!r} "
        f"({kinds}); read its parts one by one with start= and stop=, or leave the field out"
    )
