"""Engine: rows of the table of episodes, in the order that is asked for, as Arrow."""

from __future__ import annotations

import pyarrow as pa

from archive.base import UsageError
from archive.view.answers.shown import Scope, Shown
from archive.view.web import Query, Reply, arrow_reply

MAX_ROWS = 1000  # of one answer


def rows(shown: Shown, query: Query) -> Reply:
    """Rows [`start=`, `stop=`) of the `columns=`, in the order of `sort=` (`descending=1`); X-Count: of how many."""
    scope = shown.scope(query)
    start, stop = query.number("start", 0), query.number("stop", 100)
    if stop - start > MAX_ROWS:
        raise UsageError(f"start={start}, stop={stop}: at most {MAX_ROWS} rows at once")
    order = scope.order(query.text("sort"), descending=query.flag("descending"))
    places = pa.array(order[start:stop])
    names = query.names("columns") or ["episode_id", "length", "return"]
    found = pa.table({name: _taken(scope, name, places) for name in names})
    return arrow_reply(found, Count=len(scope), Start=start)


def _taken(scope: Scope, name: str, places: pa.Array) -> pa.ChunkedArray:
    return scope.column(name).take(places)
