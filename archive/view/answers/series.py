"""Numbers of an episode over its steps, as curves; what follows from rewards; and the values of some steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import ArchiveError, UsageError
from archive.fields import derived
from archive.view.answers.fieldkinds import Kind, kinds
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply
from archive.views import charts, frames

if TYPE_CHECKING:
    from archive import Episode

MOST_FIELDS = 40  # that are drawn at once; more are named, and drawn when asked for
POINTS = 2000  # of a curve; of more steps each stretch's least and greatest
GAMMA = 0.99
REWARD = "reward"
MOST_VALUES = 200  # fields whose values are told where none are named
MOST_STEPS = 50  # whose values are told at once
MOST_NUMBERS = 16  # of one axis of a value
MOST_TEXT = 2000  # characters of a value


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
        found = shown.kept(("returns", listing.key, name, gamma), lambda: _returns(ep, gamma))
        drawn += [_line(field, "", values[start:stop], derived=True) for field, values in found.items()]
    left_out = [field for field in every if field not in chosen]
    return json_reply({"length": ep.length, "start": start, "curves": drawn, "left_out": left_out})


def _lines(name: str, leaf: Any) -> Iterator[dict[str, Any]]:
    for part, values in (frames.as_curves(leaf) or {}).items():
        yield _line(name, part, values)


def _line(name: str, part: str, values: np.ndarray[Any, Any], **more: Any) -> dict[str, Any]:
    places, kept = charts.thin(values, POINTS)
    whole = len(places) == len(values)
    return {"field": name, "part": part, "x": None if whole else places.tolist(), "y": kept.tolist(), **more}


def _returns(ep: Episode, gamma: float) -> dict[str, np.ndarray[Any, Any]]:
    """What is still to come from each step on, plain and discounted."""
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
    told = {name: [_text(leaf, i) for i in range(stop - start)] for name, leaf in frames.leaves(data)}
    return json_reply({"start": start, "stop": stop, "values": told, "more": max(0, len(small) - len(names))})


def _small(kind: Kind) -> bool:
    return kind.kind != "frames" and not kind.told.endswith(" free") and math.prod(kind.shape) <= 1024


def number(value: Any) -> str:
    """A number, or a list of them, as people read it."""
    if isinstance(value, np.ndarray):
        more = f", … {len(value)} in all" if len(value) > MOST_NUMBERS else ""
        return f"[{', '.join(number(one) for one in value[:MOST_NUMBERS])}{more}]"
    plain = value.item()
    return f"{plain:.6g}" if isinstance(plain, float) else str(plain)


def _text(leaf: Any, at: int) -> str:
    if at >= len(leaf):
        return ""
    value = leaf[at]
    text = number(value) if isinstance(value, (np.ndarray, np.generic)) else str(value)
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
