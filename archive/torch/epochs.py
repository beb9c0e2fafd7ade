"""Pure, no I/O: the order of an epoch, the part of it that each reader gets, and the progress of one rank, saved as
plain values and taken up in a world of any size.

Items are numbered 0 to `count`; an epoch is a permutation of them, and a position is a place in that permutation. The
rest of an epoch is a list of ranges of positions. It is cut into lanes, one for each worker of each rank, that follow
one another, so that one worker reads items that are together in the order.

Delivered items count, not those that workers have read ahead. The state of one rank stands for all if each
has delivered as many batches as the others, as ranks that train together have; else give the states of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from archive.arrays import Ints, Steps, merge_runs, offsets_of, spans
from archive.base import UsageError

FORMAT = 1
SHUFFLES = (None, "full", "blocks")
_WORLD = ("world_size", "num_workers", "batch_size", "drop_last")  # of a split, as a state has them


@dataclass(frozen=True)
class Order:
    """An order of the items of each epoch; the same for the same values, wherever it is computed.

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


class Positions:
    """Positions as sorted ranges [start, stop) that do not touch."""

    def __init__(self, starts: Iterable[int], stops: Iterable[int]) -> None:
        self.starts, self.stops = merge_runs(np.array(list(starts), np.int64), np.array(list(stops), np.int64))

    def __len__(self) -> int:
        return int((self.stops - self.starts).sum())

    def positions(self) -> Ints:
        return spans(self.starts, self.stops - self.starts)

    def part(self, start: int, stop: int) -> Positions:
        """The positions at [start, stop), counted along the ranges."""
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
        """The items that the workers of each rank have delivered, if each as many batches as those of one rank."""
        full = [-(-count // self.batch_size) * self.batch_size for count in taken]
        return [[min(n, len(self.lane(r, w))) for w, n in enumerate(full)] for r in range(self.world_size)]

    def left(self, taken: Sequence[Sequence[int]]) -> Positions:
        """The positions that are left when worker w of rank r has delivered the first taken[r][w] items of its lane."""
        done = [self.lane(r, w).part(0, count) for r, counts in enumerate(taken) for w, count in enumerate(counts)]
        return self.runs.without(Positions.of([pair for runs in done for pair in runs.as_lists()]))


# -- progress of one rank ----------------------------------------------------------------------------------------------


class Epoch:
    """One rank's place in an epoch: the split of the rest when it began, and the items delivered by each worker."""

    def __init__(
        self,
        order: Order,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 1,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        self.order = order
        self.rank = rank
        self._world = (world_size, num_workers, batch_size, drop_last)
        self.begin(0)

    def begin(self, number: int) -> None:
        """Begin an epoch from its start."""
        self.number = number
        self._go_on(Positions([0], [self.order.count]))

    def _go_on(self, left: Positions) -> None:
        self.split = Split(left, *self._world)
        self.taken = [0] * self.split.num_workers
        self.batches = 0

    def ahead(self, worker: int) -> tuple[int, Positions]:
        """The lane that the worker started as number `worker` reads, and its rest; the next one in turn is the first,
        so that the order of batches goes on where it stopped."""
        lane = (worker + self.batches) % self.split.num_workers
        whole = self.split.lane(self.rank, lane)
        return lane, whole.part(self.taken[lane], len(whole))

    def items(self, left: Positions) -> Ints:
        """The items at some positions of this epoch."""
        found: Ints = self.order.items(self.number)[left.positions()]
        return found

    def deliver(self, lane: int, count: int) -> None:
        """Take note that the next `count` items of a lane have reached the caller."""
        self.taken[lane] += count
        self.batches += 1

    @property
    def left(self) -> Positions:
        """The positions that no rank has delivered, if all are at the same place as this one."""
        return self.split.left(self.split.alike(self.taken))

    def state(self) -> dict[str, Any]:
        """The state as plain numbers, lists and strings."""
        split = dict(zip(_WORLD, self.split.world, strict=True))
        return {
            "format": FORMAT,
            "order": asdict(self.order),
            "epoch": self.number,
            "runs": self.split.runs.as_lists(),
            **split,
            "rank": self.rank,
            "taken": list(self.taken),
            "batches": self.batches,
        }

    def load(self, states: Any) -> None:
        """Go on from the state of any rank, or from those of all ranks; then each item that was left comes once."""
        given = [states] if isinstance(states, Mapping) else list(states)
        _check(given, self.order)
        behind = min(s["epoch"] for s in given)
        current = [s for s in given if s["epoch"] == behind]
        split, taken = _delivered(given, current)
        self.number = behind
        if split.world == self._world:
            self.split, self.taken = split, list(taken[self.rank])
            self.batches = next((s["batches"] for s in current if s["rank"] == self.rank), current[0]["batches"])
        else:
            self._go_on(split.left(taken))
            taken = [[0] * self.split.num_workers] * self.split.world_size
        lanes = [(len(self.split.lane(r, w)), n) for r, each in enumerate(taken) for w, n in enumerate(each)]
        if self.order.count and not any(n < items for items, n in lanes):
            self.begin(behind + 1)


class InEpochs:
    """A reader that goes through epochs item by item, and goes on where it was; `_epoch` has its place."""

    _epoch: Epoch

    @property
    def epoch(self) -> int:
        """The next epoch, or the present one."""
        return self._epoch.number

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch, from its start."""
        self._epoch.begin(int(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Its place: items delivered in this process are done, items that workers have only read ahead are not."""
        return self._epoch.state()

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state: any rank's, where all had delivered as much, or the list of all ranks' states. The world
        size, the workers and the batch size may be others than they were."""
        self._epoch.load(state)


def _check(given: Sequence[Mapping[str, Any]], order: Order) -> None:
    if not given:
        raise UsageError("there is no state to load; give that of one rank, or those of all ranks")
    for state in given:
        if state.get("format") != FORMAT:
            raise UsageError(f"this is no state of a loader (its format is {state.get('format')!r}, not {FORMAT})")
        differing = {k: (v, state["order"].get(k)) for k, v in asdict(order).items() if state["order"].get(k) != v}
        if differing:
            changes = "; ".join(f"{k} is {now!r} and was {then!r}" for k, (now, then) in differing.items())
            raise UsageError(
                f"the state is of another order of items: {changes}. Resume with the same episodes, fields of the same "
                "kind of item, shuffle and seed"
            )


def _delivered(
    given: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]
) -> tuple[Split, list[list[int]]]:
    """The split of the epoch that some of the ranks are in, and the items of it that each worker of each rank has
    delivered; of a rank that has begun the next, all."""
    first, behind, world = current[0], current[0]["epoch"], current[0]["world_size"]
    if any(state[k] != first[k] for state in current for k in ("runs", *_WORLD)):
        raise UsageError("the states are of different checkpoints; give those that all ranks saved at the same time")
    split = Split(Positions.of(first["runs"]), *(first[k] for k in _WORLD))
    if len(given) == 1:
        return split, split.alike(first["taken"])
    by_rank = {state["rank"]: state for state in given}
    if sorted(by_rank) != list(range(world)) or len(given) != world:
        raise UsageError(
            f"these are states of ranks {sorted(by_rank)} of a world of {world}; give that of one rank, or of each "
            "rank once"
        )
    if any(s["epoch"] > behind + 1 or (s["epoch"] > behind and any(s["taken"])) for s in given):
        raise UsageError("the ranks are in different epochs; give the states that all ranks saved at the same time")
    whole = [[len(split.lane(r, w)) for w in range(split.num_workers)] for r in range(world)]
    return split, [list(s["taken"]) if s["epoch"] == behind else whole[r] for r, s in sorted(by_rank.items())]
