"""Pure, no I/O: the page of one episode, of a bounded size: pictures that play, a conversation, curves, texts."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from archive.base import MAX_PAGE_BYTES, UsageError, size
from archive.views import charts, frames, page, rollouts, summaries, texts
from archive.views.budget import FIELD_BYTES, Part, Shown, dealt
from archive.views.conversation import Conversation
from archive.views.markup import Markup, facts, join, section, shown, table, tag
from archive.views.tokens import Decode

EXACT_FLOAT32 = 2**24  # integers beyond have no float32 of their own
POINT_BYTES, VALUE_BYTES = 13, 16 / 3  # of a point of a line, and of a value beside it
MIN_SHARE = 0.002  # of a curve's points; one of fewer is left out


class Curves:
    """The components of a field as lines over the steps, as a part of a page. `components`: how many there are."""

    kind = place = "curves"

    def __init__(self, path: str, lines: Mapping[str, frames.Array], components: int) -> None:
        self.path = path
        self.lines = lines
        self.components = components
        self.length = len(next(iter(lines.values())))
        each = POINT_BYTES * min(self.length, charts.MAX_POINTS) + VALUE_BYTES * self.length
        self.need = int(len(lines) * each) + FIELD_BYTES

    def shown(self, most: int) -> Shown:
        """Above the lines the values at the step shown, below from where to where they go."""
        share = min(1.0, (most - FIELD_BYTES) / max(1, self.need - FIELD_BYTES))
        if share < MIN_SHARE:
            return Shown(left_out=f"{self.path}: its curves")
        every = int(np.ceil(1 / share))
        thinned = f"one value in {every}" if every > 1 else ""
        left_out = f"{self.path}: {thinned}" if thinned else ""
        if not self.length:
            return Shown(played=self._values(every), left_out=left_out)
        drawn = charts.lines(self.lines, width=960, height=90, points=max(2, int(charts.MAX_POINTS * share)))
        known = np.concatenate([v[np.isfinite(v)] for v in self.lines.values()])
        span = f"{shown(float(known.min()))} … {shown(float(known.max()))}" if len(known) else "no finite value"
        more = self.components > len(self.lines)
        some = f"the first {len(self.lines)} of {self.components} are shown" if more else ""
        keys = [tag("span", charts.swatch(i), name, tag("b"), class_="key") for i, name in enumerate(self.lines)]
        box = tag("div", drawn, tag("div", class_="cursor"), class_="curve", data_field=self.path)
        caption = tag("figcaption", "; ".join(filter(None, (span, some, thinned))))
        markup = section(self.path, tag("div", *keys, class_="keys"), box, caption)
        return Shown(markup, self._values(every), left_out)

    def _values(self, every: int) -> dict[str, Any]:
        """The numbers of all lines, one after the other, as float32 where that has the digits that are shown."""
        values = np.stack([line[::every] for line in self.lines.values()])
        wide = np.abs(values[np.isfinite(values)]).max(initial=0) > EXACT_FLOAT32
        packed = values.astype("<f8" if wide else "<f4")
        text = base64.b64encode(packed.tobytes()).decode()
        width = packed.dtype.itemsize
        return {"length": values.shape[1], "of": self.length, "every": every, "width": width, "values": text}


MAX_FILM_BYTES = 24 * 1024 * 1024  # of one field's pictures, before they are packed
MIN_FILM_SIDE = 112  # pixels that a picture keeps if there is not room for all
LEVEL = 6  # of deflate
SAMPLES = 8  # pictures that tell how well the others pack
SPARE = 1.25  # of what the samples say, as others may pack less well
MIN_BYTES = 400  # what a film takes beside its pictures


class Film:
    """The pictures of a field, as a part of the page of an episode of so many steps."""

    kind = place = "films"

    def __init__(self, path: str, pictures: frames.Pictures, steps: int) -> None:
        self.path = path
        self.pictures = pictures
        self.steps = steps
        self.packing = _packing(pictures.pixels)
        self.need = int(min(pictures.pixels.nbytes, MAX_FILM_BYTES) * self.packing * SPARE) + MIN_BYTES

    def shown(self, most: int) -> Shown:
        """Of more than there is room for, every second, third, ... row and column, then every n-th picture."""
        made = self._fitted(most - MIN_BYTES)
        if made is None:
            return Shown(left_out=f"{self.path}: its pictures")
        thinned = made["note"].partition("pixels; ")[2]
        style = f"width:{min(640, max(168, 2 * made['width']))}px"
        size = {"width": made["width"], "height": made["height"], "style": style}
        canvas = tag("canvas", class_="frames", data_field=self.path, **size)
        left_out = f"{self.path}: {thinned}" if thinned else ""
        return Shown(section(self.path, canvas, tag("figcaption", made["note"])), made, left_out)

    def _fitted(self, most: int) -> dict[str, Any] | None:
        """What the script is given, of at most so many characters of pixels; None if no picture fits."""
        limit = min(MAX_FILM_BYTES, int(most / self.packing))
        while limit > 0:
            made = self._thinned(limit)
            if len(made["pixels"]) <= most:
                return made
            if made["count"] == 1 and min(made["width"], made["height"]) < 2 * frames.MIN_SIDE:
                return None
            limit = int(limit * min(0.9, 0.98 * most / len(made["pixels"])))
        return None

    def _thinned(self, limit: int) -> dict[str, Any]:
        """At most `limit` bytes of pixels, but one picture of few pixels at least."""
        pixels = self.pictures.pixels
        count, height, width, _ = pixels.shape
        apart = _apart(pixels.nbytes, limit, min(height, width), 1, MIN_FILM_SIDE)
        apart = _apart(pixels.nbytes // max(1, count), limit, min(height, width), apart, frames.MIN_SIDE)
        pixels = pixels[:, ::apart, ::apart]
        every = max(1, -(-pixels.nbytes // max(1, limit)))
        kept = np.ascontiguousarray(pixels[::every])
        notes = (
            self.pictures.note,
            f"{height} x {width} pixels",
            f"one row and column in {apart}" if apart > 1 else "",
            f"one picture in {every}" if every > 1 else "",
        )
        return {
            "width": kept.shape[2],
            "height": kept.shape[1],
            "count": len(kept),
            "every": max(1, round(self.steps / count)) * every,
            "pixels": base64.b64encode(zlib.compress(kept.tobytes(), LEVEL)).decode(),
            "note": "; ".join(filter(None, notes)),
        }


def _apart(nbytes: int, limit: int, side: int, apart: int, min_side: int) -> int:
    """One row and column in how many is kept, so that they fit, or as many are left as there must be."""
    while nbytes > limit * apart**2 and side // (apart + 1) >= min_side:
        apart += 1
    return apart


def _packing(pixels: frames.Array) -> float:
    """Characters of a page for a byte of pixels."""
    if not len(pixels):
        return 1.0
    some = np.ascontiguousarray(pixels[np.unique(np.linspace(0, len(pixels) - 1, SAMPLES).astype(np.int64))])
    return max(len(zlib.compress(some.tobytes(), LEVEL)) / max(1, some.nbytes), 1e-3) * 4 / 3


PART_BYTES = 200  # of each part's frame, at most
UNBOUNDED = 2**62
TRIES = 6
PLACES = ("films", "rollout", "written", "curves", "numbers")  # of the parts, from top to bottom


def episode(
    about: Mapping[str, Any], fields: Mapping[str, str], metadata: Any, attributes: Any, data: Any,
    decode: Decode | None = None, max_bytes: int | None = MAX_PAGE_BYTES,
) -> str:  # fmt: skip
    """A page of one episode: pictures that play, what was said, curves with their values, and the text of each step.

    `data` is what reading it gave; `decode` makes text of token ids. What `max_bytes` leaves no room for is said there;
    UsageError if not even that fits.
    """
    free = {path for path, kind in fields.items() if kind.rpartition(" ")[2] == "free"}
    whole = {path: leaf for path, leaf in frames.leaves(data) if path in free}
    leaves = {path: leaf for path, leaf in frames.leaves(data) if path not in free}
    rollout = rollouts.find(leaves, whole, metadata, int(about["steps"]))
    parts = [*_parts(leaves, rollout, int(about["steps"]))]
    parts += [Conversation(rollout, decode)] if rollout else []
    made = _Page(about, parts, whole, summaries.episode(fields, metadata, attributes))
    return made.whole() if max_bytes is None else made.within(max_bytes)


def _parts(leaves: Mapping[str, Any], rollout: rollouts.Rollout | None, steps: int) -> Iterator[Part]:
    """What each field is shown as, that is not shown with the conversation."""
    ids = {track.path for track in rollout.tracks} if rollout else set()
    in_conversation = rollout.paths | (ids if rollout.flat else set()) if rollout else set()
    for path, leaf in leaves.items():
        if path in in_conversation:
            continue
        if path not in ids and (pictures := frames.as_pictures(leaf)):
            yield Film(path, pictures, steps)
        elif path not in ids and (lines := frames.as_curves(leaf)):
            yield Curves(path, lines, frames.components(leaf))
        elif text := texts.as_texts(leaf):
            yield texts.TextPart(path, text)


class _Page:
    """A page of these parts; `free`: fields of the whole episode; `after`: what stands at its end."""

    def __init__(self, about: Mapping[str, Any], parts: Sequence[Part], free: Mapping[str, Any], after: Markup) -> None:
        self.about = about
        self.steps = int(about["steps"])
        self.parts = parts
        self.free = _free(free)
        self.after = after

    def whole(self) -> str:
        """All of it, whatever that takes."""
        return self._text([part.shown(UNBOUNDED) for part in self.parts], "Left out")

    def within(self, max_bytes: int) -> str:
        """As much as fits."""
        space = max_bytes - len(self._text([], "").encode()) - PART_BYTES * len(self.parts)
        why, text = f"Left out, as this page is held to {size(max_bytes)}", ""
        for _ in range(TRIES):
            given = dealt({f"{part.kind} {part.path}": part.need for part in self.parts}, space)
            shown = [part.shown(given[f"{part.kind} {part.path}"]) for part in self.parts]
            text = self._text(shown, why)
            over = len(text.encode()) - max_bytes
            if over <= 0:
                return text
            space -= over + over // 8 + 64
            if space < 0:
                break
        raise UsageError(
            f"the page of episode {self.about['id']!r} does not fit into max_bytes={max_bytes}: it takes "
            f"{len(text.encode())} with next to nothing on it; allow more, or name fewer fields="
        )

    def _text(self, shown: Sequence[Shown], why: str) -> str:
        played: dict[str, Any] = {"steps": self.steps, "films": {}, "texts": {}, "curves": {}}
        drawn: dict[str, dict[str, Markup]] = {name: {} for name in PLACES}
        for part, one in zip(self.parts, shown, strict=False):
            if part.kind == "rollout":
                played["rollout"] = one.played
            elif one.played is not None:
                played[part.kind][part.path] = one.played
            if one.markup:
                drawn[part.place][part.path] = one.markup
        left_out = [tag("li", one.left_out) for one in shown if one.left_out]
        films, rollout, written, curves = (join(drawn[name].values()) for name in PLACES[:4])
        content = [
            facts(self.about),
            tag("section", tag("h4", why), tag("ul", *left_out), id="left") if left_out else "",
            _player(self.steps),
            tag("div", films, class_="films") if films else "",
            rollout, written, curves, _folded(drawn["numbers"]), self.free, self.after,
        ]  # fmt: skip
        own = (("page", "rollout"), ("rollout", "page")) if rollout else (("page",), ("page",))
        return page.document(str(self.about["id"]), content, played if self.steps else None, *own)


def _player(steps: int) -> Markup:
    if not steps:
        return Markup("")
    speeds = [tag("option", f"{n} a second", value=n, selected="" if n == 10 else None) for n in (2, 10, 30, 60)]
    return tag(
        "div",
        tag("button", "Play", id="play", type="button"),
        tag("input", id="step", type="range", min=0, max=steps - 1, value=0, aria_label="step"),
        tag("span", id="at"),
        tag("select", *speeds, id="speed", aria_label="steps a second"),
        id="player",
    )


def _folded(numbers: Mapping[str, Markup]) -> Markup:
    """Lists of numbers, which are long and seldom looked at."""
    if not numbers:
        return Markup("")
    return tag("details", tag("summary", f"Lists of numbers: {', '.join(numbers)}"), join(numbers.values()))


def _free(leaves: Mapping[str, Any]) -> Markup:
    """What belongs to the episode and not to its steps."""
    rows = [[path, texts.readable(leaf)] for path, leaf in leaves.items()]
    return section("Of the whole episode", table(("field", "value"), rows)) if rows else Markup("")
