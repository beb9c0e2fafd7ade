"""Rings of tensors [num_envs, max_length, ...]: a live ring comes in and is archived; a share comes in, and a
ring goes out."""

from __future__ import annotations

from archive.ring.appending import MAX_CALL_BYTES, append
from archive.ring.refilling import Filled, fill, rebuild

__all__ = [
    "MAX_CALL_BYTES",
    "Filled",
    "append",
    "fill",
    "rebuild",
]
