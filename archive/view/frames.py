"""Pure, no I/O: which fields are pictures or curves, and their steps in the form in which they are shown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from archive.view.notebook import shown

Array = np.ndarray[Any, Any]
Scale = tuple[float, float]  # what is black, what is white
MIN_SIDE = 8  # of a picture, in pixels; less is a small matrix
MAX_CHANNELS = 16
MAX_CURVES = 16  # of one field; of more, the first
EXACT = 2**53  # integers beyond have no float64 of their own
COLORED, GREY = (3, 6, 9, 12), (1, 4)  # numbers of channels, with those of frames stacked on one another


class Pictures(NamedTuple):
    """Pictures over the steps, and what was done to them to show them."""

    pixels: Array  # (T, height, width, 3) uint8
    note: str = ""


def leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nest as episodes are read."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", _plain(value)


def _plain(leaf: Any) -> Any:
    """bfloat16 and float8 as float32."""
    foreign = isinstance(leaf, np.ndarray) and leaf.dtype.kind == "V" and leaf.dtype.names is None
    return leaf.astype(np.float32) if foreign else leaf


def as_pictures(leaf: Any, scale: Scale | None = None) -> Pictures | None:
    """The pictures of a field, one a step; None of what is none.

    Channels first or last, 1, 3 or 4 of them, or none; of frames stacked on one another, the newest. What isn't uint8
    is drawn from black to white by the scale, or else by its own, as `scale_of` finds it.
    """
    picked, note = _picked(leaf)
    if picked is None:
        return None
    grey, told = _as_uint8(picked, scale)
    pixels = np.ascontiguousarray(np.broadcast_to(grey, (*grey.shape[:3], 3)))
    return Pictures(pixels, _noted(note, told))


def scale_of(leaf: Any) -> Scale | None:
    """The ends of the scale of pictures: their least value and their greatest, numbers from 0 to 1 from 0 to 1.
    None of what needs no scale: bytes, and what is no picture."""
    picked, _ = _picked(leaf)
    return None if picked is None or picked.dtype in (np.uint8, np.bool_) else _ends(picked)


def _picked(leaf: Any) -> tuple[Array | None, str]:
    """(T, height, width, 1 or 3) of a field of pictures, and what was left out; None of what is none."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "buif" or not leaf.size or not 3 <= leaf.ndim <= 5:
        return None, ""
    if leaf.ndim == 5:
        newest, note = _picked(leaf[:, -1])
        return newest, _noted(f"the last of {leaf.shape[1]}", note)
    picked, note = (leaf[..., None], "") if leaf.ndim == 3 else _channels(leaf)
    if picked is None or min(picked.shape[1:3]) < MIN_SIDE:
        return None, ""
    return picked, note


def _channels(leaf: Array) -> tuple[Array | None, str]:
    """(T, height, width, 1 or 3) of (T, ?, ?, ?), and which channels they are."""
    first = leaf.shape[1] <= MAX_CHANNELS and leaf.shape[1] < min(leaf.shape[2:])
    leaf = np.moveaxis(leaf, 1, 3) if first else leaf
    count = leaf.shape[3]
    if count == 4 and leaf.dtype == np.uint8 and (leaf[..., 3] == 255).all():
        return leaf[..., :3], ""  # opaque
    if count in COLORED:
        return leaf[..., -3:], f"the newest of {count // 3} frames" if count > 3 else ""
    if count in GREY:
        return leaf[..., -1:], f"the newest of {count} frames" if count > 1 else ""
    return None, ""


def _as_uint8(values: Array, scale: Scale | None) -> tuple[Array, str]:
    """Any numbers as uint8, and from where to where; those beyond the scale are its ends."""
    if values.dtype == np.uint8:
        return values, ""
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255, ""
    low, high = scale or _ends(values)
    known = np.clip(np.nan_to_num(values, nan=low, posinf=high, neginf=low), low, high)
    scaled = (known - low) * (255 / ((high - low) or 1.0))
    return np.rint(scaled).astype(np.uint8), f"{shown(low)} (black) … {shown(high)} (white)"


def _ends(values: Array) -> Scale:
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    return (0.0, 1.0) if values.dtype.kind == "f" and low >= 0 and high <= 1 else (low, high)


def _noted(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def as_curves(leaf: Any) -> dict[str, Array] | None:
    """Component -> values over the steps, of a field of numbers or small vectors; None of what is none."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biuf" or leaf.ndim < 1:
        return None
    flat = leaf.reshape(len(leaf), components(leaf))
    if flat.shape[1] > 4 * MAX_CURVES or (leaf.dtype == np.uint8 and leaf.ndim > 2):
        return None
    if leaf.dtype.kind in "iu" and leaf.size and (int(leaf.max()) > EXACT or int(leaf.min()) < -EXACT):
        return None
    names = [""] if leaf.ndim == 1 else [str(i) for i in range(flat.shape[1])]
    return {name: flat[:, i].astype(np.float64) for i, name in enumerate(names[:MAX_CURVES])}


def components(leaf: Array) -> int:
    """Numbers a step."""
    return math.prod(leaf.shape[1:])
