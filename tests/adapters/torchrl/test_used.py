"""TorchRL: into buffers that were in use, fields that come later, capacities of all sizes, storages made beforehand."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.adapters import torchrl
from archive.base.errors import FieldError, UsageError
from tests.support.torchrl_buffers import assert_same_samples, buffer, contents, rectangle, same, steps
from tests.support.worlds import save_world

import torch  # isort: skip
from tensordict import TensorDict  # isort: skip
from torchrl.data import (  # isort: skip
    LazyMemmapStorage, LazyTensorStorage, ListStorage, PrioritizedSampler, TensorDictMaxValueWriter,
    TensorDictReplayBuffer, TensorStorage,
)  # fmt: skip
from torchrl.data.replay_buffers.her import HERReplayBuffer  # isort: skip


def saved(*buffers: Any, **options: Any) -> archive.Checkpoint:
    return save_world(f"memory://used/{uuid.uuid4().hex}", buffers, torchrl.save, **options)


def _goals(lo: int, episode: int) -> TensorDict:
    data: TensorDict = steps(lo, 40, episode=episode)
    data["achieved_goal"] = data["observation"].clone()
    data["desired_goal"] = torch.full((40, 3), -1.0)
    data["next", "reward"] = data["next", "reward"].float()
    return data


def test_hindsight_goals_are_of_the_restored_episodes() -> None:
    def make(seed: int) -> Any:
        return HERReplayBuffer(
            lambda td: torch.zeros(td.shape[0], 1), strategy="final", her_ratio=1.0, storage=LazyTensorStorage(40),
            batch_size=30, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    rb, used = make(0), make(1)
    rb.extend(_goals(0, 10))
    used.extend(_goals(500, 4))
    used.sample()
    torchrl.restore(used, saved(rb), rank=0, existing="replace")
    batch = used.sample()
    assert (batch["desired_goal"] % 10 == 9).all()
    assert (batch["desired_goal"] // 10 == batch["observation"] // 10).all()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("episode", [7, 1000])
def test_a_field_that_comes_later(episode: int, value: float, verify: bool) -> None:
    """In an episode that is open, too; of zeros, too, which no digest tells."""

    def more(rb: Any, i: int) -> None:
        rb.extend(steps(10 + 5 * i, 5, episode=episode).set("adv", torch.full((5, 1), value)))

    rb, other = buffer(30), buffer(30, seed=1)
    rb.extend(steps(0, 10, episode=episode))
    arc = archive.open(f"memory://used/{uuid.uuid4().hex}", create=True)
    with arc.writer(0, 1, session="first") as w:
        torchrl.save(rb, w, step=1).result(60)
        more(rb, 0)
        torchrl.save(rb, w, step=2, verify=verify).result(60)
        more(rb, 1)
        checkpoint = torchrl.save(rb, w, step=3, verify=verify).result(60)
    torchrl.restore(other, checkpoint, rank=0)
    assert same(other[:], rb[:])
    assert_same_samples(rb, other, count=20, write=lambda b, i: more(b, i))


def test_what_the_best_writer_adds_later() -> None:
    def make(seed: int) -> Any:
        return buffer(10, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")), seed=seed)

    rb, other = make(0), make(1)
    rb.extend(steps(0, 5))
    arc = archive.open(f"memory://used/{uuid.uuid4().hex}", create=True)
    with arc.writer(0, 1, session="first") as w:
        torchrl.save(rb, w, step=1).result(60)
        rb.add(steps(77, 1)[0])
        checkpoint = torchrl.save(rb, w, step=2).result(60)
    torchrl.restore(other, checkpoint, rank=0)
    assert_same_samples(rb, other, write=lambda b, i: b.add(steps(50 + i, 1)[0]))


def test_steps_that_lack_a_field_get_zeros() -> None:
    """As TorchRL has it; for checkpoints whose older steps were saved before the field came."""
    arc = archive.open(f"memory://used/{uuid.uuid4().hex}", create=True)
    with arc.writer(0, 1, session="other") as w:
        w.add_episode({"x": np.arange(3.0)})
        w.add_episode({"x": np.arange(3.0), "adv": np.ones(3)})
        w.add_episode({"x": np.arange(3.0)})
        checkpoint = w.checkpoint(1).result(60)
    rb = buffer(20, plain=True)
    torchrl.restore(rb, checkpoint, rank=0)
    assert rb[:]["adv"].tolist() == [0.0] * 3 + [1.0] * 3 + [0.0] * 3
    with pytest.raises(FieldError, match="only the checkpoint has a field 'adv'"):
        torchrl.restore(buffer(storage=LazyMemmapStorage(20), plain=True), checkpoint, rank=0)


@pytest.mark.parametrize("capacity", [1, 60, 99])
def test_an_endless_trajectory_fills_a_smaller_buffer(capacity: int) -> None:
    rb, other = buffer(100), buffer(capacity)
    rb.extend(steps(0, 130, episode=1000))
    checkpoint = saved(rb)
    report = torchrl.restore(other, resharding.plan(checkpoint, capacity=torchrl.capacity(other, checkpoint)).share(0))
    assert contents(other) == [float(t) for t in range(130 - capacity, 130)]
    assert f"the plan leaves out {100 - capacity} steps of all ranks (capacity)" in str(report)


@pytest.mark.parametrize("sampler", [None, lambda: PrioritizedSampler(100, 0.7, 0.5)])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_rectangle_that_rounds_its_capacity_up(sampler: Callable[[], Any] | None) -> None:
    def make(seed: int) -> Any:
        return buffer(storage=LazyTensorStorage(100, ndim=2), sampler=None if sampler is None else sampler(), seed=seed)

    rb, other = make(0), make(1)
    for lo in range(0, 40, 4):
        rb.extend(rectangle(lo, 4, 3))
    assert len(rb) == 102
    rb.sample()
    checkpoint = saved(rb)
    assert torchrl.capacity({"replay": other}, checkpoint) == {"replay": 102}
    assert torchrl.capacity(other, checkpoint, num_envs=7) == 105
    torchrl.restore(other, resharding.plan(checkpoint, capacity=torchrl.capacity(other, checkpoint)).share(0))
    assert_same_samples(rb, other, write=lambda b, i: b.extend(rectangle(100 + 2 * i, 2, 3)))


def test_capacities_of_several_buffers() -> None:
    both = {"replay": buffer(50), "demo": buffer(20)}
    for rb in both.values():
        rb.extend(steps(0, 20, episode=1000))
    arc = archive.open(f"memory://used/{uuid.uuid4().hex}", create=True)
    with arc.writer(0, 1, session="first") as w:
        checkpoint = torchrl.save(both, w, step=1).result(60)
    others = {"replay": buffer(30), "demo": buffer(15)}
    room = torchrl.capacity(others, checkpoint)
    torchrl.restore(others, resharding.plan(checkpoint, capacity=room).share(0))
    assert {name: len(rb) for name, rb in others.items()} == {"replay": 20, "demo": 15}
    with pytest.raises(UsageError, match="capacity= names 'other'"):
        resharding.plan(checkpoint, capacity={"other": 3})


@pytest.mark.parametrize("written", [1, 3])
@pytest.mark.parametrize("capacity", [1, 10])
def test_one_step_and_one_place(capacity: int, written: int) -> None:
    def make(seed: int) -> Any:
        return buffer(capacity, sampler=PrioritizedSampler(capacity, 0.7, 0.5), batch_size=2, seed=seed)

    rb, other = make(0), make(1)
    for i in range(written):
        rb.extend(steps(i, 1))
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, write=lambda b, i: b.extend(steps(i, 1)))


@pytest.mark.parametrize("used", [False, True])
def test_a_storage_made_with_its_tensors(used: bool) -> None:
    def make() -> Any:
        return TensorDictReplayBuffer(
            storage=TensorStorage(steps(0, 10)), batch_size=4, generator=torch.Generator().manual_seed(3)
        )

    rb, other = make(), make()
    rb.empty()
    rb.extend(steps(50, 6))
    if used:
        other.extend(steps(90, 6))
    torchrl.restore(other, saved(rb), rank=0, existing="replace")
    assert_same_samples(rb, other, write=lambda b, i: b.extend(steps(100 + i, 3)))
    assert other[:]["index"].tolist() == list(range(10))


def test_buffers_without_fields_are_refused_in_words() -> None:
    for storage in (LazyTensorStorage(10), ListStorage(10)):
        rb = buffer(storage=storage, plain=True)
        rb.extend(TensorDict({}, [5]))
        with pytest.raises(FieldError, match="have no fields"):
            saved(rb)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_memory_that_another_process_made() -> None:
    def make() -> Any:
        storage = LazyTensorStorage(20, shared_init=True)
        return TensorDictReplayBuffer(storage=storage, batch_size=4, shared=True)

    rb, other = make(), make()
    child = multiprocessing.get_context("fork").Process(target=rb.extend, args=(steps(0, 12),))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    torchrl.restore(other, saved(rb), rank=0)
    assert contents(other) == contents(rb) == [float(t) for t in range(12)]
