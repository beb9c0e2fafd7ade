"""The table of episodes: its columns, rows in the order that is asked for, what a condition may say; and how columns
are spread: as histograms, group by group, along the update counts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from archive.base import NotFoundError, UsageError
from archive.view import plots
from archive.view.shown import Listing, Scope, Shown
from archive.view.wire import Query, Reply, arrow_reply, json_reply

KINDS = {  # of the columns of each table of episodes; those of labels are what they are
    "number": ("length", "return", "update_count_min", "update_count_max", "env_id", "rank", "commit"),
    "flag": ("complete", "terminated", "truncated"),
    "time": ("created_at",),
    "list": ("model_weights_uuids",),
    "json": ("metadata",),
}
_KIND = {name: kind for kind, names in KINDS.items() for name in names}


def about(shown: Shown, query: Query) -> Reply:
    """Facts that a page needs first: url, id, commit, runs, columns and their kinds."""
    arc = shown.at(query)
    return json_reply(
        {
            "url": arc.url,
            "id": arc.id,
            "commit": arc.head.number,
            "newest": shown.arc.head.number,
            "pinned": shown.arc.pinned,
            "runs": list(arc.head.runs),
            "columns": {name: _KIND.get(name, "text") for name in arc.index.names},
        }
    )


def writable(shown: Shown, query: Query) -> Reply:
    """Answer whether one may label here, and if not, why."""
    return json_reply({"why_not": shown.unwritable})


MAX_ROWS = 1000  # of one answer
FIRST = ("episode_id", "length", "return")


def rows(shown: Shown, query: Query) -> Reply:
    """Rows [`start=`, `stop=`) of the `columns=`, in the order of `sort=` (`descending=1`); X-Count: of how many."""
    scope = shown.scope(query)
    start, stop = query.number("start", 0), query.number("stop", 100)
    if stop - start > MAX_ROWS:
        raise UsageError(f"start={start}, stop={stop}: at most {MAX_ROWS} rows at once")
    order = scope.order(query.text("sort"), descending=query.flag("descending"))
    places = pa.array(order[start : max(start, stop)])
    names = query.names("columns") or FIRST
    found = pa.table({name: scope.listing.values(name, places) for name in names})
    return arrow_reply(found, Count=len(scope), All=len(scope.listing), Start=start)


def neighbours(shown: Shown, query: Query) -> Reply:
    """The place of `id=` in the order of `sort=`: its number, how many there are, and the ids before and after it. Of
    several `ids=` the first that is there; a place of null where none is."""
    scope = shown.scope(query)
    order = scope.order(query.text("sort"), descending=query.flag("descending"))
    found = _first(scope, query.names("ids")) if query.text("ids") else scope.place_of(query.needed("id"))
    if found is None:
        return json_reply({"place": None, "count": len(order)})
    here = int(np.flatnonzero(order == found)[0])
    ids = scope.listing.column("episode_id")

    def named(place: int) -> str | None:
        return str(ids[int(order[place])]) if 0 <= place < len(order) else None

    ends = {"first": named(0), "last": named(len(order) - 1)}
    beside = {"id": named(here), "before": named(here - 1), "after": named(here + 1)}
    return json_reply({"place": here, "count": len(order), **beside, **ends})


def _first(scope: Scope, ids: list[str]) -> int | None:
    for name in ids:
        with contextlib.suppress(NotFoundError):
            return scope.place_of(name)
    return None


MOST_OFFERED = 20
LONGEST_VALUE = 500  # characters of what is offered


def names(shown: Shown, query: Query) -> Reply:
    """Columns that a condition may name: those of the table, and of metadata as the newest episodes have them."""
    listing = shown.listing(query)
    return json_reply([*listing.names, *listing.metadata_names])


def values(shown: Shown, query: Query) -> Reply:
    """Values of the column `name=` that begin with `text=`, as a condition writes them; at most 20."""
    listing, name, text = shown.listing(query), query.needed("name"), query.text("text")
    column = listing.column(name) if name in (*listing.names, *listing.metadata_names) else None
    if column is None or not (pa.types.is_string(column.type) or pa.types.is_dictionary(column.type)):
        return json_reply([])
    distinct = shown.kept(("distinct", listing.key, name), lambda: column.unique())
    plain = distinct.cast(pa.string()).drop_null()
    fitting = pc.and_(pc.starts_with(plain, text), pc.less_equal(pc.utf8_length(plain), LONGEST_VALUE))
    found = plain.filter(fitting).slice(0, MOST_OFFERED).to_pylist()
    return json_reply([_quoted(value) for value in sorted(found)])


def check(shown: Shown, query: Query) -> Reply:
    """Count the episodes that meet the condition, and say what it leaves out; an error says what is wrong with it."""
    scope = shown.scope(query)
    return json_reply({"count": len(scope), "notes": scope.notes})


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


BARS = 30
MOST_VALUES = 12  # values of a column of texts that have a bar of their own


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
    """The edges of bars of these numbers. Each has as many whole numbers, so that none stands out."""
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
    short = (
        pc.less_equal(pc.utf8_length(values), LONGEST_VALUE).to_numpy(zero_copy_only=False)
        if _is_text(values)
        else True
    )
    chosen = [int(i) for i in np.argsort(-(counts * short), kind="stable")[:MOST_VALUES] if (counts * short)[i]]
    bar = np.full(len(values) + 1, len(chosen) + 1, np.int8)
    bar[chosen] = np.arange(len(chosen))
    bar[-1] = len(chosen)
    told = [_plain_value(values[i].as_py()) for i in chosen]
    others = int((counts > 0).sum()) - len(chosen)
    return Bins(bar[codes], len(chosen), {"kind": "text", "values": told, "others": others})


def _is_text(values: pa.Array) -> bool:
    return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))


def _plain_value(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else str(value)


MOST_GROUPS = 16  # groups: of more, those with the most episodes; of checkpoints the newest
LONGEST_NAME = 1000  # characters of a group's name; those of runs and weights are shorter
CHECKPOINT = "checkpoint"
QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)

Values = np.ndarray[Any, Any]


def distributions(shown: Shown, query: Query) -> Reply:
    """The spread of `column=` in each group `by=`: a column of texts, such as run, or "checkpoint":
    {edges, others, groups: [{name, count, counts, mean, quartiles}]}."""
    column, by = query.needed("column"), query.text("by") or "run"
    groups = list(_checkpoints(shown, query, column) if by == CHECKPOINT else _groups(shown, query, column, by))
    chosen = groups[-MOST_GROUPS:] if by == CHECKPOINT else sorted(groups, key=lambda one: -len(one[1]))[:MOST_GROUPS]
    every = np.concatenate([values for _, values in chosen]) if chosen else np.zeros(0)
    edges = edges_of(every) if len(every) else np.zeros(0)
    told = [_group_told(name, values, edges) for name, values in chosen]
    return json_reply({"edges": edges.tolist(), "groups": told, "others": len(groups) - len(chosen)})


def trend(shown: Shown, query: Query) -> Reply:
    """Quantiles of `column=` over the update counts, or the order of writing, run by run: {along, groups: [{name, at,
    quantiles}]}, with the quantiles of plots.QUANTILES at each place; of many runs those that wrote last."""
    scope, column = shown.scope(query), query.needed("column")
    runs = scope.column("run").cast(pa.string())
    names = list(dict.fromkeys(reversed([name for name in runs.unique().to_pylist() if name is not None])))
    table = pa.table(
        {"update_count_max": scope.column("update_count_max"), column: _floats(scope.column(column), column)}
    )
    found = {name: table.filter(pc.equal(runs, name)) for name in reversed(names[: len(plots.COLORS)])}
    series, along = plots.series_of(found, column)
    drawn = {name: plots.spread_of(one) for name, one in series.items()}
    groups = [{"name": name, "at": one.at.tolist(), "quantiles": one.quantiles.tolist()} for name, one in drawn.items()]
    return json_reply({"along": along, "groups": groups})


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
    for place in range(max(0, len(saved) - MOST_GROUPS), len(saved)):
        one = saved[place]
        if one.replay_saved:
            values = _numbers(one.episodes.columns([column])[column], column)
            yield f"{one.name} of {one.run}", values[np.isfinite(values)]


def _numbers(column: pa.ChunkedArray, name: str) -> Values:
    values: Values = _floats(column, name).combine_chunks().to_numpy(zero_copy_only=False)
    return values


def _floats(column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise UsageError(f"{name} holds no numbers")
    return column.cast(pa.float64())


def _group_told(name: str, values: Values, edges: Values) -> dict[str, Any]:
    known = len(values) > 0
    return {
        "name": name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…",
        "count": len(values),
        "counts": np.histogram(values, edges)[0].tolist() if known else [0] * max(len(edges) - 1, 0),
        "mean": float(values.mean()) if known else None,
        "quartiles": np.quantile(values, QUARTILES).tolist() if known else None,
    }
