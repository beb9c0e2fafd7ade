"""TorchRL, again and again: only what is new is written, and whatever changed is found, by whichever way it changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import numpy as np
import pytest

import archive
import resharding
from archive.adapters import torchrl
from tests.support.torchrl_buffers import assert_same_samples, buffer, contents, rectangle, steps

import torch  # isort: skip
from tensordict import TensorDict  # isort: skip
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage, PrioritizedSampler  # isort: skip
from torchrl.data import SliceSampler, TensorDictMaxValueWriter  # isort: skip

END = ("next", "done")


class World:
    """A buffer, its writer, and how many steps each save appends."""

    def __init__(self, rb: Any, url: str) -> None:
        self.rb, self.arc = rb, archive.open(url, create=True)
        self.writer = self.arc.writer(0, 1, session="first")
        self.step = 0

    def save(self, **options: Any) -> int:
        self.step += 1
        self.checkpoint = torchrl.save(self.rb, self.writer, step=self.step, **options).result(60)
        return appended(self.checkpoint)

    def check(self, **made: Any) -> None:
        """The newest checkpoint is the buffer as it stands."""
        other = buffer(len(self.rb._storage._storage), seed=9, **made)
        torchrl.restore(other, self.checkpoint, rank=0)
        assert contents(other) == contents(self.rb)


def appended(checkpoint: archive.Checkpoint) -> int:
    """Steps that this checkpoint's commit brought."""
    table = checkpoint.snapshot.columns(["commit", "length"])
    return int(np.sum(table["length"].to_numpy()[table["commit"].to_numpy() == checkpoint.number]))


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(buffer(50), f"memory://again/{request.node.name}")
    made.rb.extend(steps(0, 30))
    assert made.save() == 30
    yield made
    made.writer.close()


def test_nothing_new(world: World) -> None:
    world.rb.sample()
    assert world.save() == 0
    world.check()


def test_new_steps_only(world: World) -> None:
    world.rb.extend(steps(30, 10))
    assert world.save() == 10
    world.rb.extend(steps(40, 25))  # over the end of the ring
    assert world.save() == 25
    assert world.checkpoint.episodes.table["length"].to_pylist() == [6, 7, 7, 7, 7, 7, 7, 2]
    world.check()


def test_trajectories_go_on_over_saves(world: World) -> None:
    for lo in range(30, 51, 3):
        world.rb.extend(steps(lo, 3))
        world.save()
    assert [(ep.length, ep.complete) for ep in world.checkpoint.episodes] == [(6, False), *[(7, True)] * 6, (2, False)]


def test_what_was_overwritten_between_saves_leaves_a_gap(world: World) -> None:
    world.rb.extend(steps(30, 60))
    assert world.save() == 50
    assert contents(world.rb) == [50 + i if i < 40 else i for i in range(50)]
    lengths = world.checkpoint.episodes.table["length"].to_pylist()
    assert sum(lengths) == 50
    assert next(ep.complete for ep in world.checkpoint.episodes) is False
    world.check()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "write_at": lambda rb: rb._writer.write_at(torch.tensor([3, 4]), steps(500, 2)),
    "assignment": lambda rb: rb.__setitem__(slice(3, 5), rb[10:12]),
    "set_at_": lambda rb: rb.set_at_(
        ("next", "reward"), torch.full((2, 1), 9.0, dtype=torch.double), torch.tensor([3, 4])
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_changed_in_place(world: World, name: str) -> None:
    CHANGES[name](world.rb)
    assert world.save() == 2
    world.check()
    world.rb.extend(steps(30, 4))
    assert world.save() == 4
    world.check()


def test_behind_the_storages_back_is_found_with_verify(world: World) -> None:
    world.rb._storage._storage["next", "reward"][7] = 3.0
    assert world.save() == 0
    assert world.save(verify=True) == 1
    world.check()


def test_emptied_and_filled_again(world: World) -> None:
    world.rb.empty()
    world.rb.extend(steps(100, 20))
    assert world.save() == 20
    world.check()
    world.rb.empty()
    assert world.save() == 0
    assert len(world.checkpoint.episodes) == 0


def test_writes_that_the_tracker_was_not_told_of(world: World) -> None:
    """As another process makes them: the revision grows, nobody says which rows."""
    world.rb._storage.set(torch.arange(30, 34), steps(30, 4).exclude("index").set("index", torch.arange(30, 34)))
    world.rb._writer._cursor = 34
    assert world.save() == 4
    world.check()


def test_a_copy_of_the_storage_is_a_storage_of_its_own(world: World) -> None:
    copied = pickle.loads(pickle.dumps(world.rb._storage))
    rb = buffer(storage=copied)
    rb._writer._cursor = 30
    rb.extend(steps(30, 4))
    assert world.save() == 0
    world.rb = rb
    assert world.save() == 34
    world.check()


def test_two_archives_at_once(world: World) -> None:
    second = archive.open(f"{world.arc.url}-second", create=True)
    with second.writer(0, 1, session="other") as w:
        assert appended(torchrl.save(world.rb, w, step=1).result(60)) == 30
        world.rb.extend(steps(30, 5))
        assert world.save() == 5
        assert appended(torchrl.save(world.rb, w, step=2).result(60)) == 5


def test_another_buffer_under_the_same_name_replaces_it(world: World) -> None:
    world.rb = buffer(20)
    world.rb.extend(steps(700, 12))
    assert world.save() == 12
    assert sum(world.checkpoint.episodes.table["length"].to_pylist()) == 12
    world.check()


def test_a_rectangle(request: pytest.FixtureRequest) -> None:
    world = World(buffer(storage=LazyTensorStorage(18, ndim=2), sampler=SliceSampler(slice_len=2, strict_length=False)),
                  "memory://again/rectangle")  # fmt: skip
    for lo, count in ((0, 4), (4, 2), (6, 2)):
        world.rb.extend(rectangle(lo, count, 3))
        assert world.save() == 3 * count
    world.writer.close()


def test_a_heap_replaces_single_slots() -> None:
    world = World(buffer(10, writer=TensorDictMaxValueWriter(rank_key=("next", "reward"))), "memory://again/heap")
    world.rb.extend(steps(0, 10))
    assert world.save() == 10
    world.rb.extend(steps(8, 5))  # rewards of 10, 11 and 12 eighths (8 and 9 aren't among the best) are new
    best = world.save()
    assert 0 < best <= 5
    assert sorted(contents(world.rb))[-1] == 12
    world.check(writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))
    world.writer.close()


