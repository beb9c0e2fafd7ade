"""One column's values of several runs, checkpoints or weights side by side, on the same edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from archive.base import UsageError
from archive.view.answers.histograms import edges_of
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply

MOST = 16  # groups: of more, those with the most episodes; of checkpoints the newest
LONGEST = 1000  # characters of a group's name; those of runs and weights are shorter
CHECKPOINT = "checkpoint"
QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)

Values = np.ndarray[Any, Any]


def distributions(shown: Shown, query: Query) -> Reply:
    """How `column=` is spread in each group `by=`: a column of texts, such as run, or "checkpoint":
    {edges, others, groups: [{name, count, counts, mean, quartiles}]}."""
    column, by = query.needed("column"), query.text("by") or "run"
    groups = list(_checkpoints(shown, query, column) if by == CHECKPOINT else _groups(shown, query, column, by))
    chosen = groups[-MOST:] if by == CHECKPOINT else sorted(groups, key=lambda one: -len(one[1]))[:MOST]
    every = np.concatenate([values for _, values in chosen]) if chosen else np.zeros(0)
    edges = edges_of(every) if len(every) else np.zeros(0)
    told = [_told(name, values, edges) for name, values in chosen]
    return json_reply({"edges": edges.tolist(), "groups": told, "others": len(groups) - len(chosen)})


def _groups(shown: Shown, query: Query, column: str, by: str) -> Iterator[tuple[str, Values]]:
    scope = shown.scope(query)
    values, names = _numbers(scope.column(column), column), scope.column(by)
    if pa.types.is_list(names.type):  # weights: the first that made it
        names = pc.list_element(pc.if_else(pc.greater(pc.list_value_length(names), 0), names, None), 0)
    coded = names.cast(pa.string()).combine_chunks().dictionary_encode(null_encoding="encode")
    if not len(coded):
        return
    codes = coded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    parts = np.split(values[order], np.cumsum(np.bincount(codes, minlength=len(coded.dictionary)))[:-1])
    for name, part in zip(coded.dictionary.to_pylist(), parts, strict=True):
        yield ("none" if name is None else name), part[np.isfinite(part)]


def _checkpoints(shown: Shown, query: Query, column: str) -> Iterator[tuple[str, Values]]:
    saved = shown.at(query).checkpoints
    if query.text("run"):
        saved = saved.of(query.text("run"))
    for place in range(max(0, len(saved) - MOST), len(saved)):
        one = saved[place]
        if one.replay_saved:
            values = _numbers(one.episodes.columns([column])[column], column)
            yield f"{one.name} of {one.run}", values[np.isfinite(values)]


def _numbers(column: pa.ChunkedArray, name: str) -> Values:
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise UsageError(f"{name} holds no numbers")
    values: Values = column.combine_chunks().cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values


def _told(name: str, values: Values, edges: Values) -> dict[str, Any]:
    known = len(values) > 0
    return {
        "name": name if len(name) <= LONGEST else f"{name[:LONGEST]}…",
        "count": len(values),
        "counts": np.histogram(values, edges)[0].tolist() if known else [0] * max(len(edges) - 1, 0),
        "mean": float(values.mean()) if known else None,
        "quartiles": np.quantile(values, QUARTILES).tolist() if known else None,
    }
