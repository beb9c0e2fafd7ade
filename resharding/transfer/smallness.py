"""Which shards are small: a job that journals, or saves often, leaves many, and each costs whoever reads it requests.

Those of one buffer and schema can be joined. Whether they are small is told by tables alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from archive.base import escape, layout
from archive.manifest import Snapshot
from archive.read import Reader, Spans
from archive.write import SHARD_BYTES

MANY = 4  # of a buffer: fewer are left for later, or a few bytes more would have as many as a small shard has rewritten


class Owner(NamedTuple):
    """Whose buffer: number of the checkpoint among those that are looked at, rank, name."""

    checkpoint: int
    rank: int
    buffer: str


def small(snapshot: Snapshot, owners: Mapping[int, Owner], min_full: float) -> set[str]:
    """Shards with less than `min_full` of a full shard's bytes, that can be joined to others like it.

    owners: row of the segments table -> whose buffer holds live steps of it.
    """
    rows = np.array(sorted(owners), np.int64)
    if not min_full or not len(rows):
        return set()
    table = snapshot.take(rows, ["shard", "schema"])
    shards, schemas = (table[name].cast("string").to_pylist() for name in ("shard", "schema"))
    sizes = _sizes(snapshot)
    groups: dict[tuple[Owner, str], set[str]] = {}
    for row, shard, schema in zip(rows.tolist(), shards, schemas, strict=True):
        if sizes[shard] < min_full * SHARD_BYTES:
            groups.setdefault((owners[row], schema), set()).add(shard)
    wrote = _writers(snapshot)
    return {shard for group in groups.values() for shard in _joinable(group, wrote)}


def _sizes(snapshot: Snapshot) -> dict[str, int]:
    """Shard -> its bytes: as stored, or what its rows take in memory if that is more, as full ones are counted so."""
    table, reader = snapshot.columns(["shard", "length"]), Reader(snapshot).as_written()
    rows = np.flatnonzero(table["shard"].is_valid().to_numpy())
    spans = Spans.of_each(rows, np.zeros(len(rows), np.int64), table["length"].to_numpy()[rows])
    segments = reader.segments(rows)
    reader.shards.load_indexes(segments, list(range(len(segments.shards))))
    sizes = np.bincount(segments.shard, reader.sizes(spans), len(segments.shards)).astype(np.int64).tolist()
    return {s: max(size, reader.shards.shard_bytes(s)) for s, size in zip(segments.shards, sizes, strict=True)}


def _writers(snapshot: Snapshot) -> set[str]:
    """The sessions (escaped) that wrote steps: all others that made shards moved them."""
    return {escape(name) for name in snapshot.columns(["session"])["session"].cast("string").unique().to_pylist()}


def _joinable(shards: Iterable[str], wrote: set[str]) -> set[str]:
    """Those of one buffer and schema, if they are many.

    What one compaction made of a buffer is full, but for the last: where several of these seem small, they are of text,
    whose length no table says, and it would be done again and again.
    """
    makers = {shard: _maker(shard, wrote) for shard in shards}
    count = Counter(makers.values())
    found = {shard for shard, maker in makers.items() if maker == shard or count[maker] == 1}
    return found if len(found) >= MANY else set()


def _maker(shard: str, wrote: set[str]) -> str:
    """Of a shard that a compaction made, what it has in common with others made for the same buffer; else itself."""
    session = layout.session_of(shard)
    moved = session is not None and session not in wrote and shard.startswith("shards/")
    return shard.partition("-")[2] if moved else shard
