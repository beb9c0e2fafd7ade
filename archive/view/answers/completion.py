"""What one may write into a condition: the columns, and values of them that begin as one has begun."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply

MOST = 20
LONGEST = 500  # characters of what is offered


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
    fitting = pc.and_(pc.starts_with(plain, text), pc.less_equal(pc.utf8_length(plain), LONGEST))
    found = plain.filter(fitting).slice(0, MOST).to_pylist()
    return json_reply([_quoted(value) for value in sorted(found)])


def check(shown: Shown, query: Query) -> Reply:
    """How many episodes meet the condition, and what it leaves out; an error says what is wrong with it."""
    scope = shown.scope(query)
    return json_reply({"count": len(scope), "notes": scope.notes})


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
