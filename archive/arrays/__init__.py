"""Arithmetic on numpy arrays: ranges, and memory that is used again. Arrays come in, arrays go out."""

from __future__ import annotations

from archive.arrays.memory import Memory, Shelf, end_to_end
from archive.arrays.ranges import Ints, coalesce, covered, merge_runs, spans, sums, widest_gap

__all__ = [
    "Ints",
    "Memory",
    "Shelf",
    "coalesce",
    "covered",
    "end_to_end",
    "merge_runs",
    "spans",
    "sums",
    "widest_gap",
]
