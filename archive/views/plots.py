"""Pure, no I/O: Matplotlib figures of episodes and plans (extra "plots", imported when the first is drawn)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.errors import FieldError, MissingPackageError
from archive.views import frames
from archive.views.charts import COLORS, numbers

if TYPE_CHECKING:
    import pyarrow as pa

STRIP = 8  # pictures of an episode that are drawn side by side
FEW = 20  # points that are marked, as lines alone would not show those without neighbours


def episodes(found: pa.Table) -> Any:
    """Returns over update count, and how long the episodes are; the two Axes."""
    axes = _subplots(1, 2, width=10, height=3.2)
    updates, returns = numbers(found["update_count_max"].to_pylist()), numbers(found["return"].to_pylist())
    over = updates if np.isfinite(updates).any() else np.arange(len(returns))
    axes[0].plot(over, returns, ".", alpha=0.5, color=COLORS[0])
    mean_x, mean_y = _means(over, returns)
    axes[0].plot(mean_x, mean_y, color=COLORS[1], label="mean")
    axes[0].set(xlabel="update count" if over is updates else "episode", ylabel="return", title="returns")
    lengths = found["length"].to_numpy()
    if len(lengths):
        axes[1].hist(lengths, bins=min(30, max(1, len(np.unique(lengths)))), color=COLORS[0])
    axes[1].set(xlabel="steps", ylabel="episodes", title="lengths")
    return axes


def _means(x: Any, y: Any) -> tuple[Any, Any]:
    """Mean of y for each x, where both are known."""
    known = np.isfinite(x) & np.isfinite(y)
    at, codes = np.unique(x[known], return_inverse=True)
    return at, np.bincount(codes, y[known]) / np.maximum(np.bincount(codes), 1)


def episode(data: Mapping[str, Any], title: str) -> Any:
    """A row of curves for each field of numbers, then a strip of each field of pictures; the Axes of the rows."""
    films = {path: f for path, leaf in frames.leaves(data) if (f := frames.as_film(leaf))}
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
        ax.plot(values, color=COLORS[i % len(COLORS)], label=name, linewidth=1, marker=marker)
    ax.set(ylabel=path, xlabel="step")
    if len(lines) > 1:
        ax.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5), ncols=1 + (len(lines) - 1) // 8)


def _strip(ax: Any, path: str, film: frames.Film) -> None:
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
        bars = ax.barh(
            np.arange(targets), steps, left=left, color=COLORS[source % len(COLORS)], label=f"from rank {source}"
        )
        if len(sources) > len(COLORS):  # colours come again: the bars say of whom they are
            ax.bar_label(
                bars, [str(source) if n else "" for n in steps], label_type="center", fontsize="small", color="white"
            )
        left += steps
    ax.set_yticks(range(targets), [f"rank {r}" for r in range(targets)])
    ax.margins(y=0.01)
    ax.invert_yaxis()
    ax.set(xlabel="steps", title=title)
    if 0 < len(sources) <= len(COLORS):
        ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def _subplots(rows: int, columns: int, *, width: float, height: float) -> Sequence[Any]:
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as e:
        raise MissingPackageError(f"plots need Matplotlib ({e}): pip install 'trajectory-archive[plots]'") from e
    _, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    flat: Sequence[Any] = axes.reshape(-1)
    return flat
