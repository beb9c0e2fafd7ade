"""What reading a share may take, by counting the rows of the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from archive.arrays.ranges import merge_runs

FIELDS = 4


@dataclass
class Bound:
    """What reading a share may take: 1.05 x its steps, and a chunk of each field for each cut and shard that it
    crosses; requests as many as 8 MB fit in, two a shard,
    and one a field and contiguous run of a shard that is read in part."""

    needed: int = 0
    edges: int = 0  # bytes of one chunk per field for each cut, and of the metadata, of each shard
    shards: int = 0
    partial: int = 0  # contiguous runs of partial reads

    @property
    def bytes(self) -> float:
        return 1.05 * self.needed + self.edges

    @property
    def requests(self) -> float:
        return self.bytes / 8e6 + 2 * self.shards + FIELDS * self.partial


def bound(share: Any, row_bytes: int) -> Bound:
    """From the manifest alone, by counting rows."""
    ck = share.plan.checkpoint
    table = ck.snapshot.columns(["shard", "start", "length"]).to_pylist()
    size: dict[str, int] = {}
    for row in table:
        size[row["shard"]] = size.get(row["shard"], 0) + row["length"]
    mine: dict[str, list[tuple[int, int]]] = {}
    spans = share.episodes.spans()
    for row, lo, hi in zip(spans.rows.tolist(), spans.lo.tolist(), spans.hi.tolist(), strict=True):
        start = table[row]["start"]
        mine.setdefault(table[row]["shard"], []).append((start + lo, start + hi))
    out = Bound(needed=share.steps * row_bytes, shards=len(mine))
    ends = max(1, (share.rank > 0) + (share.rank < share.plan.world_size - 1))  # cuts that may cross each shard
    for shard, pairs in mine.items():
        runs = list(zip(*merge_runs(*np.array(pairs, np.int64).T), strict=True))
        chunks = ck.reader.shards.indexes[shard].arrays
        out.edges += ends * sum(int(c.size.max()) for name, c in chunks.items() if name) + int(chunks[""].size[0])
        partial = len(runs) if runs != [(0, size[shard])] else 0
        out.partial += partial
    return out
