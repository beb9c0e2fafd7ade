"""Engine: pictures of an episode, some steps at a time. Chunks that were read are held, so that scrubbing back and
forth reads each once."""

from __future__ import annotations

from typing import Any

import numpy as np

from archive.base import UsageError
from archive.read import Gather
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, bytes_reply
from archive.views import frames

HELD_BYTES = 2**28  # decoded, of one episode
MOST_FRAMES = 64  # of one answer
MOST_BYTES = 2**25  # of one answer
LARGEST_SIDE = 1024  # pixels; of larger pictures every second, third, ... is shown


def pictures(shown: Shown, query: Query) -> Reply:
    """Frames [`start=`, `stop=`) of `field=` of episode `id=`, as many as fit, uint8 RGB one after the other.

    X-Shape: [frames, height, width]; X-Start; X-Note: what was done to show them; X-Every: of larger ones each n-th
    pixel. A field that is no picture is a UsageError.
    """
    field, start = query.needed("field"), query.number("start", 0)
    gather, length = _held(shown, query)
    stop = min(query.number("stop", start + 1), length, start + MOST_FRAMES)
    if start >= stop:
        raise UsageError(f"start={start}: the episode has steps 0 to {length - 1}")
    found = _read(shown, gather, field, start, stop)
    every = max(1, -(-max(found.pixels.shape[1:3]) // LARGEST_SIDE))
    pixels = np.ascontiguousarray(found.pixels[:, ::every, ::every])
    pixels = pixels[: max(1, MOST_BYTES // max(pixels[0].nbytes, 1))]
    facts = {"Shape": list(pixels.shape[:3]), "Start": start, "Note": found.note, "Every": every}
    return bytes_reply(pixels.tobytes(), **facts)


def _held(shown: Shown, query: Query) -> tuple[Gather, int]:
    """What reads steps of the episode, and holds what it has read; and how many there are."""
    listing, name = shown.listing(query), query.needed("id")
    place = listing.place_of(name)
    found = shown.kept(("gather", listing.key, name), lambda: _Gathers(listing.episodes[place : place + 1]))
    return found.of(query.needed("field")), int(found.lengths[0])


class _Gathers:
    """One cache for all the fields of an episode that are looked at."""

    def __init__(self, episodes: Any) -> None:
        self._first: Gather | None = None
        self._episodes = episodes
        self._of: dict[str, Gather] = {}
        self.lengths = episodes.lengths()

    def of(self, field: str) -> Gather:
        if field not in self._of:
            made = Gather(self._episodes, [field], cache_bytes=HELD_BYTES) if self._first is None else None
            self._first = self._first or made
            assert self._first is not None
            self._of[field] = made or self._first.also([field])
        return self._of[field]


def _read(shown: Shown, gather: Gather, field: str, start: int, stop: int) -> frames.Pictures:
    steps = np.arange(start, stop)
    data = gather.rows(np.zeros(len(steps), np.int64), steps)
    leaf = dict(frames.leaves(data)).get(field)
    found = frames.as_pictures(leaf)
    if found is None:
        raise UsageError(f"field {field!r} holds no pictures")
    return found
