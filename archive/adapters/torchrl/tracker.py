"""What a writer has of a storage: where each cell's step stands in its streams, which cells have changed since, and the
appending of these; where trajectories begin and end: by a trajectory key, by ends, or not at all (steps on their own).

The storage notifies a tracker of each write. As long as its revision grew by just those writes, the marked rows are
those that changed; else digests of all rows are compared with those of the last save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.adapters import Digests, Tracked, declare
from archive.adapters.torchrl.lists import Cells, ListCells, cells_of
from archive.adapters.torchrl.parts import Parts, module
from archive.arrays import Ints, Steps, ascending, run_heads, run_starts, spans
from archive.base import FieldError, UsageError, cached_property, show
from archive.fields import Array, Path
from archive.torch import ring
from archive.write import Buffer

if TYPE_CHECKING:
    from resharding import ShareBuffer

Mask = np.ndarray[Any, np.dtype[np.bool_]]
COLLECTOR: Path = ("collector", "traj_ids")
END: Path = ("next", "done")
SPLIT = "another kind of item"  # why an episode ended, though its trajectory goes on in the next


@dataclass(frozen=True)
class Keys:
    """The fields that tell trajectories apart. Without either, steps are independent of each other."""

    traj: Path | None = None
    end: Path | None = None

    @property
    def unit(self) -> str:
        return "step" if self.traj is None and self.end is None else "episode"

    def beside(self, name: str) -> Path | None:
        """The field of that name next to the end: "truncated", "terminated"."""
        return None if self.end is None else (*self.end[:-1], name)

    def to_state(self) -> dict[str, Any]:
        return {name: None if path is None else list(path) for name, path in vars(self).items()}

    @classmethod
    def from_state(cls, state: Any) -> Keys:
        return cls(as_path(state.get("traj")), as_path(state.get("end")))

    @classmethod
    def asked(cls, traj_key: Any, end_key: Any) -> Keys:
        """The keys that a user gave."""
        return cls(as_path(traj_key), as_path(end_key))


def as_path(key: Any) -> Path | None:
    """A nested key of TorchRL as a path."""
    if key is None:
        return None
    return (key,) if isinstance(key, str) else tuple(key)


def keys_of(parts: Parts, cells: Cells, asked: Keys) -> Keys:
    """The keys asked for; else those that the sampler was given; else the collector's; else the usual end."""
    if parts.max_value and asked.traj is None:
        return Keys()  # neighbours were not neighbours in time
    slicing = [s for s in parts.samplers.values() if isinstance(s, module("samplers").SliceSampler)]

    def first(*paths: Path | None) -> Path | None:
        return next((p for p in paths if p is not None and cells.has(p)), None)

    return Keys(
        first(asked.traj, *(as_path(getattr(s, "traj_key", None)) for s in slicing), COLLECTOR),
        first(asked.end, *(as_path(getattr(s, "end_key", None)) for s in slicing), END),
    )


@dataclass(frozen=True)
class Marks:
    """One entry a cell, of all cells in use."""

    first: Mask
    last: Mask
    terminated: Mask
    truncated: Mask
    previous: Ints  # the cell before it in time, -1 if there is none
    columns: int


def marks_of(cells: Cells, keys: Keys, order: Ints, *, wrapped: bool) -> Marks:
    """The ends of trajectories.  order: rows, oldest first.  wrapped: what came before them was overwritten."""
    columns, count = cells.columns, cells.rows * cells.columns
    grid = order[:, None] * columns + np.arange(columns)
    previous = np.full(count, -1, np.int64)
    previous[grid[1:].ravel()] = grid[:-1].ravel()
    last = _flags(cells, keys.end)
    ids = ids_of(cells, keys.traj)
    if ids is not None:
        last[grid[:-1].ravel()] |= (ids[grid[:-1]] != ids[grid[1:]]).ravel()  # the last step before the id changes
    begins = np.where(previous >= 0, last[previous], not wrapped)
    first = np.asarray(begins | _flags(cells, ("is_init",)), bool)
    truncated, terminated = (_flags(cells, keys.beside(name)) for name in ("truncated", "terminated"))
    return Marks(first, last, terminated & last, truncated & last, previous, columns)


