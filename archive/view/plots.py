"""Pure, no I/O: Matplotlib figures of episodes and plans (extra "plots", imported when the first is drawn)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.base import FieldError, package
from archive.view import frames

if TYPE_CHECKING:
    import pyarrow as pa

STRIP = 8  # pictures of an episode that are drawn side by side
MAX_DOTS = 500  # returns that are drawn one by one; of more, the bands alone
COLORS = ("#3b6ea8", "#c8553d", "#4f9d69", "#8a5a9e", "#d0a030", "#4aa3a2", "#a85c7b", "#6b7280")
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
MAX_BINS = 60
UPDATES, ORDER = "update count", "episode, in the order of writing"
FEW = 20  # points that are marked, as lines alone would not show those without neighbours

Values = np.ndarray[Any, np.dtype[np.float64]]


class Series(NamedTuple):
    """Values along an axis, such as returns over update counts; nan where one is not known."""

    x: Values
    y: Values


class Bands(NamedTuple):
    """The middle of each stretch of the axis, and quantiles of its values (one row each of QUANTILES)."""

    at: Values
    quantiles: Values


def series_of(found: Mapping[str, pa.Table], column: str = "return") -> tuple[dict[str, Series], str]:
    """Returns (or another column) of some tables of episodes over their update counts, or in their order if none is
    known; and which."""
    updates = {name: _numbers(table["update_count_max"]) for name, table in found.items()}
    known = any(np.isfinite(x).any() for x in updates.values())
    out = {
        name: Series(updates[name] if known else np.arange(table.num_rows, dtype=float), _numbers(table[column]))
        for name, table in found.items()
    }
    return out, UPDATES if known else ORDER


def _known(series: Series) -> Any:
    return np.isfinite(series.x) & np.isfinite(series.y)


def spread_of(series: Series, bins: int = MAX_BINS) -> Bands:
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


def _numbers(column: pa.ChunkedArray) -> Values:
    """The column as float64; nan where there is no value."""
    return np.array([np.nan if v is None else v for v in column.to_pylist()], np.float64)


def color_of(number: int) -> str:
    """The colour of a series by its number; of more than there are, they come again."""
    return COLORS[number % len(COLORS)]


def episodes(found: pa.Table, ax: Any = None, label: str | None = None, y: str = "return") -> Any:
    """Returns (or another column of numbers) over update count, and how long the episodes are; the two Axes, or those
    that were given.

    Of many returns quantile bands are drawn: 10 to 90 and 25 to 75 of 100 episodes, and the median.
    """
    axes = _subplots(1, 2, width=10, height=3.2) if ax is None else ax
    pair = list(axes) if isinstance(axes, (Sequence, np.ndarray)) else [axes]
    _check_numbers(found, y)
    series, along = series_of({"": found}, y)
    _values(pair[0], series[""], (along, y), label)
    for beside in pair[1:2]:
        _lengths(beside, found["length"].to_numpy(), label)
    return axes


def _check_numbers(found: pa.Table, y: str) -> None:
    import pyarrow as pa

    kinds = {name: found.schema.field(name).type for name in found.column_names}
    known = [n for n, k in kinds.items() if pa.types.is_integer(k) or pa.types.is_floating(k) or pa.types.is_boolean(k)]
    if y not in known:
        raise FieldError(f"y={y!r}: these episodes have numbers in {', '.join(known)}")


def _values(ax: Any, series: Series, names: tuple[str, str], label: str | None) -> None:
    """names: of the axis, and of the values."""
    spread = spread_of(series)
    dots = np.isfinite(series.y).sum() <= MAX_DOTS
    color = ax.plot(series.x, series.y, ".", alpha=0.5)[0].get_color() if dots else None  # the next of the cycle
    (line,) = ax.plot(spread.at, spread.quantiles[2], label=label or "median", linewidth=1.8, color=color)
    for low, high, alpha in ((0, 4, 0.16), (1, 3, 0.26)):
        if len(spread.at) > 1:
            between = (spread.quantiles[low], spread.quantiles[high])
            ax.fill_between(spread.at, *between, color=line.get_color(), alpha=alpha, linewidth=0)
    along, y = names
    ax.set(xlabel=along, ylabel=y, title="returns" if y == "return" else y)
    if label is not None:
        ax.legend(fontsize="small")


def _lengths(ax: Any, lengths: Any, label: str | None) -> None:
    if len(lengths):
        bins = min(30, max(1, len(np.unique(lengths))))
        ax.hist(lengths, bins=bins, label=label, alpha=1.0 if label is None else 0.5)
    ax.set(xlabel="steps", ylabel="episodes", title="lengths")
    if label is not None:
        ax.legend(fontsize="small")


def episode(data: Mapping[str, Any], title: str) -> Any:
    """A row of curves for each field of numbers, then a strip of each field of pictures; the Axes of the rows."""
    films = {path: f for path, leaf in frames.leaves(data) if (f := frames.as_pictures(leaf))}
    curves = {p: c for p, leaf in frames.leaves(data) if p not in films and (c := frames.as_curves(leaf))}
    if not curves and not films:
        raise FieldError("none of these fields is a curve or a picture; name others with fields=")
    axes = _subplots(len(curves) + len(films), 1, width=9, height=1.9 * (len(curves) + len(films)))
    for ax, (path, lines) in zip(axes, curves.items(), strict=False):
        _curves(ax, path, lines)
    for ax, (path, film) in zip(axes[len(curves) :], films.items(), strict=True):
        _strip(ax, path, film)
    axes[0].set_title(title)
    return axes


def _curves(ax: Any, path: str, lines: Mapping[str, frames.Array]) -> None:
    """The components of a field, named if there are several."""
    for i, (name, values) in enumerate(lines.items()):
        marker = "." if np.isfinite(values).sum() <= FEW else None
        ax.plot(values, color=color_of(i), label=name, linewidth=1, marker=marker)
    ax.set(ylabel=path, xlabel="step")
    if len(lines) > 1:
        ax.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5), ncols=1 + (len(lines) - 1) // 8)


def _strip(ax: Any, path: str, film: frames.Pictures) -> None:
    """Pictures at equal distances, from the first to the last."""
    shots = film.pixels
    steps = np.unique(np.linspace(0, len(shots) - 1, STRIP).astype(np.int64))
    ax.imshow(np.concatenate(list(shots[steps]), axis=1))
    wide = shots.shape[2]
    ax.set_xticks([wide * (i + 0.5) for i in range(len(steps))], [str(s) for s in steps])
    ax.set_yticks([])
    ax.set(ylabel=path, xlabel=f"step ({film.note})" if film.note else "step")


def plan(moved: Mapping[tuple[int, int], int], targets: int, title: str) -> Any:
    """A bar for each target rank, in the colours of the source ranks that its steps come from; the Axes."""
    (ax,) = _subplots(1, 1, width=8, height=max(2.0, 0.35 * targets + 1))
    left, sources = np.zeros(targets), sorted({s for s, _ in moved})
    for source in sources:
        steps = np.array([moved.get((source, target), 0) for target in range(targets)])
        look = {"color": color_of(source), "label": f"from rank {source}"}
        bars = ax.barh(np.arange(targets), steps, left=left, **look)
        if len(sources) > len(COLORS):  # colours come again: the bars say of whom they are
            names = [str(source) if n else "" for n in steps]
            ax.bar_label(bars, names, label_type="center", fontsize="small", color="white")
        left += steps
    ax.set_yticks(range(targets), [f"rank {r}" for r in range(targets)])
    ax.margins(y=0.01)
    ax.invert_yaxis()
    ax.set(xlabel="steps", title=title)
    if 0 < len(sources) <= len(COLORS):
        ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def _subplots(rows: int, columns: int, *, width: float, height: float) -> Sequence[Any]:
    pyplot = package("matplotlib.pyplot", "a plot", "'trajectory-archive[plots]'")
    _, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    flat: Sequence[Any] = axes.reshape(-1)
    return flat
