"""Pure, no I/O: how far one rank is in an epoch, saved as plain values and taken up in a world of any size.

What counts is what was delivered, not what workers have read ahead. The state of one rank stands for all where each
has delivered as many batches as the others, as ranks that train together have; else give the states of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from archive.arrays import Ints
from archive.base import UsageError
from archive.datasets.order import Order, Positions, Split

FORMAT = 1


class Epoch:
    """One rank's place in an epoch: the split of what was left when it began, and what each worker has delivered."""

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
        """The whole of an epoch lies ahead."""
        self.number = number
        self._go_on(Positions([0], [self.order.count]))

    def _go_on(self, left: Positions) -> None:
        self.split = Split(left, *self._world)
        self.taken = [0] * self.split.num_workers
        self.batches = 0

    def ahead(self, worker: int) -> tuple[int, Positions]:
        """The lane that the worker started as number `worker` reads, and what it has left; the next one in turn is the
        first, as the order of batches is to go on where it stopped."""
        lane = (worker + self.batches) % self.split.num_workers
        whole = self.split.lane(self.rank, lane)
        return lane, whole.part(self.taken[lane], len(whole))

    def items(self, left: Positions) -> Ints:
        """The items at some positions of this epoch."""
        found: Ints = self.order.items(self.number)[left.positions()]
        return found

    def deliver(self, lane: int, count: int) -> None:
        """The next `count` items of a lane have reached the caller."""
        self.taken[lane] += count
        self.batches += 1

    @property
    def left(self) -> Positions:
        """What no rank has delivered, if all are as far as this one."""
        return self.split.left(self.split.alike(self.taken))

    def state(self) -> dict[str, Any]:
        """Plain numbers, lists and strings."""
        return {
            "format": FORMAT,
            "order": self.order.as_dict(),
            "epoch": self.number,
            "runs": self.split.runs.as_lists(),
            "world_size": self.split.world_size,
            "num_workers": self.split.num_workers,
            "batch_size": self.split.batch_size,
            "drop_last": self.split.drop_last,
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
        split = _split_of(current)
        taken = _taken(given, behind)
        own = taken[self.rank] if self.rank < len(taken) else []
        self.number = behind
        if split.world == self._world:
            self.split = split
            self.taken = list(own)
            self.batches = next((s["batches"] for s in current if s["rank"] == self.rank), current[0]["batches"])
        else:
            self._go_on(split.left(taken))
        if self.order.count and not any(self._ahead_of_all(taken if self.split is split else None)):
            self.begin(behind + 1)

    def _ahead_of_all(self, taken: list[list[int]] | None) -> list[int]:
        """Items left of each lane."""
        lanes = [(r, w) for r in range(self.split.world_size) for w in range(self.split.num_workers)]
        return [max(0, len(self.split.lane(r, w)) - (taken[r][w] if taken else 0)) for r, w in lanes]


class InEpochs:
    """What goes through epochs item by item, and goes on where it was; `_epoch` is where it is."""

    _epoch: Epoch

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or that is under way."""
        return self._epoch.number

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch, from its start."""
        self._epoch.begin(int(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where it is: what it has delivered in this process is done, what workers have only read ahead is not."""
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
        differing = {k: (v, state["order"].get(k)) for k, v in order.as_dict().items() if state["order"].get(k) != v}
        if differing:
            changes = "; ".join(f"{k} is {now!r} and was {then!r}" for k, (now, then) in differing.items())
            raise UsageError(
                f"the state is of another order of items: {changes}. Resume with the same episodes, fields of the same "
                "kind of item, shuffle and seed"
            )


def _split_of(current: Sequence[Mapping[str, Any]]) -> Split:
    keys = ("runs", "world_size", "num_workers", "batch_size", "drop_last")
    first = current[0]
    if any(state[k] != first[k] for state in current for k in keys):
        raise UsageError("the states are of different checkpoints; give those that all ranks saved at the same time")
    return Split(Positions.of(first["runs"]), *(first[k] for k in keys[1:]))


def _taken(given: Sequence[Mapping[str, Any]], behind: int) -> list[list[int]]:
    """What each worker of each rank has delivered of the epoch; of a rank that has begun the next one, all."""
    current = next(s for s in given if s["epoch"] == behind)
    split, world = _split_of([current]), current["world_size"]
    if len(given) == 1:
        return split.alike(current["taken"])
    by_rank = {state["rank"]: state for state in given}
    if sorted(by_rank) != list(range(world)) or len(given) != world:
        raise UsageError(
            f"these are states of ranks {sorted(by_rank)} of a world of {world}; give that of one rank, or of each "
            "rank once"
        )
    if any(s["epoch"] > behind + 1 or (s["epoch"] > behind and any(s["taken"])) for s in given):
        raise UsageError("the ranks are in different epochs; give the states that all ranks saved at the same time")
    whole = [[len(split.lane(r, w)) for w in range(split.num_workers)] for r in range(world)]
    return [list(s["taken"]) if s["epoch"] == behind else whole[r] for r, s in sorted(by_rank.items())]
