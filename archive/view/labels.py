"""Labels: what one may set, what is set, and setting it: one batch is one commit, and can be taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from archive.base import UsageError, jsontree
from archive.read import notes
from archive.view.shown import Scope, Shown
from archive.view.wire import Query, Reply, json_reply

if TYPE_CHECKING:
    from archive import Archive

KINDS = ("flag", "choice", "number", "note")
_EXAMPLE = '[{"key": "success", "kind": "flag"}, {"key": "quality", "kind": "choice", "values": ["bad", "ok", "good"]}]'


def labels_of(document: Any) -> tuple[dict[str, Any], ...]:
    """The labels of a list of {key, kind, values of a choice, least and most of a number}; UsageError for anything
    else, which says what is right."""
    if not isinstance(document, list) or not document:
        raise UsageError(f"labels are a list, such as {_EXAMPLE}")
    return tuple(_label(one) for one in document)


def _label(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("key"), str) or given.get("kind", "flag") not in KINDS:
        raise UsageError(f"{given!r:.100} is no label: it has a key and a kind of {', '.join(KINDS)}, as in {_EXAMPLE}")
    if given.get("kind") == "choice" and not _choices(given.get("values")):
        raise UsageError(f"label {given['key']!r}: a choice has `values`, a list of texts or numbers")
    return {"kind": "flag", **given}


def _choices(values: Any) -> bool:
    return isinstance(values, list) and 0 < len(values) <= 50 and all(isinstance(v, (str, int, float)) for v in values)


PREFIX = "label."
NOTE = {"key": "note", "kind": "note"}
DEFAULT = ({"key": "success", "kind": "flag"}, {"key": "flagged", "kind": "flag"}, NOTE)
MOST_VALUES = 9  # that a label which is there is offered as a choice of
MOST_EPISODES = 20_000  # of one batch

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
    {commit, before}. What is said already is not said again. `"back": true` says that it takes something back, which
    may be what nobody may set."""
    given = query.document()
    said = given.get("labels") if isinstance(given, dict) else None
    if not isinstance(said, dict) or not said or not all(isinstance(one, dict) and one for one in said.values()):
        raise UsageError('a batch is {"labels": {"episode id": {"key": value}}, "by": "name"}')
    if not given.get("back"):
        for values in said.values():
            _check_offered(shown, values)
    return _saved(shown, said, given.get("by"))


def say_of_all(shown: Shown, query: Query) -> Reply:
    """Save `{"labels": {key: value}, "count": N}` of all the episodes that are meant, as one commit: as `say` does.
    UsageError where these are no longer N, as whoever confirmed it saw."""
    given = query.document()
    values = given.get("labels") if isinstance(given, dict) else None
    if not isinstance(values, dict) or not values:
        raise UsageError('what is said of all is {"labels": {"key": value}, "count": N}')
    _check_offered(shown, values)
    scope = shown.scope(query)
    if len(scope) != given.get("count"):
        raise UsageError(
            f"{len(scope)} episodes are meant now, not {given.get('count')!r:.20}: look again, then confirm"
        )
    ids = scope.column("episode_id").to_pylist()
    return _saved(shown, dict.fromkeys(ids, values), given.get("by"))


def said_of(shown: Shown, query: Query) -> Reply:
    """The labels of the episode `id=`: {id, labels}."""
    name = query.needed("id")
    return json_reply({"id": name, "labels": shown.listing(query).episodes[name].labels})


def _saved(shown: Shown, said: Said, by: Any) -> Reply:
    """Save what is new of it as one commit; return what was set before, by anybody."""
    _check_count(len(said))
    if shown.unwritable is not None:
        raise UsageError(f"nothing can be labelled here: {shown.unwritable}")
    by = by or shown.settings.by
    if by is not None and not isinstance(by, str):
        raise UsageError("by: a name, as text")
    with shown.writing:
        before = _before(shown.arc.refresh(), said)
        new = {name: _changed(values, before[name]) for name, values in said.items()}
        if any(new.values()):
            shown.arc.label({name: values for name, values in new.items() if values}, by=by)
    return json_reply({"commit": shown.arc.head.number, "before": before})


def _check_count(count: int) -> None:
    if not 0 < count <= MOST_EPISODES:
        raise UsageError(f"{count} episodes at once: 1 to {MOST_EPISODES}; narrow the condition")


def _before(arc: Archive, said: Said) -> dict[str, dict[str, Any]]:
    """The present values of the keys that are to be set; None where there is none."""
    index, ids = arc.index, list(said)
    numbers = notes.numbers_of(index, ids, "nothing was said of any")
    out: dict[str, dict[str, Any]] = {name: {} for name in ids}
    for key in dict.fromkeys(key for values in said.values() for key in values):
        texts = index.labels.texts(key).take(pa.array(numbers)).to_pylist()
        for name, text in zip(ids, texts, strict=True):
            if key in said[name]:
                out[name][key] = None if text is None else jsontree.loads(text)
    return out


def _changed(values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not set already; true is not 1."""
    return {key: value for key, value in values.items() if (type(value), value) != (type(before[key]), before[key])}


def _check_offered(shown: Shown, values: Mapping[str, Any]) -> None:
    """UsageError for what whoever started the viewer did not say that one may set."""
    offered = {one["key"]: one for one in shown.settings.labels}
    for key, value in values.items() if offered else ():
        if key not in offered:
            raise UsageError(f"the label {key!r:.80} may not be set here; these may: {', '.join(offered)}")
        if value is not None and not _fits(offered[key], value):
            raise UsageError(f"{value!r:.80} is no value of the label {key!r}: {offered[key]}")


def _fits(label: Mapping[str, Any], value: Any) -> bool:
    if label["kind"] == "flag":
        return isinstance(value, bool)
    if label["kind"] == "choice":
        return value in label["values"] and not isinstance(value, bool)
    if label["kind"] == "note":
        return isinstance(value, str)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and label.get("least", value) <= value <= label.get("most", value)


def _labelled(scope: Scope, key: str) -> int:
    name = PREFIX + key
    if name not in scope.listing.names:
        return 0
    column = scope.column(name)
    return int(len(column) - column.null_count)


def _found(scope: Scope) -> list[dict[str, Any]]:
    """The labels that are there, by what their values are; the usual ones where there are none, or some of these, so
    that their keys stay the same when the first one is set."""
    names = [name for name in scope.listing.names if name.startswith(PREFIX)]
    there = [_as_label(name.removeprefix(PREFIX), scope.listing.column(name)) for name in names]
    keys = {one["key"] for one in there}
    usual = [one for one in DEFAULT if one["kind"] == "flag"]
    if not keys - {NOTE["key"]} or any(one["key"] in keys for one in usual):
        there = usual + [one for one in there if one not in usual]
    return there if any(one["kind"] == "note" for one in there) else [*there, NOTE]


def _as_label(key: str, column: pa.ChunkedArray) -> dict[str, Any]:
    if pa.types.is_boolean(column.type):
        return {"key": key, "kind": "flag"}
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return {"key": key, "kind": "number"}
    choosable = pa.types.is_string(column.type) and key != NOTE["key"]
    values = pc.unique(column.drop_null()).to_pylist() if choosable else []
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
