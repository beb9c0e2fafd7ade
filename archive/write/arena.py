"""Pure, no I/O: memory that appended steps are copied into, laid out so that a shard's rows need no second copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.fields import Array, Ragged

if TYPE_CHECKING:
    from archive.write.blocks import Block

_ALIGN_BYTES = 64


class Arena:
    """One piece of memory for the steps of one shard: a region for each field of fixed size, filled row by row."""

    def __init__(self, piece: Array, block: Block) -> None:
        self._piece, self._rows = piece, 0
        sizes = {name: _row_bytes(value, block.length) for name, value in block.data.items()}
        self._sizes = {name: size for name, size in sizes.items() if size}
        room = len(piece) - _ALIGN_BYTES * len(self._sizes)
        self._capacity = room // max(1, sum(self._sizes.values()))
        self._starts: dict[str, int] = {}
        at = 0
        for name, size in self._sizes.items():
            self._starts[name] = at
            at = -(-(at + size * self._capacity) // _ALIGN_BYTES) * _ALIGN_BYTES

    def copy(self, block: Block) -> Block | None:
        """The block with its arrays copied, end to end with those of the last one; None if it does not fit."""
        if self._rows + block.length > self._capacity or not self._same_rows(block.data, block.length):
            return None
        data = {name: self._copied(name, value) for name, value in block.data.items()}
        self._rows += block.length
        return replace(block, data=data)

    def _same_rows(self, data: Mapping[str, Array | Ragged], length: int) -> bool:
        return all(_row_bytes(data[name], length) == size for name, size in self._sizes.items())

    def _copied(self, name: str, value: Array | Ragged) -> Array | Ragged:
        if isinstance(value, Ragged):
            return Ragged(value.values.copy(), value.lengths.copy())
        if name not in self._sizes:
            return np.array(value, copy=True, order="C")
        start = self._starts[name] + self._rows * self._sizes[name]
        own: Array = self._piece[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
        own[...] = value
        return own


def _row_bytes(value: Array | Ragged, length: int) -> int:
    """Bytes a step of a field that has one row of fixed size a step; else 0."""
    if isinstance(value, Ragged) or value.dtype.hasobject or len(value) != length or not length:
        return 0
    return value.nbytes // length


def end_to_end(parts: Sequence[Array]) -> Array:
    """The arrays as one; without a copy if they lie so in memory already."""
    if len(parts) == 1:
        return parts[0]
    base: Any = parts[0].base
    if base is None or not all(p.base is base and p.flags.c_contiguous for p in parts) or not _adjacent(parts):
        return np.concatenate(parts)
    shape = (sum(len(p) for p in parts), *parts[0].shape[1:])
    return np.ndarray(shape, parts[0].dtype, buffer=base, offset=_address(parts[0]) - _address(base))


def _adjacent(parts: Sequence[Array]) -> bool:
    first = parts[0]
    alike = all(p.dtype == first.dtype and p.shape[1:] == first.shape[1:] for p in parts)
    return alike and all(_address(a) + a.nbytes == _address(b) for a, b in pairwise(parts))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
