"""Pictures of an episode, some steps at a time, and the first ones of many. Chunks that were read are held, so that
scrubbing back and forth reads each once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from archive.adapters.video import decode, decoded, is_key
from archive.arrays import Ints
from archive.base import ArchiveError, FieldError, MissingPackageError, UsageError
from archive.read import Gather
from archive.view import frames
from archive.view.fields import kinds
from archive.view.shown import Listing, Shown
from archive.view.wire import Query, Reply, bytes_reply

HELD_BYTES = 2**27  # decoded, of one episode; of all that is kept see Shown
MOST_FRAMES = 64  # of one answer
MOST_BYTES = 2**25  # of one answer
BACK = 8  # steps that are looked back first for a key frame
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
    """Return a reader of the episode's steps, which holds what it has read."""
    listing, name = shown.listing(query), query.needed("id")
    place = listing.place_of(name)

    def made() -> _Held:
        episodes = listing.episodes[place : place + 1]
        films = [kind.name for kind in kinds(shown, listing, episodes[0]) if kind.bytes and kind.kind == "frames"]
        return _Held(episodes, films)

    return shown.kept(("gather", listing.key, name), made)


class _Held:
    """One cache for all the fields of an episode that are looked at."""

    def __init__(self, episodes: Any, films: Collection[str]) -> None:
        """films: the fields that are packets of video."""
        self._films = {name: _Film(episodes[0], name) for name in films}
        self._first: Gather | None = None
        self._episodes = episodes
        self._of: dict[str, Gather] = {}
        self._scales: dict[str, frames.Scale | None] = {}
        self.length = int(episodes.lengths()[0])

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(one.nbytes for one in self._films.values()) + (0 if self._first is None else self._first.held_bytes)

    @property
    def most_bytes(self) -> int:
        """Bytes that it may come to hold."""
        return HELD_BYTES

    def pictures(self, field: str, steps: Ints) -> frames.Pictures:
        """The pictures of these steps, all of an episode on one scale; UsageError of what is none."""
        if field in self._films:
            return frames.Pictures(self._films[field].pictures(int(steps[0]), int(steps[-1]) + 1))
        leaf = self._leaf(field, steps)
        if field not in self._scales:
            self._scales[field] = self._scale(field, leaf)
        found = frames.as_pictures(leaf, self._scales[field])
        if found is None:
            raise UsageError(f"field {field!r} holds no pictures")
        return found

    def _scale(self, field: str, leaf: Any) -> frames.Scale | None:
        """The scale of some of its steps, from the first to the last; bytes have none, and nothing is read for it."""
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


class _Film:
    """A field of packets of video; those that were read last are held."""

    def __init__(self, episode: Any, field: str) -> None:
        self._episode, self._field = episode, field
        self._held: tuple[int, list[Any]] = (0, [])  # the step of the first packet, and they

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(int(packet.nbytes) for packet in self._held[1])

    def pictures(self, start: int, stop: int) -> Any:
        """Pictures of steps [start, stop), as many as fit, decoded from the key frame before them on."""
        (first, packets), back = self._held, BACK
        while (key := self._key(first, packets, start, stop)) is None and back:
            first = max(0, start - back)
            data = self._episode.read([self._field], first, max(stop, start + MOST_FRAMES))
            packets, back = dict(frames.leaves(data))[self._field], 4 * back if first else 0
        if key is None:
            raise FieldError(
                f"field {self._field!r} has no key frame at or before step {start}; where that has left the buffer, "
                "the steps up to the next one cannot be decoded"
            )
        self._held = first, packets
        out: list[Any] = []
        for picture in decoded(packets[key - first : stop - first], skip=start - key):
            out.append(picture)
            if len(out) * picture.nbytes >= HELD_BYTES:
                break
        return np.stack(out)

    def _key(self, first: int, packets: list[Any], start: int, stop: int) -> int | None:
        """The step of the newest key frame up to `start` of packets that hold all from there to `stop`."""
        if not first <= start < stop <= first + len(packets):
            return None
        return next((i for i in range(start, first - 1, -1) if is_key(packets[i - first].tobytes())), None)


SIDE = 96  # pixels
MOST_EPISODES = 64  # episodes of one answer
LOOKED_AT = 8  # episodes whose fields say which is the picture


def strip(shown: Shown, query: Query) -> Reply:
    """The first frames of the episodes `ids=`, uint8 RGB one after the other, of `field=` or else of the first field of
    pictures. X-Shape: [episodes, height, width]; X-Field; X-Ids: those that have one."""
    listing, ids = shown.listing(query), query.names("ids")
    if len(ids) > MOST_EPISODES:
        raise UsageError(f"{len(ids)} ids: at most {MOST_EPISODES} at once")
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