def _flags(cells: Cells, path: Path | None) -> Mask:
    """True where a cell has anything but 0 in a field of numbers; a fresh array."""
    count = cells.rows * cells.columns
    values = None if path is None else cells.flat(path)
    if values is None or values.dtype.kind not in "biu" or not count:
        return np.zeros(count, bool)
    return np.asarray(values.reshape(count, -1).astype(bool).any(axis=1))


def ids_of(cells: Cells, path: Path | None) -> Array | None:
    """The trajectory id of each cell; None if there are none."""
    values = None if path is None else cells.flat(path)
    return None if values is None or not len(values) else values.reshape(len(values), -1)[:, 0]


# -- which cells are where ---------------------------------------------------------------------------------------

NONE = -1
_MANY_MARKS = 4096
_OF_NO_STEP = {
    "env": np.int64(NONE),
    "position": np.int64(NONE),
    "closed": False,
    "renumbered": False,
    "signatures": None,
}


class Tracker:
    """The place of each cell's step in the archive, for one buffer of one writer; position NONE: it is not there.

    It is attached to a storage, which notifies it of each write.
    closed: ended by a restore, though the step in the archive does not say so.  renumbered: its trajectory has another
    id here than in the archive.  signatures: of storages of items, what each was made of when it was appended, as
    sampling adds fields to some.  hashes, form: digests of all rows, and the fields that all cells had, then.
    moved: steps lie in other slots than those that their field "index" says in the archive.
    to_close: env rows whose open episode does not go on.  keys: that tell trajectories apart; asked: those given.
    """

    env: Ints
    position: Ints
    closed: Mask
    renumbered: Mask
    signatures: Any

    def __init__(self, cells: int = 0) -> None:
        """cells: how many there are, none of which is in the archive."""
        for name, value in _OF_NO_STEP.items():
            setattr(self, name, np.full(cells, value))
        self.hashes: Digests = np.zeros(0, np.uint64)
        self.form: Any = None
        self.moved = False
        self.to_close: list[int] = []
        self.keys: Keys | None = None
        self.asked: Keys | None = None
        self._revision = -1
        self._explained = 0  # by how much the revision has grown for the writes that it was notified of
        self._marks: list[Ints | slice] = []  # rows that were written
        self._listed = False

    def __getstate__(self) -> dict[str, Any]:
        """In another process nobody knows of the storage: all of it is new there."""
        return vars(Tracker())

    @property
    def live(self) -> Ints:
        """The cells whose step is in the archive, in live order."""
        cells = np.flatnonzero(self.position != NONE)
        return cells[np.lexsort((self.position[cells], self.env[cells]))]

    def forget(self, cells: Mask) -> None:
        """There are so many cells, and the steps in these are not those in the archive."""
        more = max(0, len(cells) - len(self.position))
        for name, value in _OF_NO_STEP.items():
            setattr(self, name, np.r_[getattr(self, name)[: len(cells)], np.full(more, value)])
        self.position[cells] = NONE
        self.closed[cells] = self.renumbered[cells] = False

    # -- what has changed ---------------------------------------------------------------------------------------

    def start(self, cells: Cells) -> None:
        """The writes from now on explain what changes."""
        self._revision = int(cells.storage._mutation_revision)
        self._explained = 0
        self._marks = []
        self._listed = cells.listed

    def mark_update(self, index: Any) -> None:
        """Called by the storage's writers, with the rows (or coordinates) that they wrote."""
        rows = np.asarray(index.detach().cpu() if hasattr(index, "detach") else index)
        rows = rows[:, 0] if rows.ndim > 1 else rows.reshape(-1)
        valid = rows[rows >= 0]
        self._explained += len(valid) if self._listed else int(len(valid) > 0)
        if len(valid):
            run = (np.diff(valid) == 1).all()
            self._marks.append(slice(int(valid[0]), int(valid[-1]) + 1) if run else ascending(valid))
        if len(self._marks) > _MANY_MARKS:
            self._marks = [ascending(np.r_[tuple(self._marks)])]

    def changed(self, cells: Cells, *, verify: bool) -> tuple[Mask, Digests]:
        """Rows in use that may differ from what was saved, and the digests of all rows."""
        # a field that came later is one that all cells have, whatever was written to them
        saved = self.hashes if self.form == cells.form() else self.hashes[:0]
        known = min(len(saved), cells.rows)
        out = np.ones(cells.rows, bool)
        if int(cells.storage._mutation_revision) - self._revision == self._explained and not verify and known:
            out[:known] = False
            for mark in self._marks:
                out[mark if isinstance(mark, slice) else mark[mark < cells.rows]] = True
            hashes = np.zeros(cells.rows, np.uint64)
            hashes[:known] = saved[:known]
            hashes[out] = cells.hashes(np.flatnonzero(out))
            return out, hashes
        hashes = cells.hashes()
        out[:known] = hashes[:known] != saved[:known]
        return out, hashes

    def idle(self, cells: Cells) -> bool:
        """True if nothing at all was written since the last save."""
        same = int(cells.storage._mutation_revision) == self._revision and not self._marks
        return same and self.keys is not None


