"""Rings of tensors out of a share of a checkpoint, and the priority trees that belong to them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from archive.arrays import Ints, Mask, zeros
from archive.base import ColumnError, FieldError, NotFoundError, UsageError, show
from archive.fields import NODES, Array, Path, dtypes, nesting
from archive.ring.places import Layout, Places, places_of

UNFINISHED = ("close", "continue", "drop")
BATCH_BYTES = 32 * 1024 * 1024
LONG_RUN = 8  # steps of an episode, on average, from which on they are copied as one


class Share(Protocol):
    """What `fill` needs of a share: where its live episodes stand, their steps, and the columns.

    A share that also has `stream()`, pairs of an episode and its steps in the same order, is read in bounded memory;
    one that has `row_specs()` and `read_into()` (see `resharding.Share`) straight into the ring. Fields that it says
    are `partly_late`, which some steps were given later and others not, have no place in a ring.
    """

    @property
    def layout(self) -> Layout: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def next_positions(self) -> Mapping[int, int]: ...
    def read(self) -> Sequence[Mapping[str, Any]]: ...


@dataclass(frozen=True)
class Filled:
    """A ring as training goes on with it: row e holds positions [pos - size, pos),
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
    """What was written into a priority tree: how many leaves are not 0, and the greatest."""

    nnz: int
    max: float


def fill(share: Share, *, num_envs: int, max_length: int, unfinished: str = "close", device: Any = None) -> Filled:
    """Put a share's steps into new ring tensors `[num_envs, max_length, ...]`; nothing is dropped.

    An env row that is longer than `max_length`, or beyond `num_envs`, is a CapacityError: plan for the size that you
    have, which drops the oldest steps and counts them.
    unfinished: an open episode whose steps are followed by another's is cut in any case. One at the end of its row is
    cut too ("close": the env starts anew), or goes on ("continue": the env's state is restored). "drop" makes sure that
    the plan has dropped them. Mark the cut steps as last, or truncated, as your buffer does it.
    """
    if unfinished not in UNFINISHED:
        raise UsageError(f"unfinished={unfinished!r}: give 'close', 'continue' or 'drop'")
    places = places_of(share, num_envs, max_length)
    if unfinished == "drop" and places.open.any():
        raise UsageError(
            f"the share has {int(places.open.sum())} open episodes, and only a plan drops: "
            "resharding.plan(..., unfinished='drop')"
        )
    arrays, nodes = _in_place(share, places) or _steps(_nests(share), places)
    columns = {name: _column(name, nesting.as_array(value, name), places) for name, value in share.columns.items()}
    cut = _cut(places, close=unfinished == "close")
    pos = np.zeros(num_envs, np.int64)
    size = np.bincount(places.env, weights=places.length, minlength=num_envs).astype(np.int64)
    known = {e: p for e, p in share.next_positions.items() if 0 <= e < num_envs}
    pos[list(known)] = list(known.values())
    buffers = nesting.unflatten({path: _tensor(arrays.pop(path), device) for path in list(arrays)} | nodes)
    return Filled(
        buffers, _tensor(pos, device), _tensor(size, device), {n: _tensor(a, device) for n, a in columns.items()},
        _tensor(cut, device), _report(places, size, cut),
    )  # fmt: skip


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


def _cut(places: Places, *, close: bool) -> Mask:
    """Last steps of open episodes that do not go on in the ring."""
    full = np.flatnonzero(places.length > 0)
    env = places.env[full]
    followed = np.r_[env[1:] == env[:-1], False] if len(full) else np.zeros(0, bool)
    chosen = full[places.open[full] & (followed | close)]
    out = np.zeros((places.rows, places.slots), bool)
    out[places.env[chosen], (places.position[chosen] + places.length[chosen] - 1) % places.slots] = True
    return out


def _in_place(share: Any, places: Places) -> tuple[dict[Path, Array], dict[Path, Any]] | None:
    """The ring of each field, decoded straight into it, and the nest's empty nodes; None where that cannot be."""
    specs = share.row_specs() if hasattr(share, "row_specs") else None
    if specs is None:
        return None
    nodes: dict[Path, Any] = {
        path: {} if spec.axis == "dict" else None for path, spec in specs.items() if spec.axis in NODES
    }
    rings = {
        path: zeros((places.rows, places.slots, *spec.shape), dtypes.to_numpy(spec.dtype))
        for path, spec in specs.items()
        if path not in nodes
    }
    share.read_into({path: _by_place(ring) for path, ring in rings.items()}, *places.runs())
    return rings, nodes


def _nests(share: Share) -> Iterable[Mapping[str, Any]]:
    stream = getattr(share, "stream", None)
    nests = share.read() if stream is None else (steps for _, steps in stream())
    left_out: Collection[Path] = getattr(share, "partly_late", frozenset())
    return (_without(nest, left_out) for nest in nests) if left_out else nests


def _without(nest: Mapping[str, Any], left_out: Collection[Path]) -> Mapping[str, Any]:
    return nesting.unflatten({path: leaf for path, leaf in nesting.flatten(nest) if path not in left_out})


