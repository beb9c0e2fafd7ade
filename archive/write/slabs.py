"""Pure, no I/O: blocks of one buffer that wait until they make up a shard, in memory laid out so that its rows need no
second copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from archive.arrays import Memory
from archive.fields import Array, Ragged, ShardSchema
from archive.shard import SHARD_BYTES
from archive.write import blocks, intake, works
from archive.write.blocks import Block
from archive.write.changes import Changes
from archive.write.episodes import SegmentRows
from archive.write.live import LiveSet
from archive.write.streams import Streams

_ALIGN_BYTES = 64
_MERGE_BLOCKS = 512
_ARENA_FROM_BYTES = 1024 * 1024  # first blocks of a shard below this size are not worth a shard's memory

SLABS = 32  # of a buffer, at least: eviction cuts one of them, which leaves many short ranges
LEAST_SLAB_BYTES = 4 * 1024 * 1024
LEAST_RUN, LEAST_RUN_BYTES = 8, 2048  # of an env row in a slab: each range is a row of the segments table


def slab_bytes(buffer_bytes: int, env_rows: int, step_bytes: int, most: int) -> int:
    """Bytes of one slab, at most `most`; `buffer_bytes`: of all live steps."""
    run_bytes = step_bytes * min(LEAST_RUN, -(-LEAST_RUN_BYTES // step_bytes))
    return min(most, max(buffer_bytes // SLABS, LEAST_SLAB_BYTES, env_rows * run_bytes))


class _OpenSlab:
    """Blocks of one schema that wait until they are a shard. Blocks are appended, or replaced by equal ones."""

    def __init__(self, arena: Arena | None) -> None:
        self.blocks: list[Block] = []
        self.nbytes = 0
        self.arena = arena


class Slabs:
    """The open slabs of one buffer, by schema: blocks that are not handed in yet. Env rows advance together, and are
    evicted together: a shard of theirs is a slab of time."""

    def __init__(
        self,
        changes: Changes,
        memory: Memory,
        streams: Streams,
        live_set: LiveSet,
        rows: SegmentRows,
        reward: Callable[[ShardSchema], str | None],
    ) -> None:
        """rows: describes the segments of a shard.  reward: gives the field of a schema that is the reward."""
        self._changes = changes
        self._memory = memory
        self._streams = streams
        self._live_set = live_set
        self._rows = rows
        self._reward = reward
        self._open: dict[str, _OpenSlab] = {}  # replaced, never changed
        self._live_steps = 0  # at the last shard that was sent off

    def mark(self) -> Any:
        """The state that a call may change."""
        slabs = []
        for one in self._open.values():
            slabs.append((one, one.blocks, len(one.blocks), one.nbytes))
        return self._open, self._live_steps, slabs

    def cut_back(self, mark: Any) -> None:
        """Restore the state of a mark."""
        self._open, self._live_steps, slabs = mark
        for one, held, length, nbytes in slabs:
            del held[length:]
            one.blocks, one.nbytes = held, nbytes

    def keep(self, block: Block, *, owned: bool = False) -> None:
        """Add a block, copied unless `owned`; full shards are sent off."""
        nbytes = block.nbytes
        pieces = [block] if nbytes <= SHARD_BYTES else blocks.split(block, SHARD_BYTES)
        for piece in pieces:
            digest, nbytes = piece.schema.digest, piece.nbytes
            slab = self._open.get(digest)
            if slab is not None and slab.nbytes + nbytes > self._shard_bytes(piece):
                self.submit(digest)
                slab = None
            if slab is None:
                large = nbytes >= _ARENA_FROM_BYTES and not owned
                slab = _OpenSlab(Arena(self._memory.take(), piece) if large else None)
                self._open = {**self._open, digest: slab}
            own = piece if owned else (slab.arena and slab.arena.copy(piece)) or intake.owned(piece)
            slab.blocks.append(own)
            slab.nbytes += nbytes
            if len(slab.blocks) >= _MERGE_BLOCKS and not any(b.whole for b in slab.blocks[-_MERGE_BLOCKS:]):
                slab.blocks = [*slab.blocks[:-_MERGE_BLOCKS], blocks.merge(slab.blocks[-_MERGE_BLOCKS:])]

    def has(self, digest: str) -> bool:
        """True if there are blocks of this schema."""
        return digest in self._open

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(slab.nbytes for slab in self._open.values())

    @property
    def steps(self) -> int:
        """Steps of all blocks."""
        return sum(block.length for slab in self._open.values() for block in slab.blocks)

    def _shard_bytes(self, piece: Block) -> int:
        """Bytes of a shard of such blocks."""
        rows = len(self._streams.slots)
        if rows < 2:
            return SHARD_BYTES
        step_bytes = max(1, piece.nbytes // max(1, piece.length))
        return slab_bytes(self._live_steps * step_bytes, rows, step_bytes, SHARD_BYTES)

    def submit(self, digest: str) -> None:
        """Hand in the blocks of one schema as a shard."""
        slab = self._open[digest]
        self._open = {name: other for name, other in self._open.items() if other is not slab}
        self._live_steps = self._live_set.steps_at_most
        describe = partial(self._rows.describe, self._streams.epoch)
        self._streams.epoch += 1
        self._changes.add(works.shard(slab.blocks, self._reward(slab.blocks[0].schema), describe))

    def submit_all(self) -> None:
        """Hand in each open slab as a shard."""
        for digest in self._open:
            self.submit(digest)


class Arena:
    """Memory for the steps of one shard: a region for each field of fixed size, filled row by row."""

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
        alike = all(_row_bytes(block.data[name], block.length) == size for name, size in self._sizes.items())
        if self._rows + block.length > self._capacity or not alike:
            return None
        data = {name: self._copied(name, value) for name, value in block.data.items()}
        self._rows += block.length
        return replace(block, data=data)

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
    """The size of a row of a field that has one row of fixed size a step; else 0."""
    if isinstance(value, Ragged) or value.dtype.hasobject or len(value) != length or not length:
        return 0
    return value.nbytes // length
