"""Restoring replay buffers: which step goes to which cell, and what is derived from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from archive.adapters import Report
from archive.adapters.torchrl import extras, writers
from archive.adapters.torchrl.cells import INDEX, Cells
from archive.adapters.torchrl.parts import Parts, module
from archive.adapters.torchrl.places import NO_STEPS, Given, Placed, Target
from archive.adapters.torchrl.samplers import Prioritized, saved_samplers
from archive.adapters.torchrl.saving import cells_of
from archive.adapters.torchrl.tracking import NONE, Record, forget_all, restored
from archive.arrays import Ints, run_starts, spans
from archive.fields import Path, leaves, nests, unflatten
from archive.read import Gather

_BATCH_BYTES = 32 * 1024 * 1024
_CACHE_BYTES = 8 * _BATCH_BYTES
Batches = Iterator[tuple[int, dict[str, Any]]]


def batches(given: Given) -> Batches:
    """(number of the first step, steps) in order, of one source rank and one kind of fields,
    some megabytes at a time."""
    rows = Gather(given.part.episodes, cache_bytes=_CACHE_BYTES)
    try:
        groups = _alike(given)
        step_bytes = [_plain_bytes(rows, lo) for lo, _ in groups]
        yield from _by_episodes(given) if 0 in step_bytes else _by_rows(given, rows, groups, step_bytes)
    finally:
        rows.close()


def _alike(given: Given) -> list[tuple[int, int]]:
    """Episodes [lo, hi) that follow each other, of one source rank and with the same fields; those with steps."""
    source, code, length = given.layout.source_rank, given.part.schema_numbers, np.asarray(given.layout.length)
    some = np.flatnonzero(length > 0)
    return list(pairwise([*some[run_starts(source[some], code[some])].tolist(), len(length)]))


def _plain_bytes(rows: Gather, number: int) -> int:
    """Bytes of a step of this episode if all its fields are numbers of one shape; else 0."""
    fields = [leaf for _, leaf in nests.flatten(rows.rows([number], [0]))]
    plain = all(isinstance(leaf, np.ndarray) and leaf.dtype != object for leaf in fields)
    return max(1, sum(leaf.nbytes for leaf in fields)) if plain and fields else 0


def _by_rows(given: Given, rows: Gather, groups: list[tuple[int, int]], step_bytes: list[int]) -> Batches:
    """A batch at a time, in any number of episodes."""
    begins = np.cumsum(given.layout.length) - given.layout.length
    for (lo, hi), nbytes in zip(groups, step_bytes, strict=True):
        length = np.asarray(given.layout.length[lo:hi], np.int64)
        numbers, steps = np.repeat(np.arange(lo, hi), length), spans(np.zeros(len(length), np.int64), length)
        depth = max(1, _BATCH_BYTES // nbytes)
        for at in range(0, len(numbers), depth):
            some = slice(at, at + depth)
            batch = rows.rows(numbers[some], steps[some])
            yield int(begins[lo]) + at, given.part.renumber_rows(batch, numbers[some])


def _by_episodes(given: Given) -> Batches:
    """Episode by episode, those of one kind put together."""
    held: list[dict[Path, Any]] = []
    kind: Any = None
    start = steps = nbytes = 0
    for i, (_, nest) in enumerate(given.part.stream()):
        length = int(given.layout.length[i])
        if not length:
            continue
        fields = leaves(nest)
        own = {p: "list" if isinstance(v, list) else (v.dtype, v.shape[1:]) for p, v in fields.items()}
        this = int(given.layout.source_rank[i]), own
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


def restore(parts: Parts, cells: Cells, given: Given, target: Target) -> Report:
    """Fill one buffer from its share; one whose steps can't be read or don't fit is left empty."""
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
    """By `rb.empty()`, as kinds of buffer have more to forget;
    also where the writer is one of data that does not change."""
    for sampler in parts.samplers.values():
        sampler._empty()
    if isinstance(parts.writer, module("writers").ImmutableDatasetWriter):
        parts.storage._empty()
    else:
        parts.rb.empty()


def _fill(parts: Parts, cells: Cells, given: Given, target: Target) -> Report:
    placed = Placed(given, target)
    closed, reclosed = _write(cells, given, target), _reclose(cells, given, target)
    renumbered = _renumber(cells, given, target)
    cells.finish(target.rows)
    notes = _restore_parts(parts, cells, placed)
    dropped, more = extras.restore(parts, placed)
    record = _record(cells, placed)
    record.closed[np.union1d(closed, reclosed)] = True
    record.renumbered[renumbered] = True
    restored(parts.storage, given.part, record).start(cells_of(parts))
    if target.own is not None and int(given.layout.open.sum()) > len(closed):
        notes.append("unfinished episodes go on; where environments begin anew, restore with unfinished='close'")
    gone = given.part.dropped
    if len(gone):
        reasons = ", ".join(dict.fromkeys(gone["reason"].tolist()))
        notes.append(f"the plan leaves out {int(gone.length.sum())} steps of all ranks ({reasons})")
    uneven = len(target.cell) - len(placed.cells)
    counts = {"closed": len(closed), "uneven_steps_dropped": uneven, "prefetched_batches_dropped": dropped}
    return Report(len(given.layout.length), len(placed.cells), counts, (*notes, *more))


def _restore_parts(parts: Parts, cells: Cells, placed: Placed) -> list[str]:
    """Give the writer and the samplers their states again; what they could not be given."""
    own = placed.target.own
    if own is not None and own["storage"]["last_cursor"] is not None and not cells.listed:
        parts.storage._set_last_cursor(own["storage"]["last_cursor"])
    notes = writers.restore(parts, cells, placed)
    every = saved_samplers(parts).values()
    for sampler in every:
        notes += sampler.restore(placed)
    if "priority" in placed.columns and not any(isinstance(sampler, Prioritized) for sampler in every):
        notes.append("the checkpoint has priorities, this buffer's sampler has no use for them")
    return notes


# -- writing ----------------------------------------------------------------------------------------------------


def _write(cells: Cells, given: Given, target: Target) -> Ints:
    """Write all steps; cells whose episode was ended now."""
    closed = [NO_STEPS]
    for lo, steps in batches(given):
        hi = lo + len(next(iter(leaves(steps).values())))
        cell = target.cell[lo:hi]
        kept = np.flatnonzero(cell != NONE)
        if not len(kept):
            continue
        if len(kept) < len(cell):
            steps, cell = _picked(steps, kept), cell[kept]
        kind = given.kind(int(given.layout.source_rank[given.unit[lo]]))
        kinds = given.columns["kind"][lo:hi][kept] if "kind" in given.columns else None
        cells.reserve(steps, kind, target.inner)
        cells.put(cell, steps, kind, kinds)
        if target.moved:
            cells.fill(INDEX, cell, cell // target.columns)
        closed.append(_close(cells, given, target, kept + lo, steps))
    return np.concatenate(closed)


def _picked(steps: Mapping[str, Any], which: Ints) -> dict[str, Any]:
    return unflatten({p: [v[i] for i in which] if isinstance(v, list) else v[which] for p, v in leaves(steps).items()})


def _close(cells: Cells, given: Given, target: Target, written: Ints, steps: Mapping[str, Any]) -> Ints:
    """Mark as ended what ends in a batch and does not say so; the cells.  written: numbers of the batch's steps."""
    flag = leaves(steps).get(given.keys.end or ())
    if flag is None:
        return NO_STEPS
    wanted = np.union1d(target.ends, target.seams)
    wanted = wanted[(wanted >= written[0]) & (wanted <= written[-1]) & (target.cell[wanted] != NONE)]
    ended = [np.asarray(flag[i]).astype(bool).any() for i in np.searchsorted(written, wanted).tolist()]
    return _mark(cells, given, target.cell[wanted[~np.array(ended, bool)]])


