"""The one maker of shards: arrays and their schema come in, objects on the store and the places of their chunks go
out."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from archive.base import layout, thread_pool, usable_cores
from archive.shard import groups, packing
from archive.shard.packing import Member, Placed

if TYPE_CHECKING:
    import numpy as np

    from archive.store import Storage

    Array = np.ndarray[Any, Any]

SHARD_BYTES = 48 * 1024 * 1024  # of steps; four of them, compressed or not, are in memory at once
_SHELF_FROM_BYTES = 8 * 1024 * 1024  # of steps that are compressed: for fewer, a shard's memory is too much


class ShardWriter:
    """Encodes shards and writes them, in one layout and compression. Safe for several threads."""

    def __init__(
        self, storage: Storage, archive_layout: str, compression: str | None = "zstd:1", chunk_bytes: int | None = None,
    ) -> None:  # fmt: skip
        from archive.arrays import Memory

        self.storage = storage
        self.archive_layout = archive_layout
        self.memory = Memory(SHARD_BYTES + 64 * 1024, keep=4)  # a piece holds a shard
        self._compression = compression
        self._chunk_bytes = chunk_bytes
        self._encoders = thread_pool(usable_cores(), "archive-encode")  # chunks of one shard, side by side
        self._encoding = threading.Lock()

    def encode(
        self, schema: str, arrays: Mapping[str, Array], *, runs: int = 1, more: Mapping[str, Array] | None = None
    ) -> list[Member]:
        """The members of a shard whose fields, of this schema, have these arrays by path; `runs` as for
        `groups.encode`, `more`: arrays that are no fields."""
        from archive.arrays import Shelf

        attributes = {"trajectory-archive": {"schema": schema, "format": layout.PART_VERSION}}
        with self._encoding if self._compression else nullcontext():
            large = self._compression is not None and sum(a.nbytes for a in arrays.values()) >= _SHELF_FROM_BYTES
            return groups.encode(
                {**arrays, **(more or {})}, attributes=attributes, compression=self._compression,
                chunk_bytes=self._chunk_bytes, runs=runs, copy=False,
                hold=Shelf(self.memory.take()).hold if large else None, each=self._encoders.map,
            )  # fmt: skip

    def write(self, key: str, members: Sequence[Member]) -> list[Placed]:
        """Write one encoded shard; where its members lie."""
        if self.archive_layout == "packed":
            buffers, placed = packing.pack(members)
            self.storage.put(key, buffers)
        else:
            objects, placed = packing.loose(members)
            self.storage.put_many((f"{key}/{name}", data) for name, data in objects)
        return placed

    def close(self) -> None:
        """Give back its threads, once they have done what they are at."""
        self._encoders.shutdown(wait=True)
