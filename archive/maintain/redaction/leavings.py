"""Does I/O: shards with rows that no segment names: of what was forgotten, or what a compaction moved elsewhere.

Such a shard may hold steps of an episode of which no row says so any more.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from archive.arrays import Ints
from archive.base import escape, layout
from archive.maintain import Decided, Mask
from archive.manifest import Snapshot
from archive.read.chunks import Segments, Shards
from archive.shard import ShardView

if TYPE_CHECKING:
    import pyarrow as pa

_PLACES = "%places"  # of an array: the companion with as many rows, where that is not one a step


def leavings(decided: Decided) -> set[str]:
    """Shards of kept rows, written by the sessions of rows that go or by compactions, that hold more than rows say."""
    table = decided.snapshot.columns(["shard", "session"])
    shards, sessions = (table[name].cast("string").combine_chunks() for name in ("shard", "session"))
    wrote = {escape(name) for name in sessions.unique().to_pylist()}
    gone = {escape(name) for name in sessions.filter(_mask(~decided.rows)).unique().to_pylist()}
    made = {key: layout.session_of(key) for key in shards.unique().drop_null().to_pylist()}
    moved = {key for key, session in made.items() if session is not None and session not in wrote}
    if not decided.parent.let_go and not moved:
        return set()
    wanted = moved | {key for key, session in made.items() if session in gone}
    return with_more(decided.snapshot, np.flatnonzero([key in wanted for key in shards.to_pylist()]))


def _mask(rows: Mask) -> pa.Array:
    import pyarrow as pa

    return pa.array(rows)


def with_more(snapshot: Snapshot, rows: Ints) -> set[str]:
    """The shards of these rows, which are all that there are of them, with an array of more rows than they say."""
    segments, shards = Segments(snapshot, rows), Shards(snapshot)
    shards.load_indexes(segments, list(range(len(segments.shards))))
    steps: Counter[str] = Counter()
    extents: Counter[tuple[str, str]] = Counter()
    for row in snapshot.take(rows, ["shard", "length", "extents"]).to_pylist():
        steps[row["shard"]] += row["length"]
        for one in row["extents"] or ():
            extents[row["shard"], one["field"]] += one["rows"]
    out = set()
    metadata = shards.plan({shard: {} for shard in segments.shards}, {}, {})
    for shard, _, chunks in shards.fetched(metadata, segments.owners):
        view = ShardView(bytes(chunks["zarr.json"]))
        for path in view.paths:
            named = extents.get((shard, path.removesuffix(_PLACES)), steps[shard])
            if view.describe(path).rows > named:
                out.add(shard)
    return out