_known: Tracked[Tracker] = Tracked()


def restored(storage: Any, part: ShareBuffer, tracker: Tracker) -> None:
    """Remember what was put into a storage: nothing else is known of it."""
    _known.restored(storage, part, tracker)
    _attach(storage, tracker)


def forget_all(storage: Any) -> None:
    """The storage's contents are replaced: nothing is known of them."""
    _known.forget(storage)
    _attach(storage)


def tracker_of(storage: Any, inner: Buffer) -> Tracker:
    """The tracker of a storage for a writer's buffer: the one that belongs to it, the restored one, or a new one."""
    tracker = _known.of(storage, inner)
    if tracker is None:
        tracker = _known.keep(storage, inner, Tracker())
        _attach(storage, tracker)
    return tracker


def _attach(storage: Any, *new: Tracker) -> None:
    """Have the storage tell the new tracker of its writes, and no tracker of a writer that is gone."""
    numbers = set(map(id, _known.all(storage)))
    attached = storage._attached_entities
    attached[:] = [one for one in attached if not isinstance(one, Tracker) or id(one) in numbers]
    for tracker in new:
        storage.attach(tracker)


def evict_unknown(inner: Buffer, tracker: Tracker) -> None:
    """Evict what is live in the writer and has no cell."""
    runs, _ = inner.live_runs()
    kept = tracker.position != NONE
    known = Steps(tracker.env[kept], tracker.position[kept], tracker.position[kept] + 1)
    gone = runs.pick(runs.length > 0).minus(known)
    for row in ascending(gone.stream).tolist():
        mine = gone.pick(gone.stream == row)
        inner.evict(row, positions=spans(mine.lo, mine.length))


# -- appending ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Appended:
    """The archive's view of one storage: which cell stands where in the order of live steps."""

    parts: Parts
    cells: Cells
    tracker: Tracker
    live: Ints  # cells, in live order
    ids: dict[str, int]  # episode id -> id of its trajectory, where that is another than in the archive

    @cached_property
    def _kinds(self) -> tuple[list[str], Ints]:
        """The kinds of item that the archive has, as JSON, and the number of that of each live step."""
        known: dict[str, int] = {}
        numbers = [known.setdefault(kind, len(known)) for kind, _ in self.tracker.signatures[self.live]]
        return list(known), np.array(numbers, np.int32)

    @property
    def columns(self) -> dict[str, Any]:
        """The cell of each live step, its kind of item, and whether a restore has ended it."""
        small = len(self.tracker.position) < 2**31
        out: dict[str, Any] = {"slot": self.live.astype(np.int32 if small else np.int64)}
        if self.cells.listed:
            out["kind"] = self._kinds[1]
        if self.tracker.keys and self.tracker.keys.end is not None:
            out["closed"] = self.tracker.closed[self.live]
        return out

    @property
    def state(self) -> dict[str, Any]:
        """The storage's state beside the columns."""
        cells, storage = self.cells, self.parts.storage
        cursor = storage._last_cursor_index
        return {
            "class": type(storage).__name__,
            "capacity": cells.capacity(cells.inner),
            "inner": list(cells.inner),
            "rows": cells.rows,
            "moved": self.tracker.moved,
            "kind": {"items": self._kinds[0]} if isinstance(cells, ListCells) else cells.kind,
            "last_cursor": None if cursor is None else int(cursor),
            "keys": (self.tracker.keys or Keys()).to_state(),
        }


