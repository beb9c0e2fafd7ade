"""Pure, no I/O: the order of an epoch, which part of it each reader gets, and what is left of it.

Items are numbered 0 to `count`; an epoch is a permutation of them, and a position is a place in that permutation. What
is left of an epoch is a list of runs of positions. It is cut into lanes, one for each worker of each rank, that follow
one another, so that what lies together in the order is read by one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from archive.arrays import Ints, merge_runs, offsets_of, spans
from archive.base import UsageError
from archive.steps import Steps

SHUFFLES = (None, "full", "blocks")


@dataclass(frozen=True)
class Order:
    """How the items of each epoch are ordered; the same for the same values, wherever it is computed.

    shuffle: None is the items' own order. "full" is any permutation. "blocks" deals blocks of `block_items` neighbours
    in random order and shuffles the items of each `pool_blocks` of them: whoever reads on needs the chunks of one pool
    at a time.
    """

    count: int
    shuffle: str | None = None
    seed: int = 0
    block_items: int = 1
    pool_blocks: int = 16

    def __post_init__(self) -> None:
        if self.shuffle not in SHUFFLES:
            raise UsageError(f"shuffle={self.shuffle!r}: give 'full', 'blocks' or None")
        if self.block_items < 1 or self.pool_blocks < 1:
            raise UsageError(
                f"blocks of {self.block_items} items, {self.pool_blocks} to a pool: both must be at least 1"
            )
        if self.seed < 0:
            raise UsageError(f"seed={self.seed}: a seed is not negative")

    def items(self, epoch: int) -> Ints:
        """The items in the order of an epoch."""
        if self.shuffle is None:
            return np.arange(self.count)
        generator = np.random.default_rng([self.seed, epoch])
        if self.shuffle == "full":
            return generator.permutation(self.count)
        blocks = -(-self.count // self.block_items)
        place = np.empty(blocks, np.int64)
        place[generator.permutation(blocks)] = np.arange(blocks)
        pool = np.repeat(place // self.pool_blocks, self.block_items)[: self.count]
        return np.lexsort((generator.random(self.count), pool))

    @property
    def pool_items(self) -> int:
        """Items that are shuffled among each other."""
        return min(self.count, self.block_items * self.pool_blocks)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Positions:
    """Positions as sorted runs [start, stop) that do not touch."""

    def __init__(self, starts: Iterable[int] = (), stops: Iterable[int] = ()) -> None:
        self.starts, self.stops = merge_runs(np.array(list(starts), np.int64), np.array(list(stops), np.int64))

    def __len__(self) -> int:
        return int((self.stops - self.starts).sum())

    def positions(self) -> Ints:
        return spans(self.starts, self.stops - self.starts)

    def part(self, start: int, stop: int) -> Positions:
        """The positions that come at [start, stop) when counting along the runs."""
        edges = offsets_of(self.stops - self.starts)
        begins, ends = edges[:-1], edges[1:]
        shift = self.starts - begins
        return Positions(np.maximum(begins, start) + shift, np.maximum(np.minimum(ends, stop), begins) + shift)

    def without(self, other: Positions) -> Positions:
        """These positions but for the others."""
        mine, theirs = (Steps(np.zeros_like(one.starts), one.starts, one.stops) for one in (self, other))
        left = mine.minus(theirs)
        return Positions(left.lo, left.hi)

    def as_lists(self) -> list[list[int]]:
        return [[int(a), int(b)] for a, b in zip(self.starts, self.stops, strict=True)]

    @classmethod
    def of(cls, pairs: Sequence[Sequence[int]]) -> Positions:
        return cls([int(a) for a, _ in pairs], [int(b) for _, b in pairs])


@dataclass(frozen=True)
class Split:
    """Positions cut into a lane for each worker of each rank: as equal as can be, longer ones first.

    drop_last: each lane is cut to the same number of whole batches.
    """

    runs: Positions
    world_size: int
    num_workers: int
    batch_size: int = 1
    drop_last: bool = False

    @property
    def world(self) -> tuple[int, int, int, bool]:
        return self.world_size, self.num_workers, self.batch_size, self.drop_last

    def lane(self, rank: int, worker: int) -> Positions:
        lanes = self.world_size * self.num_workers
        number = worker * self.world_size + rank
        each, more = divmod(len(self.runs), lanes)
        if self.drop_last:
            each, more = each // self.batch_size * self.batch_size, 0
        start = number * each + min(number, more)
        return self.runs.part(start, start + each + (number < more))

    def alike(self, taken: Sequence[int]) -> list[list[int]]:
        """What the workers of each rank have delivered if each as many batches as those of one rank."""
        full = [-(-count // self.batch_size) * self.batch_size for count in taken]
        return [[min(n, len(self.lane(r, w))) for w, n in enumerate(full)] for r in range(self.world_size)]

    def left(self, taken: Sequence[Sequence[int]]) -> Positions:
        """What is left when worker w of rank r has delivered the first taken[r][w] items of its lane."""
        done = [
            self.lane(rank, worker).part(0, count)
            for rank, counts in enumerate(taken)
            for worker, count in enumerate(counts)
        ]
        pairs = [pair for runs in done for pair in runs.as_lists()]
        return self.runs.without(Positions.of(pairs))
