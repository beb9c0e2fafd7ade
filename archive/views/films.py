"""Pure, no I/O: pictures as a page plays them: deflated pixels, of fewer rows, columns and pictures where room is short."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from archive.views import frames

MAX_FILM_BYTES = 24 * 1024 * 1024  # of one field's pictures, before they are packed
MIN_FILM_SIDE = 112  # pixels that a picture keeps if there is not room for all
LEVEL = 6  # of deflate
SAMPLES = 8  # pictures that tell how well the others pack
SPARE = 1.25  # of what the samples say, as others may pack less well
MIN_BYTES = 400  # what a film takes beside its pictures


def need(film: frames.Film) -> int:
    """About how many bytes of a page it takes."""
    nbytes = min(film.pixels.nbytes, MAX_FILM_BYTES)
    return int(nbytes * _packing(film.pixels) * SPARE) + MIN_BYTES


def packed(film: frames.Film, steps: int, most: int) -> dict[str, Any] | None:
    """Of more than there is room for, every second, third, ... row and column, then every n-th picture; None if no
    picture fits."""
    share = _packing(film.pixels)
    room = most - MIN_BYTES
    limit = min(MAX_FILM_BYTES, int(room / share))
    while limit > 0:
        made = _film(film, steps, limit)
        if len(made["pixels"]) <= room:
            return made
        if made["count"] == 1 and min(made["width"], made["height"]) < 2 * frames.MIN_SIDE:
            return None
        limit = int(limit * min(0.9, 0.98 * room / len(made["pixels"])))
    return None


def _packing(pixels: frames.Array) -> float:
    """Characters of a page for a byte of pixels."""
    if not len(pixels):
        return 1.0
    some = np.ascontiguousarray(pixels[np.unique(np.linspace(0, len(pixels) - 1, SAMPLES).astype(np.int64))])
    return max(len(zlib.compress(some.tobytes(), LEVEL)) / max(1, some.nbytes), 1e-3) * 4 / 3


def _film(film: frames.Film, steps: int, limit: int) -> dict[str, Any]:
    """At most `limit` bytes of pixels, but one picture of few pixels at least."""
    shots, notes = film.pixels, [film.note]
    count, height, width, _ = shots.shape
    apart = 1
    while shots.nbytes > limit * apart**2 and min(height, width) // (apart + 1) >= MIN_FILM_SIDE:
        apart += 1
    one = shots.nbytes // max(1, count)
    while one > limit * apart**2 and min(height, width) // (apart + 1) >= frames.MIN_SIDE:
        apart += 1
    shots = shots[:, ::apart, ::apart]
    every = max(1, -(-shots.nbytes // max(1, limit)))
    kept = np.ascontiguousarray(shots[::every])
    notes += [f"{height} x {width} pixels", f"one row and column in {apart}" if apart > 1 else ""]
    notes += [f"one picture in {every}" if every > 1 else ""]
    per_frame = max(1, round(steps / count)) * every
    return {
        "width": kept.shape[2], "height": kept.shape[1], "count": len(kept), "every": per_frame,
        "pixels": base64.b64encode(zlib.compress(kept.tobytes(), LEVEL)).decode(),
        "note": "; ".join(filter(None, notes)), "thinned": apart > 1 or every > 1,
    }  # fmt: skip
