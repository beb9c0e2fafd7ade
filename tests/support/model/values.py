"""Fields of several kinds, all of which follow from the serials of their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive import Schema

KINDS = ("plain", "image", "text", "ragged")
KIND_OF = {"replay": "image", "demo": "ragged"}  # of what is appended to streams
SCHEMA = Schema(axes={"tokens": "ragged"}, next_of={"next/x": "x"})


def fields_of(kind: str, serials: Sequence[int]) -> dict[str, Any]:
    """The nest of these steps."""
    t = np.array(serials, np.int64)
    out: dict[str, Any] = {"serial": t, "reward": t * 0.5}
    if kind == "image":
        out["obs"] = {"image": np.repeat(t[:, None] % 251, 6, 1).astype(np.uint8).reshape(-1, 2, 3)}
        out["x"] = np.stack([t, -t], 1).astype(np.float32)
        out["next"] = {"x": out["x"] + np.float32(1)}
    elif kind == "text":
        out["text"] = np.array([f"{s}é" * (s % 3) for s in serials], object)
        out["deep"] = {"er": {"flag": t % 2 == 0, "half": t.astype(np.float16)}}
    elif kind == "ragged":
        out["tokens"] = [np.arange(s, s + s % 4, dtype=np.int32) for s in serials]
        out["nested"] = {"id": t.astype(np.int16)}
    return out


def priority(serials: Sequence[int]) -> np.ndarray[Any, Any]:
    """The priority that each of these steps has."""
    return np.asarray(serials, np.float64) * 3 + 1
