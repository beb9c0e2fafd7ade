"""Rows of the segments table for what one buffer writes, in the order in which it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.base import jsontree
from archive.fields import ShardSchema
from archive.manifest import Place, chains
from archive.write.blocks import Slab
from archive.write.episodeids import Ids
from archive.write.episoderecords import EpisodeRecords

if TYPE_CHECKING:
    import pyarrow as pa


class SegmentRows:
    """Numbers segments, links each to the one before it in its episode, and adds up what an episode's segments hold."""

    def __init__(self, buffer: str, place: Place, records: EpisodeRecords, ids: Ids) -> None:
        self._buffer = buffer
        self._place = place
        self._records = records
        self._ids = ids

    def describe(self, epoch: int, slab: Slab, key: str) -> pa.Table:
        """The segments of a slab as rows; called in order, on the pipeline's thread.

        What ended after the slab was sent is open in it: a checkpoint may lie between.
        """
        episodes, positions, lengths = slab.episode.tolist(), slab.position.tolist(), slab.length.tolist()
        rows: list[dict[str, Any]] = [{}] * len(episodes)
        # episodes as they were begun: of two revisions the newer is the later; steps as they follow, beginning with
        # none
        for i in np.lexsort((slab.position, slab.episode)).tolist():
            rows[i] = row = self._segment(episodes[i], positions[i], lengths[i], epoch)
            record, reward = self._records[row.pop("index")], slab.reward[i]
            record.weights = _newest(slab, i)
            record.returned = reward if record.returned is None or reward is None else record.returned + reward
            row["return"] = record.returned
        columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {"episode_id": []}
        return self._table(
            columns, shard=key, start=slab.start, length=slab.length, env_id=slab.env_id, position=slab.position,
            extents=tables.extents(slab.extents, len(episodes)), schema=slab.schema.dumps(),
            model_weights_uuids=slab.uuids, update_count_min=slab.update_min, update_count_max=slab.update_max,
            weights=slab.weights,
        )  # fmt: skip

    def _segment(self, index: int, position: int, length: int, epoch: int) -> dict[str, Any]:
        record = self._records[index]
        ends = record.end is not None and position + length == record.end and record.ended <= epoch
        row = {
            "index": index,
            "episode_id": record.id,
            "sequence": self._ids.sequence,
            "predecessor": record.predecessor,
            "replaces": record.replaces and record.predecessor is None,
            "first": record.predecessor is None and not record.headless,
            "last": ends and not record.broken,
            "terminated": record.terminated if ends else None,
            "truncated": record.truncated if ends else None,
            "reason": record.reason if ends else None,
            "episode_start": record.stored,
            "metadata": jsontree.dumps(record.metadata, where="metadata") if record.metadata else None,
        }
        record.predecessor = chains.address(self._place.session, self._place.rank, self._ids.sequence)
        record.stored += length
        record.sealed = record.sealed or ends
        self._ids.sequence += 1
        return row

    def closing(self, closed: Sequence[int]) -> pa.Table | None:
        """A row of length 0 for each episode that ended after its last steps were written."""
        records = self._records
        late = [i for i in closed if not records[i].sealed]
        rows = [self._segment(i, records[i].end or 0, 0, records[i].ended) for i in late]
        if not rows:
            return None
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "index"}
        schema = ShardSchema(()).dumps()
        return self._table(
            columns, length=0, env_id=[records[i].env_id for i in late], position=[records[i].end for i in late],
            schema=schema, model_weights_uuids=[[] for _ in late], **{"return": [records[i].returned for i in late]},
        )  # fmt: skip

    def _table(self, columns: dict[str, Any], **more: Any) -> pa.Table:
        fixed = {"session": self._place.session, "buffer": self._buffer, "rank": self._place.rank}
        return tables.from_columns("segments", columns | more | fixed)


def _newest(slab: Slab, segment: int) -> tuple[str | None, int | None]:
    """The weights and the update count of the last step of a segment."""
    runs, uuids = slab.weights[segment], slab.uuids[segment]
    if runs is None:
        return uuids[-1] if uuids else None, slab.update_max[segment]
    return runs[-1]["model_weights_uuid"], runs[-1]["update_count"]
