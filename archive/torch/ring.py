"""Rings of tensors `[num_envs, max_length, ...]`: `append` archives a live ring, `fill` makes one of a share."""

from __future__ import annotations

from archive.torch.filled import Filled, fill, rebuild
from archive.torch.rings import MAX_CALL_BYTES, append

__all__ = [
    "MAX_CALL_BYTES",
    "Filled",
    "append",
    "fill",
    "rebuild",
]
