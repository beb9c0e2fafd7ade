"""Who reads what of an epoch, and what is left of it: any worlds, any number of resumptions, against sets."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the streams need torch")
from archive.base.errors import UsageError
from archive.torch.epochs import SHUFFLES, Epoch, Order, Positions, Split
from tests.support.sampling import examples

sets = st.sets(st.integers(0, 60))
worlds = st.tuples(st.integers(1, 4), st.integers(1, 3))


def runs(positions: set[int]) -> Positions:
    return Positions(sorted(positions), [p + 1 for p in sorted(positions)])


@given(sets, sets, st.integers(0, 60), st.integers(0, 60))
@settings(deadline=None)
def test_runs_are_sets(a: set[int], b: set[int], start: int, more: int) -> None:
    assert runs(a).positions().tolist() == sorted(a)
    assert len(runs(a)) == len(a)
    assert runs(a).without(runs(b)).positions().tolist() == sorted(a - b)
    assert runs(a).part(start, start + more).positions().tolist() == sorted(a)[start : start + more]
    assert Positions.of(runs(a).as_lists()).positions().tolist() == sorted(a)


@given(sets, worlds, st.integers(1, 4), st.booleans())
@settings(deadline=None)
def test_lanes_share_out_everything_evenly(a: set[int], world: tuple[int, int], batch: int, drop_last: bool) -> None:
    ranks, workers = world
    split = Split(runs(a), ranks, workers, batch, drop_last)
    lanes = [[split.lane(r, w).positions().tolist() for w in range(workers)] for r in range(ranks)]
    every = [p for rank in lanes for lane in rank for p in lane]
    sizes = [len(lane) for rank in lanes for lane in rank]
    totals = [sum(map(len, rank)) for rank in lanes]
    assert len(set(every)) == len(every)
    if not drop_last:
        assert sorted(every) == sorted(a)
        assert max(sizes) - min(sizes) <= 1
        assert max(totals) - min(totals) <= 1
    else:
        assert set(every) <= a
        assert len(set(sizes)) == 1
        assert sizes[0] % batch == 0
        assert len(a) - len(every) < batch * ranks * workers


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_an_order_is_a_permutation_that_follows_from_seed_and_epoch(shuffle: str | None) -> None:
    order = Order(1003, shuffle, seed=3, block_items=10, pool_blocks=4)
    first = order.items(0)
    assert sorted(first.tolist()) == list(range(1003))
    assert np.array_equal(first, Order(1003, shuffle, seed=3, block_items=10, pool_blocks=4).items(0))
    changes = shuffle is not None
    assert np.array_equal(first, order.items(1)) != changes
    assert np.array_equal(first, Order(1003, shuffle, seed=4, block_items=10, pool_blocks=4).items(0)) != changes


def test_blocks_are_read_a_pool_at_a_time_and_shuffled_within() -> None:
    order = Order(1000, "blocks", seed=1, block_items=10, pool_blocks=4).items(0)
    for start in range(0, 1000, 40):
        pool = order[start : start + 40]
        assert len(set(pool // 10)) == 4
        assert len(set((pool // 10)[:8].tolist())) > 1
    assert not np.array_equal(np.sort(order[:40]), np.arange(40))


def test_an_order_is_the_same_on_any_machine() -> None:
    assert Order(8, "full", 5).items(2).tolist() == [0, 4, 5, 7, 3, 1, 2, 6]
    assert Order(8, "blocks", 5, 2, 2).items(2).tolist() == [2, 3, 0, 1, 5, 7, 4, 6]


class World:
    """All ranks of a job that reads an epoch, by the rules that a DataLoader follows: workers take turns."""

    def __init__(self, order: Order, ranks: int, workers: int, states: Any = None, batch: int = 4) -> None:
        self.batch = batch
        self.ranks = [Epoch(order, r, ranks, workers, batch) for r in range(ranks)]
        for epoch in self.ranks if states is not None else []:
            epoch.load(states)

    def deliver(self, rank: int, batches: int = 10**6) -> list[int]:
        epoch, batch, out = self.ranks[rank], self.batch, []
        ahead = [(lane, epoch.items(left).tolist()) for lane, left in map(epoch.ahead, range(epoch.split.num_workers))]
        turn = 0
        while batches and any(items for _, items in ahead):
            lane, items = ahead[turn % len(ahead)]
            turn += 1
            if items:
                epoch.deliver(lane, len(items[:batch]))
                out += items[:batch]
                del items[:batch]
                batches -= 1
        return out


@given(st.data(), st.integers(1, 120), st.sampled_from(SHUFFLES), st.booleans())
@settings(deadline=None, max_examples=examples(100))
def test_whatever_the_worlds_each_item_comes_once(data: st.DataObject, count: int, shuffle: Any, in_step: bool) -> None:
    order, states, seen = Order(count, shuffle, 1, 7, 3), None, []
    for _ in range(4):
        ranks, workers = data.draw(worlds)
        world = World(order, ranks, workers, states, batch=data.draw(st.integers(1, 3)))
        if world.ranks[0].number:
            break
        together = data.draw(st.integers(0, 4))
        for rank in range(ranks):
            seen += world.deliver(rank, together if in_step else data.draw(st.integers(0, 4)))
        states = json.loads(json.dumps([epoch.state() for epoch in world.ranks]))
        if all(s["batches"] - states[0]["batches"] == 0 for s in states) and in_step:
            states = states[data.draw(st.integers(0, ranks - 1))]
    else:
        world = World(order, 2, 2, states)
        if not world.ranks[0].number:
            seen += world.deliver(0) + world.deliver(1)
    assert sorted(seen) == list(range(count))


def test_the_same_world_goes_on_in_the_same_order() -> None:
    order = Order(100, "full", 1)
    whole = World(order, 2, 3).deliver(1)
    world = World(order, 2, 3)
    first = world.deliver(1, 5)
    world.deliver(0, 5)
    again = World(order, 2, 3, world.ranks[1].state())
    assert first + again.deliver(1) == whole


def test_the_state_of_a_finished_epoch_begins_the_next() -> None:
    order = Order(10, "full", 1)
    world = World(order, 1, 2)
    world.deliver(0)
    again = World(order, 1, 2, world.ranks[0].state())
    assert again.ranks[0].number == 1
    assert sorted(again.deliver(0)) == list(range(10))


def test_the_last_batch_of_a_rank_may_be_smaller_than_that_of_another() -> None:
    order = Order(7, "full", 1)
    world = World(order, 2, 1, batch=2)
    sizes = [len(world.deliver(rank, 2)) for rank in range(2)]
    assert sizes == [4, 3]
    for epoch in world.ranks:
        assert World(order, 3, 1, epoch.state()).ranks[0].number == 1


def test_what_cannot_be_resumed_is_an_error() -> None:
    order = Order(40, "full", 1)
    world = World(order, 2, 1)
    world.deliver(0, 2)
    states = [epoch.state() for epoch in world.ranks]
    fresh = Epoch(order, 0, 3, 1)
    with pytest.raises(UsageError, match="seed is 2 and was 1"):
        Epoch(Order(40, "full", 2)).load(states)
    with pytest.raises(UsageError, match="count is 41 and was 40"):
        Epoch(Order(41, "full", 1)).load(states[0])
    with pytest.raises(UsageError, match=r"ranks \[0, 0\] of a world of 2|ranks \[0\] of a world of 2"):
        fresh.load([states[0], states[0]])
    other = World(order, 2, 2).ranks[1].state()
    with pytest.raises(UsageError, match="different checkpoints"):
        fresh.load([states[0], other])
    world.deliver(0)
    world.ranks[0].begin(1)
    world.deliver(0, 1)
    with pytest.raises(UsageError, match="different epochs"):
        fresh.load([epoch.state() for epoch in world.ranks])
    with pytest.raises(UsageError, match="no state"):
        fresh.load([])
    with pytest.raises(UsageError, match="format"):
        fresh.load({})


@pytest.mark.parametrize("wrong", [{"shuffle": "some"}, {"block_items": 0}, {"pool_blocks": 0}, {"seed": -1}])
def test_an_order_that_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Order(10, **{"shuffle": "full", **wrong})
