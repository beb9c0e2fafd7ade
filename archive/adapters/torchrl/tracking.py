"""What a writer knows of a storage: where each cell's step stands in its streams, and which cells have changed since.

The storage notifies a tracker of each write. As long as its revision grew by just those writes, the marked rows are
those that changed; else digests of all rows are compared with those of the last save.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.adapters import Digests, Tracked
from archive.adapters.torchrl.cells import Cells
from archive.adapters.torchrl.episodes import Keys
from archive.arrays import Ints, spans
from archive.write import Buffer

if TYPE_CHECKING:
    from resharding import ShareBuffer

Mask = np.ndarray[Any, np.dtype[np.bool_]]
NONE = -1
_MANY_MARKS = 4096
_OF_NO_STEP = {
    "env": np.int64(NONE),
    "position": np.int64(NONE),
    "closed": False,
    "renumbered": False,
    "signatures": None,
}


@dataclass
class Record:
    """Where the step of each cell stands in the archive; position NONE: it is not there."""

    env: Ints
    position: Ints
    closed: Mask  # ended by a restore, though the step in the archive does not say so
    renumbered: Mask  # its trajectory has another id here than in the archive
    signatures: Any  # of storages of items: what each was made of when it was appended; sampling adds fields to some
    hashes: Digests = field(default_factory=lambda: np.zeros(0, np.uint64))
    moved: bool = False  # steps lie in other slots than those that their field "index" says in the archive
    to_close: list[int] = field(default_factory=list)  # env rows whose open episode does not go on
    keys: Keys | None = None  # that tell trajectories apart
    asked: Keys | None = None  # those that it was given
    form: Any = None  # the fields that all cells had when they were appended, with dtypes and shapes

    @classmethod
    def of(cls, cells: int) -> Record:
        """Of cells that are not in the archive."""
        every: dict[str, Any] = {name: np.full(cells, value) for name, value in _OF_NO_STEP.items()}
        return cls(**every)

    def resized(self, cells: int) -> None:
        """As many entries as there are cells now."""
        more = max(0, cells - len(self.position))
        for name, value in _OF_NO_STEP.items():
            setattr(self, name, np.r_[getattr(self, name)[:cells], np.full(more, value)])

    def forget(self, cells: Mask) -> None:
        """The steps in these cells are not those in the archive."""
        self.position[cells] = NONE
        self.closed[cells] = self.renumbered[cells] = False

    @property
    def live(self) -> Ints:
        """The cells whose step is in the archive, in live order."""
        cells = np.flatnonzero(self.position != NONE)
        return cells[np.lexsort((self.position[cells], self.env[cells]))]


class Tracker:
    """Attached to a storage, which notifies it of each write. It belongs to one buffer of one archive writer."""

    def __init__(self, record: Record | None) -> None:
        self.record = record
        self.revision = -1
        self.explained = 0  # by how much the revision has grown for the writes that it was notified of
        self._marks: list[Ints | slice] = []  # rows that were written
        self._listed = False

    def start(self, cells: Cells) -> None:
        """The writes from now on explain what changes."""
        self.revision = int(cells.storage._mutation_revision)
        self.explained = 0
        self._marks = []
        self._listed = cells.listed

    def mark_update(self, index: Any) -> None:
        """Called by the storage's writers, with the rows (or coordinates) that they wrote."""
        if self.record is None:
            self._marks = []
            return
        rows = np.asarray(index.detach().cpu() if hasattr(index, "detach") else index)
        rows = rows[:, 0] if rows.ndim > 1 else rows.reshape(-1)
        valid = rows[rows >= 0]
        self.explained += len(valid) if self._listed else int(len(valid) > 0)
        if len(valid):
            run = (np.diff(valid) == 1).all()
            self._marks.append(slice(int(valid[0]), int(valid[-1]) + 1) if run else np.unique(valid))
        if len(self._marks) > _MANY_MARKS:
            self._marks = [np.unique(np.r_[tuple(self._marks)])]

    def changed(self, cells: Cells, *, verify: bool) -> tuple[Mask, Digests]:
        """Rows in use that may differ from what was saved, and the digests of all rows."""
        saved = np.zeros(0, np.uint64) if self.record is None else self.record.hashes
        if self.record is not None and self.record.form != cells.form():
            saved = saved[:0]  # a field that came later is one that all cells have, whatever was written to them
        known = min(len(saved), cells.rows)
        out = np.ones(cells.rows, bool)
        if int(cells.storage._mutation_revision) - self.revision == self.explained and not verify and known:
            out[:known] = False
            for mark in self._marks:
                out[mark if isinstance(mark, slice) else mark[mark < cells.rows]] = True
            return out, _patched(saved[:known], cells, out)
        hashes = cells.hashes()
        out[:known] = hashes[:known] != saved[:known]
        return out, hashes

    def idle(self, cells: Cells) -> bool:
        """Whether nothing at all was written since the last save."""
        same = int(cells.storage._mutation_revision) == self.revision and not self._marks
        return same and self.record is not None and self.record.keys is not None

    def __getstate__(self) -> dict[str, Any]:
        """In another process nobody knows of the storage: digests find what changed."""
        return vars(Tracker(None))


def _patched(known: Digests, cells: Cells, changed: Mask) -> Digests:
    """The digests of rows that did not change as they were, of the others anew."""
    if not changed.any() and len(known) == cells.rows:
        return known
    out = np.zeros(cells.rows, np.uint64)
    out[: len(known)] = known
    rows = np.flatnonzero(changed)
    out[rows] = cells.hashes(rows)
    return out


_known: Tracked[Tracker] = Tracked()


def restored(storage: Any, part: ShareBuffer, record: Record) -> Tracker:
    """A tracker of what was put into a storage: nothing else is known of it."""
    tracker = Tracker(record)
    _known.restored(storage, part, tracker)
    _attach(storage, tracker)
    return tracker


def forget_all(storage: Any) -> None:
    """The storage's contents are replaced: nothing is known of them."""
    _known.forget(storage)
    _attach(storage)


def tracker_of(storage: Any, inner: Buffer) -> Tracker:
    """The tracker of a storage for a writer's buffer: the one that belongs to it, the restored one, or a new one."""
    tracker = _known.of(storage, inner)
    if tracker is None:
        tracker = _known.keep(storage, inner, Tracker(Record.of(0)))
        _attach(storage, tracker)
    return tracker


def _attach(storage: Any, *new: Tracker) -> None:
    """Have the storage tell the new tracker of its writes, and no tracker of a writer that is gone."""
    numbers = set(map(id, _known.all(storage)))
    attached = storage._attached_entities
    attached[:] = [one for one in attached if not isinstance(one, Tracker) or id(one) in numbers]
    for tracker in new:
        storage.attach(tracker)


def evict_unknown(inner: Buffer, record: Record) -> None:
    """What is live in the writer and has no cell has left the buffer."""
    runs, _ = inner.live_runs()
    full = runs.length > 0
    env, position = np.repeat(runs.stream, runs.length), spans(runs.lo[full], runs.length[full])
    kept = record.position != NONE
    span = int(max(position.max(initial=0), record.position.max(initial=0))) + 1
    gone = ~np.isin(env * span + position, record.env[kept] * span + record.position[kept])
    rows, heads = np.unique(env[gone], return_index=True)
    for row, mine in zip(rows.tolist(), np.split(position[gone], heads[1:]), strict=False):
        inner.evict(row, positions=mine)
