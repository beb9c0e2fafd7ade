"""The first picture of each of some episodes, small, to see at a glance what they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from archive.adapters.video import decode
from archive.base import ArchiveError, MissingPackageError, UsageError
from archive.read import Gather
from archive.view.answers.fieldkinds import kinds
from archive.view.answers.listings import Listing
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, bytes_reply
from archive.views import frames

SIDE = 96  # pixels
MOST = 64  # episodes of one answer
LOOKED_AT = 8  # episodes whose fields say which is the picture


def strip(shown: Shown, query: Query) -> Reply:
    """The first frames of the episodes `ids=`, uint8 RGB one after the other, of `field=` or else of the first field of
    pictures. X-Shape: [episodes, height, width]; X-Field; X-Ids: those that have one."""
    listing, ids = shown.listing(query), query.names("ids")
    if len(ids) > MOST:
        raise UsageError(f"{len(ids)} ids: at most {MOST} at once")
    places = np.array([listing.place_of(name) for name in ids], np.int64)
    field = query.text("field") or _first_field(shown, listing, places)
    if not field or not len(places):
        return bytes_reply(b"", Shape=[0, 0, 0], Field=field, Ids=[])
    small = [
        (name, picture)
        for name, place in zip(ids, places.tolist(), strict=True)
        if (picture := _picture(listing, place, field)) is not None
    ]
    height = max((picture.shape[0] for _, picture in small), default=0)
    width = max((picture.shape[1] for _, picture in small), default=0)
    out = np.zeros((len(small), height, width, 3), np.uint8)
    for i, (_, picture) in enumerate(small):
        out[i, : picture.shape[0], : picture.shape[1]] = picture
    return bytes_reply(out.tobytes(), Shape=[*out.shape[:3]], Field=field, Ids=[name for name, _ in small])


def _first_field(shown: Shown, listing: Listing, places: np.ndarray[Any, Any]) -> str:
    for place in places[:LOOKED_AT].tolist():
        for kind in kinds(shown, listing, listing.episodes[place]):
            if kind.kind == "frames":
                return kind.name
    return ""


def _picture(listing: Listing, place: int, field: str) -> np.ndarray[Any, Any] | None:
    """A picture of at most SIDE pixels; None of an episode that has none, or whose chunk is damaged."""
    try:
        data = Gather(listing.episodes[place : place + 1], [field], cache_bytes=0).rows([0], [0])
        leaf: Any = dict(frames.leaves(data)).get(field)
        packets = isinstance(leaf, list) and all(isinstance(one, np.ndarray) and one.ndim == 1 for one in leaf)
        found = frames.Pictures(decode(leaf)) if packets else frames.as_pictures(leaf)
    except MissingPackageError:
        raise
    except (ArchiveError, IndexError):
        return None
    if found is None:
        return None
    every = max(1, -(-max(found.pixels.shape[1:3]) // SIDE))
    picked: np.ndarray[Any, Any] = found.pixels[0, ::every, ::every]
    return picked
