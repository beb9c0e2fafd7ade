"""The archives that one buffer writes to: opened when there is something to write, going on from what was loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import archive
from archive.adapters.rlinf import trajectory as trajectories
from archive.adapters.rlinf.buffer import ranks
from archive.adapters.rlinf.buffer.loading import Homes
from archive.adapters.rlinf.buffer.ranks import Job, Where
from archive.adapters.rlinf.buffer.sink import Sink, Visible
from archive.base import process_group
from archive.log import named_session, place

CHUNK_BYTES = 64 * 1024  # transitions are drawn one by one, and each reads its chunk


@dataclass(frozen=True)
class Earlier:
    """What a writer goes on from: a share or a checkpoint, and the trajectories that are live in it."""

    source: Any
    rank: int
    world_size: int
    owned: dict[int, str]
    renumbered: Mapping[str, int] = field(default_factory=dict)  # episodes that do not say their trajectory ids


class Sinks:
    """Sinks by the name of their root. Besides the one that all is appended to, the last one written to stays open."""

    def __init__(
        self, job: Job, auto: Where | None, interval_s: float, visible: Visible, homes: Homes,
        journal_s: float | None = None,
    ) -> None:  # fmt: skip
        self._homes = homes
        self.job = job
        self._interval_s = interval_s
        self._journal_s = journal_s
        self._visible = visible
        self._auto_root = None if auto is None else auto.name
        self._open: dict[str, Sink] = {}
        self._earlier: dict[str, Earlier] = {}
        self._opened: dict[str, int] = {}  # root -> how many writers it had
        self._sessions: dict[str, set[str]] = {}  # their names
        self._session: str | None = job.session

    def agree(self, rank: int) -> None:
        """Agree with the other ranks on a session, where a process group lets them; all of them must call this."""
        if self._session is None and process_group(least=2) is not None:
            self._session = place(rank, None, self.job.run, None).session

    def at(self, where: Where) -> Sink:
        """The sink of that path, opened if need be."""
        root = where.name
        if root not in self._open:
            for other in [r for r in self._open if r != self._auto_root]:
                self.close(other)
            self._open[root] = self._opened_at(where, root)
        return self._open[root]

    def _opened_at(self, where: Where, root: str) -> Sink:
        rank = self.job.rank_of(where)
        world_size = ranks.writer_world_size(rank, self.job.world_size)
        arc = archive.open(where.root, create=True, storage_options=where.options(self.job.storage_options))
        earlier = self._earlier.get(root)
        if earlier is not None and (earlier.rank, earlier.world_size) != (rank, world_size):
            earlier = None
        auto = root == self._auto_root
        journal_s = self._journal_s if auto else None
        writer = arc.writer(
            rank, world_size, self.job.run, self._new_session(root, rank, world_size), trajectories.SCHEMA,
            resume=None if earlier is None else earlier.source, chunk_bytes=CHUNK_BYTES, journal_s=journal_s,
        )  # fmt: skip
        home, interval_s = self._homes(lambda: arc.episodes), self._interval_s if auto else None
        sink = Sink(arc, writer, self.job.buffer, home, self._visible, interval_s, journal_s is not None)
        if earlier is not None:
            sink.owned = dict(earlier.owned)
            sink.renumber(earlier.renumbered)
        return sink

    def _new_session(self, root: str, rank: int, world_size: int) -> str:
        """A session of its own for each writer, which the ranks agree on as long as they open writers in step."""
        session = self._session
        if session is None:
            session = place(rank, world_size, self.job.run, None).session
        count = self._opened[root] = self._opened.get(root, 0) + 1
        name = _numbered(session, count)
        self._sessions.setdefault(root, set()).add(name)
        return name

    def sessions(self, root: str) -> set[str]:
        """Sessions that this start of the job had there, and the next one, which another rank may have begun already
        (unless only opening it can tell its name)."""
        session = self._session or named_session(self.job.run)
        coming = set() if session is None else {_numbered(session, self._opened.get(root, 0) + 1)}
        return coming | self._sessions.get(root, set())

    def begin(self, where: Where) -> None:
        """Open the writer that keeps a journal, if it goes on from what was loaded: then its journal begins with it."""
        root = where.name
        if self._journal_s is not None and root == self._auto_root and root in self._earlier:
            self.at(where)

    def journal_left(self, kept: Iterable[int]) -> None:
        """Have the journal know at once that all trajectories but these have left."""
        for sink in self._open.values():
            if sink.journaled:
                sink.keep_only(kept)

    def go_on_from(self, root: str, earlier: Earlier) -> None:
        """The next writer at that root has these trajectories already."""
        self._earlier[root] = earlier

    def close(self, root: str, error: BaseException | None = None) -> None:
        """Close one; a writer opened there later goes on from the last checkpoint."""
        sink = self._open.pop(root)
        sink.close(error)
        self._earlier.pop(root, None)
        if sink.saved is not None:
            made, owned = sink.saved
            self._earlier[root] = Earlier(made, sink.writer.rank, sink.writer.world_size, owned)

    def close_all(self, error: BaseException | None = None) -> None:
        """Close all; the first failure is raised when all are closed. error: the one that ends it all, if any."""
        errors = []
        for root in list(self._open):
            try:
                self.close(root, error)
            except Exception as failed:
                errors.append(failed)
        if errors:
            raise errors[0]

    def forget(self) -> None:
        """What was written so far is not what comes."""
        self._earlier.clear()

    def each(self, verb: Callable[[Sink], None]) -> None:
        """Do this to each that is open."""
        for sink in list(self._open.values()):
            verb(sink)


def _numbered(session: str, count: int) -> str:
    return session if count == 1 else f"{session}-{count}"
