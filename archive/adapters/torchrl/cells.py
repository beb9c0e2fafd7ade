"""What the cells of any storage can do: be read as fields, compared by digests, and be written."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from archive.adapters import Digests
from archive.arrays import Ints
from archive.base import CapacityError
from archive.fields import Array, Path

ROOT: Path = ("data",)  # the field of a storage that is one tensor, or of items without names
INDEX: Path = ("index",)  # the field that some buffers add to what they are given
ADDED = {
    INDEX,
    ("policy_version",),
}  # fields that TorchRL adds by itself, the second for a sampler that minds staleness


class Cells(ABC):
    """The cells of a storage. A cell is one item; cells lie row after row in a storage [T, B, ...]."""

    listed = False  # items of any kind, each with fields of its own

    def __init__(self, storage: Any) -> None:
        self.storage = storage

    # -- extent -------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many rows along the first dimension are in use."""

    @property
    def inner(self) -> tuple[int, ...]:
        """The storage's dimensions beside the first."""
        return ()

    @property
    def columns(self) -> int:
        """Cells a row."""
        return math.prod(self.inner)

    def capacity(self, inner: tuple[int, ...]) -> int:
        """Rows that fit, if the other dimensions are `inner`."""
        return int(self.storage.max_size)

    def check_room(self, rows: int, inner: tuple[int, ...]) -> None:
        """Refuse more rows than the storage has."""
        each = math.prod(inner)
        room = self.capacity(inner) * each
        if rows * each > room:
            raise CapacityError(
                f"the share has {rows * each} steps, the storage room for {room}; plan with capacity={room}, which "
                "drops the oldest and counts them"
            )

    # -- reading ------------------------------------------------------------------------------------------------

    @abstractmethod
    def flat(self, path: Path) -> Array | None:
        """A field of all cells in use, one entry a cell; None if not all have it."""

    def has(self, path: Path) -> bool:
        """Whether all cells in use have this field."""
        return self.flat(path) is not None

    @abstractmethod
    def read(self, cells: Ints) -> dict[str, Any]:
        """The fields of some cells of one signature, copied."""

    def signatures(self, cells: Ints) -> Array:
        """Cells of the same signature have fields of the same kind, and can be appended together."""
        return np.zeros(len(cells), np.int64)

    def form(self) -> Any:
        """The fields that all cells have, with their dtypes and shapes; None where each has its own."""
        return None

    @abstractmethod
    def json_fields(self, cells: Ints) -> list[Path]:
        """Fields that hold JSON in some of these cells, which are of one signature."""

    def next_fields(self) -> dict[Path, Path]:
        """next/x -> x, for all fields of the same kind."""
        return {}

    @abstractmethod
    def cell_bytes(self) -> int:
        """About how many bytes a cell takes."""

    @abstractmethod
    def hashes(self, rows: Ints | None = None) -> Digests:
        """A digest of each row in use, or of some."""

    # -- writing ------------------------------------------------------------------------------------------------

    def reserve(self, nest: Mapping[str, Any], kind: Any, inner: tuple[int, ...]) -> None:
        """Make room for cells like the first of `nest`, where the storage has none yet."""
        return

    @abstractmethod
    def put(self, cells: Ints, nest: Mapping[str, Any], kind: Any, kinds: Ints | None) -> None:
        """Write the fields of some cells.  kind: the source's.  kinds: number of the kind of each item, of lists."""

    @abstractmethod
    def fill(self, path: Path, cells: Ints, values: Any) -> None:
        """Set a field of tensors in some cells to one number a cell, where there is such a field."""

    @abstractmethod
    def finish(self, rows: int) -> None:
        """Say how many rows are in use, when all is written."""
