"""TorchRL's other buffers, writers and samplers; steps that another system saved; saving while others write."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.adapters import torchrl
from archive.adapters.torchrl import cells
from archive.base.errors import FieldError, MissingPackageError, UsageError
from tests.support.torchrl_buffers import assert_same_samples, buffer, contents, steps
from tests.support.worlds import save_world, shares

import torch  # isort: skip
from tensordict import TensorDict, tensorclass  # isort: skip
from torchrl.data import (  # isort: skip
    ImmutableDatasetWriter, LazyStackStorage, LazyTensorStorage, ListStorage, PrioritizedReplayBuffer, ReplayBuffer,
    RoundRobinWriter, TensorDictPrioritizedReplayBuffer, TensorDictRoundRobinWriter,
)  # fmt: skip
from torchrl.data.replay_buffers.samplers import ConsumingSampler, RandomSampler, StalenessAwareSampler  # isort: skip
from torchrl.data.replay_buffers.writers import Writer  # isort: skip


def saved(*buffers: Any, **options: Any) -> archive.Checkpoint:
    return save_world(f"memory://kinds/{uuid.uuid4().hex}", buffers, torchrl.save, **options)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_prioritized_buffers(kind: Any, sync: bool) -> None:
    def make(seed: int) -> Any:
        rb = kind(alpha=0.7, beta=0.5, storage=LazyTensorStorage(50), batch_size=8, sync=sync)
        rb.set_rng(torch.Generator().manual_seed(seed))
        return rb

    rb = make(0)
    rb.extend(steps(0, 60))
    rb.sample()
    rb.update_priority(torch.arange(30), torch.rand(30, generator=torch.Generator().manual_seed(3)))
    other = make(4)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, write=lambda b, i: b.extend(steps(1000 + i, 3)))


@pytest.mark.parametrize("kind", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_generations_of_slots(kind: Any) -> None:
    def make(seed: int) -> Any:
        return buffer(20, writer=kind(track_generations=True), seed=seed)

    rb = make(0)
    rb.extend(steps(0, 30))
    other = make(5)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, count=20, write=lambda b, i: b.extend(steps(1000 + i, 3)))


class Everything(Writer):
    """A writer of a user's own, which writes every second slot only."""

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def add(self, data: Any) -> Any:
        self.place = (self.place + 2) % self._storage.max_size
        self._storage.set(self.place, data)
        return self.place

    def extend(self, data: Any) -> Any:
        return torch.tensor([self.add(one) for one in data])

    def _empty(self, empty_write_count: bool = True) -> None:
        self.place = 0

    def dumps(self, path: Any) -> None: ...

    def loads(self, path: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


class Silent(Everything):
    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError


def test_a_writer_of_ones_own() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(10), writer=Everything(), batch_size=4)
    rb.extend(steps(0, 3))
    other = ReplayBuffer(storage=LazyTensorStorage(10), writer=Everything(), batch_size=4)
    checkpoint = saved(rb)
    torchrl.restore(other, checkpoint, rank=0)
    assert other._writer.place == 6
    with pytest.raises(UsageError, match="the writer Silent has no state_dict"):
        saved(ReplayBuffer(storage=LazyTensorStorage(10), writer=Silent(), batch_size=4))


def test_a_dataset_that_does_not_change() -> None:
    rb = buffer(20, writer=ImmutableDatasetWriter())
    rb._storage.set(torch.arange(20), steps(0, 20))
    other = buffer(20, writer=ImmutableDatasetWriter(), seed=4)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, count=20)
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        other.extend(steps(0, 1))


def test_use_counts_survive_a_move() -> None:
    rb = buffer(20, plain=True, sampler=ConsumingSampler(1), batch_size=6)
    rb.extend(steps(0, 20))
    used = (rb.sample()["next", "reward"] * 8).reshape(-1).tolist()
    other = buffer(30, plain=True, sampler=ConsumingSampler(1), batch_size=14, seed=4)
    torchrl.restore(other, resharding.plan(saved(rb), world_size=1, capacity=30).share(0))
    rest = (other.sample()["next", "reward"] * 8).reshape(-1).tolist()
    assert sorted(used + rest) == [float(i) for i in range(20)]


