"""Pure, no I/O: pictures as a page plays them: deflated pixels, of fewer rows,
columns and pictures where room is short."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from archive.views import frames
from archive.views.budget import Shown
from archive.views.markup import section, tag

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
