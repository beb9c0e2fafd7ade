"""Appending what a writer has not seen of a storage, evicting what has left it, and the columns that say where it lay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from archive.adapters import declare
from archive.adapters.torchrl.episodes import SPLIT, Keys, Marks, Mask, as_path, keys_of, marks_of
from archive.adapters.torchrl.lists import ListCells
from archive.adapters.torchrl.parts import Parts, module
from archive.adapters.torchrl.tensors import TensorCells
from archive.adapters.torchrl.tracking import NONE, Record, evict_unknown, tracker_of
from archive.arrays import Ints, run_heads
from archive.base import FieldError, UsageError, cached_property, show
from archive.ring import MAX_CALL_BYTES
from archive.write import Buffer, BufferWriter

Cells = TensorCells | ListCells


def cells_of(parts: Parts) -> Cells:
    """The cells of a buffer's storage."""
    return (TensorCells if isinstance(parts.storage, module("storages").TensorStorage) else ListCells)(parts.storage)


def order_of(parts: Parts, cells: Cells) -> tuple[Ints, bool]:
    """Rows in use, oldest first, and whether others were overwritten before them."""
    rows = np.arange(cells.rows)
    if not parts.round_robin or cells.rows < cells.capacity(cells.inner):
        return rows, False
    cursor = int(parts.writer._cursor)
    return np.roll(rows, -cursor), cursor > 0 or int(parts.writer._write_count) > len(rows)


@dataclass(frozen=True)
class Appended:
    """What a save of one storage found: which cell stands where in the order of live steps."""

    cells: Cells
    keys: Keys
    record: Record
    live: Ints  # cells, in live order
    ids: dict[str, int]  # episode id -> id of its trajectory, where that is another than in the archive

    @cached_property
    def kinds(self) -> tuple[list[str], Ints]:
        """The kinds of item that the archive has, as JSON, and the number of that of each live step."""
        known: dict[str, int] = {}
        numbers = [known.setdefault(kind, len(known)) for kind, _ in self.record.signatures[self.live]]
        return list(known), np.array(numbers, np.int32)


def append(part: Buffer, parts: Parts, *, verify: bool, traj_key: Any, end_key: Any) -> Appended:
    """Append cells that are new or changed, evict the steps that they held."""
    cells = cells_of(parts)
    asked = as_path(traj_key), as_path(end_key)
    order, wrapped = order_of(parts, cells)
    with part.exclusive(bounded=False) as inner:
        tracker = tracker_of(parts.storage, inner)
        record = tracker.record
        assert record is not None  # only a copy in another process has none
        if not verify and tracker.idle(cells) and record.keys[1] == asked:
            return _appended(inner, cells, record)
        keys = keys_of(parts, cells, traj_key, end_key)
        traj = [] if keys.traj is None else [keys.traj]
        declare(inner, episode_id=traj, next_of={} if keys.unit == "step" else cells.next_fields(), unit=keys.unit)
        changed, hashes = tracker.changed(cells, verify=verify)
        record.resized(cells.rows * cells.columns)
        record.forget(np.repeat(changed, cells.columns))
        evict_unknown(inner, record)
        marks = marks_of(cells, keys, order, wrapped=wrapped)
        _append(inner, cells, keys, record, marks, order)
        record.hashes, record.form, record.units, record.to_close = hashes, cells.form(), None, []
        record.keys = keys, asked
        tracker.start(cells)
        return _appended(inner, cells, record)


def _appended(inner: BufferWriter, cells: Cells, record: Record) -> Appended:
    live = np.flatnonzero(record.position != NONE)
    live = live[np.lexsort((record.position[live], record.env[live]))]
    keys = record.keys[0]
    return Appended(cells, keys, record, live, _ids(inner, cells, keys, record.renumbered[live], live))


def check_keys(every: Iterable[Parts], **given: Any) -> None:
    """Refuse a key that was given, and that no buffer has."""
    cells = [cells_of(parts) for parts in every if len(parts.storage)]
    for name, key in given.items():
        path = as_path(key)
        if path is not None and cells and all(c.flat(path) is None for c in cells):
            raise UsageError(
                f"{name}={key!r}: the steps have no field {show(path)!r}, or not all of them; give another key"
            )


