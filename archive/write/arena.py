"""Pure, no I/O: memory that appended steps are copied into, laid out so that a shard's rows need no second copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from archive.fields import Array, Ragged

if TYPE_CHECKING:
    from archive.write.blocks import Block

_ALIGN_BYTES = 64


class Arena:
    """One piece of memory for the steps of one shard: a region for each field of fixed size, filled row by row."""

    def __init__(self, piece: Array, block: Block) -> None:
        self._piece = piece
        self._rows = 0
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
