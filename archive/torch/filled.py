"""Rings of tensors out of a share of a checkpoint, and the priority trees that belong to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from archive.arrays import Ints, Mask, ascending, run_tails, zeros
from archive.base import CapacityError, ColumnError, FieldError, NotFoundError, UsageError, show
from archive.fields import NODES, Array, Path, dtypes, nests
from archive.torch.rings import RingSteps

UNFINISHED = ("close", "continue", "drop")


@dataclass(frozen=True)
class Filled:
    """A ring in the form for training: row e holds positions [pos - size, pos),
    position p in slot p % max_length."""

    buffers: dict[str, Any]  # nest of tensors (E, L, ...); empty if the share has no step
    pos: torch.Tensor  # (E,) int64
    size: torch.Tensor  # (E,) int64
    columns: dict[str, Any]  # name -> (E, L, ...), zero where no step is
    cut: torch.Tensor  # (E, L) bool: steps after which their unfinished episode does not go on
    report: dict[str, int]

    @property
    def live(self) -> torch.Tensor:
        """(E, L) bool: slots that hold a step."""
        slots = torch.arange(self.cut.shape[1], device=self.pos.device)
        return (self.pos[:, None] - 1 - slots) % self.cut.shape[1] < self.size[:, None]


class Leaves(NamedTuple):
    """The leaves that were written into a priority tree: the number of those that are not 0, and the greatest."""

    nnz: int
    max: float


def fill(share: Any, *, num_envs: int, max_length: int, unfinished: str = "close", device: Any = None) -> Filled:
    """Put a share's steps into new ring tensors `[num_envs, max_length, ...]`; nothing is dropped.

    share: of a plan, or anything with its `layout`, `next_positions`, `columns` and `read()`. One that also has
    `stream()` is read in bounded memory, one with `row_specs()` and `read_into()` straight into the ring. Its fields
    that are `partly_late`, which some steps were given later and others not, have no place in a ring.
    An env row that is longer than `max_length`, or beyond `num_envs`, is a CapacityError: plan for the size that you
    have, which drops the oldest steps and counts them.
    unfinished: an open episode whose steps are followed by another's is cut in any case. One at the end of its row is
    cut too ("close": the env starts anew), or goes on ("continue": the env's state is restored). "drop" makes sure that
    the plan has dropped them. Mark the cut steps as last, or truncated, as your buffer does it.
    """
    if unfinished not in UNFINISHED:
        raise UsageError(f"unfinished={unfinished!r}: give 'close', 'continue' or 'drop'")
    if num_envs < 1 or max_length < 1:
        raise UsageError(f"num_envs={num_envs}, max_length={max_length}: a ring has one or more of both")
    layout = share.layout
    env, position, length = (np.asarray(v, np.int64) for v in (layout.env_id, layout.position, layout.length))
    opened, headless = (np.asarray(v, bool) & (length > 0) for v in (layout.open, layout.headless))
    steps, shape = RingSteps(env, position, position + length, max_length), (num_envs, max_length)
    _check_room(steps, num_envs)
    _check_contiguous(steps, share.next_positions, num_envs)
    if unfinished == "drop" and opened.any():
        raise UsageError(
            f"the share has {int(opened.sum())} open episodes, and only a plan drops: "
            "resharding.plan(..., unfinished='drop')"
        )
    arrays, nodes = _in_place(share, steps, shape) or _one_by_one(share, steps, shape)
    columns = {name: _column(name, nests.as_array(value, name), steps, shape) for name, value in share.columns.items()}
    cut = _cut(steps, shape, opened, close=unfinished == "close")
    pos = np.zeros(num_envs, np.int64)
    size = np.bincount(env, weights=length, minlength=num_envs).astype(np.int64)
    known = {e: p for e, p in share.next_positions.items() if 0 <= e < num_envs}
    pos[list(known)] = list(known.values())
    buffers = nests.unflatten({path: _tensor(arrays.pop(path), device) for path in list(arrays)} | nodes)
    report = {
        "steps": int(size.sum()),
        "episodes": int((length > 0).sum()),
        "headless": int(headless.sum()),
        "open": int(opened.sum()),
        "cut": int(cut.sum()),
        "empty_rows": int((size == 0).sum()),
    }
    made = {name: _tensor(values, device) for name, values in columns.items()}
    return Filled(buffers, _tensor(pos, device), _tensor(size, device), made, _tensor(cut, device), report)


def rebuild(tree_set: Any, filled: Filled, name: str, *, elsewhere: float = 0.0) -> Leaves:
    """Write a column of a filled ring into a priority tree: leaf env * max_length + slot, live or not, in one call.

    tree_set: an object with `tree[indices] = values`, or a callable (indices, values).  elsewhere: for slots without a
    step; 0 suits trees of sums and maxima, inf those of minima.
    The tree keeps its own counters if its setter does; else set them from what this returns.
    """
    if name not in filled.columns:
        raise NotFoundError(f"the filled ring has no column {name!r}; it has: {', '.join(filled.columns) or 'none'}")
    column = filled.columns[name]
    if tuple(column.shape) != tuple(filled.cut.shape):
        raise ColumnError(f"column {name!r} has shape {list(column.shape)}; a leaf takes one number a step")
    live = filled.live
    values = torch.where(live, column, torch.full_like(column, elsewhere)).flatten()
    index = torch.arange(len(values), device=values.device)
    if callable(tree_set):
        tree_set(index, values)
    else:
        tree_set[index] = values
    priorities = column[live]
    return Leaves(int(torch.count_nonzero(priorities)), float(priorities.max()) if len(priorities) else 0.0)


# -- the place of each step --------------------------------------------------------------------------------------------


def _check_room(steps: RingSteps, num_envs: int) -> None:
    if (steps.rows < 0).any():
        raise UsageError("the share has episodes without an env row; plan with num_envs= to deal them out to rows")
    if int(steps.rows.max(initial=0)) >= num_envs:
        raise CapacityError(
            f"the share has steps in env row {int(steps.rows.max())}, the ring has {num_envs} rows; plan with "
            f"num_envs={num_envs}"
        )
    total = np.bincount(steps.rows, weights=steps.counts, minlength=num_envs).astype(np.int64)
    longest, slots = int(total.argmax()), steps.max_length
    if total[longest] > slots:
        over = np.maximum(total - slots, 0)
        raise CapacityError(
            f"env row {longest} of the share has {total[longest]} steps, the ring {slots} slots a row "
            f"({int(over.sum())} steps too many in {int((over > 0).sum())} rows); plan with max_length={slots}, "
            "which drops the oldest and counts them"
        )


def _check_contiguous(steps: RingSteps, next_positions: Mapping[int, int], num_envs: int) -> None:
    """A ring has no holes: each row's steps follow each other, up to the position that comes next."""
    full = np.flatnonzero(steps.counts > 0)
    env, start = steps.rows[full], steps.start[full]
    if not len(full):
        return
    row_ends = run_tails(env)
    following = np.r_[start[1:], 0]
    following[row_ends] = [next_positions.get(e, -1) for e in env[row_ends].tolist()]
    holes = np.flatnonzero(start + steps.counts[full] != following)
    if len(holes) or len(ascending(env)) != int(row_ends.sum()):
        where = (
            f"env row {env[holes[0]]} has a hole before position {following[holes[0]]}" if len(holes) else "no order"
        )
        raise UsageError(
            f"the steps of the share don't follow each other without holes, as a ring's do ({where}); plan with "
            f"num_envs={num_envs}, which puts what is left end to end"
        )


def _cut(steps: RingSteps, shape: tuple[int, int], opened: Mask, *, close: bool) -> Mask:
    """A mask of the ring: the last steps of open episodes that do not go on there."""
    full = np.flatnonzero(steps.counts > 0)
    chosen = full[opened[full] & (~run_tails(steps.rows[full]) | close)]
    out = np.zeros(shape, bool)
    out[steps.rows[chosen], (steps.start + steps.counts - 1)[chosen] % steps.max_length] = True
    return out


def _runs(steps: RingSteps) -> tuple[Ints, Ints]:
    """Steps, counted over all episodes, from which on they stand end to end, and the row and slot of each."""
    full = np.flatnonzero(steps.counts > 0)
    length, slot, row = steps.counts[full], steps.start[full] % steps.max_length, steps.rows[full] * steps.max_length
    first = np.cumsum(length) - length
    around = np.flatnonzero(slot + length > steps.max_length)  # the rest stands at the beginning of the same row
    starts = np.append(first, (first + steps.max_length - slot)[around])
    order = np.argsort(starts, kind="stable")
    return starts[order], np.append(row + slot, row[around])[order]


# -- their data --------------------------------------------------------------------------------------------------------


def _in_place(share: Any, steps: RingSteps, shape: tuple[int, int]) -> tuple[dict[Path, Array], dict[Path, Any]] | None:
    """The ring of each field, decoded straight into it, and the nest's empty nodes; None where that cannot be."""
    specs = share.row_specs() if hasattr(share, "row_specs") else None
    if specs is None:
        return None
    nodes: dict[Path, Any] = {
        path: {} if spec.axis == "dict" else None for path, spec in specs.items() if spec.axis in NODES
    }
    rings = {
        path: zeros((*shape, *spec.shape), dtypes.to_numpy(spec.dtype))
        for path, spec in specs.items()
        if path not in nodes
    }
    share.read_into({path: _by_place(ring) for path, ring in rings.items()}, *_runs(steps))
    return rings, nodes


def _one_by_one(share: Any, steps: RingSteps, shape: tuple[int, int]) -> tuple[dict[Path, Array], dict[Path, Any]]:
    """The ring of each field, put together as episodes come, and the nest's empty nodes."""
    episodes = (found for _, found in share.stream()) if hasattr(share, "stream") else iter(share.read())
    left_out = getattr(share, "partly_late", ())
    rings: dict[Path, Array] = {}
    nodes: dict[Path, Any] = {}
    done, stop, count = 0, np.cumsum(steps.counts).tolist(), len(steps.counts)
    for nest in episodes:
        if done == count:
            raise UsageError(f"the share's layout has {count} episodes, reading it gave more")
        length = int(steps.counts[done])
        leaves = {path: leaf for path, leaf in nests.flatten(nest) if path not in left_out}
        if length:
            _check_rows(leaves, length)
            if not rings:
                nodes = {path: leaf for path, leaf in leaves.items() if leaf is None or isinstance(leaf, dict)}
                rings = {path: _new_ring(leaf, shape) for path, leaf in leaves.items() if path not in nodes}
            _check_alike(leaves, rings, nodes)
            places: Any = steps.places[stop[done] - length : stop[done]]
            if places[-1] - places[0] == length - 1:  # else it goes around the row's end
                places = slice(int(places[0]), int(places[-1]) + 1)
            for path, ring in rings.items():
                _by_place(ring)[places] = leaves[path]
        done += 1
    if done != count:
        raise UsageError(f"the share's layout has {count} episodes, reading it gave {done}")
    return rings, nodes


def _check_rows(leaves: Mapping[Path, Any], length: int) -> None:
    for path, leaf in leaves.items():
        if leaf is None or (isinstance(leaf, dict) and not leaf):
            continue
        if not isinstance(leaf, np.ndarray) or leaf.ndim == 0 or len(leaf) != length:
            raise FieldError(
                f"field {show(path)!r} is not one row a step (ragged, JSON, or on another axis), so a ring has no "
                "place for it; read such a share with share.read()"
            )


def _check_alike(leaves: Mapping[Path, Any], rings: Mapping[Path, Array], nodes: Mapping[Path, Any]) -> None:
    if leaves.keys() != rings.keys() | nodes.keys():
        path = next(iter(leaves.keys() ^ (rings.keys() | nodes.keys())))
        raise FieldError(
            f"some episodes of the share have a field {show(path)!r}, others do not; a ring holds one kind"
        )
    for path, ring in rings.items():
        leaf = leaves[path]
        if not isinstance(leaf, np.ndarray) or (leaf.dtype, leaf.shape[1:]) != (ring.dtype, ring.shape[2:]):
            raise FieldError(
                f"field {show(path)!r} differs between episodes of the share in dtype or shape; a ring holds one kind"
            )


def _new_ring(leaf: Array, shape: tuple[int, int]) -> Array:
    whole = (*shape, *leaf.shape[1:])
    return np.full(whole, "", object) if leaf.dtype == object else zeros(whole, leaf.dtype)


def _by_place(ring: Array) -> Array:
    """A view of a ring as one axis of places, row by row."""
    return ring.reshape(ring.shape[0] * ring.shape[1], *ring.shape[2:])


def _column(name: str, values: Array, steps: RingSteps, shape: tuple[int, int]) -> Array:
    count = len(steps.places)
    if values.ndim == 0 or len(values) != count:
        given = len(values) if values.ndim else "no"
        raise ColumnError(f"column {name!r} of the share has {given} values for {count} live steps")
    ring = _new_ring(values, shape)
    _by_place(ring)[steps.places] = values
    return ring


def _tensor(array: Array, device: Any) -> Any:
    """The array on `device`; what torch has no dtype for stays a numpy array."""
    tensor = dtypes.to_torch(array)
    return tensor.to(device) if device is not None and isinstance(tensor, torch.Tensor) else tensor
