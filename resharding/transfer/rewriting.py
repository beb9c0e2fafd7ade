"""Writing pieces of segments anew, on this machine or spread over a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from archive import Archive
from archive.maintain import moving
from archive.manifest import Snapshot, tables
from archive.write import SHARD_BYTES
from resharding.transfer.engines import spread

if TYPE_CHECKING:
    import pyarrow as pa

TASK_BYTES = 4 * SHARD_BYTES

Numbered = tuple[int, moving.Piece]
_Task = tuple[int, Sequence[Numbered]]  # number of a group of pieces, and some of these


def rewrite(
    archive: Archive, groups: Sequence[Sequence[Numbered]], session: str, compression: str | None, engine: str
) -> tuple[moving.Places, pa.Table]:
    """Write pieces to new shards, those of a group together: where each came to lie, and the chunk table of these."""
    tasks: list[_Task] = [*enumerate(groups)]
    if engine == "ray":
        tasks = [(n, batch) for n, group in tasks for batch in _batches(archive.snapshot, group)]
    places: moving.Places = {}
    chunks = []
    shared = (archive.snapshot, archive.layout, session, compression)
    for placed, table in spread(engine, _write, shared, tasks):
        places |= placed
        chunks.append(table)
    return places, tables.concat("chunks", chunks)


def _batches(snapshot: Snapshot, group: Sequence[Numbered]) -> list[list[Numbered]]:
    return [*moving.batches(group, moving.sizes(snapshot, [piece for _, piece in group]), TASK_BYTES)]


def _write(
    snapshot: Snapshot, layout: str, session: str, compression: str | None, task: _Task
) -> tuple[moving.Places, pa.Table]:
    """The number of the group is in the names of its shards, as that of a rank is elsewhere."""
    return moving.write(snapshot, layout, session, compression, task[1], task[0])
