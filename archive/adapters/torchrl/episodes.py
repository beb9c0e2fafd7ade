"""Where the trajectories of a storage begin and end: by a trajectory key, by ends,
or not at all (steps on their own)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from archive.adapters.torchrl.cells import Cells
from archive.adapters.torchrl.parts import Parts, module
from archive.arrays import Ints
from archive.fields import Array, Path

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
        return {name: None if path is None else list(path) for name, path in vars(self).items()}

    @classmethod
    def from_state(cls, state: Any) -> Keys:
        return cls(as_path(state.get("traj")), as_path(state.get("end")))

    @classmethod
    def asked(cls, traj_key: Any, end_key: Any) -> Keys:
        """The keys that a user gave."""
        return cls(as_path(traj_key), as_path(end_key))


def as_path(key: Any) -> Path | None:
    """A nested key of TorchRL as a path."""
    if key is None:
        return None
    return (key,) if isinstance(key, str) else tuple(key)


def keys_of(parts: Parts, cells: Cells, asked: Keys) -> Keys:
    """The keys asked for; else those that the sampler was given; else the collector's; else the usual end."""
    if parts.max_value and asked.traj is None:
        return Keys()  # neighbours were not neighbours in time
    slicing = [s for s in parts.samplers.values() if isinstance(s, module("samplers").SliceSampler)]

    def first(*paths: Path | None) -> Path | None:
        return next((p for p in paths if p is not None and cells.has(p)), None)

    return Keys(
        first(asked.traj, *(as_path(getattr(s, "traj_key", None)) for s in slicing), COLLECTOR),
        first(asked.end, *(as_path(getattr(s, "end_key", None)) for s in slicing), END),
    )


@dataclass(frozen=True)
class Marks:
    """One entry a cell, of all cells in use."""

    first: Mask
    last: Mask
    terminated: Mask
    truncated: Mask
    previous: Ints  # the cell before it in time, -1 if there is none
    columns: int


def marks_of(cells: Cells, keys: Keys, order: Ints, *, wrapped: bool) -> Marks:
    """Where trajectories begin and end.  order: rows, oldest first.  wrapped: what came before them was overwritten."""
    columns, count = cells.columns, cells.rows * cells.columns
    grid = order[:, None] * columns + np.arange(columns)
    previous = np.full(count, -1, np.int64)
    previous[grid[1:].ravel()] = grid[:-1].ravel()
    last = _flags(cells, keys.end)
    ids = ids_of(cells, keys.traj)
    if ids is not None:
        last[grid[:-1].ravel()] |= (ids[grid[:-1]] != ids[grid[1:]]).ravel()  # the last step before the id changes
    begins = np.where(previous >= 0, last[previous], not wrapped)
    first = np.asarray(begins | _flags(cells, ("is_init",)), bool)
    truncated, terminated = (_flags(cells, keys.beside(name)) for name in ("truncated", "terminated"))
    return Marks(first, last, terminated & last, truncated & last, previous, columns)


def _flags(cells: Cells, path: Path | None) -> Mask:
    """Whether each cell has anything but 0 in a field of numbers; a fresh array."""
    count = cells.rows * cells.columns
    values = None if path is None else cells.flat(path)
    if values is None or values.dtype.kind not in "biu" or not count:
        return np.zeros(count, bool)
    return np.asarray(values.reshape(count, -1).astype(bool).any(axis=1))


def ids_of(cells: Cells, path: Path | None) -> Array | None:
    """The trajectory id of each cell; None if there are none."""
    values = None if path is None else cells.flat(path)
    return None if values is None or not len(values) else values.reshape(len(values), -1)[:, 0]