def check_keys(every: Iterable[Parts], asked: Keys) -> None:
    """Refuse a key that was given, and that no buffer has."""
    cells = [cells_of(parts) for parts in every if len(parts.storage)]
    for name, path in vars(asked).items():
        if path is not None and cells and not any(c.has(path) for c in cells):
            raise UsageError(
                f"{name}_key={path!r}: the steps have no field {show(path)!r}, or not all of them; give another key"
            )


def append(part: Buffer, parts: Parts, asked: Keys, *, verify: bool) -> Appended:
    """Append cells that are new or changed, evict the steps that they held."""
    cells = cells_of(parts)
    with part.exclusive(bounded=False) as inner:
        tracker = tracker_of(parts.storage, inner)
        inner.undone(vars(tracker).update, dict(vars(tracker)))  # arrays are replaced before they are changed
        for env in tracker.to_close:
            inner.close_episodes([env], reason="resumed")
        if verify or not tracker.idle(cells) or tracker.asked != asked:
            keys = keys_of(parts, cells, asked)
            traj = [] if keys.traj is None else [keys.traj]
            declare(inner, episode_id=traj, next_of={} if keys.unit == "step" else cells.next_fields(), unit=keys.unit)
            changed, hashes = tracker.changed(cells, verify=verify)
            tracker.forget(np.repeat(changed, cells.columns))
            evict_unknown(inner, tracker)
            _Appending(inner, cells, keys, tracker, *_order(parts, cells)).run()
            tracker.hashes, tracker.form = hashes, cells.form()
            tracker.keys, tracker.asked, tracker.to_close = keys, asked, []
            tracker.start(cells)
        live = tracker.live
        return Appended(parts, cells, tracker, live, _ids(inner, cells, tracker, live))


def _order(parts: Parts, cells: Cells) -> tuple[Ints, bool]:
    """Rows in use, oldest first, and whether others were overwritten before them."""
    rows = np.arange(cells.rows)
    if not parts.round_robin or cells.rows < cells.capacity(cells.inner):
        return rows, False
    cursor = int(parts.writer._cursor)
    return np.roll(rows, -cursor), cursor > 0 or int(parts.writer._write_count) > len(rows)


def _ids(inner: Buffer, cells: Cells, tracker: Tracker, live: Ints) -> dict[str, int]:
    """Ids of trajectories that a restore has renumbered, by episode."""
    renumbered = tracker.renumbered[live]
    values = ids_of(cells, tracker.keys.traj) if tracker.keys and renumbered.any() else None
    if values is None:
        return {}
    runs, names = inner.live_runs()
    heads = np.cumsum(runs.length) - runs.length
    chosen = [i for i in range(len(heads)) if runs.length[i] and renumbered[heads[i]]]
    return {names[i]: int(values[live[heads[i]]]) for i in chosen}


