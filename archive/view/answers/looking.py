"""Engine: one episode to look at: what is known of it, and what its fields are. Reads no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import ArchiveError
from archive.view.answers.fieldkinds import MOST, Kind, kinds
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply

if TYPE_CHECKING:
    from archive import Episode

_OF_STEPS = ("model_weights_uuids", "update_count_min", "update_count_max", "session", "rank", "commit")
MOST_PARTS = 500


def episode(shown: Shown, query: Query) -> Reply:
    """The episode `id=`: what is known of it, its fields and how each is looked at, which weights made which steps."""
    ep = shown.listing(query).episodes[query.needed("id")]
    fields = list(kinds(ep.specs, ep.fields))
    return json_reply(
        {
            "id": ep.id,
            "length": ep.length,
            "about": {name: value for name, value in ep.about.items() if value not in (None, [])},
            "fields": [_told(kind) for kind in fields[:MOST]],
            "more_fields": max(0, len(fields) - MOST),
            "metadata": _metadata(ep),
            "attributes": ep.attributes,
            "labels": ep.labels,
            "history": ep.label_history[-MOST_PARTS:],
            "parts": _parts(ep),
        }
    )


def _metadata(ep: Episode) -> Any:
    """Its metadata; where they cannot be read, why, as all else of it can be looked at."""
    try:
        return ep.metadata
    except ArchiveError as e:
        return {"cannot be read": str(e)}


def _told(kind: Kind) -> dict[str, Any]:
    return {"name": kind.name, "told": kind.told, "kind": kind.kind, "shape": list(kind.shape)}


def _parts(ep: Episode) -> list[dict[str, Any]]:
    """Which steps were made by which weights, at which update count, in which session."""
    spans = ep.alone().step_spans()
    rows = ep.alone().reader.snapshot.take(spans.rows, list(_OF_STEPS)).to_pylist()
    stops = np.cumsum(spans.hi - spans.lo).tolist()
    out: list[dict[str, Any]] = []
    for row, start, stop in zip(rows, [0, *stops], stops, strict=False):
        if out and all(out[-1][name] == row[name] for name in _OF_STEPS):
            out[-1]["stop"] = stop
        else:
            out.append({**row, "start": start, "stop": stop})
    return out[:MOST_PARTS]
