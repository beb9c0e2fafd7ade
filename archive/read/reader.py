"""Reading steps of episodes: what they take is planned as vectors,
fetched chunk by chunk and decoded into its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from archive.arrays import Ints, reuse_freed_memory
from archive.base import IntegrityError
from archive.fields import Array, Ragged
from archive.manifest import Snapshot
from archive.read import build, sizes
from archive.read.chunks import LateFields, ReadPlan, Segments, Shards, Tails, Want, filling
from archive.read.destination import Destination
from archive.read.latesteps import Shown, shown
from archive.read.plan import Group, plan
from archive.read.selection import Selection
from archive.read.spans import Spans
from archive.tables import STRETCH

_LARGE_BYTES = 256 * 1024 * 1024
Request = tuple[Spans, Selection]
Build = Callable[[Sequence[Group], Selection], list[Any]]


class Reader:
    """Reads steps of one snapshot. Keeps what is small and immutable: where chunks lie, and metadata of shards."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.shards = Shards(snapshot)
        self._added: LateFields | None = None
        reuse_freed_memory()

    def __getstate__(self) -> dict[str, Any]:
        return {"snapshot": self.snapshot}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["snapshot"])  # type: ignore[misc]

    def as_written(self) -> Reader:
        """The same, without the fields that came after their steps."""
        if not self.snapshot.later.head.late:
            return self
        return Reader(self.snapshot.as_written())

    def read(
        self, spans: Spans, selection: Selection, tails: Tails | None = None, into: Destination | None = None
    ) -> list[dict[str, Any]]:
        """A nested dict for each episode, fetched together.

        tails: see `archive.read.chunks.filling`.  into: memory of the caller's, which what is returned shares.
        """
        return self._read([(spans, selection)], build.nests, tails, into)[0]

    def read_into(self, spans: Spans, selection: Selection, into: Destination) -> None:
        """Put fields of one row a step into memory of the caller's, wherever its rows are to go."""
        split = spans if into.starts is None else spans.split(into.starts)
        self._read([(split, selection)], build.nothing, None, into)

    def read_each(self, requests: Sequence[Request]) -> list[list[dict[str, Any]]]:
        """As `read`, for several requests, fetched together: each chunk once."""
        return self._read(requests, build.nests)

    def read_stored(self, spans: Spans) -> list[dict[str, Array | Ragged]]:
        """The fields of each episode in their stored form, by name, fetched together: for writing them again.

        Without those that came after their steps, which are of steps wherever these lie.
        """
        return self._filled([(spans, Selection())], self._plain(spans.rows), build.stored)[0]

    def plan(self, spans: Spans) -> ReadPlan:
        """What reading all fields takes, metadata included; the same whatever was read before."""
        segments = self.segments(spans.rows)
        return filling.plan(self.shards, segments, _wants([plan(spans, Selection(), segments)], segments))

    def sizes(self, spans: Spans, selection: Selection | None = None) -> Ints:
        """Bytes of the steps of each episode, uncompressed, in the fields selected; no data is read. Text counts as 8 a
        value."""
        view = self.shown(spans)
        rows = self.snapshot.take(view.spans.rows, sizes.COLUMNS)
        return sizes.of_spans(view.spans, rows, view.schemas, view.code, selection or Selection())

    def shard_bytes(self, spans: Spans) -> int:
        """Bytes of all members of the shards in which these spans lie."""
        segments = self.segments(spans.rows)
        self.shards.load_indexes(segments, list(range(len(segments.shards))))
        return sum(self.shards.shard_bytes(shard) for shard in segments.shards)

    def segments(self, rows: Any) -> Segments:
        """Rows of the segments table, each once."""
        return Segments(self.snapshot, np.unique(rows), self._late if self.snapshot.later.head.late else None)

    @property
    def _late(self) -> LateFields:
        """The fields that came after their steps, as of the commit whose late fields count."""
        table = self.snapshot.later.late
        if self._added is None or self._added.table is not table:
            self._added = LateFields(table, self.snapshot.columns(STRETCH))
        return self._added

    def schema_texts(self, rows: Ints) -> list[str]:
        """The distinct schemas of rows of the segments table, with fields that came later; no data is read."""
        table = self.snapshot.take(rows, ["schema", "length"])
        if not self.snapshot.later.head.late:
            found: list[str] = table["schema"].unique().to_pylist()
            return found
        spans = Spans.of_each(rows, np.zeros(len(rows), np.int64), table["length"].to_numpy())
        return list(dict.fromkeys(one.dumps() for one in self.shown(spans).schemas))

    def shown(self, spans: Spans) -> Shown:
        """What fields these steps have."""
        return shown(spans, self.segments(spans.rows))

    def _plain(self, rows: Any) -> Segments:
        return Segments(self.snapshot, np.unique(rows))

    def _of(self, requests: Sequence[Request]) -> Segments:
        return self.segments(np.concatenate([spans.rows for spans, _ in requests]))

    def _read(
        self, requests: Sequence[Request], build: Build, tails: Tails | None = None, into: Destination | None = None
    ) -> list[list[dict[str, Any]]]:
        return self._filled(requests, self._of(requests), build, tails, into)

    def _filled(
        self, requests: Sequence[Request], segments: Segments, build: Build, tails: Tails | None = None,
        into: Destination | None = None,
    ) -> list[list[dict[str, Any]]]:  # fmt: skip
        groups = [plan(spans, selection, segments) for spans, selection in requests]
        if into is not None:
            into.take(groups[0])
        fields = [field for own in groups for group in own for field in group.fields.values()]
        if sum(field.most_bytes for field in fields) > _LARGE_BYTES:  # before memory is made for what no chunk holds
            filling.plan(self.shards, segments, _wants(groups, segments))
        for field in fields:
            field.prepare()
        filling.fill(self.shards, segments, _wants(groups, segments), tails)
        try:
            return [build(own, selection) for own, (_, selection) in zip(groups, requests, strict=True)]
        except IntegrityError as e:
            episodes = sum(len(spans) for spans, _ in requests)
            raise type(e)(f"{e} (reading {episodes} episodes at {self.snapshot.storage.url})") from e


def _wants(groups: Sequence[Sequence[Group]], segments: Segments) -> list[Want]:
    every = (field for own in groups for group in own for field in group.fields.values())
    return [want for field in every for want in field.wants(segments.shard)]