class _Appending:
    """One round of appending: what is not in the archive yet, to the streams of the storage's columns."""

    def __init__(self, inner: Buffer, cells: Cells, keys: Keys, tracker: Tracker, order: Ints, wrapped: bool) -> None:
        self.inner = inner
        self.cells = cells
        self.keys = keys
        self.tracker = tracker
        self.order = order
        self.marks: Marks = marks_of(cells, keys, order, wrapped=wrapped)

    def run(self) -> None:
        """Append slab by slab."""
        cells, tracker, known = self.cells, self.tracker, self.inner.schema
        for chosen in self._slabs():
            env = chosen % cells.columns
            heads = run_heads(env)
            first, last, jumps = self._ends(chosen, heads)
            positions = self._positions(env, heads, jumps)
            steps = cells.read(chosen)
            if not steps:
                raise FieldError(
                    "the buffer's items have no fields, so there is nothing to save; give them one, such as a number"
                )
            self.inner.append(
                steps,
                env_ids=env,
                first=first,
                last=last,
                terminated=self.marks.terminated[chosen],
                truncated=self.marks.truncated[chosen],
                positions=positions,
                owned=True,
                declared=replace(known, json=tuple(dict.fromkeys((*known.json, *cells.json_fields(chosen))))),
            )
            tracker.env[chosen], tracker.position[chosen] = env, positions
            if cells.listed:
                tracker.signatures[chosen] = cells.signatures(chosen)

    def _slabs(self) -> Iterator[Ints]:
        """Cells to append, some megabytes of one kind at a time, column by column in order of time."""
        columns, order = self.cells.columns, self.order
        depth = max(1, ring.MAX_CALL_BYTES // (self.cells.cell_bytes() * max(1, columns))) if len(order) else 1
        for lo in range(0, len(order), depth):
            grid = order[lo : lo + depth][:, None] * columns + np.arange(columns)
            chosen = grid.T.ravel()
            chosen = chosen[self.tracker.position[chosen] == NONE]
            if len(chosen):
                signature = self.cells.signatures(chosen)
                yield from np.split(chosen, run_starts(signature)[1:])

    def _ends(self, chosen: Ints, heads: Mask) -> tuple[Mask, Mask, Mask]:
        """The steps of a slab that begin an episode, that end one, and before which some are missing."""
        if self.keys.unit == "step":
            return heads, np.append(heads[1:], True), np.zeros(len(heads), bool)
        marks, tracker = self.marks, self.tracker
        runs_on = self._runs_on(chosen, heads)
        first = marks.first[chosen]
        split = bool(runs_on[0] & ~first[0]) and self._differs(int(chosen[0]))
        first[0] |= split
        before = marks.previous[chosen[first & runs_on]]
        known = before[tracker.position[before] != NONE]
        if len(known):  # trajectories that were open have ended, as their successors tell
            self.inner.close_episodes(tracker.env[known], truncated=None, reason=SPLIT if split else "ended")
        return first, marks.last[chosen], ~first & ~runs_on

    def _runs_on(self, chosen: Ints, heads: Mask) -> Mask:
        """True where a cell's step follows the newest of its stream."""
        tracker, before = self.tracker, self.marks.previous[chosen]
        out: Mask = ~heads & (np.r_[NONE, chosen[:-1]] == before)
        for i in np.flatnonzero(heads & (before >= 0)).tolist():
            known, env = int(before[i]), int(chosen[i] % max(1, self.marks.columns))
            newest = self.inner.next_position(env) - 1
            out[i] = tracker.env[known] == env and tracker.position[known] == newest >= 0
        return out

    def _differs(self, cell: int) -> bool:
        """True if an item is of another kind than the one before it was, so that it can't go on with its episode."""
        before = self.tracker.signatures[self.marks.previous[cell]]
        return self.cells.listed and bool(before != self.cells.signatures(np.array([cell]))[0])

    def _positions(self, env: Ints, heads: Mask, jumps: Mask) -> Ints:
        """The next positions of each stream; one is left out where something is missing in between."""
        out = np.zeros(len(env), np.int64)
        edges = np.flatnonzero(heads).tolist()
        for lo, hi in zip(edges, [*edges[1:], len(env)], strict=True):
            start = self.inner.next_position(env[lo])
            skipped = jumps[lo:hi].copy()
            skipped[0] &= start > 0
            out[lo:hi] = start + np.arange(hi - lo) + np.cumsum(skipped)
        return out
