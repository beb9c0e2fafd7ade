"""Rings of `[num_envs, max_length, ...]` tensors, step p in slot p % max_length: the steps that they hold, and
appending new ones to a writer: slabs of time, oldest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from archive.arrays import Ints, Steps, ascending, spans
from archive.base import FieldError, UsageError, cached_property, show
from archive.fields import Array, Path, dtypes, is_tensor, nests
from archive.shard import SHARD_BYTES
from archive.write import Buffer, StepsPart, slab_bytes

MAX_CALL_BYTES = SHARD_BYTES  # of one slab of time: it becomes a shard of its own
_BOOKKEEPING_BYTES = 24  # a step, beside its fields
_OBJECT_BYTES = 64  # a guess at a string
_PER_STEP = ("first", "last", "terminated", "truncated", "episode_ids", "model_weights_uuid", "update_count")
_WEIGHTS = ("model_weights_uuid", "update_count")
_OPTIONS = (*_PER_STEP, "metadata")

Empty = Callable[[tuple[int, ...], Any], Array]  # (shape, dtype) -> memory


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
    """Append the steps of a ring that `w` has not seen, evict overwritten ones; the columns, for `w.checkpoint`.

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
    leaves = nests.leaves(buffers)
    ring = Ring(leaves, pos, size, env_ids)
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
    inner: Buffer,
    ring: Ring,
    leaves: dict[Path, Any],
    how: dict[str, Any],
    columns: Mapping[str, Any],
    begin: Any,
) -> dict[str, Array]:
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
    return {name: nests.as_array(ring.live.take(value, inner.column), name) for name, value in columns.items()}


def _append_unseen(inner: Buffer, ring: Ring, start: Ints, leaves: dict[Path, Any], how: dict[str, Any]) -> None:
    """The steps from `start` on: in slabs that are copied one by one, as what each of them is part of."""
    rows = ring.rows[start[ring.rows] < ring.pos[ring.rows]]
    if not len(rows):
        return
    unseen = RingSteps(rows, start[rows], ring.pos[rows], ring.max_length)
    of_all = {name: _given(unseen, how, name) for name in _OPTIONS if name not in _WEIGHTS}
    held = sum(leaf.size * _OBJECT_BYTES if leaf.dtype == object else leaf.nbytes for leaf in leaves.values())
    step_bytes = _BOOKKEEPING_BYTES + int(held) // (len(ring.pos) * ring.max_length)
    slabs = _slabs(unseen, int(ring.size.sum()), step_bytes)
    inner.append_parts((_part(inner, ring, slab, leaves, how) for slab in slabs), _env_runs(ring, unseen), **of_all)


def _part(inner: Buffer, ring: Ring, slab: RingSteps, leaves: dict[Path, Any], how: dict[str, Any]) -> StepsPart:
    steps = nests.unflatten({path: slab.take(leaf, inner.empty) for path, leaf in leaves.items()})
    return StepsPart(steps, _env_runs(ring, slab), *(_given(slab, how, name) for name in _WEIGHTS))


def _given(steps: RingSteps, how: dict[str, Any], name: str) -> Any:
    """The part of these steps of one value a slot, or what was given for all."""
    value = how[name]
    return steps.take(value) if name in _PER_STEP and getattr(value, "ndim", 0) > 1 else value


def _env_runs(ring: Ring, steps: RingSteps) -> Steps:
    return Steps(ring.env_ids[steps.rows], steps.start, steps.start + steps.counts)


