"""TorchRL, other ranks and capacities: what the columns say goes with each step; ends, ids and cursors fit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.adapters import torchrl
from archive.base.errors import CapacityError, FieldError, NotFoundError, UsageError
from tests.support.backends import make_backend
from tests.support.torchrl_buffers import assert_same_samples, buffer, contents, rectangle, same, steps
from tests.support.worlds import STORES, WORLDS, save_world, shares

import torch  # isort: skip
from torchrl.data import (  # isort: skip
    LazyTensorStorage, ListStorage, PrioritizedSampler, SamplerWithoutReplacement, SliceSampler,
    SliceSamplerWithoutReplacement, TensorDictMaxValueWriter,
)  # fmt: skip

SLICES: dict[str, Any] = {"slice_len": 2, "strict_length": False}


def ranks(count: int, written: int = 60, *, ids: bool = False, **made: Any) -> list[Any]:
    """Buffers of `count` ranks; steps of rank r are those from 1000 r on."""
    out = []
    for rank in range(count):
        rb = buffer(50, seed=rank, **{k: v(rank) if callable(v) else v for k, v in made.items()})
        rb.extend(steps(1001 * rank, written, ids=ids))
        out.append(rb)
    return out


def restored(checkpoint: archive.Checkpoint, count: int, capacity: int = 200, **options: Any) -> list[tuple[Any, Any]]:
    out = []
    for share in shares(checkpoint, count, **options):
        rb = buffer(capacity, seed=100, sampler=SliceSampler(**SLICES))
        out.append((rb, torchrl.restore(rb, share)))
    return out


def pairs_are_steps(rb: Any, count: int = 30) -> bool:
    """No slice crosses from one trajectory into another."""
    rb._sampler.strict_length = True
    found = torch.cat([rb.sample()["action"].reshape(-1) for _ in range(count)])
    return bool((found[1::2] - found[::2] == 3).all())


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("world", WORLDS)
def test_worlds_on_every_store(
    world: tuple[int, int], kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source, target = world
    backend = make_backend(request, kind, tmp_path)
    sources = ranks(source)
    checkpoint = save_world(backend.url, sources, torchrl.save, storage_options=backend.storage_options)
    out = restored(checkpoint, target)
    every = sorted(v for rb, _ in out for v in contents(rb))
    assert every == sorted(v for rb in sources for v in contents(rb))
    again = [buffer(50, seed=9) for _ in sources]
    for rank, rb in enumerate(again):
        torchrl.restore(rb, checkpoint, rank=rank)
        assert contents(rb) == contents(sources[rank])


def test_trajectories_end_where_they_do_not_go_on() -> None:
    checkpoint = save_world("memory://moving/ends", ranks(4, 52), torchrl.save)
    for rb, report in restored(checkpoint, 3):
        assert pairs_are_steps(rb)
        held = rb._storage._storage[: len(rb)]
        ends = held["next", "done"].reshape(-1).nonzero().reshape(-1)
        assert int(ends[-1]) == len(rb) - 1
        assert int(held["next", "truncated"].sum()) == report.counts["closed"] > 0


def test_the_write_cursor_is_behind_the_newest_step() -> None:
    checkpoint = save_world("memory://moving/cursor", ranks(2, 60), torchrl.save)
    ((rb, _),) = restored(checkpoint, 1, capacity=120)
    assert (len(rb), rb._writer._cursor, rb._storage._last_cursor_index) == (100, 100, 99)
    rb.extend(steps(5000, 30))
    assert (len(rb), rb._writer._cursor) == (120, 10)
    assert contents(rb)[:10] == [5020.0 + i for i in range(10)]


def test_ids_of_trajectories_are_those_of_the_target() -> None:
    checkpoint = save_world("memory://moving/ids", ranks(3, 49, ids=True), torchrl.save)
    ((rb, _),) = restored(checkpoint, 1)
    ids = rb._storage._storage[: len(rb)]["collector", "traj_ids"]
    runs = 1 + int((ids[1:] != ids[:-1]).sum())
    assert runs == len(ids.unique())
    assert pairs_are_steps(rb)


@pytest.mark.parametrize("capacity", [30, 50, 80])
def test_other_capacities(capacity: int) -> None:
    checkpoint = save_world(f"memory://moving/capacity-{capacity}", ranks(1, 65), torchrl.save)
    rb = buffer(capacity, sampler=SliceSampler(**SLICES))
    report = torchrl.restore(rb, resharding.plan(checkpoint, world_size=1, capacity=capacity).share(0))
    assert report.steps == len(rb) <= capacity
    assert sorted(contents(rb)) == [float(65 - len(rb) + i) for i in range(len(rb))]
    index = rb._storage._storage["index"][: len(rb)]
    assert index.tolist() == list(range(len(rb)))


def test_too_little_room_is_said_before_anything_is_touched() -> None:
    checkpoint = save_world("memory://moving/room", ranks(2), torchrl.save)
    rb = buffer(60)
    rb.extend(steps(9000, 3))
    with pytest.raises(CapacityError, match="plan with capacity=60"):
        torchrl.restore(rb, shares(checkpoint, 1)[0], existing="replace")
    assert contents(rb) == [9000.0, 9001.0, 9002.0]


def test_priorities_go_with_their_steps() -> None:
    sources = ranks(4, 60, sampler=lambda r: PrioritizedSampler(50, 0.7, 0.5))
    known: dict[float, float] = {}
    for rank, rb in enumerate(sources):
        rb.update_priority(torch.arange(50), torch.rand(50, generator=torch.Generator().manual_seed(rank)) * (rank + 1))
        known |= dict(zip(contents(rb), rb._sampler._sum_tree[torch.arange(50)].tolist(), strict=True))
    highest = max(float(rb._sampler._max_priority[0]) for rb in sources)
    checkpoint = save_world("memory://moving/priorities", sources, torchrl.save)
    assert checkpoint.column("priority", 0).dtype == np.float64
    for share in shares(checkpoint, 3):
        rb = buffer(150, sampler=PrioritizedSampler(150, 0.1, 0.1), seed=5)
        torchrl.restore(rb, share)
        leaves = rb._sampler._sum_tree[torch.arange(len(rb))].tolist()
        assert dict(zip(contents(rb), leaves, strict=True)) == {k: known[k] for k in contents(rb)}
        assert rb._sampler._min_tree.query(0, 150) == min(leaves)
        assert float(rb._sampler._max_priority[0]) == highest
        assert (rb._sampler._alpha, rb._sampler._beta) == (0.7, 0.5)
        rb.sample()


def test_used_items_stay_used() -> None:
    sources = ranks(2, 40, sampler=lambda r: SamplerWithoutReplacement())
    used = [v for rb in sources for _ in range(2) for v in (rb.sample()["next", "reward"] * 8).reshape(-1).tolist()]
    checkpoint = save_world("memory://moving/used", sources, torchrl.save)
    rb = buffer(100, sampler=SamplerWithoutReplacement(), seed=5)
    torchrl.restore(rb, shares(checkpoint, 1)[0])
    rest = [v for _ in range(6) for v in (rb.sample()["next", "reward"] * 8).reshape(-1).tolist()]
    assert len(used) == 32
    assert Counter(used + rest) == Counter(contents(rb))


def test_used_trajectories_stay_used() -> None:
    sources = ranks(2, 49, sampler=lambda r: SliceSamplerWithoutReplacement(slice_len=7), batch_size=21)
    used = [v for rb in sources for v in (rb.sample()["next", "reward"] * 8).reshape(-1).tolist()]
    checkpoint = save_world("memory://moving/used-trajectories", sources, torchrl.save)
    rb = buffer(100, sampler=SliceSamplerWithoutReplacement(slice_len=7), seed=5, batch_size=56)
    torchrl.restore(rb, shares(checkpoint, 1)[0])
    rest = (rb.sample()["next", "reward"] * 8).reshape(-1).tolist()
    assert len(used) == 42
    assert Counter(used + rest) == Counter(contents(rb))


def test_the_heap_keeps_its_ranks() -> None:
    def best(rank: int = 0) -> Any:
        return TensorDictMaxValueWriter(rank_key=("next", "reward"))

    sources = ranks(2, 60, writer=best)
    ranked = {contents(rb)[slot]: value for rb in sources for value, slot in rb._writer._current_top_values}
    checkpoint = save_world("memory://moving/heap", sources, torchrl.save)
    for share in shares(checkpoint, 3):
        rb = buffer(50, writer=best(), seed=5)
        torchrl.restore(rb, share)
        held = contents(rb)
        heap = rb._writer._current_top_values
        assert {held[slot]: value for value, slot in heap} == {v: ranked[v] for v in held}
        assert heap[0] == min(heap)
        rb.extend(steps(100_000, 60))
        assert min(contents(rb)) >= 100_010 - 1


@pytest.mark.parametrize(("envs", "target"), [(3, 3), (3, 4), (4, 2)])
def test_rectangles(envs: int, target: int) -> None:
    sources = []
    for rank in range(2):
        rb = buffer(storage=LazyTensorStorage(9 * envs, ndim=2), seed=rank)
        rb.extend(rectangle(100 * rank, 6, envs))
        rb.extend(rectangle(100 * rank + 6, 6, envs))
        sources.append(rb)
    checkpoint = save_world(f"memory://moving/rectangles-{envs}-{target}", sources, torchrl.save)
    rb = buffer(storage=LazyTensorStorage(100 * target, ndim=2), sampler=SliceSampler(**SLICES), seed=5)
    report = torchrl.restore(rb, shares(checkpoint, 1, num_envs=target)[0])
    total = sum(len(contents(s)) for s in sources)
    assert len(rb) == report.steps == total - report.counts["uneven_steps_dropped"]
    assert report.counts["uneven_steps_dropped"] == total % target
    assert rb._storage._storage.shape[1] == target
    before = Counter(v for s in sources for v in contents(s))
    assert not Counter(contents(rb)) - before
    assert pairs_are_steps(rb)
    rb.extend(rectangle(7000, 4, target))


def test_a_rectangle_into_one_row() -> None:
    rb = buffer(storage=LazyTensorStorage(18, ndim=2))
    rb.extend(rectangle(0, 4, 3)), rb.extend(rectangle(4, 4, 3))
    checkpoint = save_world("memory://moving/flat", [rb], torchrl.save)
    other = buffer(40, sampler=SliceSampler(**SLICES))
    torchrl.restore(other, resharding.plan(checkpoint, world_size=1, capacity=40).share(0))
    assert sorted(contents(other)) == sorted(contents(rb))
    assert pairs_are_steps(other)


def test_lists_of_any_items() -> None:
    sources = []
    for rank in range(2):
        rb = buffer(storage=ListStorage(20), plain=True, seed=rank)
        rb.extend([f"{rank}-{k}" if k % 2 else torch.arange(10 * rank + k) for k in range(9)])
        sources.append(rb)
    checkpoint = save_world("memory://moving/lists", sources, torchrl.save)
    found: list[Any] = []
    for share in shares(checkpoint, 3):
        rb = buffer(storage=ListStorage(20), plain=True)
        torchrl.restore(rb, share)
        found += rb._storage._storage
    key = lambda v: v if isinstance(v, str) else f"tensor {len(v):4}"  # noqa: E731
    assert sorted(map(key, found)) == sorted(key(v) for rb in sources for v in rb._storage._storage)


def test_the_seed_is_another_for_each_rank_and_the_same_everywhere() -> None:
    checkpoint = save_world("memory://moving/seed", ranks(4), torchrl.save)
    first, again = ([rb._rng.initial_seed() for rb, _ in restored(checkpoint, 3)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 3


def test_unfinished_trajectories_at_the_same_size() -> None:
    checkpoint = save_world("memory://moving/unfinished", ranks(1, 31), torchrl.save)
    going_on, ended = buffer(50), buffer(50)
    report = torchrl.restore(going_on, checkpoint, rank=0)
    assert "unfinished='close'" in str(report)
    assert not going_on[30]["next", "done"].any()
    assert torchrl.restore(ended, checkpoint, rank=0, unfinished="close").counts["closed"] == 1
    assert ended[30]["next", "done"].all()
    assert ended[30]["next", "truncated"].all()
    with pytest.raises(UsageError, match="only a plan drops"):
        torchrl.restore(buffer(50), checkpoint, rank=0, unfinished="drop")


def test_an_end_made_by_a_restore_lasts() -> None:
    checkpoint = save_world("memory://moving/lasting", ranks(1, 31), torchrl.save)
    share = resharding.plan(checkpoint, world_size=1, capacity=80).share(0)
    rb = buffer(80)
    torchrl.restore(rb, share, unfinished="close")
    arc = archive.open("memory://moving/lasting")
    with arc.writer(session="second", resume=share) as w:
        rb.extend(steps(500, 4))
        second = torchrl.save(rb, w, step=2).result(60)
    other = buffer(80)
    torchrl.restore(other, second, rank=0)
    assert bool((other[:]["next", "done"] == rb[:]["next", "done"]).all())
    assert bool(other[30]["next", "done"])
    assert [ep.length for ep in second.episodes] == [7, 7, 7, 7, 3, 4]


@pytest.mark.parametrize("envs", [None, 4])
def test_a_second_generation_is_as_exact_as_the_first(envs: int | None) -> None:
    """After a move, a save uploads only what is new, and restoring it gives back the buffer, ids and all."""
    url = f"memory://moving/generations-{envs}"

    def make(seed: int) -> Any:
        storage = LazyTensorStorage(200) if envs is None else LazyTensorStorage(200, ndim=2)
        return buffer(storage=storage, seed=seed, sampler=SliceSampler(**SLICES))

    sources = [make(0), make(1)]
    for rb in sources:
        data = steps(0, 33, ids=True) if envs is None else rectangle(0, 9, 3)
        rb.extend(data)
    checkpoint = save_world(url, sources, torchrl.save)
    share = shares(checkpoint, 1, num_envs=envs)[0]
    rb, other = make(2), make(3)
    torchrl.restore(rb, share)
    arc = archive.open(url)
    with arc.writer(session="second", resume=share) as w:
        assert fresh(torchrl.save(rb, w, step=2).result(60)) == 0
        rb.extend(steps(900, 5, ids=True) if envs is None else rectangle(900, 2, envs))
        second = torchrl.save(rb, w, step=3).result(60)
    assert fresh(second) == (5 if envs is None else 2 * envs)
    torchrl.restore(other, second, rank=0)
    assert same(
        rb._storage._storage[: rb._storage._len_along_dim0], other._storage._storage[: rb._storage._len_along_dim0]
    )
    assert_same_samples(rb, other, count=20)
    again = arc.writer(session="third", resume=shares(second, 1)[0])
    assert fresh(torchrl.save(other, again, step=4).result(60)) == 0
    third = make(4)
    torchrl.restore(third, arc.checkpoints.latest, rank=0)
    assert_same_samples(other, third, count=5)
    again.close()


def fresh(checkpoint: archive.Checkpoint) -> int:
    """Steps that this checkpoint's commit brought."""
    table = checkpoint.snapshot.columns(["commit", "length"])
    return int(np.sum(table["length"].to_numpy()[table["commit"].to_numpy() == checkpoint.number]))


