"""Filling a replay buffer with the steps of a share, each in its cell, and with what was saved beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from archive.adapters import Report
from archive.adapters.torchrl import states
from archive.adapters.torchrl.cells import INDEX
from archive.adapters.torchrl.lists import Cells, cells_of
from archive.adapters.torchrl.parts import Parts, module
from archive.adapters.torchrl.placement import NO_STEPS, Placement
from archive.adapters.torchrl.tracker import NONE, Tracker, forget_all, restored
from archive.arrays import Ints, ascending, run_starts, spans
from archive.fields import Path, leaves, nests, unflatten
from archive.read import Gather


def restore(parts: Parts, cells: Cells, placed: Placement) -> Report:
    """Fill one buffer from its share; one whose steps can't be read or don't fit is left empty."""
    parts.rb.synchronize()
    with parts.rb._futures_lock:
        parts.rb._clear_prefetch_queue_locked()
        with parts.rb._replay_lock, parts.rb._write_lock:
            forget_all(parts.storage)
            _empty(parts)
            try:
                return _fill(parts, cells, placed)
            except BaseException:
                _empty(parts)  # nothing rather than a part of it
                raise


def _empty(parts: Parts) -> None:
    """Empty the buffer by `rb.empty()`, as kinds of buffer have more to forget; also where the writer is one of data
    that does not change."""
    for sampler in parts.samplers.values():
        sampler._empty()
    if isinstance(parts.writer, module("writers").ImmutableDatasetWriter):
        parts.storage._empty()
    else:
        parts.rb.empty()


def _fill(parts: Parts, cells: Cells, placed: Placement) -> Report:
    closed, reclosed, renumbered = _write(cells, placed), _reclose(cells, placed), _renumber(cells, placed)
    cells.finish(placed.rows)
    notes = _restore_parts(parts, cells, placed)
    dropped, more = states.restore_rest(parts, placed)
    tracker = _tracker(cells, placed)
    tracker.closed[np.union1d(closed, reclosed)] = True
    tracker.renumbered[renumbered] = True
    restored(parts.storage, placed.part, tracker)
    tracker.start(cells_of(parts))
    if placed.own("storage") and int(placed.layout.open.sum()) > len(closed):
        notes.append("unfinished episodes go on; where environments begin anew, restore with unfinished='close'")
    if gone := placed.part.plan.dropped_of(placed.part.name):
        steps = sum(lost["steps"] for lost in gone.values())
        notes.append(f"the plan leaves out {steps} steps of all ranks ({', '.join(gone)})")
    uneven = len(placed.cell) - len(placed.cells)
    counts = {"closed": len(closed), "uneven_steps_dropped": uneven, "prefetched_batches_dropped": dropped}
    return Report(len(placed.layout.length), len(placed.cells), counts, (*notes, *more))


def _restore_parts(parts: Parts, cells: Cells, placed: Placement) -> list[str]:
    """Give the writer and the samplers their states again; what they could not be given."""
    if (cursor := placed.own("storage").get("last_cursor")) is not None and not cells.listed:
        parts.storage._set_last_cursor(cursor)
    notes = states.restore_writer(parts, cells, placed)
    every = states.saved_samplers(parts).values()
    for sampler in every:
        notes += sampler.restore(placed)
    if "priority" in placed.columns and not any(isinstance(sampler, states.Prioritized) for sampler in every):
        notes.append("the checkpoint has priorities, this buffer's sampler has no use for them")
    return notes


# -- writing ----------------------------------------------------------------------------------------------------


def _write(cells: Cells, placed: Placement) -> Ints:
    """Write all steps; cells whose episode was ended now."""
    closed = [NO_STEPS]
    for lo, steps in batches(placed):
        hi = lo + len(next(iter(leaves(steps).values())))
        cell = placed.cell[lo:hi]
        kept = np.flatnonzero(cell != NONE)
        if not len(kept):
            continue
        if len(kept) < len(cell):
            steps, cell = _picked(steps, kept), cell[kept]
        kinds = placed.values["kind"][lo:hi][kept] if "kind" in placed.values else None
        cells.reserve(steps, placed.kind(lo), placed.inner)
        cells.put(cell, steps, placed.kind(lo), kinds)
        if placed.moved:
            cells.fill(INDEX, cell, cell // placed.width)
        closed.append(_close(cells, placed, kept + lo, steps))
    return np.concatenate(closed)


def _picked(steps: Mapping[str, Any], which: Ints) -> dict[str, Any]:
    return unflatten({p: [v[i] for i in which] if isinstance(v, list) else v[which] for p, v in leaves(steps).items()})


def _close(cells: Cells, placed: Placement, written: Ints, steps: Mapping[str, Any]) -> Ints:
    """Mark as ended what ends in a batch and does not say so; the cells.  written: numbers of the batch's steps."""
    flag = leaves(steps).get(placed.keys.end or ())
    if flag is None:
        return NO_STEPS
    wanted = np.union1d(placed.ends, placed.seams)
    wanted = wanted[(wanted >= written[0]) & (wanted <= written[-1]) & (placed.cell[wanted] != NONE)]
    ended = [np.asarray(flag[i]).astype(bool).any() for i in np.searchsorted(written, wanted).tolist()]
    return _mark(cells, placed, placed.cell[wanted[~np.array(ended, bool)]])


def _mark(cells: Cells, placed: Placement, cell: Ints) -> Ints:
    """Have these cells say that their trajectory ends there, truncated."""
    for path in (placed.keys.end, placed.keys.beside("truncated")):
        if path is not None:
            cells.fill(path, cell, np.ones(len(cell), bool))
    return cell


