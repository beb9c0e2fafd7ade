"""Shares: a plan and a rank come in; that rank's episodes, columns and states go out."""

from __future__ import annotations

from resharding.sharing.share import Share
from resharding.sharing.sharebuffer import ShareBuffer

__all__ = [
    "Share",
    "ShareBuffer",
]
