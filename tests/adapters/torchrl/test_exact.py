"""TorchRL, nothing moved: the next 100 samples agree with and without the round trip, also after more writes."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import archive
import resharding
from archive.adapters import torchrl
from archive.base.errors import StateError
from tests.support.torchrl_buffers import assert_same_samples, buffer, contents, rectangle, same, steps

import torch  # isort: skip
from tensordict import NonTensorStack, TensorDict  # isort: skip
from torchrl.data import (  # isort: skip
    LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, ListStorage, PrioritizedSampler, RandomSampler,
    SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement, TensorDictMaxValueWriter,
)  # fmt: skip
from torchrl.data.replay_buffers.samplers import ConsumingSampler, PrioritizedSliceSampler  # isort: skip

CAPACITY = 50
Make = Callable[..., Any]
SLICES: dict[str, Any] = {"slice_len": 2, "strict_length": False}


def extend(rb: Any, i: int) -> None:
    rb.extend(steps(1000 + 13 * i, 5))


def saved(rb: Any, *, url: str = "memory://exact", **options: Any) -> archive.Checkpoint:
    arc = archive.open(f"{url}-{uuid.uuid4().hex}", create=True)
    with arc.writer(0, 1, session="first") as w:
        return torchrl.save(rb, w, step=1, **options).result(60)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "slices": lambda: SliceSampler(**SLICES),
    "cached slices": lambda: SliceSampler(cache_values=True, **SLICES),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(**SLICES),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "prioritized, within the buffer": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5, max_priority_within_buffer=True),
    "prioritized, float64": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5, dtype=torch.double),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, **SLICES),
}


@pytest.mark.parametrize("written", [30, 50, 73])
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name: str, written: int) -> None:
    rb = buffer(CAPACITY, sampler=SAMPLERS[name]())
    rb.extend(steps(0, written))
    for _ in range(2):
        rb.sample()
    if "prioritized" in name:
        rb.update_priority(torch.arange(20), torch.rand(20, generator=torch.Generator().manual_seed(3)) * 5)
    checkpoint = saved(rb)
    other = buffer(CAPACITY, sampler=SAMPLERS[name](), seed=7, batch_size=6)
    report = torchrl.restore(other, checkpoint, rank=0)
    assert report.steps == min(written, CAPACITY)
    assert other._writer._cursor == rb._writer._cursor
    assert other.write_count == rb.write_count
    assert other.batch_size == rb.batch_size
    assert_same_samples(rb, other, count=100 if written == 73 else 30, write=extend)


def test_the_writers_cursor_keeps_slices_from_crossing_the_write_head() -> None:
    rb = buffer(10, sampler=SliceSampler(**SLICES), batch_size=20)
    rb.extend(steps(0, 14, episode=100))
    other = buffer(10, sampler=SliceSampler(**SLICES), batch_size=20, seed=1)
    torchrl.restore(other, saved(rb), rank=0)
    for _ in range(20):
        pairs = other.sample()["action"].reshape(-1, 2)
        assert bool((pairs[:, 1] - pairs[:, 0] == 3).all())


@pytest.mark.parametrize("written", [4, 8])
def test_columns_of_a_rectangle(written: int) -> None:
    def make(seed: int) -> Any:
        return buffer(storage=LazyTensorStorage(18, ndim=2), sampler=SliceSampler(**SLICES), seed=seed)

    rb = make(0)
    for lo in range(0, written, 2):
        rb.extend(rectangle(lo, 2, 3))
    checkpoint = saved(rb)
    assert sorted(set(checkpoint.live["env_id"].to_pylist())) == [0, 1, 2]
    other = make(5)
    torchrl.restore(other, checkpoint, rank=0)
    assert same(rb._storage._storage[: min(6, written)], other._storage._storage[: min(6, written)])
    assert_same_samples(rb, other, write=lambda b, i: b.extend(rectangle(100 + i, 2, 3)))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # torchrl's ravel_multi_index
def test_priorities_of_a_rectangle() -> None:
    def make(seed: int) -> Any:
        return buffer(storage=LazyTensorStorage(18, ndim=2), sampler=PrioritizedSampler(18, 0.7, 0.5), seed=seed)

    rb = make(0)
    rb.extend(rectangle(0, 4, 3))
    batch = rb.sample()
    batch["td_error"] = torch.rand(batch.shape[0])
    rb.update_tensordict_priority(batch)
    other = make(5)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, write=lambda b, i: b.extend(rectangle(100 + i, 2, 3)))


def test_memory_mapped(tmp_path: Path) -> None:
    rb = buffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "a"))
    rb.extend(steps(0, 60))
    other = buffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "b"), seed=3)
    torchrl.restore(other, saved(rb), rank=0)
    assert contents(rb) == contents(other)
    assert_same_samples(rb, other, write=extend)


def _ragged(rb: Any, i: int) -> None:
    for k in range(i, i + 3):
        rb.add(TensorDict({"tokens": torch.arange(k % 4 + 1), "text": f"item {k}", "score": torch.tensor(float(k))}))


def test_a_lazy_stack_of_ragged_items() -> None:
    rb = buffer(storage=LazyStackStorage(10), plain=True, batch_size=4)
    for i in range(0, 15, 3):
        _ragged(rb, i)
    other = buffer(storage=LazyStackStorage(10), plain=True, batch_size=4, seed=9)
    torchrl.restore(other, saved(rb), rank=0)
    assert [i["text"] for i in other._storage._storage] == [i["text"] for i in rb._storage._storage]
    assert_same_samples(rb, other, count=30, write=_ragged)


ITEMS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda k: torch.arange(k, k + 3),
    "tensors of any shape": lambda k: torch.zeros(k % 3 + 1, k % 2 + 2),
    "numbers": lambda k: k,
    "texts": lambda k: f"text {k}",
    "trees": lambda k: {"a": torch.tensor([k]), "b": (torch.tensor(k / 2), f"{k}", {"deep": torch.ones(2, k % 2)})},
    "trajectories": lambda k: TensorDict({"obs": torch.ones(k % 3 + 1, 2)}, batch_size=[k % 3 + 1]),
    "mixed": lambda k: k if k % 2 else torch.tensor([k, k]),
}


@pytest.mark.parametrize("name", ITEMS)
def test_lists(name: str) -> None:
    """TorchRL itself can't dump a ListStorage."""

    def make(seed: int) -> Any:
        return buffer(storage=ListStorage(10), plain=True, seed=seed, batch_size=3, collate_fn=lambda items: items)

    rb = make(0)
    for k in range(14):
        rb.extend([ITEMS[name](k)])
    other = make(9)
    torchrl.restore(other, saved(rb), rank=0)
    assert same(rb._storage._storage, other._storage._storage)
    assert_same_samples(rb, other, write=lambda b, i: b.extend([ITEMS[name](100 + i)]))


