"""Engine: what one may say of episodes, what is said, and saying it: one batch is one commit, and can be taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from archive.base import UsageError
from archive.view.answers.listings import Scope
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply

PREFIX = "label."
NOTE = {"key": "note", "kind": "note"}
DEFAULT = ({"key": "success", "kind": "flag"}, {"key": "flagged", "kind": "flag"}, NOTE)
MOST_VALUES = 9  # that a label which is there is offered as a choice of
MOST_EPISODES = 10_000  # of one batch

Said = Mapping[str, Mapping[str, Any]]


def offered(shown: Shown, query: Query) -> Reply:
    """The labels that one may set, whether one may, and how far a pass over the episodes that are meant has come:
    {labels, by, why_not, count, labelled: {key: episodes}}."""
    scope = shown.scope(query)
    labels = list(shown.settings.labels) or shown.kept(("offered", scope.listing.key), lambda: _found(scope))
    labelled = {one["key"]: _labelled(scope, one["key"]) for one in labels}
    return json_reply(
        {
            "labels": labels,
            "by": shown.settings.by,
            "why_not": shown.unwritable,
            "count": len(scope),
            "labelled": labelled,
        }
    )


def say(shown: Shown, query: Query) -> Reply:
    """Save `{"labels": {id: {key: value}}, "by": name}` as one commit; what it was before comes back, to take it back:
    {commit, before}."""
    given = query.document()
    said = given.get("labels") if isinstance(given, dict) else None
    if not isinstance(said, dict) or not said or not all(isinstance(one, dict) and one for one in said.values()):
        raise UsageError('a batch is {"labels": {"episode id": {"key": value}}, "by": "name"}')
    if len(said) > MOST_EPISODES:
        raise UsageError(f"{len(said)} episodes at once: at most {MOST_EPISODES}")
    if shown.unwritable is not None:
        raise UsageError(f"nothing can be labelled here: {shown.unwritable}")
    by = given.get("by") or shown.settings.by
    if by is not None and not isinstance(by, str):
        raise UsageError("by: a name, as text")
    with shown.writing:
        before = _before(shown, said)
        shown.arc.label(said, by=by)
    return json_reply({"commit": shown.arc.head.number, "before": before})


def _before(shown: Shown, said: Said) -> dict[str, dict[str, Any]]:
    """What is said now of the keys that are to be said; None where nothing is."""
    episodes = shown.arc.episodes
    out = {}
    for name, values in said.items():
        now = episodes[name].labels
        out[name] = {key: now.get(key) for key in values}
    return out


def _labelled(scope: Scope, key: str) -> int:
    name = PREFIX + key
    if name not in scope.listing.names:
        return 0
    column = scope.column(name)
    return int(len(column) - column.null_count)


def _found(scope: Scope) -> list[dict[str, Any]]:
    """The labels that are there, by what their values are; the usual ones, where there are none."""
    names = [name for name in scope.listing.names if name.startswith(PREFIX)]
    found = [_as_label(name.removeprefix(PREFIX), scope.listing.column(name)) for name in names] or list(DEFAULT)
    return found if any(one["kind"] == "note" for one in found) else [*found, NOTE]


def _as_label(key: str, column: pa.ChunkedArray) -> dict[str, Any]:
    if pa.types.is_boolean(column.type):
        return {"key": key, "kind": "flag"}
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return {"key": key, "kind": "number"}
    values = pc.unique(column.drop_null()).to_pylist() if pa.types.is_string(column.type) else []
    if 0 < len(values) <= MOST_VALUES and max(map(len, values)) <= 40:
        return {"key": key, "kind": "choice", "values": sorted(values)}
    return {"key": key, "kind": "note"}


def next_unlabelled(shown: Shown, query: Query) -> Reply:
    """The next episode after `id=`, in the order that is asked for, without a label `key=`: {id}, null for none."""
    scope, key = shown.scope(query), query.needed("key")
    order = scope.order(query.text("sort"), descending=query.flag("descending"))
    here = int(np.flatnonzero(order == scope.place_of(query.needed("id")))[0])
    name = PREFIX + key
    if name in scope.listing.names:
        missing = pc.is_null(scope.listing.column(name)).to_numpy()
        free = np.flatnonzero(missing[order])
    else:
        free = np.arange(len(order))
    later = np.concatenate([free[free > here], free[free < here]])
    found = str(scope.listing.column("episode_id")[int(order[later[0]])]) if len(later) else None
    return json_reply({"id": found})