def _ids(inner: BufferWriter, cells: Cells, keys: Keys, renumbered: Mask, live: Ints) -> dict[str, int]:
    """Ids of trajectories that a restore has renumbered, by episode."""
    values = cells.flat(keys.traj) if keys.traj is not None and renumbered.any() else None
    if values is None:
        return {}
    runs, names = inner.live_runs()
    heads = np.cumsum(runs.length) - runs.length
    chosen = [i for i in range(len(heads)) if runs.length[i] and renumbered[heads[i]]]
    numbers = np.asarray(values).reshape(len(values), -1)[:, 0]
    return {names[i]: int(numbers[live[heads[i]]]) for i in chosen}


def _append(inner: BufferWriter, cells: Cells, keys: Keys, record: Record, marks: Marks, order: Ints) -> None:
    known = inner.schema
    for chosen in _slabs(cells, record, order):
        declared = replace(known, json=tuple(dict.fromkeys((*known.json, *cells.json_fields(chosen)))))
        env = chosen % cells.columns
        heads = run_heads(env)
        if keys.unit == "step":
            first, last, jumps = heads, np.r_[heads[1:], True], np.zeros(len(heads), bool)
        else:
            runs_on = _runs_on(inner, record, marks, chosen, heads)
            first, last = marks.first[chosen], marks.last[chosen]
            split = bool(runs_on[0] & ~first[0]) and _differs(cells, record, marks, int(chosen[0]))
            first[0] |= split
            _end_known(inner, record, marks, chosen[first & runs_on], SPLIT if split else "ended")
            jumps = ~first & ~runs_on
        positions = _positions(inner, env, heads, jumps)
        steps = cells.read(chosen)
        if not steps:
            raise FieldError(
                "the buffer's items have no fields, so there is nothing to save; give them one, such as a number"
            )
        inner.append(
            steps, env_ids=env, first=first, last=last, terminated=marks.terminated[chosen],
            truncated=marks.truncated[chosen], positions=positions, owned=True, declared=declared,
        )  # fmt: skip
        record.env[chosen], record.position[chosen] = env, positions
        if cells.listed:
            record.signatures[chosen] = cells.signatures(chosen)


def _slabs(cells: Cells, record: Record, order: Ints) -> Iterator[Ints]:
    """Cells to append, some megabytes of one kind at a time, column by column in order of time."""
    columns = cells.columns
    depth = max(1, MAX_CALL_BYTES // (cells.cell_bytes() * max(1, columns))) if len(order) else 1
    for lo in range(0, len(order), depth):
        grid = order[lo : lo + depth][:, None] * columns + np.arange(columns)
        chosen = grid.T.ravel()
        chosen = chosen[record.position[chosen] == NONE]
        if len(chosen):
            signature = cells.signatures(chosen)
            yield from np.split(chosen, np.flatnonzero(signature[1:] != signature[:-1]) + 1)


def _runs_on(inner: BufferWriter, record: Record, marks: Marks, chosen: Ints, heads: Mask) -> Mask:
    """Whether each cell's step follows the newest of its stream."""
    before = marks.previous[chosen]
    out: Mask = ~heads & (np.r_[NONE, chosen[:-1]] == before)
    for i in np.flatnonzero(heads & (before >= 0)).tolist():
        known, env = int(before[i]), int(chosen[i] % max(1, marks.columns))
        newest = inner.next_position(env) - 1
        out[i] = record.env[known] == env and record.position[known] == newest >= 0
    return out


def _differs(cells: Cells, record: Record, marks: Marks, cell: int) -> bool:
    """Whether an item is of another kind than the one before it was, so that it can't go on with its episode."""
    before = int(marks.previous[cell])
    return cells.listed and record.signatures[before] != cells.signatures(np.array([cell]))[0]


def _end_known(inner: BufferWriter, record: Record, marks: Marks, begins: Ints, reason: str) -> None:
    """Trajectories that were open have ended, as their successors tell."""
    before = marks.previous[begins]
    known = before[record.position[before] != NONE]
    if len(known):
        inner.close_episodes(record.env[known], None, None, reason)


def _positions(inner: BufferWriter, env: Ints, heads: Mask, jumps: Mask) -> Ints:
    """The next positions of each stream; one is left out where something is missing in between."""
    out = np.zeros(len(env), np.int64)
    edges = np.flatnonzero(heads).tolist()
    for lo, hi in zip(edges, [*edges[1:], len(env)], strict=True):
        start = inner.next_position(env[lo])
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
