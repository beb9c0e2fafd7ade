"""Whole archives: archives come in; merged, split, filtered, compacted or exported ones go out."""

from __future__ import annotations

from resharding.transfer.compaction import Compacted, compact, compactable
from resharding.transfer.exports import export
from resharding.transfer.transfer import filter, merge, reshard, split

__all__ = [
    "Compacted",
    "compact",
    "compactable",
    "export",
    "filter",
    "merge",
    "reshard",
    "split",
]
