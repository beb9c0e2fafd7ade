"""Writing pieces of segments anew, on this machine or spread over a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from archive import Archive
from archive.maintain import moving
from archive.manifest import tables
from archive.write import SHARD_BYTES
from resharding.transfer.engines import spread

if TYPE_CHECKING:
    import pyarrow as pa

TASK_BYTES = 4 * SHARD_BYTES


def rewrite(
    archive: Archive, pieces: Sequence[moving.Piece], session: str, compression: str | None, engine: str
) -> tuple[moving.Places, pa.Table]:
    """Write the pieces to new shards: where each came to lie, and the chunk table of these shards."""
    numbered = list(enumerate(pieces))
    sizes = moving.sizes(archive.snapshot, pieces)
    batches = list(moving.batches(numbered, sizes, TASK_BYTES)) if engine == "ray" else [numbered]
    places: moving.Places = {}
    chunks = []
    shared = (archive.snapshot, archive.layout, session, compression)
    for placed, table in spread(engine, moving.write, shared, batches):
        places |= placed
        chunks.append(table)
    return places, tables.concat("chunks", chunks)
