"""Episodes as shards and rows for a commit that somebody else makes: of tasks whose results are collected."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress

from archive.base import AlreadyExistsError, UsageError, layout
from archive.fields import Schema
from archive.index import chains
from archive.log import Claim, Place, Sighting
from archive.shard import ShardWriter
from archive.store import Storage
from archive.write.buffer import Buffer
from archive.write.changes import Changes
from archive.write.episodes import Ids
from archive.write.pipeline import Pipeline
from archive.write.works import RankRows, ShardObjects


class Staging:
    """A buffer of one rank of a session that never opens: `buffer` takes episodes, `finish` gives their rows.

    Nothing is visible before a commit has these rows, and what no commit has a prune finds by the session. A task that
    is done again stages the same rows with shards of other names.
    """

    def __init__(
        self,
        storage: Storage,
        archive_layout: str,
        place: Place,
        name: str,
        schema: Schema,
        compression: str | None,
        *,
        first_id: int = 0,
    ) -> None:
        """first_id: the number in the first new id."""
        self._storage = storage
        self._place = place
        shards = ShardWriter(storage, archive_layout, compression)
        self._pipeline = Pipeline(shards, ShardObjects(shards, place.session, place.rank))
        self._changes = changes = Changes(self._pipeline, lambda: None, self._surface)
        ids = Ids(place, set)  # those of others are looked at by the commit
        ids.take(first_id)
        changes.parts.append(ids.kept)
        self.buffer = Buffer(name, place, schema, self._pipeline.memory, ids, changes, _no_journal)

    def _surface(self) -> None:
        if error := self._pipeline.failure():
            raise error

    def rows(self) -> RankRows:
        """Upload what was added; the rows of all."""
        with self._changes(wait=False):
            self.buffer._submit()
        rows = RankRows.joined([one.rows for one in self._pipeline.wait(self._pipeline.uncommitted())])
        return RankRows(*(table.combine_chunks() for table in rows))

    def finish(self, seen: Sighting | None) -> RankRows:
        """Upload what was added, and claim the rank; the rows of all. seen: the newest commit that is known."""
        rows = self.rows()
        if rows.size:
            claim = Claim(self._place.run, self._place.session, self._place.rank, "staged", seen)
            with suppress(AlreadyExistsError):  # the same task did, before it was killed
                key = layout.rank_key(self._place.session, self._place.rank)
                self._storage.create_once(key, json.dumps(claim.to_json()).encode())
        return rows

    def close(self) -> None:
        self._pipeline.close()


def _no_journal(*_: object) -> None:
    raise UsageError("there is no journal here")


def end_to_end(parts: Iterable[tuple[RankRows, int]]) -> RankRows:
    """The rows of one rank from those that several tasks staged, each as if it were the first. parts: the rows of each,
    and how many positions they take."""
    import pyarrow as pa
    import pyarrow.compute as pc

    out, sequence, position = [], 0, 0
    for rows, taken in parts:
        segments = rows.segments
        before = [None if one is None else chains.later(one, sequence) for one in segments["predecessor"].to_pylist()]
        moved = {
            "sequence": pc.add(segments["sequence"], sequence),
            "position": pc.add(segments["position"], position),
            "predecessor": pa.chunked_array([before], pa.string()),
        }
        for name, column in moved.items():
            field = segments.schema.field(name)
            segments = segments.set_column(segments.schema.get_field_index(name), field, column.cast(field.type))
        out.append(rows._replace(segments=segments))
        sequence, position = sequence + rows.next_sequence, position + taken
    return RankRows.joined(out)
