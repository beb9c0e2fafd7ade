"""Pure, no I/O: the pieces of segments behind parts of units, where they stand, and values that follow their steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, merge_runs, offsets_of, spans
from archive.manifest import Located
from resharding.placing.records import Parts
from resharding.placing.source import SourceBuffer


def cut_pieces(source: SourceBuffer, parts: Parts) -> tuple[Ints, Located, Ints, Ints]:
    """The pieces of segments behind parts of units: where those of each part begin, the pieces, where each stands in
    the columns, and its source rank."""
    first = source.offsets[parts.unit]
    counts = source.offsets[parts.unit + 1] - first
    index = spans(first, counts)
    begins = offsets_of(source.pieces.hi - source.pieces.lo)
    before = begins[index] - np.repeat(begins[first], counts)  # steps of the unit before this piece
    pieces = source.pieces.pick(index)
    steps = pieces.hi - pieces.lo
    lo = np.clip(np.repeat(parts.lo, counts) - before, 0, steps)
    hi = np.clip(np.repeat(parts.hi, counts) - before, 0, steps)
    begun = (before >= np.repeat(parts.lo, counts)) & (before <= np.repeat(parts.hi, counts))
    keep = (hi > lo) | (steps == 0) & begun
    owner = np.repeat(np.arange(len(parts.unit)), counts)[keep]
    cut = pieces._replace(lo=pieces.lo + lo, hi=pieces.lo + hi, position=pieces.position + lo).pick(keep)
    bounds = np.searchsorted(owner, np.arange(len(parts.unit) + 1))
    return bounds, cut, (source.column_at[index] + lo)[keep], source.rank[index][keep]


def piece_positions(parts: Parts, counts: Ints, pieces: Located) -> Ints:
    """Where each piece stands in its target row. A beginning without steps stands where its first step does."""
    begins = offsets_of(pieces.hi - pieces.lo)
    first = begins[offsets_of(counts)[:-1]]
    out: Ints = np.repeat(parts.position - first, counts) + begins[:-1]
    return out


def gather(
    starts: Ints, steps: Ints, runs: Sequence[tuple[int, int]], rows: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Rows [start, start + steps) of a column, end to end, out of its sorted runs, which `rows` has end to end."""
    wanted = spans(starts, steps)
    begin, stop = np.array(runs, np.int64).T
    run = np.searchsorted(begin, wanted, side="right") - 1
    out: np.ndarray[Any, Any] = rows[wanted - begin[run] + offsets_of(stop - begin)[run]]
    return out


def joined(starts: Ints, steps: Ints) -> list[tuple[int, int]]:
    """The sorted runs that cover [start, start + steps) of each."""
    a, b = merge_runs(starts, starts + steps)
    return list(zip(a.tolist(), b.tolist(), strict=True))
