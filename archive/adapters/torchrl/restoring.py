"""Restoring replay buffers: which step goes to which cell, and what is derived from that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from archive.adapters import common
from archive.adapters.torchrl import extras as _torchrl_extras
from archive.adapters.torchrl import samplers, writers
from archive.adapters.torchrl.episodes import Keys
from archive.adapters.torchrl.parts import Parts, module
from archive.adapters.torchrl.places import Given, Target, target_of
from archive.adapters.torchrl.reading import batches
from archive.adapters.torchrl.samplers import Placed
from archive.adapters.torchrl.saving import Cells, cells_of
from archive.adapters.torchrl.tensors import INDEX, check_room
from archive.adapters.torchrl.tracking import NONE, Record, Tracker, attach, forget_all, units_of
from archive.arrays import Ints, spans
from archive.fields import nesting


def restore(parts: Parts, given: Given, existing: str) -> common.Report:
    """Fill one buffer from its share."""
    cells = cells_of(parts)
    common.check_room(existing, len(parts.storage), f"buffer {parts.name!r}")
    target = target_of(cells, given)
    check_room(cells, target.rows, target.inner)
    parts.rb.synchronize()
    with parts.rb._futures_lock:
        parts.rb._clear_prefetch_queue_locked()
        with parts.rb._replay_lock, parts.rb._write_lock:
            forget_all(parts.storage)
            _empty(parts)
            try:
                return _fill(parts, cells, given, target)
            except BaseException:
                _empty(parts)  # nothing rather than a part of it
                raise


def _empty(parts: Parts) -> None:
    """By `rb.empty()`, as kinds of buffer have more to forget; also where the writer is one of data that does not change."""
    for sampler in parts.samplers.values():
        sampler._empty()
    if isinstance(parts.writer, module("writers").ImmutableDatasetWriter):
        parts.storage._empty()
    else:
        parts.rb.empty()


def _fill(parts: Parts, cells: Cells, given: Given, target: Target) -> common.Report:
    closed, reclosed = _write(cells, given, target)
    renumbered = _renumber(cells, given, target)
    cells.finish(target.rows)
    kept = np.flatnonzero(target.cell != NONE)
    columns = {name: values[kept] for name, values in given.columns.items()}
    placed = Placed(target.cell[kept], columns, target.rows, max(1, target.columns))
    if target.own is not None and target.own["storage"]["last_cursor"] is not None and not cells.listed:
        parts.storage._set_last_cursor(target.own["storage"]["last_cursor"])
    notes = writers.restore(parts, cells, _part(given, "writer"), _own(target, "writer"), placed)
    for name, sampler in parts.samplers.items():
        notes += samplers.restore(parts, sampler, _part(given, name), _own(target, name), placed)
    notes += _unused(parts, columns)
    extras = _torchrl_extras.restore(parts, _part(given, "extras"), _own(target, "extras"), given.share.seed)
    record = _record(parts, given, target)
    record.closed[np.union1d(closed, reclosed)] = True
    record.renumbered[renumbered], record.moved = True, target.moved
    attach(parts.storage, Tracker(None, record)).start(cells_of(parts))
    opened = int(np.asarray(given.layout.open).sum()) - len(closed)
    if target.own is not None and opened > 0:
        notes.append("unfinished episodes go on; where environments begin anew, restore with unfinished='close'")
    gone = given.share.plan.placements[given.part.name].dropped
    if len(gone.unit):
        reasons = ", ".join(dict.fromkeys(gone.reason.tolist()))
        notes.append(f"the plan leaves out {int((gone.hi - gone.lo).sum())} steps of all ranks ({reasons})")
    counts = {"closed": len(closed), "uneven_steps_dropped": len(target.cell) - len(kept)} | extras[0]
    return common.Report(len(given.layout.length), len(kept), counts, (*notes, *extras[1]))


def _part(given: Given, name: str) -> dict[int, Any]:
    return {rank: state.get(name) for rank, state in given.states.items()}


def _own(target: Target, name: str) -> Any:
    return None if target.own is None else target.own.get(name)


def _unused(parts: Parts, columns: Mapping[str, Any]) -> list[str]:
    """Columns that are worth something, for which this buffer has no use."""
    ranked = any(map(samplers.is_prioritized, parts.samplers.values()))
    if "priority" in columns and not ranked:
        return ["the checkpoint has priorities, this buffer's sampler has no use for them"]
    return []


# -- writing ----------------------------------------------------------------------------------------------------


def _write(cells: Cells, given: Given, target: Target) -> tuple[Ints, Ints]:
    """Write all steps; cells whose episode was ended now, and those that an earlier restore had ended."""
    closed: list[Ints] = []
    for lo, steps in batches(given):
        hi = lo + _length(steps)
        cell = target.cell[lo:hi]
        if (cell == NONE).any():
            steps, cell = _picked(steps, np.flatnonzero(cell != NONE)), cell[cell != NONE]
        if not len(cell):
            continue
        source = int(given.layout.source_rank[given.unit[lo]])
        kinds = given.columns["kind"][lo:hi] if "kind" in given.columns else None
        cells.reserve(steps, given.kinds(source), target.inner)
        cells.put(cell, steps, given.kinds(source), kinds)
        if target.moved:
            cells.fill(INDEX, cell, cell // max(1, target.columns))
        closed.append(_close(cells, given, target, lo, hi, steps))
    reclosed = _reclose(cells, given, target)
    return np.concatenate([np.zeros(0, np.int64), *closed]), reclosed


def _length(steps: Mapping[str, Any]) -> int:
    return len(next(leaf for _, leaf in nesting.flatten(steps) if not isinstance(leaf, dict)))


def _picked(steps: Mapping[str, Any], which: Ints) -> dict[str, Any]:
    leaves = nesting.flatten(steps)
    return nesting.unflatten({p: [v[i] for i in which] if isinstance(v, list) else v[which] for p, v in leaves})


def _close(cells: Cells, given: Given, target: Target, lo: int, hi: int, steps: Mapping[str, Any]) -> Ints:
    """Mark as ended what ends here and does not say so; the cells."""
    end = given.keys.end
    wanted = np.union1d(target.ends, target.seams)
    wanted = wanted[(wanted >= lo) & (wanted < hi) & (target.cell[wanted] != NONE)] if len(wanted) else wanted
    if end is None or not len(wanted):
        return wanted[:0]
    kept = np.flatnonzero(target.cell[lo:hi] != NONE) + lo
    flag = dict(nesting.flatten(steps)).get(end)
    if flag is None:
        return wanted[:0]
    flags = [np.asarray(flag[i]).astype(bool).any() for i in np.searchsorted(kept, wanted).tolist()]
    wanted = wanted[~np.array(flags, bool)]
    return _mark(cells, given.keys, target.cell[wanted])


def _mark(cells: Cells, keys: Keys, cell: Ints) -> Ints:
    truncated = keys.beside("truncated")
    for path in (keys.end, truncated):
        if path is not None:
            cells.fill(path, cell, np.ones(len(cell), bool))
    return cell


def _reclose(cells: Cells, given: Given, target: Target) -> Ints:
    """What an earlier restore had ended, though the steps in the archive do not say so."""
    if "closed" not in given.columns:
        return np.zeros(0, np.int64)
    return _mark(cells, given.keys, target.cell[given.columns["closed"].astype(bool) & (target.cell != NONE)])


def _renumber(cells: Cells, given: Given, target: Target) -> Ints:
    """Give trajectories the ids that they had in the buffer; cells whose id is another than in the archive."""
    path = given.keys.traj
    if path is None:
        return np.zeros(0, np.int64)
    if given.renumbered:
        return np.asarray(target.cell[target.cell != NONE])
    known = given.part.attributes.get("trajectory", {})
    if not known:
        return np.zeros(0, np.int64)
    names = given.part.episodes.table["episode_id"].to_pylist()
    numbers = np.array([known.get(name, NONE) for name in names], np.int64)[given.unit]
    chosen = np.array([name in known for name in names], bool)[given.unit] & (target.cell != NONE)
    cells.fill(path, target.cell[chosen], numbers[chosen])
    return np.asarray(target.cell[chosen])


def _record(parts: Parts, given: Given, target: Target) -> Record:
    """What a writer that goes on from the share knows already."""
    layout = given.layout
    record = Record.of(target.rows * max(1, target.columns))
    kept = np.flatnonzero(target.cell != NONE)
    where = target.cell[kept]
    env, position, length = (np.asarray(c, np.int64) for c in (layout.env_id, layout.position, layout.length))
    record.env[where] = env[given.unit][kept]
    record.position[where] = spans(position, length)[kept]
    cells = cells_of(parts)
    record.hashes, record.form = cells.hashes(), cells.form()
    if cells.listed:
        record.signatures[where] = cells.signatures(where)
    record.units = units_of(env, position, length, given.part.episodes.table["episode_id"].to_pylist())
    if given.unfinished == "close":
        record.to_close = np.unique(env[np.asarray(layout.open, bool)]).tolist()
    return record
