"""Pure, no I/O: the pieces of segments behind parts of units, where they stand, and values that follow their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, merge_runs
from archive.manifest import Located
from resharding.placing.assignment import Parts
from resharding.placing.source import SourceBuffer


def cut_pieces(source: SourceBuffer, parts: Parts) -> tuple[Ints, Located, Ints, Ints]:
    """The pieces of segments behind parts of units."""
    offsets = source.offsets
    first, last = offsets[parts.unit], offsets[parts.unit + 1]
    counts = last - first
    ends = np.cumsum(counts)
    index = np.arange(int(counts.sum())) + np.repeat(first - (ends - counts), counts)
    pieces = source.pieces.pick(index)
    steps = pieces.hi - pieces.lo
    total = np.cumsum(source.pieces.hi - source.pieces.lo)
    before = (total - (source.pieces.hi - source.pieces.lo))[index] - np.repeat(
        np.concatenate([[0], total])[first], counts
    )  # steps of the unit before this piece
    lo = np.clip(np.repeat(parts.lo, counts) - before, 0, steps)
    hi = np.clip(np.repeat(parts.hi, counts) - before, 0, steps)
    keep = (hi > lo) | (steps == 0)
    owner = np.repeat(np.arange(len(parts.unit)), counts)[keep]
    cut = pieces._replace(lo=pieces.lo + lo, hi=pieces.lo + hi, position=pieces.position + lo).pick(keep)
    bounds = np.searchsorted(owner, np.arange(len(parts.unit) + 1))
    return bounds, cut, (source.column_at[index] + lo)[keep], source.rank[index][keep]


def piece_positions(parts: Parts, counts: Ints, pieces: Located) -> Ints:
    """Where each piece stands in its target row."""
    steps = pieces.hi - pieces.lo
    before = np.cumsum(steps) - steps
    heads = np.cumsum(counts) - counts
    base = before[heads[counts > 0]] if len(steps) else before
    start = np.zeros(len(counts), np.int64)
    start[counts > 0] = base
    out: Ints = np.repeat(parts.position - start, counts) + before
    return out


def gather(
    starts: Ints, steps: Ints, runs: Sequence[tuple[int, int]], rows: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Rows [start, start + steps) of a column, end to end, out of its sorted runs, which `rows` has end to end."""
    ends = np.cumsum(steps)
    wanted = np.arange(int(steps.sum())) + np.repeat(starts - (ends - steps), steps)
    begin = np.array([a for a, _ in runs], np.int64)
    length = np.array([b - a for a, b in runs], np.int64)
    run = np.searchsorted(begin, wanted, side="right") - 1
    out: np.ndarray[Any, Any] = rows[wanted - begin[run] + (np.cumsum(length) - length)[run]]
    return out


def joined(starts: Ints, steps: Ints) -> list[tuple[int, int]]:
    """The sorted runs that cover [start, start + steps) of each."""
    a, b = merge_runs(starts, starts + steps)
    return list(zip(a.tolist(), b.tolist(), strict=True))