def test_the_consumers_version_goes_on() -> None:
    def make() -> Any:
        return buffer(20, plain=True, sampler=StalenessAwareSampler(max_staleness=3))

    sources = [make(), make()]
    for version, rb in enumerate(sources):
        rb.extend(steps(100 * version, 5))
        rb._sampler.consumer_version = 7 + version
    checkpoint = saved(*sources)
    same, moved = make(), make()
    torchrl.restore(same, checkpoint, rank=0)
    torchrl.restore(moved, shares(checkpoint, 1)[0])
    assert (same._sampler.consumer_version, moved._sampler.consumer_version) == (7, 8)


def test_a_sampler_that_the_checkpoint_knows_nothing_of() -> None:
    rb = buffer(50)
    rb.extend(steps(0, 20))
    checkpoint = saved(rb)
    new = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(50), batch_size=8)
    report = torchrl.restore(new, checkpoint, rank=0)
    assert "no priorities" in str(report)
    assert new.sample()["next", "reward"].shape == (8, 1)
    plain = buffer(50)
    assert "has no use for them" in str(torchrl.restore(plain, saved(new), rank=0))


def foreign() -> archive.Checkpoint:
    """A checkpoint that this adapter knows nothing of."""
    arc = archive.open(f"memory://kinds/{uuid.uuid4().hex}", create=True)
    with arc.writer(0, 1, session="other") as w:
        for k in range(4):
            w.add_episode(
                {"observation": np.full((5, 2), k, np.float32), "next": {"done": np.arange(5) == (4 if k else 9)}}
            )
        return w.checkpoint(1, columns={"priority": np.arange(20) + 1.0}).result(60)


def test_steps_that_another_system_saved() -> None:
    checkpoint = foreign()
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=0.5, storage=LazyTensorStorage(50), batch_size=8)
    report = torchrl.restore(rb, checkpoint, rank=0)
    assert (report.steps, report.episodes, report.counts["closed"]) == (20, 4, 1)
    assert rb[:]["observation"][:, 0].tolist() == [float(k) for k in range(4) for _ in range(5)]
    assert rb[:]["next", "done"].tolist() == [i % 5 == 4 for i in range(20)]
    assert rb._sampler._sum_tree[torch.arange(20)].tolist() == [i + 1.0 for i in range(20)]
    listed = ReplayBuffer(storage=LazyStackStorage(50), batch_size=8)
    torchrl.restore(listed, checkpoint, rank=0)
    assert listed.sample()["observation"].shape == (8, 2)


def test_from_a_list_to_tensors_and_back() -> None:
    rb = buffer(storage=LazyStackStorage(50), plain=True)
    rb.extend(steps(0, 20))
    tensors = buffer(50)
    tensors._writer = RoundRobinWriter()
    tensors._writer.register_storage(tensors._storage)
    torchrl.restore(tensors, saved(rb), rank=0)
    assert contents(tensors) == [float(i) for i in range(20)]
    ragged = buffer(storage=ListStorage(50), plain=True)
    ragged.extend([torch.arange(k + 1) for k in range(4)])
    with pytest.raises(FieldError, match="differs in length"):
        torchrl.restore(buffer(50, plain=True), saved(ragged), rank=0)


def test_items_of_ones_own_class() -> None:
    class Pair:
        a: torch.Tensor
        b: torch.Tensor

    kind: Any = tensorclass(Pair)

    def more(rb: Any, i: int) -> None:
        rb.extend(kind(a=torch.arange(i, i + 4), b=torch.ones(4, 2) * i, batch_size=[4]))

    rb = buffer(20, plain=True)
    more(rb, 0), more(rb, 4)
    checkpoint = saved(rb)
    other = buffer(20, plain=True, seed=4)
    with pytest.raises(UsageError, match="class Pair"):
        torchrl.restore(other, checkpoint, rank=0)
    more(other, 50)
    torchrl.restore(other, checkpoint, rank=0, existing="replace")
    for i in range(10):
        assert other.sample().a.tolist() == rb.sample().a.tolist()
        more(rb, i), more(other, i)
    listed = buffer(storage=ListStorage(5), plain=True)
    listed.extend([kind(a=torch.ones(1), b=torch.ones(1), batch_size=[])])
    with pytest.raises(UsageError, match="class Pair"):
        torchrl.restore(buffer(storage=ListStorage(5), plain=True), saved(listed), rank=0)
    listed.extend([kind])
    with pytest.raises(FieldError, match="cannot be saved without pickle"):
        saved(listed)


def test_a_single_field_named_data() -> None:
    rb = buffer(20, plain=True)
    rb.extend(TensorDict({"data": torch.arange(8)}, [8]))
    other = buffer(20, plain=True, seed=4)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, count=5)


