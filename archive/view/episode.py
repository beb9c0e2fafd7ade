"""One episode to look at: what is known of it, its fields, its turns and tokens, and the episodes of its group."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from archive import tables
from archive.base import ArchiveError, jsontree
from archive.view import frames, rollouts
from archive.view.fields import MOST_TOLD, Kind, kinds
from archive.view.shown import Listing, Shown
from archive.view.tokens import decoder
from archive.view.wire import Query, Reply, json_reply

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
            "fields": [_told(kind) for kind in fields[:MOST_TOLD]],
            "more_fields": max(0, len(fields) - MOST_TOLD),
            "metadata": _metadata(ep),
            "attributes": ep.attributes,
            "labels": ep.labels,
            "history": ep.label_history[-MOST_PARTS:],
            "parts": _parts(ep),
        }
    )


def _metadata(ep: Episode) -> Any:
    """The metadata; where they cannot be read, why, as all else of it can be looked at."""
    try:
        return ep.metadata
    except ArchiveError as e:
        return {"cannot be read": str(e)}


def _told(kind: Kind) -> dict[str, Any]:
    return {"name": kind.name, "told": kind.told, "kind": kind.kind, "shape": list(kind.shape)}


def _parts(ep: Episode) -> list[dict[str, Any]]:
    """The stretches of steps by their weights, with update count, in which session."""
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
    """The weights of some steps of a segment; nothing where all have the same."""
    if run is None:
        return {}
    uuid, count = run["model_weights_uuid"], run["update_count"]
    return {"model_weights_uuids": [uuid] if uuid else [], "update_count_min": count, "update_count_max": count}


MOST_BYTES = 8 * 2**20  # of turns, as JSON; of more, the first
MOST_MEMBERS = 200
GROUP_KEYS = ("group", "group_id", "prompt_id", "question_id", "task_id", "prompt", "question", "task")


def rollout(shown: Shown, query: Query) -> Reply:
    """The rollout of episode `id=`: {blocks, signals, masks, left_out, texts}; null of an episode that is none."""
    listing = shown.listing(query)
    ep = listing.episodes[query.needed("id")]
    found = _find(ep, kinds(shown, listing, ep))
    if found is None:
        return json_reply(None)
    decode = decoder(shown.settings.tokenizer)
    blocks, left_out = rollouts.fitted(rollouts.blocks_of(found, decode), MOST_BYTES)
    told = {"blocks": blocks, **rollouts.about(found)} if blocks else {}
    return json_reply({**told, "left_out": left_out, "texts": decode is not None})


def _find(ep: Episode, specs: list[Kind]) -> rollouts.Rollout | None:
    """The rollout that its fields are. Pictures are not read."""
    if not any(kind.kind in ("tokens", "text") or kind.name.endswith("tokens") for kind in specs):
        return None
    names = [kind.name for kind in specs if kind.kind in ("tokens", "text", "curve") or kind.told.endswith(" free")]
    free = {kind.name for kind in specs if kind.told.endswith(" free")}
    data = dict(frames.leaves(ep.read(names, missing="skip"))) if names else {}
    whole = {name: leaf for name, leaf in data.items() if name in free}
    parts = {name: leaf for name, leaf in data.items() if name not in free}
    return rollouts.find(parts, whole, _metadata_or_none(ep), ep.length)


def group(shown: Shown, query: Query) -> Reply:
    """The episodes of the same prompt as `id=`, by the metadata `by=` or the first of the usual keys that it has:
    {by, value, members: [{id, return, length}], more}; members null where it is in no group."""
    listing = shown.listing(query)
    ep = listing.episodes[query.needed("id")]
    metadata = _metadata_or_none(ep)
    key = query.text("by") or next((key for key in GROUP_KEYS if metadata.get(key) is not None), "")
    value = metadata.get(key)
    if value is None:
        return json_reply({"by": None, "value": None, "members": None, "more": 0})
    places = shown.kept(("group", listing.key, key, json.dumps(value)), lambda: _members(listing, key, value))
    some = pa.array(places[:MOST_MEMBERS])
    columns = {"id": "episode_id", "return": "return", "length": "length"}
    rows = pa.table({name: listing.column(column).take(some) for name, column in columns.items()}).to_pylist()
    told = value if isinstance(value, (str, int, float)) else json.dumps(value)
    return json_reply({"by": key, "value": told, "members": rows, "more": max(0, len(places) - MOST_MEMBERS)})


def _metadata_or_none(ep: Episode) -> dict[str, Any]:
    """The metadata; none where they cannot be read, which the answer about the episode says."""
    try:
        return ep.metadata
    except ArchiveError:
        return {}


def _members(listing: Listing, key: str, value: Any) -> list[int]:
    """Places of the episodes whose metadata has the value; only texts that have the key in them are parsed."""
    texts = listing.column("metadata")
    likely = pc.indices_nonzero(pc.fill_null(pc.match_substring(texts, json.dumps(key)), False))
    if isinstance(value, int) or (isinstance(value, str) and value.isascii()):
        needle = json.dumps(value)
        there = pc.fill_null(pc.match_substring(texts.take(likely), needle), False)
        likely = likely.filter(there)
    found = texts.take(likely).to_pylist()
    return [place for place, text in zip(likely.to_pylist(), found, strict=True) if _has(text, key, value)]


def _has(text: str, key: str, value: Any) -> bool:
    document = jsontree.loads(text)
    return isinstance(document, dict) and bool(document.get(key) == value)
