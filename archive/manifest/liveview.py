"""Pure, no I/O: the live steps of a checkpoint, found in the segments table: which rows of which segment,
in live order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from archive.arrays import Ints, run_starts
from archive.base import CorruptManifestError
from archive.steps import Steps, row_codes
from archive.tables import LIVE_STREAM, STREAM, STRETCH

if TYPE_CHECKING:
    import pyarrow as pa

SEGMENT_COLUMNS = (*STRETCH, "shard")


def locate(live: pa.Table, segments: pa.Table) -> Steps:
    """Where each live step lies, in live order, by rows of the segments table as streams. run: the live run, in which
    it stands at `position`. A live step that no segment has is an error."""
    out = pieces(live, segments)
    _check_complete(live, out)
    return out


def pieces(live: pa.Table, segments: pa.Table) -> Steps:
    """Where each live step lies that is in these segments."""
    run_lo, run_hi, run_position = (live[n].to_numpy() for n in ("lo", "hi", "position"))
    position, length = (segments[n].to_numpy() for n in ("position", "length"))
    runs, rows = _written(live, segments)
    met = runs.placed.meet(rows)  # an episode without steps stands at a position of its own
    row = rows["row"][met.right]
    lo = met.lo - position[row]
    hi = np.minimum(run_hi[met.left] - position[row], length[row])
    at = run_position[met.left] + met.lo - run_lo[met.left]
    return Steps(row, lo, np.maximum(hi, lo), follows=("position",), run=met.left, position=at)


def touched(live: pa.Table, segments: pa.Table) -> Any:
    """Which segments have a live step, of those that are there; other live steps are passed over."""
    runs, rows = _written(live, segments)
    out = np.zeros(segments.num_rows, bool)
    out[rows["row"][runs.placed.union().meet(rows).right]] = True
    return out


def _written(live: pa.Table, segments: pa.Table) -> tuple[Steps, Steps]:
    """Where live runs were written, and segments: rows with steps, and episodes without; not the rows that only close
    an episode."""
    run, of_row = row_codes(live.select(LIVE_STREAM), segments.select(STREAM))
    position, length = (segments[n].to_numpy() for n in ("position", "length"))
    rows = np.flatnonzero((length > 0) | segments["shard"].is_valid().to_numpy())
    held = Steps(of_row[rows], position[rows], (position + length)[rows], row=rows)
    return Steps(run, live["lo"].to_numpy(), live["hi"].to_numpy()), held.placed


def lacking(live: pa.Table, found: Steps) -> Ints:
    """The live runs of which not all steps, or some twice, were found."""
    return np.flatnonzero((_steps(live, found) != live["hi"].to_numpy() - live["lo"].to_numpy()) | _absent(live, found))


def _steps(live: pa.Table, found: Steps) -> Ints:
    """How many steps of each live run were found."""
    return np.bincount(found["run"], weights=found.length, minlength=live.num_rows).astype(np.int64)


def _absent(live: pa.Table, found: Steps) -> Any:
    return np.bincount(found["run"], minlength=live.num_rows) == 0


def _check_complete(live: pa.Table, found: Steps) -> None:
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
