"""One episode to look at: what is known of it, and what its fields are. Reads no data, but for the first bytes of what
may be video."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archive import tables
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
    listing = shown.listing(query)
    ep = listing.episodes[query.needed("id")]
    fields = kinds(shown, listing, ep)
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
    rows = ep.alone().reader.snapshot.take(spans.rows, [*_OF_STEPS, *tables.WEIGHTS]).to_pylist()
    out: list[dict[str, Any]] = []
    at = 0
    for row, lo, hi in zip(rows, spans.lo.tolist(), spans.hi.tolist(), strict=True):
        for run in tables.weights_of(row, lo, hi) if row["weights"] else [None]:
            told = {name: row[name] for name in _OF_STEPS} | _as_part(run)
            start, at = at, at + (hi - lo if run is None else run["steps"])
            if out and all(out[-1][name] == told[name] for name in _OF_STEPS):
                out[-1]["stop"] = at
            else:
                out.append({**told, "start": start, "stop": at})
    return out[:MOST_PARTS]


def _as_part(run: dict[str, Any] | None) -> dict[str, Any]:
    """What is told of the weights of some steps of a segment; nothing where all have the same."""
    if run is None:
        return {}
    uuid, count = run["model_weights_uuid"], run["update_count"]
    return {"model_weights_uuids": [uuid] if uuid else [], "update_count_min": count, "update_count_max": count}
