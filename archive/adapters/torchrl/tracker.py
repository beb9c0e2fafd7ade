"""What a writer has of a storage: where each cell's step stands in its streams, which cells have changed since, and the
appending of these; where trajectories begin and end: by a trajectory key, by ends, or not at all (steps on their own).

The storage notifies a tracker of each write. As long as its revision grew by just those writes, the marked rows are
those that changed; else digests of all rows are compared with those of the last save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.adapters import Digests, Tracked, declare
from archive.adapters.torchrl.lists import Cells, ListCells, cells_of
from archive.adapters.torchrl.parts import Parts, module
from archive.arrays import Ints, run_heads, run_starts, spans
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
    """Which fields tell trajectories apart. Without either, steps are independent of each other."""

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
    """Where trajectories begin and end.  order: rows, oldest first.  wrapped: what came before them was overwritten."""
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
    """Whether each cell has anything but 0 in a field of numbers; a fresh array."""
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


# -- appending ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Appended:
    """What a save of one storage found: which cell stands where in the order of live steps."""

    cells: Cells
    record: Record
    live: Ints  # cells, in live order
    ids: dict[str, int]  # episode id -> id of its trajectory, where that is another than in the archive

    @property
    def keys(self) -> Keys:
        return self.record.keys or Keys()

    @cached_property
    def kinds(self) -> tuple[list[str], Ints]:
        """The kinds of item that the archive has, as JSON, and the number of that of each live step."""
        known: dict[str, int] = {}
        numbers = [known.setdefault(kind, len(known)) for kind, _ in self.record.signatures[self.live]]
        return list(known), np.array(numbers, np.int32)


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
        record = tracker.record
        assert record is not None  # only a copy in another process has none
        for env in record.to_close:
            inner.close_episodes([env], reason="resumed")
        record.to_close = []
        if verify or not tracker.idle(cells) or record.asked != asked:
            keys = keys_of(parts, cells, asked)
            traj = [] if keys.traj is None else [keys.traj]
            declare(inner, episode_id=traj, next_of={} if keys.unit == "step" else cells.next_fields(), unit=keys.unit)
            changed, hashes = tracker.changed(cells, verify=verify)
            record.resized(cells.rows * cells.columns)
            record.forget(np.repeat(changed, cells.columns))
            evict_unknown(inner, record)
            _Appending(inner, cells, keys, record, *_order(parts, cells)).run()
            record.hashes, record.form = hashes, cells.form()
            record.keys, record.asked = keys, asked
            tracker.start(cells)
        live = record.live
        return Appended(cells, record, live, _ids(inner, cells, record, live))


def _order(parts: Parts, cells: Cells) -> tuple[Ints, bool]:
    """Rows in use, oldest first, and whether others were overwritten before them."""
    rows = np.arange(cells.rows)
    if not parts.round_robin or cells.rows < cells.capacity(cells.inner):
        return rows, False
    cursor = int(parts.writer._cursor)
    return np.roll(rows, -cursor), cursor > 0 or int(parts.writer._write_count) > len(rows)


def _ids(inner: Buffer, cells: Cells, record: Record, live: Ints) -> dict[str, int]:
    """Ids of trajectories that a restore has renumbered, by episode."""
    renumbered = record.renumbered[live]
    values = ids_of(cells, record.keys.traj) if record.keys and renumbered.any() else None
    if values is None:
        return {}
    runs, names = inner.live_runs()
    heads = np.cumsum(runs.length) - runs.length
    chosen = [i for i in range(len(heads)) if runs.length[i] and renumbered[heads[i]]]
    return {names[i]: int(values[live[heads[i]]]) for i in chosen}


class _Appending:
    """One round of appending: what is not in the archive yet, to the streams of the storage's columns."""

    def __init__(self, inner: Buffer, cells: Cells, keys: Keys, record: Record, order: Ints, wrapped: bool) -> None:
        self.inner = inner
        self.cells = cells
        self.keys = keys
        self.record = record
        self.order = order
        self.marks: Marks = marks_of(cells, keys, order, wrapped=wrapped)

    def run(self) -> None:
        """Append slab by slab."""
        cells, record, known = self.cells, self.record, self.inner.schema
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
                steps, env_ids=env, first=first, last=last, terminated=self.marks.terminated[chosen],
                truncated=self.marks.truncated[chosen], positions=positions, owned=True,
                declared=replace(known, json=tuple(dict.fromkeys((*known.json, *cells.json_fields(chosen))))),
            )  # fmt: skip
            record.env[chosen], record.position[chosen] = env, positions
            if cells.listed:
                record.signatures[chosen] = cells.signatures(chosen)

    def _slabs(self) -> Iterator[Ints]:
        """Cells to append, some megabytes of one kind at a time, column by column in order of time."""
        columns, order = self.cells.columns, self.order
        depth = max(1, ring.MAX_CALL_BYTES // (self.cells.cell_bytes() * max(1, columns))) if len(order) else 1
        for lo in range(0, len(order), depth):
            grid = order[lo : lo + depth][:, None] * columns + np.arange(columns)
            chosen = grid.T.ravel()
            chosen = chosen[self.record.position[chosen] == NONE]
            if len(chosen):
                signature = self.cells.signatures(chosen)
                yield from np.split(chosen, run_starts(signature)[1:])

    def _ends(self, chosen: Ints, heads: Mask) -> tuple[Mask, Mask, Mask]:
        """Of a slab: which steps begin an episode, which end one, before which some are missing."""
        if self.keys.unit == "step":
            return heads, np.append(heads[1:], True), np.zeros(len(heads), bool)
        marks, record = self.marks, self.record
        runs_on = self._runs_on(chosen, heads)
        first = marks.first[chosen]
        split = bool(runs_on[0] & ~first[0]) and self._differs(int(chosen[0]))
        first[0] |= split
        before = marks.previous[chosen[first & runs_on]]
        known = before[record.position[before] != NONE]
        if len(known):  # trajectories that were open have ended, as their successors tell
            self.inner.close_episodes(record.env[known], truncated=None, reason=SPLIT if split else "ended")
        return first, marks.last[chosen], ~first & ~runs_on

    def _runs_on(self, chosen: Ints, heads: Mask) -> Mask:
        """Whether each cell's step follows the newest of its stream."""
        record, before = self.record, self.marks.previous[chosen]
        out: Mask = ~heads & (np.r_[NONE, chosen[:-1]] == before)
        for i in np.flatnonzero(heads & (before >= 0)).tolist():
            known, env = int(before[i]), int(chosen[i] % max(1, self.marks.columns))
            newest = self.inner.next_position(env) - 1
            out[i] = record.env[known] == env and record.position[known] == newest >= 0
        return out

    def _differs(self, cell: int) -> bool:
        """Whether an item is of another kind than the one before it was, so that it can't go on with its episode."""
        before = self.record.signatures[self.marks.previous[cell]]
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


def columns_of(found: Appended) -> dict[str, Any]:
    """Which cell each live step lies in, its kind of item, and whether a restore has ended it."""
    cells = found.live
    out: dict[str, Any] = {"slot": cells.astype(np.int32 if len(found.record.position) < 2**31 else np.int64)}
    if found.cells.listed:
        out["kind"] = found.kinds[1]
    if found.keys.end is not None:
        out["closed"] = found.record.closed[cells]
    return out


def storage_state(parts: Parts, found: Appended) -> dict[str, Any]:
    """What else there is to say of a storage."""
    cells = found.cells
    cursor = parts.storage._last_cursor_index
    return {
        "class": type(parts.storage).__name__,
        "capacity": cells.capacity(cells.inner),
        "inner": list(cells.inner),
        "rows": cells.rows,
        "moved": found.record.moved,
        "kind": {"items": found.kinds[0]} if isinstance(cells, ListCells) else cells.kind,
        "last_cursor": None if cursor is None else int(cursor),
        "keys": found.keys.to_state(),
    }
