"""What a writer has not seen of a ring, into the writer: slabs of time, oldest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from archive.arrays import Ints
from archive.base import UsageError
from archive.fields import Array, Path, dtypes, is_tensor, nesting
from archive.ring.rings import Ring, RingSteps, plain, ring_of, row_values
from archive.shard import SHARD_BYTES
from archive.write import Buffer, BufferWriter, EnvRuns, Part, slab_bytes

MAX_CALL_BYTES = SHARD_BYTES  # of one slab of time: it becomes a shard of its own
_BOOKKEEPING_BYTES = 24  # a step, beside its fields
_OBJECT_BYTES = 64  # a guess at a string
_PER_STEP = ("first", "last", "terminated", "truncated", "episode_ids", "model_weights_uuid", "update_count")
_WEIGHTS = ("model_weights_uuid", "update_count")
_OPTIONS = (*_PER_STEP, "metadata")


def append(
    w: Buffer,
    buffers: Any,
    *,
    pos: Any,
    size: Any,
    first: Any = None,
    last: Any = None,
    columns: Mapping[str, Any] | None = None,
    env_ids: Any = None,
    begin: Any = None,
    bounded: bool = False,
    **options: Any,
) -> dict[str, Array]:
    """Append what `w` has not seen of a ring, evict what the ring has overwritten; the columns, for `w.checkpoint`.

    w: a writer, or one of its buffers.
    buffers: nest of tensors or arrays [E, L, ...].  pos, size: [E]; row e holds positions [pos - size, pos).
    first, last: masks [E, L]; so may be terminated, truncated, episode_ids, model_weights_uuid, update_count (or what
    `w.append` takes).  env_ids: [E], default 0 to E.  columns: name -> [E, L, ...]; returned one value a live step, in
    live order (env id, then position).
    begin: [E], default 0, positions below which a row never had steps: it was cleared, and its positions went on.
    Steps that were written and overwritten since the last call are lost to the archive: the open episode ends there,
    with reason "gap"; they are counted in the next checkpoint's `discarded` ("overwritten"), and a warning is logged
    the first time. Everything is copied before this returns. It waits for no upload, unless `bounded`.
    A writer with journal_s= journals all of it at its next tick, also the columns: as they are at the last call before.
    """
    unknown = set(options) - set(_OPTIONS)
    if unknown:
        raise UsageError(f"ring.append() has no option {min(unknown)!r}; beside its own it takes {', '.join(_OPTIONS)}")
    leaves = nesting.leaves(buffers)
    ring = ring_of(leaves, pos, size, env_ids)
    how = dict.fromkeys(_OPTIONS) | options | {"first": first, "last": last}
    for name, value in {**how, **(columns or {})}.items():
        if name in (columns or {}) or (name in _PER_STEP and getattr(value, "ndim", 0) > 1):
            ring.check(name, value)
    with w.together():
        with w.exclusive(bounded=bounded) as inner:
            found = _appended(inner, ring, leaves, how, columns or {}, begin)
        if found and inner.journaled:
            w.journal(columns=found)
        return found


def _appended(
    inner: BufferWriter, ring: Ring, leaves: dict[Path, Any], how: dict[str, Any], columns: Mapping[str, Any],
    begin: Any,
) -> dict[str, Array]:  # fmt: skip
    """The columns of the ring's live steps, once the writer has all of these and no others."""
    seen = ring.seen(inner)
    start: Ints = np.maximum(seen, ring.pos - ring.size)
    lost = np.where(
        seen >= 0, start - np.maximum(seen, 0 if begin is None else row_values(begin, "begin", len(seen))), 0
    )
    if (lost > 0).any():
        inner.overwritten(int((lost > 0).sum()), int(lost[lost > 0].sum()))
    _append_unseen(inner, ring, start, {path: plain(leaf) for path, leaf in leaves.items()}, how)
    evicted = np.flatnonzero(ring.pos > ring.size)
    inner.evict_before(ring.env_ids[evicted], (ring.pos - ring.size)[evicted])
    return {name: _as_numpy(ring.live.take(value, inner.column), name) for name, value in columns.items()}


def _append_unseen(inner: BufferWriter, ring: Ring, start: Ints, leaves: dict[Path, Any], how: dict[str, Any]) -> None:
    """The steps from `start` on: in slabs that are copied one by one, as what each of them is part of."""
    rows = ring.rows[start[ring.rows] < ring.pos[ring.rows]]
    if not len(rows):
        return
    unseen = RingSteps(rows, start[rows], ring.pos[rows], ring.max_length)
    of_all = {name: _given(unseen, how, name) for name in _OPTIONS if name not in _WEIGHTS}
    slabs = _slabs(ring, start, _step_bytes(ring, leaves))
    inner.append_parts((_part(inner, ring, slab, leaves, how) for slab in slabs), _env_runs(ring, unseen), **of_all)


def _part(inner: BufferWriter, ring: Ring, slab: RingSteps, leaves: dict[Path, Any], how: dict[str, Any]) -> Part:
    steps = nesting.unflatten({path: slab.take(leaf, inner.empty) for path, leaf in leaves.items()})
    return Part(steps, _env_runs(ring, slab), *(_given(slab, how, name) for name in _WEIGHTS))


def _given(steps: RingSteps, how: dict[str, Any], name: str) -> Any:
    """What was given for these steps: their part of one value a slot, or what stands for all."""
    value = how[name]
    return steps.take(value) if name in _PER_STEP and getattr(value, "ndim", 0) > 1 else value


def _env_runs(ring: Ring, steps: RingSteps) -> EnvRuns:
    return EnvRuns(ring.env_ids[steps.rows], steps.start, steps.counts)


def _slabs(ring: Ring, start: Ints, step_bytes: int) -> Iterator[RingSteps]:
    """The unseen steps as slabs of time, oldest first: rows at the same distance from their newest step are together,
    because a full ring overwrites them together."""
    rows = ring.rows[start[ring.rows] < ring.pos[ring.rows]]
    if not len(rows):
        return
    start, stop = start[rows], ring.pos[rows]
    longest = int((stop - start).max())
    size = slab_bytes(int(ring.size.sum()) * step_bytes, len(rows), step_bytes, MAX_CALL_BYTES)
    most = max(1, size // step_bytes)
    depth = min(longest, max(1, most // len(rows)))
    depth = _even(-(-longest // -(-longest // depth)))  # of slabs of equal size
    for far in range(longest, 0, -depth):
        lo, hi = np.maximum(start, stop - far), np.maximum(start, stop - max(0, far - depth))
        present = np.flatnonzero(hi > lo)
        at_once = max(1, most // depth)
        for i in range(0, len(present), at_once):
            chosen = present[i : i + at_once]
            yield RingSteps(rows[chosen], lo[chosen], hi[chosen], ring.max_length)


def _even(depth: int) -> int:
    """A little less, so that chunks can be equal parts of it."""
    return depth - depth % 4 if depth > 16 else depth


def _step_bytes(ring: Ring, leaves: Mapping[Path, Any]) -> int:
    held = sum(leaf.size * _OBJECT_BYTES if leaf.dtype == object else leaf.nbytes for leaf in leaves.values())
    return _BOOKKEEPING_BYTES + int(held) // (len(ring.pos) * ring.max_length)


def _as_numpy(value: Any, name: str) -> Array:
    return dtypes.from_torch(value, where=name) if is_tensor(value) else np.asarray(value)
