"""One rank's writer in one archive, for a buffer's trajectories: appended,
committed in the background, checkpointed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from archive import Archive, Writer
from archive.adapters import Saved, checkpoint, part_of
from archive.adapters.rlinf import NUMBER, Steps
from archive.adapters.rlinf.buffer.autosave import AutoSave
from archive.adapters.rlinf.buffer.home import ArchiveHome
from archive.adapters.rlinf.buffer.window import Entry
from archive.checkpoint import Checkpoint, Pending, on_terminal

MAX_UNCOMMITTED_BYTES = 256 * 1024 * 1024  # added but not visible yet, and so in memory


class Added(NamedTuple):
    """A trajectory that was appended as an episode."""

    entry: Entry
    name: str
    nbytes: int


Visible = Callable[[list[Added], ArchiveHome], None]


class Sink:
    """Writes a buffer's trajectories to one archive; `visible` is called with those that can be read there."""

    def __init__(
        self, arc: Archive, writer: Writer, buffer: str, home: ArchiveHome, visible: Visible,
        interval_s: float | None, journaled: bool = False,
    ) -> None:  # fmt: skip
        self.arc = arc
        self.writer = writer
        self.buffer = buffer
        self.journaled = journaled
        self.home = home
        self.owned: dict[int, str] = {}  # trajectory id -> its episode, live in this writer
        self.saved: tuple[Checkpoint, dict[int, str]] | None = None  # the newest checkpoint, and what was live in it
        self.pending: Pending | None = None
        self.step = self._first_step()
        self._visible = visible
        self._committing = threading.RLock()
        self._uncommitted: list[Added] = []
        self._autosave = None if interval_s is None else AutoSave(self._commit_aside, interval_s)

    def _first_step(self) -> int:
        """Goes on from the run's newest checkpoint: all ranks see the same one, as none can be made without them."""
        newest = self.arc.checkpoints.of(self.writer.run).latest
        return 0 if newest is None else newest.step + 1

    def add(self, entry: Entry, made: Steps, nbytes: int, leaving: Iterable[int] = ()) -> None:
        """Append a trajectory, copied; it can be read once it is committed.

        leaving: ids of trajectories that it drives out of the buffer. A journal is told at once, others at a save.
        """
        part = part_of(self.writer, self.buffer)
        with self.writer.together():
            name = made.add(part)
            if self.journaled:
                self._let_go(i for i in leaving if i in self.owned)
        self.owned[entry.trajectory_id] = name
        with self._committing:
            self._uncommitted.append(Added(entry, name, nbytes))
            waiting = sum(added.nbytes for added in self._uncommitted)
        if self._autosave is not None:
            tell = self._autosave.hurry if waiting > MAX_UNCOMMITTED_BYTES else self._autosave.added
            tell()

    def keep_only(self, ids: Iterable[int]) -> None:
        """All other trajectories have left the buffer."""
        self._let_go(sorted(self.owned.keys() - set(ids)))

    def _let_go(self, ids: Iterable[int]) -> None:
        gone = list(ids)
        if gone:
            part_of(self.writer, self.buffer).remove([self.owned[i] for i in gone])
            for i in gone:
                del self.owned[i]

    def renumber(self, numbers: Mapping[str, int]) -> None:
        """Episodes that a journal finds in the buffer under other trajectory ids than they say."""
        if self.journaled and numbers:
            self.writer.journal(attributes={NUMBER: numbers}, buffer=self.buffer)

    def commit_now(self) -> None:
        """Wait until what was added is visible, or could not be made so (`surface()` tells); none is begun while a
        checkpoint is under way."""
        if self._autosave is not None and (self.pending is None or self.pending.done()):
            self._autosave.now()

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

    def _commit_aside(self) -> None:
        """Commit while others add: all but the commit itself is done without keeping them waiting."""
        self.writer.upload()
        self.commit()

    def _later(self) -> None:
        if self._autosave is not None:
            self._autosave.added()

    def _committed(self, made: list[Added]) -> None:
        done = {id(added) for added in made}
        with self._committing:
            self._uncommitted = [added for added in self._uncommitted if id(added) not in done]
        self.home.expect(added.name for added in made)
        self._visible(made, self.home)

    def checkpoint(self, saved: Saved, step: int | None, on_progress: Any, options: Mapping[str, Any]) -> Pending:
        """Checkpoint this rank, with what its buffer saves.

        Returns once it has staged; with the last rank to stage, once it is committed.
        """
        staged = threading.Event()
        shown = on_progress or on_terminal(self.writer.rank)

        def tell(event: dict[str, Any]) -> None:
            if event["phase"] not in ("uploading", "staging"):
                staged.set()
            if shown is not None:
                shown(event)

        with self._committing:
            made = list(self._uncommitted)
            step = self.step if step is None else step
            pending = checkpoint(self.writer, step, {self.buffer: saved}, on_progress=tell, **options)
            self.pending, self.step = pending, step + 1
            owned = dict(self.owned)
        future = pending.future
        future.add_done_callback(lambda done: None if done.exception() else self._saved(done.result(), owned, made))
        future.add_done_callback(lambda _: staged.set())
        staged.wait()
        if pending.done() or pending.all_staged():
            pending.result()
        return pending

    def _saved(self, made: Checkpoint, owned: dict[int, str], added: list[Added]) -> None:
        self.saved = made, owned
        self._committed(added)

    def settle(self) -> None:
        """Wait for the checkpoint that is under way; raise its error if nobody has seen it."""
        if self.pending is not None:
            self.pending.future.exception()  # waits
        self.surface()

    def surface(self) -> None:
        """Raise what went wrong in the background, if nobody has seen it."""
        if self._autosave is not None:
            self._autosave.surface()
        if self.pending is not None and (error := self.pending.unseen_error()):
            raise error

    def finish(self) -> None:
        """Wait for the checkpoint that is under way, and commit what was added since."""
        self.settle()
        self.commit()

    def close(self, error: BaseException | None = None) -> None:
        """Commit what is pending, and end the writer. After an error: without waiting for other ranks."""
        if self._autosave is not None:
            self._autosave.close()
        if error is not None:
            with noted(error):
                self.commit()
            self.writer.__exit__(type(error), error, error.__traceback__)
            return
        try:
            self.finish()
        finally:
            self.writer.close()


@contextmanager
def noted(error: BaseException) -> Iterator[None]:
    """Add what fails meanwhile to an error that is on its way already."""
    try:
        yield
    except Exception as more:
        error.add_note(f"what was added last could not be committed: {more}")
