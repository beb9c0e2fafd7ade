"""Pure, no I/O: how values are spread along an axis: quantile bands for any number of them, drawn with axes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.views.charts import Values, color_of, numbers, svg, swatch
from archive.views.markup import Markup, tag

if TYPE_CHECKING:
    import pyarrow as pa

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
MAX_BINS = 60
MAX_DOTS = 400  # values that are drawn one by one; of more, the bands alone
WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 10.0, 38.0  # room for the axes
UPDATES, ORDER = "update count", "episode, in the order of writing"


class Series(NamedTuple):
    """Values along an axis, such as returns over update counts; nan where one is not known."""

    x: Values
    y: Values


class Bands(NamedTuple):
    """Of each stretch of the axis its middle, and quantiles of its values (one row each of QUANTILES)."""

    at: Values
    quantiles: Values


def series_of(found: Mapping[str, pa.Table], column: str = "return") -> tuple[dict[str, Series], str]:
    """Returns (or another column) of some tables of episodes over their update counts, or in their order if none is
    known; and which."""
    updates = {name: numbers(table["update_count_max"].to_pylist()) for name, table in found.items()}
    known = any(np.isfinite(x).any() for x in updates.values())
    out = {
        name: Series(
            updates[name] if known else np.arange(table.num_rows, dtype=float), numbers(table[column].to_pylist())
        )
        for name, table in found.items()
    }
    return out, UPDATES if known else ORDER


def _known(series: Series) -> Any:
    return np.isfinite(series.x) & np.isfinite(series.y)


def spread(series: Series, bins: int = MAX_BINS) -> Bands:
    """The quantiles of y along x: at each value of x or, of more than `bins` of them, in as many equal stretches."""
    known = _known(series)
    x, y = series.x[known], series.y[known]
    at, codes = np.unique(x, return_inverse=True)
    if len(at) > bins:
        edges = np.linspace(at[0], at[-1], bins + 1)
        _, codes = np.unique(np.clip(np.searchsorted(edges, x, "right") - 1, 0, bins - 1), return_inverse=True)
        at = np.bincount(codes, x) / np.bincount(codes)
    order = np.argsort(codes, kind="stable")
    groups = np.split(y[order], np.cumsum(np.bincount(codes, minlength=len(at)))[:-1]) if len(at) else []
    rows = [np.quantile(group, QUANTILES) for group in groups]
    return Bands(at, np.array(rows, np.float64).reshape(len(rows), len(QUANTILES)).T)


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Round numbers from low to high, at most about `most` of them."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    rough = span / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, first + most + 2) if i * step <= high + step * 1e-9]


def short(value: float) -> str:
    """A number at an axis."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value + 0.0:.4g}"


def chart(series: Mapping[str, Series], xlabel: str, ylabel: str) -> Markup:
    """Bands of 10 to 90 and 25 to 75 percent and the median of each series; few values as dots too.
    Empty without any."""
    drawn = {name: bands for name, one in series.items() if len((bands := spread(one)).at)}
    if not drawn:
        return Markup("")
    frame = _frame(list(drawn.values()), series)
    parts = _axes(frame, xlabel, ylabel)
    for i, (name, bands) in enumerate(drawn.items()):
        parts += _drawn(frame, series[name], bands, color_of(i), name)
    text = f"{ylabel} over {xlabel}: {', '.join(filter(None, drawn))}".rstrip(": ")
    plot = svg(WIDTH, HEIGHT, tag("title", text), *parts, class_="bands", role="img")
    return tag("figure", plot, tag("figcaption", _legend(list(drawn)), _NOTE), class_="wide")


_NOTE = "line: median; bands: 25 to 75 and 10 to 90 of 100 episodes"


def _legend(names: Sequence[str]) -> Markup:
    if not any(names):
        return Markup("")
    return tag("span", *(tag("span", swatch(i), name, class_="key") for i, name in enumerate(names)), class_="keys")


class Frame(NamedTuple):
    """From values to places of the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, values: Any) -> Any:
        low, high = self.x
        return LEFT + (values - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def up(self, values: Any) -> Any:
        low, high = self.y
        return HEIGHT - BOTTOM - (values - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _frame(drawn: Sequence[Bands], series: Mapping[str, Series]) -> Frame:
    at = np.concatenate([b.at for b in drawn])
    dots = [s.y[known] for s in series.values() if (known := _known(s)).sum() <= MAX_DOTS]
    heights = np.concatenate([*(b.quantiles.reshape(-1) for b in drawn), *dots])
    return Frame(_wide(at.min(), at.max()), _wide(heights.min(), heights.max(), 0.04))


def _wide(low: float, high: float, margin: float = 0.0) -> tuple[float, float]:
    """A little more, and never nothing."""
    low, high = float(low), float(high)
    if not high > low:
        apart = abs(low) * 0.1 or 1.0
        return low - apart, high + apart
    return low - margin * (high - low), high + margin * (high - low)


def _axes(frame: Frame, xlabel: str, ylabel: str) -> list[Markup]:
    ink = {"fill": "currentColor", "font_size": 11}
    faint = {"stroke": "currentColor", "stroke_opacity": 0.15}
    bottom = HEIGHT - BOTTOM
    out = []
    for value in ticks(*frame.y, most=7):
        y = frame.up(value)
        out.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, **faint))
        out.append(tag("text", short(value), x=LEFT - 6, y=y + 4, text_anchor="end", **ink))
    for value in ticks(*frame.x, most=8, whole=True):
        x = frame.across(value)
        out.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, stroke="currentColor", stroke_opacity=0.5))
        out.append(tag("text", short(value), x=x, y=bottom + 16, text_anchor="middle", **ink))
    middle = (TOP + bottom) / 2
    out.append(tag("text", xlabel, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 4, text_anchor="middle", **ink))
    turned = {"transform": f"rotate(-90 11 {middle:.1f})", "text_anchor": "middle"}
    return [*out, tag("text", ylabel, x=11, y=middle, **turned, **ink)]


def _drawn(frame: Frame, series: Series, bands: Bands, color: str, name: str) -> list[Markup]:
    x = frame.across(bands.at)
    y = frame.up(bands.quantiles)
    if len(x) == 1:  # a lone stretch is as wide as can be seen
        x, y = np.array([x[0] - 8, x[0] + 8]), np.repeat(y, 2, axis=1)
    out = [
        tag("path", d=_area(x, y[low], y[high]), fill=color, fill_opacity=opacity, stroke="none")
        for low, high, opacity in ((0, 4, 0.16), (1, 3, 0.26))
    ]
    known = _known(series)
    if known.sum() <= MAX_DOTS:
        at = zip(frame.across(series.x[known]).tolist(), frame.up(series.y[known]).tolist(), strict=True)
        out += [tag("circle", cx=a, cy=b, r=2, fill=color, fill_opacity=0.5) for a, b in at]
    title = tag("title", name) if name else ""
    return [*out, tag("path", title, d=_line(x, y[2]), fill="none", stroke=color, stroke_width=1.8)]


def _line(x: Values, y: Values) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _area(x: Values, low: Values, high: Values) -> str:
    return f"{_line(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]]))}Z"
