"""Where the trajectories of a storage begin and end: by a trajectory key, by ends, or not at all (steps on their own)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from archive.adapters.torchrl.parts import Parts, module
from archive.arrays import Ints
from archive.fields import Path

COLLECTOR: Path = ("collector", "traj_ids")
END: Path = ("next", "done")
SPLIT = "another kind of item"  # why an episode ended, though its trajectory goes on in the next
Mask = np.ndarray[Any, np.dtype[np.bool_]]


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
        return {
            "traj": None if self.traj is None else list(self.traj),
            "end": None if self.end is None else list(self.end),
        }

    @classmethod
    def from_state(cls, state: Any) -> Keys:
        return cls(*(None if state.get(n) is None else tuple(state[n]) for n in ("traj", "end")))


def as_path(key: Any) -> Path | None:
    """A nested key of TorchRL as a path."""
    if key is None:
        return None
    return (key,) if isinstance(key, str) else tuple(key)


def keys_of(parts: Parts, cells: Any, traj_key: Any, end_key: Any) -> Keys:
    """The keys given; else those that the sampler was given; else the collector's; else the usual end."""
    if parts.max_value and traj_key is None:
        return Keys()  # neighbours were not neighbours in time
    fields = [as_path(traj_key), *_sampled_by(parts, "traj_key"), COLLECTOR]
    traj = next((p for p in fields if p is not None and cells.flat(p) is not None), None)
    ends = [as_path(end_key), *_sampled_by(parts, "end_key"), END]
    end = next((p for p in ends if p is not None and cells.flat(p) is not None), None)
    return Keys(traj, end)


def _sampled_by(parts: Parts, name: str) -> list[Path | None]:
    slices = module("samplers").SliceSampler
    samplers = [s for s in parts.samplers.values() if isinstance(s, slices)]
    return [as_path(getattr(s, name, None)) for s in samplers]


@dataclass(frozen=True)
class Marks:
    """One entry a cell, of all cells in use."""

    first: Mask
    last: Mask
    terminated: Mask
    truncated: Mask
    previous: Ints  # the cell before it in time, -1 if there is none
    columns: int


def marks_of(cells: Any, keys: Keys, order: Ints, *, wrapped: bool) -> Marks:
    """order: rows, oldest first.  wrapped: what came before the oldest was overwritten."""
    columns, count = cells.columns, cells.rows * cells.columns
    grid = order[:, None] * columns + np.arange(columns)
    previous = np.full(count, -1, np.int64)
    previous[grid[1:].ravel()] = grid[:-1].ravel()
    ended = _flags(cells, keys.end, count)
    changes = np.zeros(count, bool)  # at the last step before the id changes
    ids = None if keys.traj is None else _ids(cells, keys.traj, count)
    if ids is not None:
        changes[grid[:-1].ravel()] = (ids[grid[:-1]] != ids[grid[1:]]).ravel()
    last: Mask = ended | changes
    begins = np.where(previous >= 0, last[previous], not wrapped)
    first = np.asarray(begins | _flags(cells, ("is_init",), count), bool)
    truncated, terminated = (_flags(cells, keys.beside(n), count) for n in ("truncated", "terminated"))
    return Marks(first, last, terminated & last, truncated & last, previous, columns)


def _flags(cells: Any, path: Path | None, count: int) -> Mask:
    values = None if path is None else cells.flat(path)
    if values is None:
        return np.zeros(count, bool)
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.dtype.kind not in "biu":
        return np.zeros(count, bool)
    return np.asarray(array.reshape(count, -1).astype(bool).any(axis=1) if count else np.zeros(0), bool)


def _ids(cells: Any, path: Path, count: int) -> Any:
    values = cells.flat(path)
    if values is None:
        return None
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    return array.reshape(count, -1)[:, 0] if count else None
