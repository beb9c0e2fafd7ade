"""Appending what a writer has not seen of a storage, evicting what has left it,
and the columns that say where it lay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from archive.adapters import declare
from archive.adapters.torchrl.cells import Cells
from archive.adapters.torchrl.episodes import SPLIT, Keys, Marks, Mask, ids_of, keys_of, marks_of
from archive.adapters.torchrl.lists import ListCells
from archive.adapters.torchrl.parts import Parts, module
from archive.adapters.torchrl.tensors import TensorCells
from archive.adapters.torchrl.tracking import NONE, Record, evict_unknown, tracker_of
from archive.arrays import Ints, run_heads, run_starts
from archive.base import FieldError, UsageError, cached_property, show
from archive.torch import ring
from archive.write import Buffer


def cells_of(parts: Parts) -> TensorCells | ListCells:
    """The cells of a buffer's storage."""
    return (TensorCells if isinstance(parts.storage, module("storages").TensorStorage) else ListCells)(parts.storage)


@dataclass(frozen=True)
class Appended:
    """What a save of one storage found: which cell stands where in the order of live steps."""

    cells: TensorCells | ListCells
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