def _mark(cells: Cells, given: Given, cell: Ints) -> Ints:
    """Have these cells say that their trajectory ends there, truncated."""
    for path in (given.keys.end, given.keys.beside("truncated")):
        if path is not None:
            cells.fill(path, cell, np.ones(len(cell), bool))
    return cell


def _reclose(cells: Cells, given: Given, target: Target) -> Ints:
    """Mark what an earlier restore had ended, though the steps in the archive do not say so; the cells."""
    if "closed" not in given.columns:
        return NO_STEPS
    return _mark(cells, given, target.cell[given.columns["closed"].astype(bool) & (target.cell != NONE)])


def _renumber(cells: Cells, given: Given, target: Target) -> Ints:
    """Give trajectories the ids that they had in the buffer; cells whose id is another than in the archive."""
    path = given.keys.traj
    if path is None:
        return NO_STEPS
    if not given.share.plan.is_identity:  # reading has given them all new ones
        return target.cell[target.placed]
    known = given.part.attributes.get("trajectory", {})
    numbers = np.array([known.get(name, NONE) for name in given.episode_ids], np.int64)[given.unit]
    named = np.array([name in known for name in given.episode_ids], bool)[given.unit]
    chosen = named & (target.cell != NONE)
    cells.fill(path, target.cell[chosen], numbers[chosen])
    return np.asarray(target.cell[chosen])


def _record(cells: Cells, placed: Placed) -> Record:
    """What a writer that goes on from the share knows already."""
    given, target = placed.given, placed.target
    layout, where = given.layout, placed.cells
    record = Record.of(target.rows * target.columns)
    env, position, length = (np.asarray(c, np.int64) for c in (layout.env_id, layout.position, layout.length))
    record.env[where] = env[given.unit][target.placed]
    record.position[where] = spans(position, length)[target.placed]
    record.hashes, record.form, record.moved = cells.hashes(), cells.form(), target.moved
    if cells.listed:
        record.signatures[where] = cells.signatures(where)
    if given.unfinished == "close":
        record.to_close = np.unique(env[layout.open]).tolist()
    return record