def test_a_list() -> None:
    rb = buffer(storage=ListStorage(10), plain=True, collate_fn=lambda items: items)
    world = World(rb, "memory://again/list")
    rb.extend([torch.arange(k + 1) for k in range(8)])
    assert world.save() == 8
    rb.extend([f"text {k}" for k in range(4)])
    assert world.save() == 4
    rb._storage._storage[5] = torch.zeros(2)
    assert world.save() == 0
    assert world.save(verify=True) == 1
    world.writer.close()


def test_many_small_writes_are_remembered_in_little_room(world: World) -> None:
    for k in range(30, 4180):
        world.rb.add(steps(k, 1)[0])
    (tracker,) = world.rb._storage._attached_entities[-1:]
    assert len(tracker._marks) < 4097
    assert world.save() == 50
    world.check()


def test_items_to_which_sampling_adds_fields() -> None:
    """A lazy stack's samples are its items, so what `sample()` sets on them appears there: behind the storage's
    back."""

    def make(seed: int) -> Any:
        sampler = PrioritizedSampler(30, 0.7, 0.9)
        return buffer(storage=LazyStackStorage(30), sampler=sampler, seed=seed, batch_size=4)

    world = World(make(0), "memory://again/stack")
    world.rb.extend(steps(0, 10))
    assert world.save() == 10
    world.rb.sample()  # now some items have a priority_weight
    assert world.save() == 0
    world.rb.extend(steps(10, 5))
    world.rb.sample()
    assert world.save() == 5
    world.writer.close()
    other = make(9)
    torchrl.restore(other, world.checkpoint, rank=0)
    assert_same_samples(world.rb, other, count=30)


def test_a_trajectory_whose_items_are_of_two_kinds_goes_on_when_moved() -> None:
    rb = buffer(storage=ListStorage(20), plain=True, collate_fn=list)
    for k, item in enumerate(steps(0, 12)):
        rb.add(item if k < 3 or k > 9 else item.set("late", torch.zeros(2)))
    world = World(rb, "memory://again/two kinds")
    world.save()
    world.writer.close()
    other = buffer(storage=ListStorage(40), plain=True, collate_fn=list)
    share = resharding.plan(world.checkpoint, world_size=1, unfinished="continue").share(0)
    assert torchrl.restore(other, share).counts["closed"] == 0
    assert [bool(item[END]) for item in other._storage._storage] == [k == 6 for k in range(12)]


def test_items_whose_numbers_became_arrays() -> None:
    rb = buffer(
        storage=LazyStackStorage(30), sampler=SliceSampler(slice_len=3, end_key=END, strict_length=False), batch_size=6
    )
    rb.extend(steps(0, 20))
    for _ in range(5):
        rb.sample()
    world = World(rb, "memory://again/arrays")
    assert world.save() == 20
    world.writer.close()
    other = buffer(storage=LazyStackStorage(30), sampler=SliceSampler(slice_len=3, end_key=END, strict_length=False))
    torchrl.restore(other, world.checkpoint, rank=0)
    assert_same_samples(rb, other, count=30)


