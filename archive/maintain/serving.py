"""Whether a checkpoint is the same when it is read with the tables of another commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from archive.arrays import run_starts
from archive.base import CorruptManifestError
from archive.manifest import COLUMNS, Commit, EpisodeIndex, Snapshot, liveview, tablefiles

if TYPE_CHECKING:
    import pyarrow as pa

_SAME = tuple(name for name in COLUMNS if name not in ("run", "created_at", "commit"))  # of an episode, as it is seen


def serves(tables: Snapshot, before: Snapshot, commit: Commit) -> bool:
    """Whether a checkpoint has the same live steps, of the same episodes, with other tables as it had before."""
    if commit.live is None:
        return True
    live = tablefiles.load(tables.storage, "live", [commit.live])
    try:
        now = _seen(tables, commit, live)
    except CorruptManifestError:  # some steps are not there
        return False
    return bool(now.equals(_seen(before, commit, live)))


def _seen(snapshot: Snapshot, commit: Commit, live: pa.Table) -> pa.Table:
    """What a checkpoint has: a row for each live run and episode in it, with its steps and the episode's summary."""
    import pyarrow as pa

    located = liveview.locate(live, snapshot.columns(liveview.SEGMENT_COLUMNS))
    sequences = None if commit.checkpoint is None else commit.checkpoint.sequences
    index = EpisodeIndex(snapshot, lambda: located.stream, (commit.session, sequences))
    episode = index.episode_of_row[located.stream]
    heads = run_starts(located["run"], episode)
    steps = np.add.reduceat(located.length, heads) if len(heads) else heads
    if (episode < 0).any():
        raise CorruptManifestError(f"live steps of commit {commit.number} at {snapshot.storage.url} are in no episode")
    summary = index.table(_SAME).take(pa.array(episode[heads])).combine_chunks()
    plain = {name: _plain(summary[name]) for name in _SAME}
    return pa.table({"live_run": located["run"][heads], "position": located["position"][heads], "steps": steps} | plain)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Repeated strings may be numbered otherwise in other tables."""
    import pyarrow as pa

    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
