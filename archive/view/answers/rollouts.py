"""Language rollouts of an episode as turns, with what is known of each token; and the episodes of its group."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from archive.base import ArchiveError, jsontree
from archive.view.answers.fieldkinds import Kind, kinds
from archive.view.answers.listings import Listing
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, json_reply
from archive.views import conversation, decoder, frames, rollouts

if TYPE_CHECKING:
    from archive import Episode

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
    part = conversation.Conversation(found, decode).shown(MOST_BYTES)
    return json_reply({**(part.played or {}), "left_out": part.left_out, "texts": decode is not None})


def _find(ep: Episode, specs: list[Kind]) -> rollouts.Rollout | None:
    """The rollout that its fields are. Pictures are not read."""
    if not any(kind.kind in ("tokens", "text") or kind.name.endswith("tokens") for kind in specs):
        return None
    names = [kind.name for kind in specs if kind.kind in ("tokens", "text", "curve") or kind.told.endswith(" free")]
    free = {kind.name for kind in specs if kind.told.endswith(" free")}
    data = dict(frames.leaves(ep.read(names, missing="skip"))) if names else {}
    whole = {name: leaf for name, leaf in data.items() if name in free}
    parts = {name: leaf for name, leaf in data.items() if name not in free}
    return rollouts.find(parts, whole, _metadata(ep), ep.length)


def group(shown: Shown, query: Query) -> Reply:
    """The episodes of the same prompt as `id=`, by the metadata `by=` or the first of the usual keys that it has:
    {by, value, members: [{id, return, length}], more}; members null where it is in no group."""
    listing = shown.listing(query)
    ep = listing.episodes[query.needed("id")]
    metadata = _metadata(ep)
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


def _metadata(ep: Episode) -> dict[str, Any]:
    """Its metadata; none where they cannot be read, which the answer about the episode says."""
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
