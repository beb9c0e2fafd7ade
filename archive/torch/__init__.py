"""Torch users' side of the archive: rings of tensors. Nothing below `archive` itself needs torch."""

from __future__ import annotations

from archive.torch import ring

__all__ = ["ring"]