def test_given_keys() -> None:
    def lengths(**keys: Any) -> list[int]:
        rb = buffer(50)
        data = steps(0, 20)
        data["task"] = torch.arange(20) // 4
        data["stop"] = (torch.arange(20) % 10 == 9)[:, None]
        rb.extend(data)
        return [int(ep.length) for ep in saved(rb, **keys).episodes]

    assert lengths() == [7, 7, 6]
    assert lengths(end_key="stop") == [10, 10]
    assert lengths(traj_key="task", end_key="stop") == [4, 4, 2, 2, 4, 4]
    with pytest.raises(UsageError, match="no field 'next/nothing'"):
        lengths(traj_key=("next", "nothing"))


def test_the_collectors_ids_come_first() -> None:
    rb = buffer(50)
    data = steps(0, 20, ids=True)
    data["collector", "traj_ids"] = torch.arange(20) // 5
    rb.extend(data.exclude(("next", "done")))
    assert [ep.length for ep in saved(rb).episodes] == [5, 5, 5, 5]


def test_steps_on_their_own_are_dealt_out_evenly() -> None:
    rb = buffer(50, plain=True)
    rb.extend(torch.arange(50))
    parts = []
    for share in shares(saved(rb), 3):
        other = buffer(50, plain=True)
        torchrl.restore(other, share)
        parts.append(other[:].tolist())
    assert [len(p) for p in parts] == [16, 17, 17]
    assert [v for p in parts for v in p] == list(range(50))


def test_saving_while_a_thread_writes() -> None:
    """Each checkpoint is of one moment: items and counters agree."""
    rb = buffer(40, plain=True, sampler=RandomSampler())
    rb.extend(torch.arange(10))
    stop = threading.Event()

    def write() -> None:
        number = 10
        while not stop.is_set():
            rb.extend(torch.arange(number, number + 3))
            number += 3

    thread = threading.Thread(target=write)
    arc = archive.open("memory://kinds/threads", create=True)
    with arc.writer(0, 1, session="s") as w:
        thread.start()
        checkpoints = [torchrl.save(rb, w, step=i).result(60) for i in range(8)]
        stop.set()
        thread.join()
    for checkpoint in checkpoints:
        other = buffer(40, plain=True)
        torchrl.restore(other, checkpoint, rank=0)
        count = other.write_count
        assert sorted(other[:].tolist()) == list(range(max(0, count - 40), count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.complex64])
def test_a_changed_bit_changes_the_digest(dtype: Any) -> None:
    rb = buffer(64, plain=True)
    rb.extend((torch.rand(64, 9, generator=torch.Generator().manual_seed(1)) > 0.5).to(dtype))
    held = cells.TensorCells(rb._storage)
    before = held.hashes()
    assert len(np.unique(before)) == len(np.unique(rb[:].to(torch.complex64).numpy(), axis=0))
    for row, column in ((0, 0), (31, 8), (63, 4)):
        rb._storage._storage[row, column] = ~rb._storage._storage[row, column] if dtype == torch.bool else 7
        after = held.hashes()
        assert np.flatnonzero(before != after).tolist() == [row]
        assert (held.hashes(np.array([row, 5])) == after[[row, 5]]).all()
        before = after


def test_options_of_a_checkpoint() -> None:
    rb = buffer(20)
    rb.extend(steps(0, 10))
    arc = archive.open("memory://kinds/options", create=True)
    with arc.writer(0, 1, session="s") as w:
        first = torchrl.save(rb, w, step=1, name="one", progress={"samples": 4}, wait=True)
        assert first.done()
        second = torchrl.save(rb, w, step=2, save_replay=False).result(60)
        assert not second.replay_saved
        with pytest.raises(UsageError, match="columns="):
            torchrl.save(rb, w, step=3, columns={})
    assert arc.checkpoints["one"].progress == {"samples": 4}


def test_a_buffer_of_an_earlier_release_is_refused_by_what_it_lacks() -> None:
    class Earlier(ReplayBuffer):
        @property
        def synchronize(self) -> Any:
            raise AttributeError

    rb = Earlier(storage=LazyTensorStorage(10))
    rb.extend(torch.arange(3))
    with pytest.raises(MissingPackageError, match=r"Earlier of torchrl .* has no synchronize: .*torchrl>=0\.14"):
        saved(rb)