def test_a_wrapped_list_begins_within_a_trajectory() -> None:
    world = World(buffer(storage=ListStorage(10), plain=True, collate_fn=torch.stack), "memory://again/headless")
    for item in steps(0, 12):
        world.rb.add(item)
    assert world.save() == 10
    world.writer.close()
    layout = resharding.plan(world.checkpoint, world_size=1).share(0).layout
    assert layout.length.tolist() == [5, 5]
    assert layout.headless.tolist() == [True, False]


@pytest.mark.parametrize("capacity", [50, 80])
def test_after_a_resume_only_new_steps_are_uploaded(world: World, capacity: int) -> None:
    world.rb.extend(steps(30, 33))
    world.save()
    world.writer.close()
    plan = resharding.plan(world.checkpoint, world_size=1, capacity=None if capacity == 50 else capacity)
    share = plan.share(0)
    rb = buffer(capacity, seed=3)
    torchrl.restore(rb, share)
    with world.arc.writer(session="second", resume=share) as w:
        assert appended(torchrl.save(rb, w, step=10).result(60)) == 0
        rb.extend(steps(63, 6))
        checkpoint = torchrl.save(rb, w, step=11).result(60)
    assert appended(checkpoint) == 6
    other = buffer(capacity, seed=3)
    torchrl.restore(other, checkpoint, rank=0)
    assert contents(other) == contents(rb)
    assert_same_samples(rb, other, count=20)


ODD_ITEMS: list[Any] = [
    *steps(0, 6),
    torch.arange(3),
    torch.ones(2, dtype=torch.bfloat16),
    torch.zeros(2, requires_grad=True),
    np.arange(4),
    np.array("text"),
    "text",
    1,
    2.5,
    True,
    None,
    {"a": np.zeros(2), "b": [torch.zeros(1), 3]},
    TensorDict({"x": torch.zeros(2), "words": "some", "any": {"k": [1]}}),
]


@pytest.mark.parametrize("capacity", [30, 40])
def test_items_are_known_after_a_restore(capacity: int) -> None:
    """As other items are not: the digests made while restoring are those of the items as they stand."""
    world = World(buffer(storage=ListStorage(30), plain=True, collate_fn=list), f"memory://again/odd-{capacity}")
    world.rb.extend(ODD_ITEMS)
    world.save()
    world.writer.close()
    share = resharding.plan(world.checkpoint, world_size=1, capacity=capacity).share(0)
    rb = buffer(storage=ListStorage(capacity), plain=True, collate_fn=list)
    torchrl.restore(rb, share)
    with world.arc.writer(session="second", resume=share) as w:
        assert appended(torchrl.save(rb, w, step=10, verify=True).result(60)) == 0
        rb._storage._storage[6][1] = 7
        rb._storage._storage[3]["next", "reward"][...] = 7
        rb._storage._storage[11] = "another text"
        assert appended(torchrl.save(rb, w, step=11, verify=True).result(60)) == 3


def test_a_writer_that_did_not_resume_gets_everything(world: World) -> None:
    world.writer.close()
    rb = buffer(50, seed=3)
    torchrl.restore(rb, world.checkpoint, rank=0)
    with world.arc.writer(0, 1, session="second") as w:
        assert appended(torchrl.save(rb, w, step=10).result(60)) == 30


def test_fields_that_cannot_be_saved_change_nothing(world: World) -> None:
    rb = buffer(storage=ListStorage(10), plain=True)
    rb.extend([torch.arange(3), object()])
    with pytest.raises(archive.ArchiveError, match="cannot be saved without pickle"):
        torchrl.save(rb, world.writer, step=5)
    assert world.save() == 0
    assert world.checkpoint.name == "step-2"


def test_next_observations_are_not_stored_twice() -> None:
    t = torch.arange(1001)
    obs = t.float()[:, None] + torch.rand(64, generator=torch.Generator().manual_seed(0))
    data = {"observation": obs[:-1], "next": {"done": torch.zeros(1000, 1, dtype=torch.bool)}}

    def uploaded(name: str, data: Any) -> int:
        world = World(buffer(2000), f"memory://again/next-{name}")
        world.rb.extend(TensorDict(data, [1000]))
        world.save()
        world.writer.close()
        return int(fsspec.filesystem("memory").du(f"/again/next-{name}/shards"))

    single = uploaded("single", data)
    assert uploaded("both", data | {"next": {**data["next"], "observation": obs[1:]}}) < 1.1 * single
