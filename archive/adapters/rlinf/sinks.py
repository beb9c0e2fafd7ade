"""The archives that a TrajectoryReplayBuffer writes to, a writer for each: trajectories are appended, committed in the
background, and checkpointed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from archive import Archive, Writer
from archive.adapters import Item, Saved, checkpoint, part_of
from archive.adapters.rlinf import trajectory as trajectories
from archive.adapters.rlinf.contents import Entry
from archive.adapters.rlinf.stored import BufferJob, Home, Homes, Start, Where
from archive.adapters.rlinf.trajectory import Mark, Steps, renumbered
from archive.base import process_group
from archive.checkpoint import Pending, on_terminal
from archive.log import named_session, place

CHUNK_BYTES = 64 * 1024  # transitions are drawn one by one, and each reads its chunk
MAX_UNCOMMITTED_BYTES = 256 * 1024 * 1024  # added but not visible yet, and so in memory


Visible = Callable[[dict[Entry, str], Home], None]  # of trajectories and their episodes' ids


class Earlier(NamedTuple):
    """The start of a writer: a share or a checkpoint, and the trajectories that are live in it."""

    source: Any
    rank: int
    world_size: int
    known: dict[int, Item]


class Sink:
    """Writes a buffer's trajectories to one archive; `visible` is called with those that can be read there.

    interval_s: after which what was added is committed in the background; what goes wrong then is for `surface()`, and
    is tried again an interval later. None: it waits for `commit()` or a checkpoint.
    """

    def __init__(
        self, arc: Archive, writer: Writer, buffer: str, home: Home, visible: Visible, interval_s: float | None
    ) -> None:
        self.arc = arc
        self.writer = writer
        self.part = part_of(writer, buffer)
        self.home = home
        self.known: dict[int, Item] = {}  # live in it, by trajectory id
        self.saved: Earlier | None = None  # the newest checkpoint
        self.pending: Pending | None = None
        newest = arc.checkpoints.of(writer.run).latest  # all ranks see the same one: none is made without them
        self.step = 0 if newest is None else newest.step + 1
        self._buffer = buffer
        self._visible = visible
        self._interval_s = interval_s
        self._committing = threading.RLock()
        self._uncommitted: dict[Entry, int] = {}  # and their bytes
        self._timing = threading.Lock()
        self._timer: threading.Timer | None = None
        self._at_work = False  # in the background
        self._error: BaseException | None = None

    def append(self, entry: Entry, made: Steps) -> None:
        """Append a trajectory, copied. `added` has to follow."""
        self.known[entry.trajectory_id] = Item(Mark(entry, entry.trajectory_id), made.add(self.part))

    def added(self, entry: Entry, nbytes: int) -> None:
        """It can be read once it is committed. Not within `together()`: a commit may be waiting for the writer."""
        with self._committing:
            self._uncommitted[entry] = nbytes
            hurry = sum(self._uncommitted.values()) > MAX_UNCOMMITTED_BYTES
        self._later(hurry=hurry)

    def drop(self, numbers: Iterable[int]) -> None:
        """Take out the trajectories that have left the buffer."""
        gone = [number for number in numbers if number in self.known]
        if gone:
            self.part.remove([self.known[number].episode_id for number in gone])
            for number in gone:
                del self.known[number]

    def keep_only(self, numbers: Collection[int]) -> None:
        """Drop all other trajectories."""
        self.drop([number for number in self.known if number not in numbers])

    def commit(self) -> None:
        """Make visible what was added; while a checkpoint is under way, that will."""
        with self._committing:
            if self.pending is not None and not self.pending.done():
                self.pending.future.add_done_callback(lambda _: self._later())
                return
            made = list(self._uncommitted)
            if made:
                self.writer.commit()
                self._committed(made)

    def commit_now(self) -> None:
        """Commit what was added; not while a checkpoint is under way. What goes wrong is for `surface()`."""
        if self._interval_s is None or (self.pending is not None and not self.pending.done()):
            return
        try:
            self.commit()
        except Exception as error:
            with self._timing:
                self._error = error
            self._later()

    def _later(self, *, hurry: bool = False) -> None:
        """Commit in the background: in an interval, if not earlier, or now."""
        with self._timing:
            if self._interval_s is None or self._at_work or (self._timer is not None and not hurry):
                return
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(0.0 if hurry else self._interval_s, self._commit_aside)
            self._timer.daemon = True
            self._timer.start()

    def _commit_aside(self) -> None:
        """Commit while others add: all but the commit itself is done without keeping them waiting."""
        self._at_work = True
        try:
            self.writer.upload()
            self.commit()
            error: BaseException | None = None
        except BaseException as failed:
            error = failed
        with self._timing:
            self._at_work, self._timer = False, None
            self._error = error or self._error
        if self._uncommitted:
            self._later()

    def _committed(self, made: Iterable[Entry]) -> None:
        with self._committing:
            for entry in made:
                self._uncommitted.pop(entry, None)
        found = ((entry, self.known.get(entry.trajectory_id)) for entry in made)
        names = {entry: item.episode_id for entry, item in found if item is not None and item.mark.entry is entry}
        self._visible(names, self.home)

    def checkpoint(self, state: Any, step: int | None, on_progress: Any, options: Mapping[str, Any]) -> Pending:
        """Checkpoint this rank, with its buffer's state.

        Returns once it has staged; with the last rank to stage, once it is committed.
        """
        staged = threading.Event()
        shown = on_progress or on_terminal(self.writer.rank)

        def tell(event: dict[str, Any]) -> None:
            if event["phase"] not in ("uploading", "staging"):
                staged.set()
            if shown is not None:
                shown(event)

        def saved(future: Any) -> None:
            try:
                if not future.exception():
                    self.saved = Earlier(future.result(), self.writer.rank, self.writer.world_size, known)
                    self._committed(made)
            finally:
                staged.set()

        with self._committing:
            made, known = list(self._uncommitted), dict(self.known)
            step = self.step if step is None else step
            values = {self._buffer: Saved(attributes=renumbered(self.known), state=state)}
            self.pending = pending = checkpoint(self.writer, step, values, on_progress=tell, **options)
            self.step = step + 1
        pending.future.add_done_callback(saved)
        staged.wait()
        if pending.done() or pending.all_staged():
            pending.result()
        return pending

    def settle(self) -> None:
        """Wait for the checkpoint that is under way; raise its error if nobody has seen it."""
        if self.pending is not None:
            self.pending.future.exception()  # waits
        self.surface()

    def surface(self) -> None:
        """Raise what went wrong in the background, if nobody has seen it."""
        with self._timing:
            error, self._error = self._error, None
        if error is None and self.pending is not None:
            error = self.pending.unseen_error()
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the checkpoint that is under way, and commit what was added since."""
        self.settle()
        self.commit()

    def stop(self) -> None:
        """End what goes on in the background: a commit under way is finished, none is begun."""
        with self._timing:
            timer, self._interval_s = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()

    def close(self, error: BaseException | None = None) -> None:
        """Commit what is pending, and end the writer. After an error: without waiting for other ranks."""
        self.stop()
        if error is not None:
            try:
                self.commit()
            except Exception as more:
                error.add_note(f"what was added last could not be committed: {more}")
            self.writer.__exit__(type(error), error, error.__traceback__)
            return
        try:
            self.finish()
        finally:
            self.writer.close()


