"""Pure, no I/O: the live steps of a checkpoint, found in the segments table: which rows of which segment,
in live order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive.arrays import Ints, merge_runs, run_starts
from archive.base import CorruptManifestError

if TYPE_CHECKING:
    import pyarrow as pa

SEGMENT_COLUMNS = ("session", "buffer", "rank", "env_id", "position", "length", "shard")


class Located(NamedTuple):
    """Pieces of segments in live order: steps [lo, hi) of segment `row`,
    standing at `position` of the live run `run`."""

    run: Ints
    row: Ints
    lo: Ints
    hi: Ints
    position: Ints

    def pick(self, index: Any) -> Located:
        return Located(*(column[index] for column in self))


def locate(live: pa.Table, segments: pa.Table) -> Located:
    """Where each live step lies. A live step that no segment has is an error."""
    out = pieces(live, segments)
    _check_complete(live, out)
    return out


def pieces(live: pa.Table, segments: pa.Table) -> Located:
    """Where each live step lies that is in these segments."""
    run_lo, run_hi, run_position = (live[n].to_numpy() for n in ("lo", "hi", "position"))
    position, length = (segments[n].to_numpy() for n in ("position", "length"))
    run_key, row_key = _stream_keys(live, segments)
    rows = np.flatnonzero((row_key >= 0) & _holds_steps(segments, length))
    span = int(max(run_hi.max(initial=0), (position + length)[rows].max(initial=0))) + 2
    if int(row_key.max(initial=0)) * span >= 2**62:
        raise CorruptManifestError("the live set has positions beyond what can be indexed; run `archive verify`")
    count = np.maximum(length[rows], 1)  # an episode without steps stands at a position of its own
    start = row_key[rows] * span + position[rows]
    order = np.argsort(start, kind="stable")
    rows, start, stop = rows[order], start[order], (start + count)[order]
    wanted_lo, wanted_hi = run_key * span + run_lo, run_key * span + np.maximum(run_hi, run_lo + (run_hi == run_lo))
    first = np.searchsorted(stop, wanted_lo, side="right")
    last = np.maximum(np.searchsorted(start, wanted_hi, side="left"), first)
    run = np.repeat(np.arange(len(run_lo)), last - first)
    within = np.arange(len(run)) - np.repeat(np.cumsum(last - first) - (last - first), last - first)
    row = rows[first[run] + within]
    lo = np.maximum(run_lo[run] - position[row], 0)
    hi = np.minimum(run_hi[run] - position[row], length[row])
    return Located(run, row, lo, np.maximum(hi, lo), run_position[run] + position[row] + lo - run_lo[run])


def touched(live: pa.Table, segments: pa.Table) -> Any:
    """Which segments have a live step, of those that are there; other live steps are passed over."""
    run_lo, run_hi = (live[n].to_numpy() for n in ("lo", "hi"))
    position, length = (segments[n].to_numpy() for n in ("position", "length"))
    run_key, row_key = _stream_keys(live, segments)
    start, stop = position, position + np.maximum(length, 1)
    span = int(max(run_hi.max(initial=0), stop.max(initial=0))) + 2
    los, his = merge_runs(run_key * span + run_lo, run_key * span + np.maximum(run_hi, run_lo + 1))
    before = np.searchsorted(los, row_key * span + stop, side="left")  # runs that begin before the segment ends
    ends = np.append(np.iinfo(np.int64).min, his)[before]
    return (row_key >= 0) & _holds_steps(segments, length) & (ends > row_key * span + start)


def _holds_steps(segments: pa.Table, length: Ints) -> Any:
    """Rows with steps, and episodes without; not the rows that only close an episode."""
    return (length > 0) | segments["shard"].is_valid().to_numpy()


def _stream_keys(live: pa.Table, segments: pa.Table) -> tuple[Ints, Ints]:
    """A number for each stream, for live runs and for segments; -1 where no live run has the stream."""
    live_columns = [live["session"], live["buffer"], live["stream_rank"], live["stream_env"]]
    row_columns = [segments["session"], segments["buffer"], segments["rank"], segments["env_id"]]
    run_key = np.zeros(live.num_rows, np.int64)
    row_key = np.zeros(segments.num_rows, np.int64)
    known = np.ones(segments.num_rows, bool)
    for ours, theirs in zip(live_columns, row_columns, strict=True):
        values, code = np.unique(_plain(ours), return_inverse=True)
        row_code, found = _codes(theirs, values)
        run_key, row_key = run_key * len(values) + code, row_key * len(values) + row_code
        known &= found
    kept, run_key = np.unique(run_key, return_inverse=True)
    place = np.clip(np.searchsorted(kept, row_key), 0, max(0, len(kept) - 1))
    known &= (kept[place] == row_key) if len(kept) else False
    return run_key, np.where(known, place, -1)


def _plain(column: pa.ChunkedArray) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        return np.array(column.cast(pa.string()).to_pylist(), object)
    return column.to_numpy()


def _codes(column: pa.ChunkedArray, values: Any) -> tuple[Ints, Any]:
    """Place of each entry among sorted values, and whether it is one of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        array = column.to_numpy()
        place = np.clip(np.searchsorted(values, array), 0, max(0, len(values) - 1))
        return place, (values[place] == array) if len(values) else np.zeros(len(array), bool)
    found = pc.index_in(column.cast(pa.string()), value_set=pa.array(list(values), pa.string()))
    return pc.fill_null(found, 0).to_numpy().astype(np.int64), found.is_valid().to_numpy()


def lacking(live: pa.Table, found: Located) -> Ints:
    """The live runs of which not all steps, or some twice, were found."""
    return np.flatnonzero((_steps(live, found) != live["hi"].to_numpy() - live["lo"].to_numpy()) | _absent(live, found))


def _steps(live: pa.Table, found: Located) -> Ints:
    """How many steps of each live run were found."""
    return np.bincount(found.run, weights=found.hi - found.lo, minlength=live.num_rows).astype(np.int64)


def _absent(live: pa.Table, found: Located) -> Any:
    return np.bincount(found.run, minlength=live.num_rows) == 0


def _check_complete(live: pa.Table, found: Located) -> None:
    bad, steps = lacking(live, found), _steps(live, found)
    if len(bad):
        row = live.slice(int(bad[0]), 1).to_pylist()[0]
        raise CorruptManifestError(
            f"the live set names steps {row['lo']} to {row['hi']} of env {row['stream_env']}, rank "
            f"{row['stream_rank']}, session {row['session']!r}, of which only {int(steps[bad[0]])} are in the segments "
            "table; run `archive verify`"
        )


def episode_groups(episode: Ints, run_rank: Ints) -> Ints:
    """Where each episode begins in live order: neighbours of one episode on one rank belong together."""
    return run_starts(episode, run_rank)
