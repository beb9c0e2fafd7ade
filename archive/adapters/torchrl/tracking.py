"""What a writer knows of a storage: where each cell's step stands in its streams, and which cells have changed since.

A tracker attached to the storage is told of each write. As long as the storage's revision grew by just what it was
told of, the marked rows are those that changed; else digests of all rows are compared with those of the last save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from archive.arrays import Ints, run_starts, spans
from archive.write import BufferWriter

Mask = np.ndarray[Any, np.dtype[np.bool_]]
NONE = -1
_MANY_MARKS = 4096


@dataclass
class Record:
    """Where the step of each cell stands; position NONE: it is not in the archive."""

    env: Ints
    position: Ints
    hashes: np.ndarray[Any, np.dtype[np.uint64]]
    closed: Mask  # ended by a restore, though the step in the archive does not say so
    renumbered: Mask  # its trajectory has another id here than in the archive
    signatures: Any  # of storages of items: what each was made of when it was appended; sampling adds fields to some
    units: frozenset[tuple[int, int, int, str]] | None = None  # what was restored: a writer must hold just this
    moved: bool = False  # steps lie in other slots than those that their field "index" says in the archive
    to_close: list[int] = field(default_factory=list)  # env rows whose open episode does not go on
    keys: Any = None  # by which a save told trajectories apart, and what was asked for
    form: Any = None  # the fields that all cells had when they were appended, with dtypes and shapes

    @classmethod
    def of(cls, cells: int) -> Record:
        nothing = np.full(cells, NONE, np.int64)
        return cls(
            nothing,
            nothing.copy(),
            np.zeros(0, np.uint64),
            np.zeros(cells, bool),
            np.zeros(cells, bool),
            np.full(cells, None),
        )

    def resized(self, cells: int) -> None:
        """As many entries as there are cells now."""
        more = max(0, cells - len(self.position))
        self.env = np.r_[self.env[:cells], np.full(more, NONE, np.int64)]
        self.position = np.r_[self.position[:cells], np.full(more, NONE, np.int64)]
        self.closed = np.r_[self.closed[:cells], np.zeros(more, bool)]
        self.renumbered = np.r_[self.renumbered[:cells], np.zeros(more, bool)]
        self.signatures = np.r_[self.signatures[:cells], np.full(more, None)]

    def forget(self, cells: Any) -> None:
        self.position[cells] = NONE
        self.closed[cells] = self.renumbered[cells] = False


class Tracker:
    """Attached to a storage: told of each write by the writer. It belongs to one buffer of one archive writer."""

    def __init__(self, inner: BufferWriter | None, record: Record | None) -> None:
        self.inner = None if inner is None else ref(inner)
        self.record = record
        self.revision = -1
        self.explained = 0
        self._marks: list[Any] = []
        self._listed = False

    def start(self, cells: Any) -> None:
        """From now on: what is told explains what changes."""
        self.revision, self.explained, self._marks = int(cells.storage._mutation_revision), 0, []
        self._listed = cells.listed

    def mark_update(self, index: Any) -> None:
        """Called by the storage's writers, with the rows (or coordinates) that they wrote."""
        if self.record is None or (self.inner is not None and self.inner() is None):
            self._marks = []
            return
        rows = np.asarray(index.detach().cpu() if hasattr(index, "detach") else index)
        rows = rows[:, 0] if rows.ndim > 1 else rows.reshape(-1)
        valid = rows[rows >= 0]
        self.explained += len(valid) if self._listed else int(len(valid) > 0)
        if len(valid):
            self._marks.append((int(valid[0]), int(valid[-1]) + 1) if _is_run(valid) else np.unique(valid))
        if len(self._marks) > _MANY_MARKS:
            every = [np.arange(*mark) if isinstance(mark, tuple) else mark for mark in self._marks]
            self._marks = [np.unique(np.concatenate(every))]

    def changed(self, cells: Any, *, verify: bool) -> tuple[Mask, np.ndarray[Any, np.dtype[np.uint64]]]:
        """Rows in use that may differ from what was saved, and the digests of all rows."""
        saved = np.zeros(0, np.uint64) if self.record is None else self.record.hashes
        if self.record is not None and self.record.form != cells.form():
            saved = saved[:0]  # a field that came later is one that all cells have, whatever was written to them
        known = min(len(saved), cells.rows)
        out = np.ones(cells.rows, bool)
        if int(cells.storage._mutation_revision) - self.revision == self.explained and not verify and known:
            out[:known] = False
            for mark in self._marks:
                out[slice(*mark) if isinstance(mark, tuple) else mark[mark < cells.rows]] = True
            return out, _patched(saved[:known], cells, out)
        hashes = cells.hashes()
        out[:known] = hashes[:known] != saved[:known]
        return out, hashes

    def idle(self, cells: Any) -> bool:
        """Whether nothing at all was written since the last save."""
        same = int(cells.storage._mutation_revision) == self.revision and not self._marks
        return same and self.record is not None and self.record.keys is not None and self.record.units is None

    def __getstate__(self) -> dict[str, Any]:
        """In another process the storage is told of by nobody: digests find what changed."""
        return {"inner": None, "record": None, "revision": -1, "explained": 0, "_marks": [], "_listed": self._listed}