def _slabs(unseen: RingSteps, live_steps: int, step_bytes: int) -> Iterator[RingSteps]:
    """The unseen steps as slabs of time, oldest first: rows at the same distance from their newest step are together,
    because a full ring overwrites them together."""
    rows, start, stop = unseen.rows, unseen.start, unseen.start + unseen.counts
    longest = int(unseen.counts.max())
    size = slab_bytes(live_steps * step_bytes, len(rows), step_bytes, MAX_CALL_BYTES)
    most = max(1, size // step_bytes)
    depth = min(longest, max(1, most // len(rows)))
    depth = -(-longest // -(-longest // depth))  # of slabs of equal size
    depth -= depth % 4 if depth > 16 else 0  # a little less, so that chunks can be equal parts of it
    for far in range(longest, 0, -depth):
        lo, hi = np.maximum(start, stop - far), np.maximum(start, stop - max(0, far - depth))
        present = np.flatnonzero(hi > lo)
        at_once = max(1, most // depth)
        for i in range(0, len(present), at_once):
            chosen = present[i : i + at_once]
            yield RingSteps(rows[chosen], lo[chosen], hi[chosen], unseen.max_length)


# -- contents of a ring ------------------------------------------------------------------------------------------------


class Ring:
    """The positions that each env row holds."""

    def __init__(self, leaves: Mapping[Path, Any], pos: Any, size: Any, env_ids: Any) -> None:
        """Arguments are those of `append`; UsageError or FieldError if they make no ring."""
        if not leaves:
            raise FieldError("the ring has no fields; give a nest of tensors [num_envs, max_length, ...]")
        self.pos = row_values(pos, "pos", None)
        self.size = row_values(size, "size", len(self.pos))
        rows = np.arange(len(self.pos))
        self.env_ids = rows if env_ids is None else row_values(env_ids, "env_ids", len(rows))
        first = next(iter(leaves.values()))
        self.max_length = int(first.shape[1]) if getattr(first, "ndim", 0) > 1 else 0
        for path, leaf in leaves.items():
            self.check(show(path), leaf)
        bad = np.flatnonzero((self.size < 0) | (self.size > np.minimum(self.pos, self.max_length)))
        if len(bad):
            e = int(bad[0])
            raise UsageError(
                f"row {e} of the ring: size {self.size[e]} with pos {self.pos[e]} and {self.max_length} slots; size is "
                "at most either"
            )
        if len(ascending(self.env_ids)) < len(rows) or int(self.env_ids.min(initial=0)) < 0:
            raise UsageError("env_ids of a ring are distinct and not negative, one a row")

    @cached_property
    def rows(self) -> Ints:
        """Ring rows in order of their env ids, the order of live steps."""
        return np.argsort(self.env_ids, kind="stable")

    @cached_property
    def live(self) -> RingSteps:
        """The steps of the ring, in live order."""
        stop = self.pos[self.rows]
        return RingSteps(self.rows, stop - self.size[self.rows], stop, self.max_length)

    def check(self, name: str, value: Any) -> None:
        """Refuse values that do not have one entry a slot."""
        expected = (len(self.pos), self.max_length)
        if not (is_tensor(value) or isinstance(value, np.ndarray)):
            raise FieldError(f"{name!r} is a {type(value).__name__}; a ring has tensors or arrays {list(expected)}")
        if tuple(value.shape[:2]) != expected:
            raise FieldError(
                f"{name!r} has shape {list(value.shape)}; this ring has {expected[0]} env rows of {expected[1]} slots, "
                f"so it must be [{expected[0]}, {expected[1]}, ...]"
            )

    def seen(self, inner: Buffer) -> Ints:
        """The offset up to which the writer has each row; -1 for one that it does not know."""
        seen = inner.streams.following(self.env_ids)
        behind = np.flatnonzero(self.pos < seen)
        if len(behind):
            e = int(behind[0])
            raise UsageError(
                f"env {self.env_ids[e]} of the ring is at position {self.pos[e]}, but the writer has its steps up to "
                f"{seen[e]} ({len(behind)} env rows in all): positions only grow. Fill the ring from what the writer "
                "resumed from, or open a writer without resume="
            )
        return seen


def row_values(value: Any, name: str, rows: int | None) -> Ints:
    """One integer a row; UsageError for anything else."""
    array = np.asarray(nests.as_array(value if not isinstance(value, tuple) else list(value), name))
    if array.ndim != 1 or array.dtype.kind not in "iu" or (rows is not None and len(array) != rows):
        wanted = "one integer a row" if rows is None else f"{rows} integers, one a row"
        raise UsageError(f"{name} of a ring is {array.dtype} {list(array.shape)}; give {wanted}")
    return array.astype(np.int64)


class RingSteps:
    """Steps [start, stop) of some rows of a ring, row by row."""

    def __init__(self, rows: Ints, start: Ints, stop: Ints, max_length: int) -> None:
        self.rows = rows
        self.start = start
        self.counts = stop - start
        self.max_length = max_length

    @cached_property
    def positions(self) -> Ints:
        return spans(self.start, self.counts)

    @cached_property
    def places(self) -> Ints:
        """Row and slot of each step as one number."""
        places: Ints = np.repeat(self.rows * self.max_length, self.counts) + self.positions % self.max_length
        return places

    @cached_property
    def block(self) -> tuple[slice, int, int] | None:
        """(rows, first slot, count) if neighbouring rows have the same slots, as those of a vector env do."""
        slots = self.start % self.max_length if self.max_length else self.start
        if not len(self.rows) or (np.diff(self.rows) != 1).any() or np.ptp(slots) or np.ptp(self.counts):
            return None
        return slice(int(self.rows[0]), int(self.rows[-1]) + 1), int(slots[0]), int(self.counts[0])

    def take(self, leaf: Any, empty: Empty = np.empty) -> Any:
        """This slab's part of `[num_envs, max_length, ...]`, one row a step: a copy, made once, in memory of `empty`
        unless it is another device's.

        numpy copies: torch does it on all cores, and waits for the last of them, which others may be using.
        """
        if not is_tensor(leaf):
            return self._copied(leaf, empty)
        plain = _bits(leaf.detach())
        if plain.device.type == "cpu":
            plain = torch.from_numpy(self._copied(plain.resolve_conj().resolve_neg().numpy(), empty))
        else:
            plain = plain[tuple(torch.from_numpy(index).to(plain.device) for index in self._slots)]
        return plain.view(leaf.dtype)

    @property
    def _slots(self) -> tuple[Ints, Ints]:
        """Row and slot of each step."""
        return self.places // self.max_length, self.places % self.max_length

    def _copied(self, leaf: Array, empty: Empty) -> Array:
        room = empty((int(self.counts.sum()), *leaf.shape[2:]), leaf.dtype)
        if self.block:
            self._copy_block(leaf, room, *self.block)
        elif leaf.strides[0] == self.max_length * leaf.strides[1]:
            rows = leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])
            rows.take(self.places, axis=0, out=room, mode="clip")  # no place is outside; another mode copies twice
        else:
            room[...] = leaf[self._slots]
        return room

    def _copy_block(self, leaf: Array, room: Array, rows: slice, slot: int, count: int) -> None:
        head = min(count, leaf.shape[1] - slot)
        by_row = room.reshape(rows.stop - rows.start, count, *leaf.shape[2:])
        by_row[:, :head] = leaf[rows, slot : slot + head]
        if count > head:
            by_row[:, head:] = leaf[rows, : count - head]


def plain(leaf: Any) -> Any:
    """A tensor as an array that shares its memory, where numpy has such: what is taken of it then needs no torch."""
    if not is_tensor(leaf) or leaf.device.type != "cpu" or leaf.layout is not torch.strided or leaf.is_quantized:
        return leaf
    return leaf if leaf.dtype.is_floating_point and leaf.element_size() < 4 else dtypes.from_torch(leaf, where="")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Small floats as integers of their width: not every torch can gather them."""
    if tensor.dtype.is_floating_point and tensor.element_size() < 4:
        return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    return tensor
