"""Engine: what one may write into a condition: the columns, and values of them that begin as one has begun."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from archive.view.answers.listings import Listing
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply

MOST = 20
LONGEST = 500  # characters of what is offered
LOOKED_AT = 2000  # episodes whose metadata is looked into for its keys


def names(shown: Shown, query: Query) -> Reply:
    """Columns that a condition may name: those of the table, and `metadata.<key>` of keys that some episode has."""
    listing = shown.listing(query)
    keys = shown.kept(("metadata", listing.key), lambda: _metadata_keys(listing))
    return json_reply([*listing.names, *(f"metadata.{key}" for key in keys)])


def values(shown: Shown, query: Query) -> Reply:
    """Values of the column `name=` that begin with `text=`, as a condition writes them; at most 20."""
    listing, name, text = shown.listing(query), query.needed("name"), query.text("text")
    column = listing.column(name) if name in listing.names else None
    if column is None or not (pa.types.is_string(column.type) or pa.types.is_dictionary(column.type)):
        return json_reply([])
    distinct = shown.kept(("distinct", listing.key, name), lambda: column.unique())
    plain = distinct.cast(pa.string()).drop_null()
    fitting = pc.and_(pc.starts_with(plain, text), pc.less_equal(pc.utf8_length(plain), LONGEST))
    found = plain.filter(fitting).slice(0, MOST).to_pylist()
    return json_reply([_quoted(value) for value in sorted(found)])


def check(shown: Shown, query: Query) -> Reply:
    """How many episodes meet the condition; an error says what is wrong with it."""
    return json_reply({"count": len(shown.scope(query))})


def _metadata_keys(listing: Listing) -> list[str]:
    column, counted = listing.column("metadata"), Counter[str]()
    recent = column.slice(max(len(column) - LOOKED_AT, 0)).to_pylist()
    for text in filter(None, islice(recent, LOOKED_AT)):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            continue  # a reader of the episode is told; here it has no keys
        if isinstance(document, dict):
            counted.update(key for key in document if len(key) <= LONGEST)
    return [key for key, _ in counted.most_common(MOST)]


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
