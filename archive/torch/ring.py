"""Rings of tensors under their public name: `from archive.torch import ring`."""

from __future__ import annotations

from archive.ring import *  # noqa: F403
