"""How a column's values are spread: of all episodes of a listing, and of those that are meant."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from archive.view.answers.listings import Listing, Scope
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply

BARS = 30
LONGEST = 500  # characters of a text that has a bar
MOST = 12  # values of a column of texts that have a bar of their own


def histograms(shown: Shown, query: Query) -> Reply:
    """A histogram for each of the `columns=`: of numbers `edges` and counts between them; of all else the most frequent
    `values`, and how many `others` there are. `all` counts the listing's episodes, `counts` those that are meant."""
    scope = shown.scope(query)
    return json_reply({name: _histogram(shown, scope, name) for name in query.names("columns")})


def _histogram(shown: Shown, scope: Scope, name: str) -> dict[str, Any]:
    base = shown.kept(("bins", scope.listing.key, name), lambda: _binned(scope.listing, name))
    bars = base.bars
    counts = np.bincount(base.codes if len(scope) == len(base.codes) else base.codes[scope.places], minlength=bars + 2)
    every = np.bincount(base.codes, minlength=bars + 2)
    return {
        **base.told,
        "counts": counts[:bars].tolist(),
        "all": every[:bars].tolist(),
        "none": int(counts[bars]),
        "none_all": int(every[bars]),
    }


class Bins(NamedTuple):
    """The bar that each episode is in: `bars` for those without a value, one more for those of values without a bar."""

    codes: np.ndarray[Any, Any]
    bars: int
    told: dict[str, Any]


def _binned(listing: Listing, name: str) -> Bins:
    column = listing.column(name).combine_chunks()
    if pa.types.is_list(column.type):  # weights: the newest ones that made it
        column = pc.list_element(pc.if_else(pc.greater(pc.list_value_length(column), 0), column, None), 0)
    if pa.types.is_timestamp(column.type):
        return _of_numbers(column.cast(pa.int64()).cast(pa.float64()).to_numpy(zero_copy_only=False) / 1e6, "time")
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return _of_numbers(column.cast(pa.float64()).to_numpy(zero_copy_only=False), "number")
    return _of_texts(column if pa.types.is_dictionary(column.type) else column.dictionary_encode())


def _of_numbers(values: np.ndarray[Any, Any], kind: str) -> Bins:
    finite = np.isfinite(values)
    known = values if finite.all() else values[finite]
    edges = edges_of(known) if len(known) else np.zeros(0)
    bars = max(len(edges) - 1, 0)
    codes = np.full(len(values), bars, np.int8)
    if bars:
        scaled = (known - edges[0]) * (bars / (edges[-1] - edges[0]))
        codes[finite] = np.clip(scaled.astype(np.int64), 0, bars - 1)
    ends = {"least": float(known.min()), "most": float(known.max())} if bars else {}
    return Bins(codes, bars, {"kind": kind, "edges": edges.tolist(), **ends})


def edges_of(known: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Where bars of these numbers begin and end. Of whole numbers each has as many, so that none stands out."""
    low, high = float(known.min()), float(known.max())
    if max(-low, high) < 2**50 and (known == np.rint(known)).all():
        wide = max(1, math.ceil((high - low + 1) / BARS))
        return low + wide * np.arange(math.ceil((high - low + 1) / wide) + 1.0)
    if not high - low < math.inf:
        low, high = max(low, -1e300), min(high, 1e300)
    return np.linspace(low, high, BARS + 1) if high > low else np.array([low - 0.5, low + 0.5])


def _of_texts(column: pa.DictionaryArray) -> Bins:
    values = column.dictionary
    codes = pc.fill_null(column.indices.cast(pa.int64()), len(values)).to_numpy()
    counts = np.bincount(codes, minlength=len(values) + 1)[:-1]
    short = pc.less_equal(pc.utf8_length(values), LONGEST).to_numpy(zero_copy_only=False) if _is_text(values) else True
    chosen = [int(i) for i in np.argsort(-(counts * short), kind="stable")[:MOST] if (counts * short)[i]]
    bar = np.full(len(values) + 1, len(chosen) + 1, np.int8)
    bar[chosen] = np.arange(len(chosen))
    bar[-1] = len(chosen)
    told = [_told(values[i].as_py()) for i in chosen]
    others = int((counts > 0).sum()) - len(chosen)
    return Bins(bar[codes], len(chosen), {"kind": "text", "values": told, "others": others})


def _is_text(values: pa.Array) -> bool:
    return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))


def _told(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)
