"""Engine: pictures of an episode, some steps at a time. Chunks that were read are held, so that scrubbing back and
forth reads each once."""

from __future__ import annotations

from typing import Any

import numpy as np

from archive.arrays import Ints
from archive.base import UsageError
from archive.read import Gather
from archive.view.answers.shown import Shown
from archive.view.web import Query, Reply, bytes_reply
from archive.views import frames

HELD_BYTES = 2**28  # decoded, of one episode
MOST_FRAMES = 64  # of one answer
MOST_BYTES = 2**25  # of one answer
SCALED = 64  # steps that say how dark numbers are drawn
LARGEST_SIDE = 1024  # pixels; of larger pictures every second, third, ... is shown


def pictures(shown: Shown, query: Query) -> Reply:
    """Frames [`start=`, `stop=`) of `field=` of episode `id=`, as many as fit, uint8 RGB one after the other.

    X-Shape: [frames, height, width]; X-Start; X-Note: what was done to show them; X-Every: of larger ones each n-th
    pixel. A field that is no picture is a UsageError.
    """
    field, start = query.needed("field"), query.number("start", 0)
    held = _held(shown, query)
    length = held.length
    stop = min(query.number("stop", start + 1), length, start + MOST_FRAMES)
    if start >= stop:
        raise UsageError(f"start={start}: the episode has steps 0 to {length - 1}")
    found = held.pictures(field, np.arange(start, stop))
    every = max(1, -(-max(found.pixels.shape[1:3]) // LARGEST_SIDE))
    pixels = np.ascontiguousarray(found.pixels[:, ::every, ::every])
    pixels = pixels[: max(1, MOST_BYTES // max(pixels[0].nbytes, 1))]
    facts = {"Shape": list(pixels.shape[:3]), "Start": start, "Note": found.note, "Every": every}
    return bytes_reply(pixels.tobytes(), **facts)


def _held(shown: Shown, query: Query) -> _Held:
    """What reads steps of the episode, and holds what it has read."""
    listing, name = shown.listing(query), query.needed("id")
    place = listing.place_of(name)
    return shown.kept(("gather", listing.key, name), lambda: _Held(listing.episodes[place : place + 1]))


class _Held:
    """One cache for all the fields of an episode that are looked at."""

    def __init__(self, episodes: Any) -> None:
        self._first: Gather | None = None
        self._episodes = episodes
        self._of: dict[str, Gather] = {}
        self._scales: dict[str, frames.Scale | None] = {}
        self.length = int(episodes.lengths()[0])

    def pictures(self, field: str, steps: Ints) -> frames.Pictures:
        """The pictures of these steps, all of an episode on one scale; UsageError of what is none."""
        leaf = self._leaf(field, steps)
        if field not in self._scales:
            self._scales[field] = self._scale(field, leaf)
        found = frames.as_pictures(leaf, self._scales[field])
        if found is None:
            raise UsageError(f"field {field!r} holds no pictures")
        return found

    def _scale(self, field: str, leaf: Any) -> frames.Scale | None:
        """That of some of its steps, from the first to the last; bytes have none, and nothing is read for it."""
        if frames.scale_of(leaf) is None:
            return None
        return frames.scale_of(self._leaf(field, np.unique(np.linspace(0, self.length - 1, SCALED).astype(np.int64))))

    def _leaf(self, field: str, steps: Ints) -> Any:
        data = self._gather(field).rows(np.zeros(len(steps), np.int64), steps)
        return dict(frames.leaves(data)).get(field)

    def _gather(self, field: str) -> Gather:
        if field not in self._of:
            made = Gather(self._episodes, [field], cache_bytes=HELD_BYTES) if self._first is None else None
            self._first = self._first or made
            assert self._first is not None
            self._of[field] = made or self._first.also([field])
        return self._of[field]