def _tree(lo: int, count: int) -> Any:
    t = torch.arange(lo, lo + count)
    return {"a": t, "b": (t.float()[:, None], {"c": t.to(torch.bfloat16)})}


@pytest.mark.parametrize("make_data", [lambda lo, n: torch.arange(lo, lo + n), _tree], ids=["tensor", "tree"])
def test_storages_without_tensordicts(make_data: Any) -> None:
    rb = buffer(20, plain=True)
    rb.extend(make_data(0, 26))
    other = buffer(20, plain=True, seed=4)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, write=lambda b, i: b.extend(make_data(100 + i, 3)))


def test_text_beside_tensors() -> None:
    def more(rb: Any, i: int) -> None:
        rb.extend(
            TensorDict({"x": torch.arange(i, i + 3), "text": NonTensorStack(*[f"{i}-{k}" for k in range(3)])}, [3])
        )

    rb = buffer(10)
    for i in range(4):
        more(rb, i)
    other = buffer(10, seed=4)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, write=more)


def test_the_heap_of_the_best() -> None:
    def make(seed: int) -> Any:
        return buffer(10, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")), seed=seed)

    def more(rb: Any, i: int) -> None:
        data = steps(0, 6)
        data["next", "reward"] = torch.rand(6, 1, generator=torch.Generator().manual_seed(i), dtype=torch.double)
        rb.extend(data)

    rb = make(0)
    for i in range(5):
        more(rb, i)
    other = make(2)
    torchrl.restore(other, saved(rb), rank=0)
    assert other._writer._current_top_values == rb._writer._current_top_values
    assert_same_samples(rb, other, write=lambda b, i: more(b, 100 + i))


def test_items_that_are_used_up() -> None:
    rb = buffer(20, plain=True, sampler=ConsumingSampler(2), batch_size=6)
    rb.extend(steps(0, 20))
    rb.sample(), rb.sample()
    other = buffer(20, plain=True, sampler=ConsumingSampler(2), batch_size=6, seed=3)
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, count=4)
    rb.extend(steps(50, 8)), other.extend(steps(50, 8))
    assert_same_samples(rb, other, count=2)