def _is_run(rows: Ints) -> bool:
    return bool((np.diff(rows) == 1).all())


def _patched(known: Any, cells: Any, changed: Mask) -> Any:
    """The digests of rows that did not change as they were, of the others anew."""
    if not changed.any() and len(known) == cells.rows:
        return known
    out = np.zeros(cells.rows, np.uint64)
    out[: len(known)] = known
    rows = np.flatnonzero(changed)
    out[rows] = cells.hashes(rows)
    return out


_trackers: WeakKeyDictionary[Any, list[Tracker]] = WeakKeyDictionary()


def attach(storage: Any, tracker: Tracker) -> Tracker:
    """Have the storage tell the tracker of its writes; trackers of writers that are gone are let go."""
    dead = [t for t in _trackers.get(storage, []) if t.inner is not None and t.inner() is None]
    every = storage._attached_entities
    every[:] = [e for e in every if not any(e is t for t in dead)]
    _trackers[storage] = [t for t in _trackers.get(storage, []) if t not in dead]
    if not any(t is tracker for t in _trackers[storage]):
        _trackers[storage].append(tracker)
        storage.attach(tracker)
    return tracker


def forget_all(storage: Any) -> None:
    """The storage's contents are replaced: nothing is known of them."""
    gone = _trackers.pop(storage, [])
    every = storage._attached_entities
    every[:] = [e for e in every if not any(e is t for t in gone)]


def tracker_of(storage: Any, inner: BufferWriter) -> Tracker:
    """The tracker of a storage for a writer's buffer: the one that belongs to it, the restored one, or a new one."""
    every = _trackers.get(storage, [])
    for tracker in every:
        if tracker.inner is not None and tracker.inner() is inner:
            return tracker
    for tracker in every:
        if tracker.inner is None and tracker.record is not None and tracker.record.units == live_units(inner):
            tracker.inner = ref(inner)
            for env in tracker.record.to_close:
                inner.close_episodes([env], None, True, "resumed")
            return tracker
    return attach(storage, Tracker(inner, Record.of(0)))


def live_units(inner: BufferWriter) -> frozenset[tuple[int, int, int, str]]:
    """Runs of live steps of one episode: (env row, position, steps, episode id)."""
    runs, ids = inner.live_runs()
    return units_of(runs.env, runs.position, runs.length, ids)


def units_of(env: Ints, position: Ints, length: Ints, ids: list[str]) -> frozenset[tuple[int, int, int, str]]:
    return frozenset(_joined(zip(env.tolist(), position.tolist(), length.tolist(), ids, strict=True)))


def _joined(runs: Any) -> Iterator[tuple[int, int, int, str]]:
    """Neighbours of one episode as one."""
    held: tuple[int, int, int, str] | None = None
    for run in sorted(runs):
        if held and run[0] == held[0] and run[3] == held[3] and run[1] == held[1] + held[2]:
            held = (held[0], held[1], held[2] + run[2], held[3])
            continue
        if held and held[2]:
            yield held
        held = run
    if held and held[2]:
        yield held


def evict_unknown(inner: BufferWriter, record: Record) -> None:
    """What is live in the writer and has no cell has left the buffer."""
    runs, _ = inner.live_runs()
    full = runs.length > 0
    env, position = np.repeat(runs.env, runs.length), spans(runs.position[full], runs.length[full])
    kept = record.position != NONE
    span = int(max(position.max(initial=0), record.position.max(initial=0))) + 1
    gone = ~np.isin(env * span + position, record.env[kept] * span + record.position[kept])
    env, position = env[gone], position[gone]
    heads = run_starts(env)
    for row, mine in zip(env[heads].tolist(), np.split(position, heads[1:]), strict=False):
        inner.evict(row, None, mine)
