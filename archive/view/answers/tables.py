"""Rows of the table of episodes, in the order that is asked for, as Arrow; and who stands beside whom."""

from __future__ import annotations

import contextlib

import numpy as np
import pyarrow as pa

from archive.base import NotFoundError, UsageError
from archive.view.answers.listings import Scope
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, arrow_reply, json_reply

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
    """Where `id=` stands in the order of `sort=`: its place, how many there are, and the ids before and after it. Of
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
