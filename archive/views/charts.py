"""Pure, no I/O: small SVG charts: a line, a histogram, bars, and who gets what of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from archive.views.markup import Markup, shown, tag

COLORS = ("#3b6ea8", "#c8553d", "#4f9d69", "#8a5a9e", "#d0a030", "#4aa3a2", "#a85c7b", "#6b7280")
MAX_POINTS = 1000
LONE = 4  # width of a point without neighbours
EDGE = 8.0  # above and below a picture, for the text at its ends
Values = np.ndarray[Any, np.dtype[np.float64]]


def numbers(values: Any) -> Values:
    """As float64; None is nan."""
    return np.array([np.nan if v is None else v for v in values], np.float64)


def thin(values: Values, most: int = MAX_POINTS) -> tuple[Values, Values]:
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


def lines(series: Mapping[str, Any], *, width: int = 640, height: int = 120, points: int = MAX_POINTS) -> Markup:
    """Lines over the step, one a name, on one scale, of at most `points` each, without axes; gaps where a value is
    missing. Empty if there is none."""
    drawn = {name: numbers(values) for name, values in series.items()}
    finite = [v[np.isfinite(v)] for v in drawn.values()]
    every = np.concatenate(finite) if finite else np.zeros(0)
    if not len(every):
        return Markup("")
    low, high = float(every.min()), float(every.max())
    span, length = high - low, max(len(v) for v in drawn.values())
    paths = []
    for i, values in enumerate(drawn.values()):
        places, kept = thin(values, points)
        x = places / max(length - 1, 1) * width if length > 1 else np.array([width / 2])
        share = (kept - low) / span if span else np.where(np.isfinite(kept), 0.5, np.nan)
        y = height - 2 - share * (height - 4)
        paths.append(tag("path", d=_path(x, y), fill="none", stroke=color_of(i), stroke_width=1.2))
    text = f"{', '.join(name for name in drawn if name)} from {shown(low)} to {shown(high)}".strip()
    shape = {"class_": "lines", "data_length": length, "preserveAspectRatio": "none"}
    return svg(width, height, tag("title", text), *paths, **shape)


def _path(x: Values, y: Values) -> str:
    """Moves over gaps. A lone point is a short dash."""
    known = np.isfinite(y)
    before, after = np.append(False, known[:-1]), np.append(known[1:], False)
    out = []
    for px, py, joins, goes_on in zip(x[known], y[known], before[known], after[known], strict=True):
        if joins or goes_on:
            out.append(f"{'L' if joins else 'M'}{px:.1f} {py:.1f}")
        else:
            out.append(f"M{max(px - LONE, 0):.1f} {py:.1f}h{LONE}")
    return "".join(out)


def histogram(values: Any, label: str, *, bins: int = 24) -> Markup:
    """How many values lie where; empty if there are none."""
    known = numbers(values)
    known = known[np.isfinite(known)]
    if not len(known):
        return Markup("")
    low, high, width, height = float(known.min()), float(known.max()), 240, 60
    counts, names = _binned(known, low, high, bins)
    step = width / len(counts)
    bars = []
    for i, (count, name) in enumerate(zip(counts.tolist(), names, strict=True)):
        tall = height * count / counts.max()
        shape = {"x": i * step, "y": height - tall, "width": max(step - 1, 0.5), "height": tall}
        bars.append(tag("rect", tag("title", f"{name}: {count}"), **shape, fill=COLORS[0]))
    caption = tag("figcaption", f"{label}: {shown(low)} … {shown(high)}")
    return tag("figure", svg(width, height, *bars, class_="histogram"), caption)


def _binned(known: Values, low: float, high: float, bins: int) -> tuple[Any, list[str]]:
    """How many values each bar has, and which. Of whole numbers each bar has as many,
    so that none stands out for that."""
    if max(-low, high) < 2**50 and (known == np.rint(known)).all():
        wide = max(1, math.ceil((high - low + 1) / bins))
        edges = low + wide * np.arange(math.ceil((high - low + 1) / wide) + 1) - 0.5
        spans = [(shown(e + 0.5), shown(min(e + wide - 0.5, high))) for e in edges[:-1].tolist()]
    else:
        edges = np.linspace(low, high, bins + 1) if high > low else np.array([low - 0.5, low + 0.5])
        spans = [(shown(a), shown(b)) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    return np.histogram(known, bins=edges)[0], [a if a == b else f"{a} to {b}" for a, b in spans]


def bars(counts: Mapping[str, float]) -> Markup:
    """A bar a name, the longest as wide as there is room."""
    most, width = max(counts.values(), default=0) or 1, 320
    rows = []
    for name, count in counts.items():
        rect = tag("rect", x=0, y=1, width=width * count / most, height=10, fill=COLORS[0])
        bar = svg(width, 12, rect, class_="bar")
        rows.append(tag("tr", tag("th", name), tag("td", bar), tag("td", shown(count), class_="number")))
    return tag("table", tag("tbody", *rows), class_="bars") if rows else Markup("")


def flow(moved: Mapping[tuple[int, int], int], sources: int, targets: int) -> Markup:
    """From source ranks (left) to target ranks (right): a band as wide as the steps that move."""
    total = sum(moved.values())
    if not total:
        return Markup("")
    width, gap, bar, margin = 560, 6.0, 14.0, 70.0
    scale = max(120, 22 * max(sources, targets)) / total
    tall_left, tall_right = np.zeros(sources), np.zeros(targets)
    for (source, target), steps in moved.items():
        tall_left[source] += steps * scale
        tall_right[target] += steps * scale
    top_left, top_right = _tops(tall_left, gap), _tops(tall_right, gap)
    at_left, at_right, bands = top_left.copy(), top_right.copy(), []
    for (source, target), steps in sorted(moved.items()):
        ends = (margin + bar, width - margin - bar, at_left[source], at_right[target])
        title = tag("title", f"{steps} steps from rank {source} to rank {target}")
        shape = _band(*ends, steps * scale)
        bands.append(tag("path", title, d=shape, fill=color_of(target), fill_opacity=0.45))
        at_left[source] += steps * scale
        at_right[target] += steps * scale
    boxes = _ends(margin, top_left, tall_left, bar, margin - 6, "end")
    boxes += _ends(width - margin - bar, top_right, tall_right, bar, width - margin + 6, "start")
    return svg(width, 2 * EDGE + total * scale + gap * max(sources, targets), *bands, *boxes, class_="flow")


def _tops(tall: Values, gap: float) -> Values:
    tops: Values = EDGE + np.cumsum(tall) - tall + gap * np.arange(len(tall))
    return tops


def _band(x0: float, x1: float, y0: float, y1: float, tall: float) -> str:
    middle = (x0 + x1) / 2
    return (
        f"M{x0:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
        f"L{x1:.1f} {y1 + tall:.1f}C{middle:.1f} {y1 + tall:.1f} {middle:.1f} {y0 + tall:.1f} {x0:.1f} {y0 + tall:.1f}Z"
    )


def _ends(x: float, tops: Values, tall: Values, wide: float, text_x: float, anchor: str) -> list[Markup]:
    out = []
    for rank, (y, height) in enumerate(zip(tops.tolist(), tall.tolist(), strict=True)):
        out.append(tag("rect", x=x, y=y, width=wide, height=max(height, 1), fill="#6b7280"))
        place = {"x": text_x, "y": y + height / 2 + 4, "text_anchor": anchor}
        out.append(tag("text", f"rank {rank}", **place, font_size=11, fill="currentColor"))
    return out


def color_of(number: int) -> str:
    """The colour of a series by its number; of more than there are, they come again."""
    return COLORS[number % len(COLORS)]


def swatch(number: int) -> Markup:
    """A patch of the colour of that series."""
    return tag("i", style=f"background:{color_of(number)}")


def svg(width: float, height: float, *content: Any, **attributes: Any) -> Markup:
    """A picture that is so large where nothing else is said."""
    size = {"viewBox": f"0 0 {width:g} {height:g}", "width": width, "height": height}
    return tag("svg", *content, **size, xmlns="http://www.w3.org/2000/svg", **attributes)
