"""Blocks of one buffer that wait until they make up a shard."""

from __future__ import annotations

from collections.abc import Callable

from archive.arrays import Memory
from archive.fields import ShardSchema
from archive.write import blocks, intake, works
from archive.write.arena import Arena
from archive.write.blocks import Block
from archive.write.changes import Changes
from archive.write.works import Describe

_MERGE_BLOCKS = 512
_ARENA_FROM_BYTES = 1024 * 1024  # of the first block of a shard: small ones are not worth a shard's memory


class Collected:
    """Blocks by their schema. `shard_bytes(block)`: how much of such blocks is a shard.  `describing()`: called when a
    shard is ready; gives what describes its segments.  `reward`: the field of a schema that is the reward.
    `most_bytes`: of a block; a larger one is cut."""

    def __init__(
        self, changes: Changes, memory: Memory, shard_bytes: Callable[[Block], int], describing: Callable[[], Describe],
        reward: Callable[[ShardSchema], str | None], most_bytes: Callable[[], int],
    ) -> None:  # fmt: skip
        self._changes = changes
        self._undo = changes.undo
        self._memory = memory
        self._shard_bytes = shard_bytes
        self._describing = describing
        self._reward = reward
        self._most_bytes = most_bytes
        self._pending: dict[str, list[Block]] = {}
        self._bytes: dict[str, int] = {}
        self._arenas: dict[str, Arena] = {}

    def keep(self, block: Block, *, owned: bool = False) -> None:
        """Copy a block (unless nobody else has its arrays) to the others; full shards are sent off."""
        for piece in blocks.split(block, self._most_bytes()):
            digest = piece.schema.digest
            if self.has(digest) and self._bytes[digest] + piece.nbytes > self._shard_bytes(piece):
                self.submit(digest)
            if digest not in self._pending:
                self._undo.key(self._pending, digest)
                self._pending[digest] = []
            self._add(digest, self._pending[digest], piece, owned=owned)

    def has(self, digest: str) -> bool:
        """Whether there are blocks of this schema."""
        return bool(self._pending.get(digest))

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return sum(self._bytes.values())

    @property
    def steps(self) -> int:
        """Of all blocks."""
        return sum(block.length for pending in self._pending.values() for block in pending)

    def submit(self, digest: str) -> None:
        """The blocks of one schema are a shard."""
        for mapping in (self._pending, self._bytes, self._arenas):
            self._undo.key(mapping, digest)
        pending = self._pending.pop(digest)
        self._bytes[digest] = 0
        self._arenas.pop(digest, None)
        self._changes.add(works.shard(pending, self._reward(pending[0].schema), self._describing()))

    def submit_all(self) -> None:
        """What there is of each schema is a shard."""
        for digest in [d for d, found in self._pending.items() if found]:
            self.submit(digest)

    def _add(self, digest: str, pending: list[Block], piece: Block, *, owned: bool) -> None:
        own = piece if owned else self._owned(piece, new=not pending)
        self._undo.key(self._bytes, digest)
        self._undo.length(pending)
        pending.append(own)
        self._bytes[digest] = self._bytes.get(digest, 0) + piece.nbytes
        if len(pending) >= _MERGE_BLOCKS and all(b.single is None for b in pending[-_MERGE_BLOCKS:]):
            merged = blocks.merge(pending[-_MERGE_BLOCKS:])
            self._undo.content(pending)
            pending[-_MERGE_BLOCKS:] = [merged]

    def _owned(self, block: Block, *, new: bool) -> Block:
        """The block copied; large ones into memory where those of one shard lie end to end."""
        digest = block.schema.digest
        if new:
            self._undo.key(self._arenas, digest)
            self._arenas.pop(digest, None)
            if block.nbytes >= _ARENA_FROM_BYTES:
                self._arenas[digest] = Arena(self._memory.take(), block)
        arena = self._arenas.get(digest)
        return (arena and arena.copy(block)) or intake.owned(block)