def _reclose(cells: Cells, placed: Placement) -> Ints:
    """Mark what an earlier restore had ended, though the steps in the archive do not say so; the cells."""
    if "closed" not in placed.values:
        return NO_STEPS
    return _mark(cells, placed, placed.cell[placed.values["closed"].astype(bool) & (placed.cell != NONE)])


def _renumber(cells: Cells, placed: Placement) -> Ints:
    """Give trajectories the ids that they had in the buffer; cells whose id is another than in the archive."""
    path = placed.keys.traj
    if path is None:
        return NO_STEPS
    if not placed.share.plan.is_identity:  # reading has given them all new ones
        return placed.cell[placed.placed]
    known, ids = placed.part.attributes.get("trajectory", {}), placed.part.episodes.table["episode_id"].to_pylist()
    numbers = np.array([known.get(name, NONE) for name in ids], np.int64)[placed.unit]
    named = np.array([name in known for name in ids], bool)[placed.unit]
    chosen = named & (placed.cell != NONE)
    cells.fill(path, placed.cell[chosen], numbers[chosen])
    return np.asarray(placed.cell[chosen])


def _tracker(cells: Cells, placed: Placement) -> Tracker:
    """A tracker for the writer that goes on from the share."""
    layout, where = placed.layout, placed.cells
    tracker = Tracker(placed.rows * placed.width)
    env, position, length = (np.asarray(c, np.int64) for c in (layout.env_id, layout.position, layout.length))
    tracker.env[where] = env[placed.unit][placed.placed]
    tracker.position[where] = spans(position, length)[placed.placed]
    tracker.hashes, tracker.form, tracker.moved = cells.hashes(), cells.form(), placed.moved
    if cells.listed:
        tracker.signatures[where] = cells.signatures(where)
    if placed.unfinished == "close":
        tracker.to_close = ascending(env[layout.open]).tolist()
    return tracker


# -- reading ----------------------------------------------------------------------------------------------------

_BATCH_BYTES = 32 * 1024 * 1024
_CACHE_BYTES = 8 * _BATCH_BYTES
Batches = Iterator[tuple[int, dict[str, Any]]]


def batches(placed: Placement) -> Batches:
    """(number of the first step, steps) in order, of one source rank and one kind of fields,
    some megabytes at a time."""
    rows = Gather(placed.part.episodes, cache_bytes=_CACHE_BYTES)
    try:
        groups = _alike(placed)
        step_bytes = [_plain_bytes(rows, lo) for lo, _ in groups]
        yield from _by_episodes(placed) if 0 in step_bytes else _by_rows(placed, rows, groups, step_bytes)
    finally:
        rows.close()


def _alike(placed: Placement) -> list[tuple[int, int]]:
    """Episodes [lo, hi) that follow each other, of one source rank and with the same fields; those with steps."""
    source, code, length = placed.layout.source_rank, placed.part.schema_numbers, np.asarray(placed.layout.length)
    some = np.flatnonzero(length > 0)
    return list(pairwise([*some[run_starts(source[some], code[some])].tolist(), len(length)]))


def _plain_bytes(rows: Gather, number: int) -> int:
    """Bytes of a step of this episode if all its fields are numbers of one shape; else 0."""
    fields = [leaf for _, leaf in nests.flatten(rows.rows([number], [0]))]
    plain = all(isinstance(leaf, np.ndarray) and leaf.dtype != object for leaf in fields)
    return max(1, sum(leaf.nbytes for leaf in fields)) if plain and fields else 0


def _by_rows(placed: Placement, rows: Gather, groups: list[tuple[int, int]], step_bytes: list[int]) -> Batches:
    """A batch at a time, in any number of episodes."""
    begins = np.cumsum(placed.layout.length) - placed.layout.length
    for (lo, hi), nbytes in zip(groups, step_bytes, strict=True):
        length = np.asarray(placed.layout.length[lo:hi], np.int64)
        numbers, steps = np.repeat(np.arange(lo, hi), length), spans(np.zeros(len(length), np.int64), length)
        depth = max(1, _BATCH_BYTES // nbytes)
        for at in range(0, len(numbers), depth):
            some = slice(at, at + depth)
            batch = rows.rows(numbers[some], steps[some])
            yield int(begins[lo]) + at, placed.part.renumber_rows(batch, numbers[some])


def _by_episodes(placed: Placement) -> Batches:
    """Episode by episode, those of one kind put together."""
    held: list[dict[Path, Any]] = []
    kind: Any = None
    start = steps = nbytes = 0
    for i, (_, nest) in enumerate(placed.part.stream()):
        length = int(placed.layout.length[i])
        if not length:
            continue
        fields = leaves(nest)
        own = {p: "list" if isinstance(v, list) else (v.dtype, v.shape[1:]) for p, v in fields.items()}
        this = int(placed.layout.source_rank[i]), own
        if held and (this != kind or nbytes > _BATCH_BYTES):
            yield start, _joined(held)
            held, start, nbytes = [], steps, 0
        kind, steps = this, steps + length
        held.append(fields)
        nbytes += sum(int(getattr(v, "nbytes", 64)) for v in fields.values())
    if held:
        yield start, _joined(held)


def _joined(parts: list[dict[Path, Any]]) -> dict[str, Any]:
    if len(parts) == 1:
        return unflatten(parts[0])
    every = {path: [part[path] for part in parts] for path in parts[0]}
    return unflatten(
        {
            p: [v for e in all_ for v in e] if isinstance(all_[0], list) else np.concatenate(all_)
            for p, all_ in every.items()
        }
    )
