"""Pure, no I/O: the pieces of segments behind parts of units, where they stand, and values that follow their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, group_of, merge_runs, offsets_of, spans
from archive.steps import Steps
from resharding.placing.records import Parts
from resharding.placing.source import SourceBuffer


def cut_pieces(source: SourceBuffer, parts: Parts) -> tuple[Ints, Steps]:
    """The pieces of segments behind parts of units, and where those of each part begin."""
    first = source.offsets[parts.unit]
    counts = source.offsets[parts.unit + 1] - first
    index = spans(first, counts)
    begins = offsets_of(source.pieces.length)
    before = begins[index] - np.repeat(begins[first], counts)  # steps of the unit before this piece
    steps = source.pieces.length[index]
    lo = np.clip(np.repeat(parts.lo, counts) - before, 0, steps)
    hi = np.clip(np.repeat(parts.hi, counts) - before, 0, steps)
    begun = (before >= np.repeat(parts.lo, counts)) & (before <= np.repeat(parts.hi, counts))
    keep = (hi > lo) | (steps == 0) & begun
    owner, index = np.repeat(np.arange(len(parts.unit)), counts)[keep], index[keep]
    start = source.pieces.lo[index]
    cut = source.pieces.cut(index, start + lo[keep], start + hi[keep])
    return offsets_of(np.bincount(owner, minlength=len(parts.unit))), cut


def piece_positions(parts: Parts, counts: Ints, pieces: Steps) -> Ints:
    """Where each piece stands in its target row. A beginning without steps stands where its first step does."""
    begins = offsets_of(pieces.length)
    first = begins[offsets_of(counts)[:-1]]
    out: Ints = np.repeat(parts.position - first, counts) + begins[:-1]
    return out


def gather(
    starts: Ints, steps: Ints, runs: Sequence[tuple[int, int]], rows: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Rows [start, start + steps) of a column, end to end, out of its sorted runs, which `rows` has end to end."""
    wanted = spans(starts, steps)
    begin, stop = np.array(runs, np.int64).T
    run = group_of(begin, wanted)
    out: np.ndarray[Any, Any] = rows[wanted - begin[run] + offsets_of(stop - begin)[run]]
    return out


def joined(starts: Ints, steps: Ints) -> list[tuple[int, int]]:
    """The sorted runs that cover [start, start + steps) of each."""
    a, b = merge_runs(starts, starts + steps)
    return list(zip(a.tolist(), b.tolist(), strict=True))