def test_prefetched_batches_come_first() -> None:
    rb = buffer(CAPACITY, prefetch=3)
    rb.extend(steps(0, 30))
    rb.sample()
    checkpoint = saved(rb)
    other = buffer(CAPACITY, prefetch=3, seed=4)
    other.extend(steps(900, 10))
    other.sample()
    torchrl.restore(other, checkpoint, rank=0, existing="replace")
    assert len(other._prefetch_queue) == len(rb._prefetch_queue) == 3
    for _ in range(20):
        assert_same_samples(rb, other, count=1)
        for future in (*rb._prefetch_queue, *other._prefetch_queue):
            future.result()  # its threads draw in any order where several wait
    none = buffer(CAPACITY, seed=4)
    assert torchrl.restore(none, checkpoint, rank=0).counts["prefetched_batches_dropped"] == 3


def test_transforms_with_state() -> None:
    from torchrl.envs.transforms import ObservationNorm

    def make(seed: int, scale: float) -> Any:
        norm = ObservationNorm(
            loc=torch.ones(3), scale=torch.full((3,), scale), in_keys=["observation"], standard_normal=True
        )
        return buffer(CAPACITY, seed=seed, transform=norm)

    rb, other = make(0, 4.0), make(1, 9.0)
    rb.extend(steps(0, 30))
    torchrl.restore(other, saved(rb), rank=0)
    assert_same_samples(rb, other, write=extend)
    norm = ObservationNorm(loc=torch.ones(2), scale=torch.ones(2), in_keys=["observation"])
    unlike = buffer(CAPACITY, transform=norm)
    with pytest.raises(StateError, match="made alike"):
        torchrl.restore(unlike, saved(rb), rank=0)
    assert len(unlike) == 0


def test_several_buffers_in_one_checkpoint() -> None:
    both = {"replay": buffer(CAPACITY), "demo": buffer(20, sampler=SamplerWithoutReplacement(), seed=1)}
    both["replay"].extend(steps(0, 70))
    both["demo"].extend(steps(500, 15))
    both["demo"].sample()
    arc = archive.open("memory://several", create=True)
    with arc.writer(0, 1, session="first") as w:
        checkpoint = torchrl.save(both, w, step=1).result(60)
    assert sorted(checkpoint.buffers) == ["demo", "replay"]
    others = {"replay": buffer(CAPACITY, seed=5), "demo": buffer(20, sampler=SamplerWithoutReplacement(), seed=6)}
    reports = torchrl.restore(others, resharding.plan(checkpoint, world_size=1).share(0))
    assert {name: r.steps for name, r in reports.items()} == {"replay": 50, "demo": 15}
    for name, rb in both.items():
        assert_same_samples(rb, others[name], write=extend)


def test_an_empty_buffer() -> None:
    other = buffer(CAPACITY, seed=5)
    assert torchrl.restore(other, saved(buffer(CAPACITY)), rank=0).steps == 0
    extend(other, 0)
    assert len(other) == 5


def test_one_that_was_emptied_and_filled_again() -> None:
    rb = buffer(CAPACITY)
    rb.extend(steps(0, 70))
    rb.empty()
    rb.extend(steps(200, 20))
    other = buffer(CAPACITY, seed=5)
    torchrl.restore(other, saved(rb), rank=0)
    assert contents(other) == [200.0 + i for i in range(20)]
    assert_same_samples(rb, other, write=extend)
