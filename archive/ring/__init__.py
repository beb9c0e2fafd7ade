"""Rings of tensors [num_envs, max_length, ...]: a live ring comes in and is archived; a share comes in, and a
ring goes out."""

from __future__ import annotations

from archive.ring.filled import Filled, fill, rebuild
from archive.ring.rings import MAX_CALL_BYTES, append

__all__ = [
    "MAX_CALL_BYTES",
    "Filled",
    "append",
    "fill",
    "rebuild",
]
