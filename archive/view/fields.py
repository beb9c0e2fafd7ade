"""The fields of an episode: what each is looked at as, its numbers over the steps as curves, what follows from rewards,
and the values of some steps as texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.adapters.video import is_packets
from archive.base import ArchiveError, FieldError, NotFoundError, UsageError
from archive.fields import derived, schema, to_numpy
from archive.view import frames
from archive.view.shown import Listing, Shown
from archive.view.wire import Query, Reply, json_reply

if TYPE_CHECKING:
    from archive import Episode

LARGEST = 2**24  # numbers a step; more is no picture that one looks at
MOST_TOLD = 200  # fields that are told of; of more, the first
FIRST = 8  # steps whose bytes say whether they are packets


@dataclass(frozen=True)
class Kind:
    """A field: "frames", "curve", "text" (words, JSON), "tokens" (lists of numbers), or "raw"."""

    name: str
    told: str  # dtype, shape and axis, for people
    kind: str
    shape: tuple[int, ...] = ()
    bytes: bool = False  # lists of bytes: if "frames", packets of video


def kinds(shown: Shown, listing: Listing, ep: Episode) -> list[Kind]:
    """The fields of an episode; nodes, which hold other fields, left out."""
    every = list(_by_schema(ep.specs, ep.fields))
    lists = [kind.name for kind in every if kind.bytes]
    films = shown.kept(("films", listing.key, ep.id), lambda: _films(ep, lists)) if lists else ()
    return [replace(kind, kind="frames") if kind.name in films else kind for kind in every]


def _films(ep: Episode, lists: list[str]) -> tuple[str, ...]:
    """The fields of these that are packets of video; none where they cannot be read, which a look says."""
    try:
        data = ep.read(lists, 0, min(FIRST, ep.length), missing="skip", ragged="flat")
    except ArchiveError:
        return ()
    return tuple(name for name, leaf in frames.leaves(data) if is_packets(leaf))


def _by_schema(specs: Mapping[schema.Path, schema.FieldSpec], told: Mapping[str, str]) -> Iterator[Kind]:
    for spec in specs.values():
        if spec.name in told:
            of_bytes = (spec.axis, spec.dtype, spec.shape) == ("ragged", "|u1", ())
            yield Kind(spec.name, told[spec.name], _kind(spec), spec.shape, of_bytes)


def _kind(spec: schema.FieldSpec) -> str:
    if spec.axis == "free":
        return "raw"
    sample = _sample(spec)
    if sample is None:
        return "text"
    if spec.axis == "ragged":
        return "tokens" if sample.ndim <= 2 else "raw"
    if math.prod(spec.shape) > LARGEST or len(spec.shape) > 4:
        return "raw"
    if frames.as_pictures(sample) is not None:
        return "frames"
    return "curve" if frames.as_curves(sample) is not None else "raw"


def _sample(spec: schema.FieldSpec) -> np.ndarray | None:
    """A step of zeros as it is read, without taking the memory; None for what is no number."""
    try:
        dtype = to_numpy(spec.dtype)
    except (FieldError, ValueError, TypeError):
        return None
    if dtype.kind not in "biufV":
        return None
    dtype = np.dtype(np.float32) if dtype.kind == "V" else dtype
    return np.broadcast_to(np.zeros((), dtype), (1, *spec.shape)) if math.prod(spec.shape) <= LARGEST else np.zeros(1)


MOST_FIELDS = 40  # that are drawn at once; more are named, and drawn when asked for
POINTS = 2000  # of a curve; of more steps each stretch's least and greatest
GAMMA = 0.99
REWARD = "reward"
MOST_VALUES = 200  # fields whose values are told where none are named
MOST_STEPS = 50  # whose values are told at once
MOST_NUMBERS = 16  # of one axis of a value
MOST_TEXT = 2000  # characters of a value
Numbers = np.ndarray[Any, Any]


def curves(shown: Shown, query: Query) -> Reply:
    """Curves of `fields=` (all numbers, without it) of episode `id=`: [{field, part, x, y}], x null for every step; and
    `left_out`, the fields that nobody asked for by name. With rewards, also the return to go, and that discounted by
    `gamma=`. Of steps [`start=`, `stop=`) alone, where these are given: of at most 2,000 each has its value."""
    listing, name = shown.listing(query), query.needed("id")
    ep = listing.episodes[name]
    start, stop = query.number("start", 0), min(query.number("stop", ep.length), ep.length)
    every = [kind.name for kind in kinds(shown, listing, ep) if kind.kind == "curve"]
    asked = query.names("fields")
    chosen = [field for field in every if field in asked] if asked else every[:MOST_FIELDS]
    data = dict(frames.leaves(ep.read(chosen, start, stop, missing=np.nan))) if chosen and start < stop else {}
    drawn = [line for field in chosen for line in _lines(field, data.get(field))]
    if REWARD in chosen:
        gamma = _gamma(query)
        found = shown.kept(("returns", listing.key, name, gamma), lambda: returns_of(ep, gamma))
        drawn += [_line(field, "", values[start:stop], derived=True) for field, values in found.items()]
    left_out = [field for field in every if field not in chosen]
    return json_reply({"length": ep.length, "start": start, "curves": drawn, "left_out": left_out})


def _lines(name: str, leaf: Any) -> Iterator[dict[str, Any]]:
    for part, values in (frames.as_curves(leaf) or {}).items():
        yield _line(name, part, values)


def _line(name: str, part: str, values: np.ndarray[Any, Any], **more: Any) -> dict[str, Any]:
    places, kept = _thin(values, POINTS)
    whole = len(places) == len(values)
    return {"field": name, "part": part, "x": None if whole else places.tolist(), "y": kept.tolist(), **more}


def _thin(values: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """(place, value) of at most `most` points: of each stretch, its least and its greatest, so that peaks stay."""
    places = np.arange(len(values), dtype=np.float64)
    if len(values) <= most:
        return places, values
    edges = np.linspace(0, len(values), most // 2 + 1).astype(np.int64)
    kept: list[int] = []
    for lo, hi in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = values[lo:hi]
        if np.isfinite(part).any():
            kept += sorted({lo + int(np.nanargmin(part)), lo + int(np.nanargmax(part))})
    return places[kept], values[kept]


def returns_of(ep: Episode, gamma: float) -> dict[str, np.ndarray[Any, Any]]:
    """The rewards still to come from each step on, plain and discounted."""
    wanted = {"return to go": 1.0, f"discounted {gamma:g}": gamma}
    made = [derived.discounted_return(one, as_name=name) for name, one in wanted.items()]
    try:
        data = ep.read([REWARD], derive=made)
    except (ArchiveError, ValueError):
        return {}  # rewards of several numbers, or none of them any
    found = {name: np.asarray(data[name], np.float64) for name in wanted}
    return {name: values for name, values in found.items() if values.ndim == 1}


def _gamma(query: Query) -> float:
    text = query.text("gamma") or str(GAMMA)
    try:
        gamma = float(text)
    except ValueError:
        gamma = -1.0
    if not 0 <= gamma <= 1:
        raise UsageError(f"gamma={text[:20]!r} is no number from 0 to 1")
    return gamma


def steps(shown: Shown, query: Query) -> Reply:
    """The values of steps [`start=`, `stop=`) of `fields=` (all but pictures, without it) of episode `id=`, as texts:
    {field: [text, ...]}; of very many fields the first, and how many `more` there are."""
    listing = shown.listing(query)
    ep = listing.episodes[query.needed("id")]
    start = query.number("start", 0)
    stop = min(query.number("stop", start + 1), ep.length, start + MOST_STEPS)
    every = kinds(shown, listing, ep)
    small = [kind.name for kind in every if _small(kind)]
    names = query.names("fields") or small[:MOST_VALUES]
    data = ep.read(names, start, stop, missing="skip") if names and start < stop else {}
    told = {
        name: [_text(leaf[i]) if i < len(leaf) else "" for i in range(stop - start)]
        for name, leaf in frames.leaves(data)
    }
    return json_reply({"start": start, "stop": stop, "values": told, "more": max(0, len(small) - len(names))})


def _small(kind: Kind) -> bool:
    return kind.kind != "frames" and not kind.told.endswith(" free") and math.prod(kind.shape) <= 1024


def _number(value: Any) -> str:
    """A number, or a list of them, as people read it."""
    if isinstance(value, np.ndarray):
        more = f", … {len(value)} in all" if len(value) > MOST_NUMBERS else ""
        return f"[{', '.join(_number(one) for one in value[:MOST_NUMBERS])}{more}]"
    plain = value.item()
    return f"{plain:.6g}" if isinstance(plain, float) else str(plain)


def _text(value: Any) -> str:
    """A value as people read it, cut where it is long."""
    text = _number(value) if isinstance(value, (np.ndarray, np.generic)) else str(value)
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"


MOST_ROWS = 100
MOST_COLUMNS = 48


def field_rows(shown: Shown, query: Query) -> Reply:
    """Rows [`start=`, `stop=`) of `field=` of episode `id=`, their numbers from `column=` on: {told, steps (whether
    a row is a step), start, count, columns: their places, all_columns, rows: [[text]]}."""
    listing = shown.listing(query)
    ep = listing.episodes[query.needed("id")]
    kind = _kind_of(kinds(shown, listing, ep), query.needed("field"))
    free = kind.told.endswith(" free")
    start = query.number("start", 0)
    leaf = _leaf(ep.read([kind.name]) if free else _some(ep, kind.name, start, query), kind.name)
    count = len(leaf) if free else ep.length
    picked = leaf[start : start + MOST_ROWS] if free else leaf
    picked = picked[: max(0, query.number("stop", start + 1) - start)]
    columns, every, rows = _cells(picked, query.number("column", 0))
    return json_reply(
        {
            "told": kind.told,
            "steps": not free,
            "start": start,
            "count": count,
            "columns": columns,
            "all_columns": every,
            "rows": rows,
        }
    )


def _kind_of(found: list[Kind], name: str) -> Kind:
    for kind in found:
        if kind.name == name:
            return kind
    raise NotFoundError(f"the episode has no field {name!r:.80}")


def _some(ep: Any, name: str, start: int, query: Query) -> dict[str, Any]:
    stop = min(query.number("stop", start + 1), ep.length, start + MOST_ROWS)
    found: dict[str, Any] = ep.read([name], start, stop, missing="skip") if start < stop else {}
    return found


def _leaf(data: dict[str, Any], name: str) -> Any:
    leaf = dict(frames.leaves(data)).get(name, ())
    several = leaf.ndim > 0 if isinstance(leaf, np.ndarray) else isinstance(leaf, (list, tuple))
    return leaf if several else [leaf]


def _cells(rows: Sequence[Any], first: int) -> tuple[list[str], int, list[list[str]]]:
    """The places of the columns that are shown, how many there are, and the texts."""
    arrays = [value if isinstance(value, np.ndarray) else None for value in rows]
    widest = max((one for one in arrays if one is not None), key=lambda one: one.size, default=None)
    if widest is None or not widest.ndim:
        return [""], 1, [[_text(value)] for value in rows]
    shown = range(first, min(widest.size, first + MOST_COLUMNS))
    names = [", ".join(map(str, np.unravel_index(i, widest.shape))) for i in shown]
    texts = [[_at(value, i) for i in shown] for value in rows]
    return names, int(widest.size), texts


def _at(value: Any, i: int) -> str:
    if not isinstance(value, np.ndarray):
        return _text(value) if i == 0 else ""
    return _text(value.reshape(-1)[i]) if i < value.size else ""
