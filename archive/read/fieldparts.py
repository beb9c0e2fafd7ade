"""Pure, no I/O: which rows of which stored arrays make up a field of an episode, and the field from those rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from archive.base import CorruptManifestError, FieldError, jsontree, show
from archive.fields import LENGTHS, NODES, PLACES, Array, FieldSpec, Path, Ragged, ShardSchema, dtypes, unflatten
from archive.read.segments import Part, Segment, Slice

Leaf = tuple[Segment, Part]


class Arrays:
    """Decoded rows: runs of each array of each shard."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str], tuple[list[int], list[Array]]] = {}

    def put(self, shard: str, array: str, runs: Sequence[tuple[int, int]], data: list[Array]) -> None:
        self._runs[shard, array] = [a for a, _ in runs], data

    def get(self, s: Slice) -> Array:
        starts, data = self._runs[s.shard, s.array]
        i = bisect_right(starts, s.start) - 1
        return data[i][s.start - starts[i] : s.stop - starts[i]]


@dataclass
class Selection:
    """Which fields to read, and what to do about those that an episode does not have.

    missing: "error", "skip", or a value to fill in.  ragged: "list" (one array a step) or "flat" (values, lengths).
    """

    names: Sequence[str | Path] | None = None
    missing: Any = "error"
    ragged: str = "list"
    _known: dict[str | Path, FieldSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ragged not in ("list", "flat"):
            raise FieldError(f"ragged={self.ragged!r}: give 'list' or 'flat'")
        if isinstance(self.names, str):
            self.names = [self.names]

    def specs(self, schema: ShardSchema) -> dict[Path, FieldSpec]:
        """The fields of a shard that are wanted, by path."""
        if self.names is None:
            return {f.path: f for f in schema.fields}
        out: dict[Path, FieldSpec] = {}
        for name in self.names:
            found = {f.path: f for f in schema.fields if _matches(name, f.path)}
            self._known |= dict.fromkeys([name], next(iter(found.values()))) if found else {}
            out |= found
        return out

    def absent(self, schemas: Iterable[ShardSchema]) -> list[str | Path]:
        """Names asked for that no field of an episode answers; an error if that is what was asked for."""
        have = list(dict.fromkeys(f.path for schema in schemas for f in schema.fields)) if self.names else []
        names = [n for n in self.names or () if not any(_matches(n, p) for p in have)]
        if names and isinstance(self.missing, str) and self.missing == "error":
            raise FieldError(
                f"an episode has no field {names[0]!r} (it has: {', '.join(sorted(map(show, have))) or 'none'}); pass "
                "missing='skip' to leave it out, or missing=VALUE to fill it in"
            )
        return [] if isinstance(self.missing, str) and self.missing == "skip" else names

    def filled(self, name: str | Path, steps: int) -> Array:
        """The stand-in for an absent field: of the shape and dtype that other episodes of this read have."""
        spec = self._known.get(name)
        try:
            if spec is None or spec.axis in NODES or spec.dtype in ("str", "json"):
                return np.full(steps, self.missing)
            dtype = dtypes.to_numpy(spec.dtype)
            given = np.asarray(self.missing)
            if dtype.kind in "iub" and (given.dtype.kind not in "iub" or (given.astype(dtype) != given).any()):
                raise ValueError(f"{dtype} cannot hold it")  # numpy would cut it to what it can
            return np.full((steps, *spec.shape), self.missing, dtype)
        except (TypeError, ValueError, OverflowError) as e:
            raise FieldError(
                f"missing={self.missing!r} cannot stand in for field {name!r}: {e}; give another value"
            ) from e


def _matches(name: str | Path, path: Path) -> bool:
    if isinstance(name, str):
        joined = "/".join(path)
        return joined == name or joined.startswith(name + "/")
    return path[: len(name)] == tuple(name)


class _Piece(NamedTuple):
    """What one part contributes to one field: named slices, and the part itself."""

    segment: Segment
    part: Part
    slices: dict[str, Slice]


@dataclass
class EpisodeJob:
    """The reading of one episode (or a part of it)."""

    pieces: dict[Path, tuple[FieldSpec, list[_Piece]]]
    absent: list[str | Path]
    steps: int
    selection: Selection

    def slices(self) -> Iterator[tuple[Segment, Slice]]:
        for _, pieces in self.pieces.values():
            for piece in pieces:
                for s in piece.slices.values():
                    if s.stop > s.start and not _without_bytes(piece.segment.schema.by_name.get(s.array)):
                        yield piece.segment, s

    def stored(self, arrays: Arrays) -> dict[str, Array | Ragged]:
        """The fields of a job of one segment in their stored form, by name: what writing them again takes."""
        return {
            spec.name: _ragged(spec, pieces, arrays) if spec.axis == "ragged" else _stored(spec, pieces, arrays)
            for spec, pieces in self.pieces.values()
            if spec.axis not in NODES
        }

    def build(self, arrays: Arrays) -> dict[str, Any]:
        """The nested dict of fields; arrays may share memory with each other's neighbours, never with other episodes'."""
        out: dict[Path, Any] = {}
        for path, (spec, pieces) in self.pieces.items():
            out[path] = _value(spec, pieces, arrays, self.selection.ragged)
        for name in self.absent:
            out[tuple(name.split("/")) if isinstance(name, str) else tuple(name)] = self.selection.filled(
                name, self.steps
            )
        return unflatten(out)


def episode_job(parts: Sequence[Leaf], selection: Selection) -> EpisodeJob:
    """What reading these parts, in order, takes."""
    pieces: dict[Path, tuple[FieldSpec, list[_Piece]]] = {}
    for segment, part in parts:
        for path, spec in selection.specs(segment.schema).items():
            _, found = pieces.setdefault(path, (spec, []))
            found.append(_Piece(segment, part, _slices(spec, segment, part)))
    for spec, found in pieces.values():
        if spec.axis == "offset":
            _go_on(spec, found)
    absent = selection.absent(dict.fromkeys(segment.schema for segment, _ in parts))
    return EpisodeJob(pieces, absent, sum(p.hi - p.lo for _, p in parts), selection)


def _slices(spec: FieldSpec, segment: Segment, part: Part) -> dict[str, Slice]:
    if segment.shard is None or spec.axis in NODES:
        return {}
    shard, name, start = segment.shard, spec.name, segment.start
    if spec.per_step:
        return {"": Slice(shard, name, start + part.lo, start + part.hi)}
    first, rows = segment.extents.get(name, (0, 0))
    whole = Slice(shard, name, first, first + rows)
    if spec.axis == "free":
        return {"": whole}
    if spec.axis == "offset":
        return {"": Slice(shard, name, first + part.lo, first + max(part.lo, min(part.hi, rows)))}
    if part.hi <= part.lo:
        return {}
    if spec.axis == "ragged":
        return {"": whole, LENGTHS: Slice(shard, name + LENGTHS, start, start + segment.length)}
    followed = Slice(shard, spec.next_of, start + part.lo + 1, start + min(part.hi + 1, segment.length))
    return {"": whole, PLACES: Slice(shard, name + PLACES, first, first + rows), "next": followed}


def _go_on(spec: FieldSpec, pieces: Sequence[_Piece]) -> None:
    """Lengthen an offset field by its extra rows: the next steps' rows, and past the last segment's steps its own."""
    more = [(p, *p.segment.extents.get(spec.name, (0, 0))) for p in pieces if p.part.extra and p.slices]
    lacking = spec.extra
    for i, (piece, first, rows) in enumerate(more):
        followed = any(count for _, _, count in more[i + 1 :])
        limit = min(rows, piece.segment.length) if followed else rows
        own = piece.slices[""]
        stop = max(own.stop, min(own.stop + lacking, first + limit))
        piece.slices[""] = own._replace(stop=stop)
        lacking -= stop - own.stop


def _value(spec: FieldSpec, pieces: Sequence[_Piece], arrays: Arrays, ragged: str) -> Any:
    if spec.axis in NODES:
        return {} if spec.axis == "dict" else None
    spec = _agreed(spec, pieces)
    if spec.axis == "ragged":
        values, lengths = _ragged(spec, pieces, arrays)
        out = Ragged(dtypes.from_stored(values, spec.dtype), lengths)
        return out if ragged == "flat" else out.split()
    value = dtypes.from_stored(_stored(spec, pieces, arrays), spec.dtype)
    if spec.dtype == "json":
        return [jsontree.loads(text) for text in value]
    return value[-1:].reshape(spec.shape) if spec.scalar else value


def _stored(spec: FieldSpec, pieces: Sequence[_Piece], arrays: Arrays) -> Array:
    parts = [p for p in (_rows(piece.segment.schema.by_name[spec.name], piece, arrays) for piece in pieces) if len(p)]
    return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else empty_rows(spec)


def _agreed(spec: FieldSpec, pieces: Sequence[_Piece]) -> FieldSpec:
    """What the segments say of the field. They may differ in next_of and in the width of strings, but in nothing else."""
    schemas = {id(p.segment.schema): p.segment.schema for p in pieces}
    if len(schemas) == 1:
        return spec
    if spec.axis == "ragged":  # of empty lists the dtype is a guess
        telling = [p for p in pieces if p.segment.extents.get(spec.name, (0, 0))[1]] or pieces
        schemas = {id(p.segment.schema): p.segment.schema for p in telling}
    found = [s.by_name[spec.name] for s in schemas.values()]
    if all(s.dtype[1:2] == "U" for s in found):
        widest = max((s.dtype for s in found), key=lambda name: dtypes.to_numpy(name).itemsize)
        found = [replace(s, dtype=widest) for s in found]
    if len({(s.axis, s.dtype, s.shape, s.extra, s.scalar) for s in found}) > 1:
        told = " and ".join(dict.fromkeys(f"{s.dtype}{list(s.shape)} {s.axis}" for s in found))
        raise FieldError(
            f"episode {pieces[0].segment.episode_id!r} goes on with another kind of field {show(spec.path)!r} ({told}); read "
            "its parts one by one with start= and stop=, or leave the field out"
        )
    return found[0]


def empty_rows(spec: FieldSpec) -> Array:
    """No rows of a field, in their stored form: its dtype and shape."""
    dtype = dtypes.to_numpy(spec.dtype)
    shape = (0, *dtypes.stored_trailing(spec.dtype, spec.shape))
    return dtypes.to_stored(np.zeros((0, *spec.shape), dtype))[0].reshape(shape)


def _without_bytes(spec: FieldSpec | None) -> bool:
    """Whether rows of the field hold no element, so that no chunk of them exists (spec is None for companions)."""
    return spec is not None and 0 in spec.shape


def _taken(spec: FieldSpec, s: Slice, arrays: Arrays) -> Array:
    """The rows of a slice of the field's own array."""
    if not _without_bytes(spec):
        return arrays.get(s)
    empty = empty_rows(spec)
    return np.zeros((s.stop - s.start, *empty.shape[1:]), empty.dtype)


def _rows(spec: FieldSpec, piece: _Piece, arrays: Arrays) -> Array:
    if spec.next_of:
        return _followed(spec, piece, arrays)
    s = piece.slices.get("")
    return empty_rows(spec) if s is None or s.stop <= s.start else _taken(spec, s, arrays)


def _followed(spec: FieldSpec, piece: _Piece, arrays: Arrays) -> Array:
    """A field declared in next_of: the next rows of the field it follows, and the rows that were kept."""
    if not piece.slices:
        return empty_rows(spec)
    part = piece.part
    kept, places = _taken(spec, piece.slices[""], arrays), arrays.get(piece.slices[PLACES])
    out = np.empty((part.hi - part.lo, *kept.shape[1:]), kept.dtype)
    following = piece.slices["next"]
    count = following.stop - following.start
    if count:
        rows = _taken(piece.segment.schema.by_name[spec.next_of], following, arrays)
        out[:count] = rows if rows.dtype == out.dtype and rows.shape[1:] == out.shape[1:] else _unlike(spec)
    inside = (places >= part.lo) & (places < part.hi)
    out[places[inside] - part.lo] = kept[inside]
    return out


def _unlike(spec: FieldSpec) -> Any:
    """Rows that differ in shape or dtype were all kept, so what is put here is overwritten."""
    return "" if spec.dtype in ("str", "json") or spec.dtype[1:2] == "U" else 0


def _ragged(spec: FieldSpec, pieces: Sequence[_Piece], arrays: Arrays) -> Ragged:
    values, lengths = [empty_rows(spec)], [np.zeros(0, np.int64)]
    for piece in pieces:
        if not piece.slices:
            continue
        part = piece.part
        of_segment = arrays.get(piece.slices[LENGTHS])
        ends = np.concatenate([[0], np.cumsum(of_segment)])
        whole = piece.slices[""]
        if ends[-1] != whole.stop - whole.start:
            raise CorruptManifestError(
                f"lengths of ragged field {show(spec.path)!r} do not add up; run `archive verify`"
            )
        if ends[part.hi] > ends[part.lo]:
            values.append(_taken(spec, whole, arrays)[ends[part.lo] : ends[part.hi]])
        lengths.append(of_segment[part.lo : part.hi])
    joined = np.concatenate(values) if len(values) != 2 else values[1]
    return Ragged(joined, np.concatenate(lengths))