def _steps(nests: Iterable[Mapping[str, Any]], places: Places) -> tuple[dict[Path, Array], dict[Path, Any]]:
    """The ring of each field, and the nest's empty nodes."""
    rings: dict[Path, Array] = {}
    nodes: dict[Path, Any] = {}
    done = 0
    for lo, batch in _batches(nests, places):
        done = lo + len(batch)
        full = [leaves for leaves, n in zip(batch, places.length[lo:done].tolist(), strict=True) if n]
        if not full:
            continue
        if not rings:
            nodes = {path: leaf for path, leaf in full[0].items() if leaf is None or isinstance(leaf, dict)}
            rings = {path: _new_ring(path, leaf, places) for path, leaf in full[0].items() if path not in nodes}
        _check_alike(full, rings, nodes)
        index = places.of(lo, done)
        for path, ring in rings.items():
            _put(ring, index, [leaves[path] for leaves in full])
    if done != len(places.length):
        raise UsageError(f"the share's layout has {len(places.length)} episodes, reading it gave {done}")
    return rings, nodes


def _batches(nests: Iterable[Mapping[str, Any]], places: Places) -> Iterator[tuple[int, list[dict[Path, Any]]]]:
    """(number of the first, flattened nests) of neighbouring episodes, some megabytes at a time."""
    batch: list[dict[Path, Any]] = []
    start = nbytes = 0
    for i, nest in enumerate(nests):
        if i >= len(places.length):
            raise UsageError(f"the share's layout has {len(places.length)} episodes, reading it gave more")
        batch.append(_flat(nest, int(places.length[i])))
        nbytes += sum(leaf.nbytes for leaf in batch[-1].values() if isinstance(leaf, np.ndarray))
        if nbytes >= BATCH_BYTES:
            yield start, batch
            batch, start, nbytes = [], i + 1, 0
    if batch:
        yield start, batch


def _flat(nest: Mapping[str, Any], length: int) -> dict[Path, Any]:
    leaves = dict(nesting.flatten(nest))
    for path, leaf in leaves.items() if length else ():
        if leaf is None or (isinstance(leaf, dict) and not leaf):
            continue
        if not isinstance(leaf, np.ndarray) or leaf.ndim == 0 or len(leaf) != length:
            raise FieldError(
                f"field {show(path)!r} is not one row a step (ragged, JSON, or on another axis), so a ring has no "
                "place for it; read such a share with share.read()"
            )
    return leaves


def _new_ring(path: Path, leaf: Array, places: Places) -> Array:
    shape = (places.rows, places.slots, *leaf.shape[1:])
    if leaf.dtype == object:
        return np.full(shape, "", object)
    return zeros(shape, leaf.dtype)


def _check_alike(batch: Sequence[Mapping[Path, Any]], rings: Mapping[Path, Array], nodes: Mapping[Path, Any]) -> None:
    kinds = {path: (ring.dtype, ring.shape[2:]) for path, ring in rings.items()}
    for leaves in batch:
        if leaves.keys() != rings.keys() | nodes.keys():
            path = next(iter(leaves.keys() ^ (rings.keys() | nodes.keys())))
            raise FieldError(
                f"some episodes of the share have a field {show(path)!r}, others do not; a ring holds one kind"
            )
        for path, kind in kinds.items():
            leaf = leaves[path]
            if not isinstance(leaf, np.ndarray) or (leaf.dtype, leaf.shape[1:]) != kind:
                raise FieldError(
                    f"field {show(path)!r} differs between episodes of the share in dtype or shape; a ring holds one "
                    "kind"
                )


def _by_place(ring: Array) -> Array:
    """A view of a ring as one axis of places, row by row."""
    return ring.reshape(ring.shape[0] * ring.shape[1], *ring.shape[2:])


def _put(ring: Array, index: Ints, parts: Sequence[Array]) -> None:
    """Episodes, each in one row of the ring, into their places."""
    flat = _by_place(ring)
    if len(index) < LONG_RUN * len(parts):
        flat[index] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return
    start = 0
    for part in parts:
        places = index[start : start + len(part)]
        start += len(part)
        together = int(places[-1]) - int(places[0]) == len(places) - 1  # else it goes around the row's end
        flat[slice(int(places[0]), int(places[-1]) + 1) if together else places] = part


def _column(name: str, values: Array, places: Places) -> Array:
    index = places.of(0, len(places.length))
    if values.ndim == 0 or len(values) != len(index):
        count = len(values) if values.ndim else "no"
        raise ColumnError(f"column {name!r} of the share has {count} values for {len(index)} live steps")
    ring = _new_ring((name,), values, places)
    _by_place(ring)[index] = values
    return ring


def _tensor(array: Array, device: Any) -> Any:
    """On `device`; what torch has no dtype for stays a numpy array."""
    tensor = dtypes.to_torch(array)
    return tensor.to(device) if device is not None and isinstance(tensor, torch.Tensor) else tensor


def _report(places: Places, size: Ints, cut: Mask) -> dict[str, int]:
    full = places.length > 0
    return {
        "steps": int(size.sum()),
        "episodes": int(full.sum()),
        "headless": int(places.headless.sum()),
        "open": int(places.open.sum()),
        "cut": int(cut.sum()),
        "empty_rows": int((size == 0).sum()),
    }
