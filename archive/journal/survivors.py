"""What the buffers of dead ranks held when their journals ended, as cuts that can be staged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.base import cached_property, jsontree
from archive.checkpoint import Checkpoint
from archive.journal.awaiting import awaited_steps, fresh_rows
from archive.journal.bases import Base
from archive.journal.liveruns import (
    Part,
    Streams,
    appended,
    blank,
    by_part,
    ends_of,
    fill,
    left_over,
    together,
    without,
)
from archive.journal.positions import Ends
from archive.journal.tails import RankTail
from archive.manifest import Commit, LiveRuns, RunEntry, Snapshot
from archive.steps import Steps
from archive.store import Storage
from archive.tables import coded
from archive.write import Column, Cut, live_table

if TYPE_CHECKING:
    import pyarrow as pa

Kind = tuple[str, tuple[int, ...]]  # of a column: its dtype, and the shape of a row in stored form
_ROWS = ("episode_id", *tables.LOCATING)


class Survivors:
    """All ranks' live steps, positions, open episodes, columns and attributes."""

    def __init__(
        self, storage: Storage, head: Commit, entry: RunEntry, base: Base, found: Mapping[int, RankTail]
    ) -> None:  # fmt: skip
        self._session = entry.session
        self._base = base
        self._found = found
        self._streams = Streams()
        self._before = {} if base.held is None else by_part(base.held.live, self._streams)
        self._left_out = by_part(base.left_out, self._streams)
        known = [one.world_size for one in (base.held, base.own_newest) if one is not None]
        self.world_size = max([1 + max(entry.journal or {0: 0}), *known])
        self._held = self._before if self._base.own else self._resumed()  # when the tails began
        self._awaited = awaited_steps(storage, head, entry, base, found)
        runs = self._runs()
        self._tables = {part: self._table(part, one) for part, one in runs.items()}
        self._ids: list[str] = []
        self._located = self._episodes(storage, head, entry, runs)
        self.lacking: dict[tuple[int, str, str], int] = {}  # rank, buffer, column -> steps without a value

    # -- live steps ----------------------------------------------------------------------------------------------

    def _runs(self) -> dict[Part, LiveRuns]:
        """What was live before, and came, less what left."""
        import pyarrow.compute as pc

        held = self._held
        new: dict[Part, LiveRuns] = {}
        for rank, tail in self._found.items():
            rows = tail.held.table("segments")
            new |= appended(rows.filter(pc.greater_equal(rows["sequence"], self._base.sequence(rank))), self._streams)
        parts = {*held, *new, *((rank, buffer) for rank in range(self.world_size) for buffer in self._named(rank))}
        none = LiveRuns.empty()
        return {p: self._left(p, together(held.get(p, none), new.get(p, none))) for p in sorted(parts)}

    def _left(self, part: Part, runs: LiveRuns) -> LiveRuns:
        tail = self._found.get(part[0])
        gone = self._streams.steps([] if tail is None else tail.held.gone.get(part[1], []))
        left = without(runs, gone.placed.minus(self._streams.steps(self._awaited.get(part[1], []))))
        return together(LiveRuns.empty(), left)

    def _resumed(self) -> dict[Part, LiveRuns]:
        """What the ranks of a session that has no checkpoint yet held when it began."""
        began = [tail.held.live for tail in self._found.values() if tail.held.live is not None]
        taken: dict[Part, LiveRuns] = {}
        for table in began:
            taken |= by_part(table, self._streams)
        dead = [rank for rank in range(self.world_size) if rank not in self._found or not self._found[rank].objects]
        if self._base.held is not None and len(dead) == self.world_size == self._base.held.world_size:
            return self._before
        if self._base.held is not None and dead:
            taken |= left_over(self._before, taken, dead[0])
        return taken

    def _named(self, rank: int) -> set[str]:
        """Buffers of a rank, also those in which nothing is live."""
        tail, held = self._found.get(rank), self._base.held
        out = set() if tail is None else {*tail.held.gone, *tail.held.columns, *tail.held.attributes}
        if held is not None and rank in held.ranks:
            out |= set(held.staged(rank).index.buffers)
        return out

    def _table(self, part: Part, runs: LiveRuns) -> pa.Table:
        return live_table(part[1], (self._session, part[0]), runs, self._streams.names)

    def _episodes(
        self, storage: Storage, head: Commit, entry: RunEntry, runs: Mapping[Part, LiveRuns]
    ) -> dict[Part, LiveRuns]:  # fmt: skip
        """The live runs as runs of one episode each; an error if a live step is in no segment."""
        every = tables.concat("live", self._tables.values())
        segments = _segments(storage, head, entry, self._found)
        located = tables.locate(every, segments)
        (self._ids, episode), position = coded(segments["episode_id"]), segments["position"].to_numpy()
        env = every["env_id"].to_numpy()[located["run"]]
        stream = self._streams.of(every["session"], every["stream_rank"], every["stream_env"])[located["run"]]
        lo = position[located.stream] + located.lo
        found = LiveRuns(env, located["position"], located.length, episode[located.stream], stream, lo)
        counts = [table.num_rows for table in self._tables.values()]
        owner = np.repeat(np.arange(len(counts)), counts)[located["run"]]
        return {part: together(LiveRuns.empty(), found.pick(owner == at)) for at, part in enumerate(self._tables)}

    # -- cuts ----------------------------------------------------------------------------------------------------

    def cuts(self, rank: int) -> list[Cut]:
        """Each buffer of a rank."""
        tail = self._found.get(rank)
        segments = tables.concat("segments", []) if tail is None else tail.held.table("segments")
        return [self._cut(part, segments) for part in self._located if part[0] == rank]

    def _cut(self, part: Part, segments: pa.Table) -> Cut:
        runs = self._located[part]
        names = [self._ids[i] for i in runs.episode.tolist()]
        ends = Ends(segments, part[1])
        ends.follow(*self._began(part, runs, names))
        return Cut(
            part[1], (self._session, part[0]), runs, tuple(self._streams.names), ends.next, ends.open,
            self._columns(part, runs), self._attributes(part, set(names)), None, {},
            self._left_out.get(part, LiveRuns.empty()),
        )  # fmt: skip

    def _began(self, part: Part, runs: LiveRuns, names: list[str]) -> tuple[dict[int, int], dict[int, str]]:
        """Next positions and open episodes as far as they do not follow from the tail."""
        rank, buffer = part
        following = ends_of(together(runs, self._held.get(part, LiveRuns.empty())))
        held = self._base.held
        if held is None:
            return following, {}
        same = self._base.own or (held.world_size == self.world_size == len(self._found) and self._as_before(part))
        own = held.staged(rank).index.buffers.get(buffer) if same and rank in held.ranks else None
        if own is not None:
            following |= {env: max(end, following.get(env, 0)) for env, end in own.next_positions.items()}
        if own is not None or self._base.own:
            return following, {} if own is None else dict(own.open_episodes)
        last = dict(zip(runs.env.tolist(), names, strict=True))
        return following, {env: name for env, name in last.items() if name in self._open_in_base}

    def _as_before(self, part: Part) -> bool:
        """Whether a resumed rank began with what the one of its number had held: a plan may have moved it."""
        none = LiveRuns.empty()
        began, before = (together(none, of.get(part, none)) for of in (self._held, self._before))
        return all(np.array_equal(one, other) for one, other in zip(began, before, strict=True))

    @cached_property
    def _open_in_base(self) -> set[str]:
        """Episodes that were open in the checkpoint which the session resumed from."""
        held = self._base.held
        indexes = [] if held is None else [held.staged(rank).index for rank in held.ranks]
        return {name for one in indexes for buffer in one.buffers.values() for name in buffer.open_episodes.values()}

    # -- columns and attributes ----------------------------------------------------------------------------------

    def _sources(self, part: Part) -> Iterator[tuple[Checkpoint, Part]]:
        """The parts of the earlier checkpoint in which values of these steps may lie."""
        held = self._base.held
        if held is not None:
            ranks = [rank for rank in held.ranks if rank == part[0] or not self._base.own]
            yield from ((held, (rank, part[1])) for rank in ranks)

    def _columns(self, part: Part, runs: LiveRuns) -> dict[str, Column]:
        given: dict[str, list[tuple[Column, Steps]]] = {}
        for held, source in self._sources(part):
            steps = self._before.get(source, LiveRuns.empty()).written
            for name, ref in held.staged(source[0]).index.columns.get(part[1], {}).items():
                (array,) = held.file(ref).rows({ref.array: [(0, ref.rows)]})[ref.array]
                given.setdefault(name, []).append((Column(array, ref.dtype), steps))
        tail = self._found.get(part[0])
        for name, journaled in ({} if tail is None else tail.held.columns.get(part[1], {})).items():
            given.setdefault(name, []).extend((column, self._streams.steps(steps)) for column, steps in journaled)
        for name, (dtype, shape) in self._kinds.get(part[1], {}).items():
            given.setdefault(name, [(Column(blank(dtype, 0, shape), dtype), self._streams.steps([]))])
        return {name: self._filled(part, name, runs, values) for name, values in given.items()}

    @cached_property
    def _kinds(self) -> dict[str, dict[str, Kind]]:
        """Of each buffer the columns that some rank has values of: a plan may deal its steps to any rank."""
        out: dict[str, dict[str, Kind]] = {}
        held = self._base.held
        indexes = [] if held is None else [held.staged(rank).index for rank in held.ranks]
        for index in indexes:
            for buffer, refs in index.columns.items():
                out.setdefault(buffer, {}).update((name, (ref.dtype, ref.shape)) for name, ref in refs.items())
        for tail in self._found.values():
            for buffer, of in tail.held.columns.items():
                newest = {name: values[-1].column for name, values in of.items()}
                kinds = {name: (column.dtype, column.array.shape[1:]) for name, column in newest.items()}
                out.setdefault(buffer, {}).update(kinds)
        return out

    def _filled(self, part: Part, name: str, runs: LiveRuns, given: list[tuple[Column, Steps]]) -> Column:
        column, lacking = fill(runs.written, given)
        if lacking:
            self.lacking[*part, name] = lacking
        return column

    def _attributes(self, part: Part, names: set[str]) -> dict[str, str]:
        values: dict[str, dict[str, Any]] = {}
        for held, source in self._sources(part):
            for name, of in held.attributes(*source).items():
                values.setdefault(name, {}).update(of)
        tail = self._found.get(part[0])
        for name, given in ({} if tail is None else tail.held.attributes.get(part[1], {})).items():
            values.setdefault(name, {}).update(given)
        live = {name: {key: value for key, value in of.items() if key in names} for name, of in values.items()}
        return {name: jsontree.dumps(of, where="attributes") for name, of in live.items()}


def _segments(storage: Storage, head: Commit, entry: RunEntry, found: Mapping[int, RankTail]) -> pa.Table:
    """Rows of the segments table, as far as live steps are found by them: those of the commit, and those to come."""
    import pyarrow as pa

    fresh = fresh_rows("segments", entry, found).select(_ROWS)
    return pa.concat_tables([Snapshot(storage, head).columns(_ROWS), fresh]).unify_dictionaries()
