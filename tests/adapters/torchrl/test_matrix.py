"""TorchRL: storages x samplers x writers x transforms,
saved and restored in the middle of use beside a twin that was not.

Both go on writing, sampling with the same seeds and updating: all results are equal. The default run takes one of each
kind with each of another; the marker soak runs them all.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest

import archive
from archive.adapters import torchrl
from tests.support.torchrl_buffers import SLICES, buffer, rectangle, same, steps

import torch  # isort: skip
from torchrl.data import (  # isort: skip
    LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, ListStorage, PrioritizedSampler, RandomSampler,
    SamplerWithoutReplacement, SliceSampler, SliceSamplerWithoutReplacement, TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter, TensorStorage,
)  # fmt: skip
from torchrl.data.replay_buffers.samplers import (  # isort: skip
    ConsumingSampler, PrioritizedSliceSampler, StalenessAwareSampler,
)  # fmt: skip
from torchrl.envs.transforms import Compose, ObservationNorm, RewardScaling  # isort: skip

CAPACITY, ENVS = 30, 3
Make = Callable[[], Any]
STORAGES: dict[str, Make] = {
    "lazy": lambda: LazyTensorStorage(CAPACITY),
    "memmap": lambda: LazyMemmapStorage(CAPACITY),
    "made": lambda: TensorStorage(steps(0, CAPACITY)),
    "rectangle": lambda: LazyTensorStorage(CAPACITY, ndim=2),
    "uneven rectangle": lambda: LazyTensorStorage(CAPACITY + 1, ndim=2),
    "memmap rectangle": lambda: LazyMemmapStorage(CAPACITY, ndim=2),
    "list": lambda: ListStorage(CAPACITY),
    "stack": lambda: LazyStackStorage(CAPACITY),
}
SAMPLERS: dict[str, Make] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(**SLICES),
    "cached slices": lambda: SliceSampler(cache_values=True, **SLICES),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(**SLICES),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "prioritized within": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5, max_priority_within_buffer=True),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, **SLICES),
    "consuming": lambda: ConsumingSampler(3),
    "stale": lambda: StalenessAwareSampler(max_staleness=3),
}
WRITERS: dict[str, Make] = {
    "round": TensorDictRoundRobinWriter,
    "generations": lambda: TensorDictRoundRobinWriter(track_generations=True),
    "best": lambda: TensorDictMaxValueWriter(rank_key=("next", "reward")),
}
TRANSFORMS: dict[str, Make] = {
    "none": lambda: None,
    "norm": lambda: Compose(
        ObservationNorm(loc=torch.ones(3), scale=torch.full((3,), 2.0), in_keys=["observation"], standard_normal=True),
        RewardScaling(loc=1.0, scale=0.5, in_keys=[("next", "reward")]),
    ),
}
FILLED = {"partly": 12, "wrapped": 45}


def possible(storage: str, sampler: str, writer: str, transform: str, filled: str) -> bool:
    """What TorchRL itself allows."""
    listed, flat = storage in ("list", "stack"), "rectangle" not in storage
    if writer == "best" and (not flat or sampler in ("consuming", "stale")):
        return False
    if listed:
        return sampler in ("random", "without replacement", "prioritized") and transform == "none"
    return sampler not in ("consuming", "stale") or flat


EVERY = [c for c in itertools.product(STORAGES, SAMPLERS, WRITERS, TRANSFORMS, FILLED) if possible(*c)]


def pairs(every: list[Any]) -> list[Any]:
    """Some of them, in which most kinds of storage, sampler, writer and so on meet most of the others."""
    chosen: list[Any] = []
    met: set[Any] = set()
    order = random.Random(0).sample(every, len(every))
    for case in order:
        new = set(itertools.combinations(enumerate(case), 2)) - met
        if len(new) >= 5:
            chosen.append(case)
            met |= new
    return chosen


def made(case: Any, seed: int) -> Any:
    storage, sampler, writer, transform, _ = case
    rb = buffer(
        storage=STORAGES[storage](), sampler=SAMPLERS[sampler](), writer=WRITERS[writer](), seed=seed, batch_size=6,
        transform=TRANSFORMS[transform](), **({"plain": True, "collate_fn": list} if storage == "list" else {}),
    )  # fmt: skip
    if storage == "made":
        rb.empty()
    return rb


def write(rb: Any, case: Any, lo: int, count: int) -> None:
    data = rectangle(lo, max(2, count // ENVS), ENVS) if "rectangle" in case[0] else steps(lo, count)
    if case[1] == "stale":
        data["policy_version"] = torch.full(data.batch_size, float(rb._sampler.consumer_version))
    rb.extend(data)


def use(rb: Any, case: Any, number: int) -> Any:
    """Write, sample and update, by a number that says with what; what was sampled."""
    if number % 3 == 2:
        write(rb, case, 1000 + 7 * number, 3)
    if case[1] == "consuming" and number % 3 == 1:
        write(rb, case, 5000 + 7 * number, 6)
    if case[1] == "stale" and number % 4 == 3:
        rb._sampler.consumer_version += 1
    torch.manual_seed(number)
    batch = rb.sample()
    if "prioritized" in case[1] and not isinstance(batch, list) and batch.get("index", None) is not None:
        batch["td_error"] = torch.rand(batch.batch_size, generator=torch.Generator().manual_seed(number)) * 3
        if case[0] == "stack":
            rb.update_priority(batch["index"], batch["td_error"])
        else:
            rb.update_tensordict_priority(batch)
    return batch


def check(case: Any) -> None:
    twin, rb, other = made(case, 0), made(case, 0), made(case, 5)
    for one in (twin, rb):
        for lo in range(0, FILLED[case[-1]], 3):
            write(one, case, lo, 3)
        for number in range(3):
            use(one, case, number)
    if len(str(case)) % 2:  # into one that was in use, too
        write(other, case, 9000, 6)
        use(other, case, 1)
    arc = archive.open(f"memory://matrix/{uuid.uuid4().hex}", create=True)
    with arc.writer(0, 1, session="first") as w:
        torchrl.save(rb, w, step=1).result(60)
        for one in (twin, rb):
            use(one, case, 5)
        checkpoint = torchrl.save(rb, w, step=2).result(60)
    torchrl.restore(other, checkpoint, rank=0, existing="replace")
    for number in range(10, 22):
        assert same(use(twin, case, number), use(other, case, number)), f"sample {number} differs"
    assert other.write_count == twin.write_count
    assert same(_held(other), _held(twin))


def _held(rb: Any) -> Any:
    held = rb._storage._storage
    return list(held) if isinstance(held, list) else held[: rb._storage._len_along_dim0]


def _name(case: Any) -> str:
    return ", ".join(case)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("case", pairs(EVERY), ids=_name)
def test_a_twin(case: Any) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("case", EVERY, ids=_name)
def test_all_twins(case: Any) -> None:
    check(case)
