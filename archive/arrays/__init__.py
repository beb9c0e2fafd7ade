"""Arithmetic on numpy arrays: ranges, and memory that is used again. Arrays come in, arrays go out."""

from __future__ import annotations

from archive.arrays.columns import arrow, numbers, texts, times
from archive.arrays.memory import Memory, Shelf, end_to_end, fresh, fresh_together, reuse_freed_memory, zeros
from archive.arrays.ranges import (
    MAX_BLOCK_BYTES,
    MAX_GAP_BYTES,
    MIN_GAP_BYTES,
    Ints,
    Mask,
    Pieces,
    coalesce,
    covered,
    group_of,
    merge_runs,
    offsets_of,
    run_heads,
    run_starts,
    run_tails,
    since_head,
    spans,
    sums,
    widest_gap,
)
from archive.arrays.steps import Steps, codes, places, row_codes

__all__ = [
    "MAX_BLOCK_BYTES",
    "MAX_GAP_BYTES",
    "MIN_GAP_BYTES",
    "Ints",
    "Mask",
    "Memory",
    "Pieces",
    "Shelf",
    "Steps",
    "arrow",
    "coalesce",
    "codes",
    "covered",
    "end_to_end",
    "fresh",
    "fresh_together",
    "group_of",
    "merge_runs",
    "numbers",
    "offsets_of",
    "places",
    "reuse_freed_memory",
    "row_codes",
    "run_heads",
    "run_starts",
    "run_tails",
    "since_head",
    "spans",
    "sums",
    "texts",
    "times",
    "widest_gap",
    "zeros",
]