def test_prefetched_batches_are_dropped_and_counted() -> None:
    sources = ranks(2, prefetch=2)
    for rb in sources:
        rb.sample()
    share = shares(save_world("memory://moving/prefetch", sources, torchrl.save), 1)[0]
    rb = buffer(200, prefetch=2)
    report = torchrl.restore(rb, share)
    assert report.counts["prefetched_batches_dropped"] == 4
    assert "4 prefetched batches dropped" in str(report)
    assert not rb._prefetch_queue


def test_a_rewritten_slot_is_no_part_of_the_trajectory_around_it() -> None:
    rb = buffer(50)
    rb.extend(steps(0, 40, episode=100))
    arc = archive.open("memory://moving/rewritten", create=True)
    with arc.writer(0, 1, session="first") as w:
        torchrl.save(rb, w, step=1).result(60)
        rb._writer.write_at(torch.tensor([10, 11]), steps(500, 2, episode=1000))
        checkpoint = torchrl.save(rb, w, step=2).result(60)
    other = buffer(80)
    report = torchrl.restore(other, resharding.plan(checkpoint, world_size=1, capacity=80).share(0))
    assert contents(other) == contents(rb)
    assert other[:]["next", "done"].reshape(-1).nonzero().reshape(-1).tolist() == [9, 11, 39]
    assert report.counts["closed"] == 3


def test_what_does_not_fit_is_refused_and_leaves_nothing_half_restored() -> None:
    checkpoint = save_world("memory://moving/refused", ranks(1, 20), torchrl.save)
    rb = buffer(50)
    rb.extend(steps(0, 5))
    with pytest.raises(UsageError, match="already holds 5 steps"):
        torchrl.restore(rb, checkpoint, rank=0)
    rb.empty()
    rb._storage._storage = rb._storage._storage.exclude("action")
    with pytest.raises(FieldError, match="'action'"):
        torchrl.restore(rb, checkpoint, rank=0, existing="replace")
    assert len(rb) == 0
    with pytest.raises(NotFoundError, match="no buffer 'demo'"):
        torchrl.restore({"demo": buffer(50)}, checkpoint, rank=0)
    with pytest.raises(UsageError, match="give rank="):
        torchrl.restore(buffer(50), checkpoint)
    with pytest.raises(UsageError, match="list"):
        torchrl.restore([1], checkpoint, rank=0)
