"""Whole archives: archives come in; merged, split, filtered, compacted or exported ones go out."""

from __future__ import annotations

from resharding.transfer.compaction import Compacted, compact, compactable
from resharding.transfer.exporting import export
from resharding.transfer.merging import filter, merge, split
from resharding.transfer.resaving import reshard

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