class Sinks:
    """Sinks by the name of their root: opened when there is something to write, going on from what was loaded. Besides
    the one that all is appended to, the last one written to stays open."""

    def __init__(
        self,
        job: BufferJob,
        auto: Where | None,
        interval_s: float,
        visible: Visible,
        homes: Homes,
        journal_s: float | None,
        journal: str,
    ) -> None:
        self.job = job
        self.open: dict[str, Sink] = {}
        self._homes = homes
        self._interval_s = interval_s
        self._journal_s = journal_s
        self._journal = journal
        self._visible = visible
        self._auto_root = None if auto is None else auto.name
        self._earlier: dict[str, Earlier] = {}
        self._sessions: dict[str, list[str]] = {}  # of the writers that a root had
        self._session = job.session
        if auto is not None and self._session is None and process_group(least=2) is not None:
            self._session = place(job.own_rank, None, job.run, None).session  # all ranks are asked, and agree

    def at(self, where: Where) -> Sink:
        """The sink of that path, opened if need be."""
        root = where.name
        if root not in self.open:
            for other in [r for r in self.open if r != self._auto_root]:
                self.close(other)
            self.open[root] = self._opened(where, root)
        return self.open[root]

    def _opened(self, where: Where, root: str) -> Sink:
        job, auto = self.job, root == self._auto_root
        rank = job.own_rank if where.rank is None else where.rank
        world_size = job.writers(rank)
        arc = job.open(where, create=True)
        earlier = self._earlier.get(root)
        if earlier is not None and (earlier.rank, earlier.world_size) != (rank, world_size):
            earlier = None
        session = self._session or place(rank, world_size, job.run, None).session
        name = self._named(root, session)
        self._sessions.setdefault(root, []).append(name)
        source, journal_s = None if earlier is None else earlier.source, self._journal_s if auto else None
        writer = arc.writer(
            *(rank, world_size, job.run, name, trajectories.SCHEMA),
            resume=source,
            chunk_bytes=CHUNK_BYTES,
            journal_s=journal_s,
            journal="rank" if journal_s is None else self._journal,
        )
        home, interval_s = self._homes(lambda: arc.episodes), self._interval_s if auto else None
        sink = Sink(arc, writer, job.buffer, home, self._visible, interval_s)
        if earlier is not None:
            sink.known = dict(earlier.known)
            if sink.part.journaled and (attributes := renumbered(sink.known)):
                sink.part.journal(attributes=attributes)
        return sink

    def _named(self, root: str, session: str) -> str:
        """A session of its own for each writer, which the ranks agree on as long as they open writers in step."""
        count = len(self._sessions.get(root, ())) + 1
        return session if count == 1 else f"{session}-{count}"

    def sessions(self, root: str) -> set[str]:
        """Sessions that this start of the job had there, and the next one, which another rank may have begun already
        (unless only opening it can tell its name)."""
        session = self._session or named_session(self.job.run)
        coming = set() if session is None else {self._named(root, session)}
        return coming | {*self._sessions.get(root, ())}

    def go_on_from(self, where: Where, start: Start, entries: Iterable[Entry]) -> None:
        """Close all. The next writer of that path has what was loaded already."""
        self.close_all()
        known = {e.trajectory_id: Item(Mark(e, e.original), e.name) for e in entries}
        self._earlier = {where.name: Earlier(start.source, start.rank, start.world_size, known)}
        self.job.rank, self.job.world_size = start.rank, start.world_size

    def begin(self, where: Where) -> None:
        """Open the writer of that path if it keeps a journal, which then begins with what was loaded."""
        if self._journal_s is not None and where.name == self._auto_root:
            self.at(where)

    def close(self, root: str, error: BaseException | None = None) -> None:
        """Close one; a writer opened there later goes on from the last checkpoint."""
        sink = self.open.pop(root)
        sink.close(error)
        self._earlier.pop(root, None)
        if sink.saved is not None:
            self._earlier[root] = sink.saved

    def close_all(self, error: BaseException | None = None) -> None:
        """Close all; the first failure is raised when all are closed. error: the one that ends it all, if any."""
        errors = []
        for root in list(self.open):
            try:
                self.close(root, error)
            except Exception as failed:
                errors.append(failed)
        if errors:
            raise errors[0]

    def each(self, verb: Callable[[Sink], None]) -> None:
        """Do this to each that is open."""
        for sink in list(self.open.values()):
            verb(sink)
