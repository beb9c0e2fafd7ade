"""Pure, no I/O: which fields are pictures, curves or text, and their steps in the form in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from archive.tree import Ragged

Array = np.ndarray[Any, Any]
MIN_SIDE = 8  # of a picture, in pixels; less is a small matrix
MAX_CURVES = 16  # of one field; of more, the first


def leaves(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nest as episodes are read."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def as_frames(leaf: Any) -> Array | None:
    """(T, height, width, 3) uint8 of a uint8 field of pictures; None of what is none.

    Channels first or last, 1, 3 or 4 of them, or none; of a stack of grey frames, the newest.
    """
    if not isinstance(leaf, np.ndarray) or leaf.dtype != np.uint8 or not 3 <= leaf.ndim <= 4 or not leaf.size:
        return None
    if leaf.ndim == 4:
        channels_first = leaf.shape[1] <= 4 and leaf.shape[3] > 4
        leaf = np.moveaxis(leaf, 1, 3) if channels_first else leaf
        if leaf.shape[3] not in (1, 3, 4):
            return None
        leaf = leaf[..., -1:] if channels_first and leaf.shape[3] == 4 else leaf[..., :3]
    else:
        leaf = leaf[..., None]
    if min(leaf.shape[1:3]) < MIN_SIDE:
        return None
    return np.ascontiguousarray(np.broadcast_to(leaf, (*leaf.shape[:3], 3)))


def as_curves(leaf: Any) -> dict[str, Array] | None:
    """Component -> values over the steps, of a field of numbers or small vectors; None of what is none."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biuf" or leaf.ndim < 1:
        return None
    flat = leaf.reshape(len(leaf), -1) if leaf.size else leaf.reshape(len(leaf), 0)
    if flat.shape[1] > 4 * MAX_CURVES or (leaf.dtype == np.uint8 and leaf.ndim > 2):
        return None
    names = [""] if leaf.ndim == 1 else [str(i) for i in range(flat.shape[1])]
    return {name: flat[:, i].astype(np.float64) for i, name in enumerate(names[:MAX_CURVES])}


def as_texts(leaf: Any) -> list[str] | None:
    """The text of each step, of strings, JSON or tokens; None of what is none."""
    if isinstance(leaf, Ragged):
        return as_texts(leaf.split())
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OUT" and leaf.ndim == 1:
        return [str(value) for value in leaf.tolist()]
    if isinstance(leaf, list):
        return [_text(value) for value in leaf]
    return None


def _text(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return " ".join(f"{v:.5g}" if isinstance(v, float) else str(v) for v in value.reshape(-1).tolist())
    return str(value)
