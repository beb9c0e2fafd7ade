"""Any field of an episode as a table of texts, some rows and columns at a time, whatever its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.base import NotFoundError
from archive.view.answers.fieldkinds import Kind, kinds
from archive.view.answers.series import MOST_TEXT, number
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply
from archive.views import frames

MOST_ROWS = 100
MOST_COLUMNS = 48


def field_rows(shown: Shown, query: Query) -> Reply:
    """Rows [`start=`, `stop=`) of `field=` of episode `id=`, their numbers from `column=` on: {told, steps (whether
    a row is a step), start, count, columns: their places, all_columns, rows: [[text]]}."""
    listing = shown.listing(query)
    ep = listing.episodes[query.needed("id")]
    kind = _kind(kinds(shown, listing, ep), query.needed("field"))
    free = kind.told.endswith(" free")
    start = query.number("start", 0)
    leaf = _leaf(ep.read([kind.name]) if free else _some(ep, kind.name, start, query), kind.name)
    count = len(leaf) if free else ep.length
    picked = leaf[start : start + MOST_ROWS] if free else leaf
    picked = picked[: max(0, query.number("stop", start + 1) - start)]
    columns, every, rows = _cells(picked, query.number("column", 0))
    return json_reply(
        {
            "told": kind.told, "steps": not free, "start": start, "count": count, "columns": columns,
            "all_columns": every, "rows": rows,
        }
    )  # fmt: skip


def _kind(found: list[Kind], name: str) -> Kind:
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


def _text(value: Any) -> str:
    text = number(value) if isinstance(value, (np.ndarray, np.generic)) else str(value)
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
