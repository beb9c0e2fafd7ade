"""Ranks of a TrajectoryReplayBuffer: saved by M of them, gone on with by N, as RLinf's workers call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import archive
from archive.base.errors import NotFoundError, RanksMissingError, UsageError
from archive.buffers import TrajectoryReplayBuffer
from tests.support import worlds
from tests.support.backends import make_backend
from tests.support.places import DATA
from tests.support.processes import answers_in_processes
from tests.support.trajectories import (
    add,
    check_batch,
    close,
    everything,
    make,
    rlinf,
    sample_for_a_while,
    save,
    world,
)


@pytest.mark.parametrize(
    ("before", "after", "store"),
    [*((4, 3, store) for store in worlds.STORES), *((2, 5, store) for store in ("memory", "local"))],
)
def test_a_world_of_another_size_goes_on(
    before: int, after: int, store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    backend = make_backend(request, store, tmp_path)
    url, options = backend.url, {"storage_options": backend.storage_options}
    old = world(url, before, "first", **options)
    add(old, 11)
    save(old, url)
    close(old)
    new = world(url, after, "second", **options)
    for rank, buffer in enumerate(new):
        buffer.load_checkpoint(f"{url}/rank_{rank}", world_size=after)
    shared = [b.trajectory_ids for b in new]
    assert sorted(i for ids in shared for i in ids) == list(range(11))
    assert [len(ids) for ids in shared] == [11 // after + (r < 11 % after) for r in range(after)]
    for buffer, ids in zip(new, shared, strict=True):
        assert ids == sorted(ids)
        assert everything(buffer) == set(ids)
    add_after(new, 11)
    shards = set(archive.open(url, **options).shards)
    ck = save(new, url)
    assert (ck.world_size, ck.step, len(ck.episodes)) == (after, 1, 11 + after)
    arc = archive.open(url, **options)
    assert len(arc.episodes) == 11 + after  # what was there was not written again
    assert shards < set(arc.shards)
    close(new)


def add_after(buffers: list[TrajectoryReplayBuffer], taken: int) -> None:
    """One trajectory for each rank: ids are new, and no two ranks have the same."""
    ids = [i for r, b in enumerate(buffers) for i in b.add_trajectories([make(100 + r)])]
    assert len(set(ids)) == len(ids)
    assert min(ids) >= taken


def test_a_world_of_the_same_size_goes_on_exactly(tmp_path: Path) -> None:
    url = str(tmp_path)
    old = world(url, 3, "first")
    add(old, 7)
    save(old, url)
    following = [check_batch(b.sample(16), 16) for b in old]
    close(old)
    new = world(url, 3, "second")
    for rank, buffer in enumerate(new):
        buffer.load_checkpoint(f"{url}/rank_{rank}", world_size=3)
    assert [b.trajectory_ids for b in new] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [check_batch(b.sample(16), 16) for b in new] == following
    assert new[1].add_trajectories([make(7)]) == [7]
    close(new)


def test_a_second_checkpoint_uploads_what_is_new_only(tmp_path: Path) -> None:
    url = str(tmp_path)
    buffers = world(url, 1, "s", auto_save=False)
    buffers[0].add_trajectories([make(i, steps=50) for i in range(40)])
    sizes = []
    for i in range(3):
        before = archive.open(url, create=True).shards
        buffers[0].save_checkpoint(f"{url}/rank_0")
        arc = archive.open(url)
        new = [s for s in arc.shards if s not in before]
        sizes.append(sum((tmp_path / s).stat().st_size for s in new))
        buffers[0].add_trajectories([make(40 + i, steps=50)])
    assert sizes[1] < sizes[0] / 5
    assert sizes[2] < sizes[0] / 5
    close(buffers)


def test_a_list_is_split_as_rlinf_splits_it(tmp_path: Path) -> None:
    """is_distributed: contiguous blocks, the first of them one longer; ids stay."""
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([make(i) for i in range(10)])
        buffer.save_checkpoint(tmp_path / "rank_0")
    for path in (tmp_path, tmp_path / "rank_0"):
        for size in (3, 12):
            parts = []
            for rank in range(size):
                demo = TrajectoryReplayBuffer()
                demo.load_checkpoint(path, is_distributed=True, local_rank=rank, world_size=size)
                parts.append(demo.trajectory_ids)
            expected = [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]] if size == 3 else [*([i] for i in range(10)), [], []]
            assert parts == expected
    for rank, size in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=r"rank|world_size"):
            TrajectoryReplayBuffer().load_checkpoint(tmp_path, True, rank, size)


def test_one_rank_of_several_can_be_split(tmp_path: Path) -> None:
    buffers = world(str(tmp_path), 2, "s")
    add(buffers, 6)
    save(buffers, str(tmp_path))
    parts = []
    for rank in range(2):
        demo = TrajectoryReplayBuffer(sample_window_size=0)
        demo.load_checkpoint(tmp_path / "rank_1", is_distributed=True, local_rank=rank, world_size=2)
        parts.append(demo.trajectory_ids)
    assert parts == [[1, 3], [5]]
    demo.add_trajectories([make(8)])
    demo._job.world_size, demo._job.rank = 1, 0
    demo.save_checkpoint(tmp_path / "demo" / "rank_0")  # elsewhere: copied
    demo.close()
    assert [e.metadata["trajectory_id"] for e in archive.open(tmp_path / "demo").episodes] == [5, 7]
    with pytest.raises(NotFoundError, match="rank 7"):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "rank_7", is_distributed=True, world_size=1)
    close(buffers)


def test_without_a_job_a_path_means_that_rank_as_it_was_saved(tmp_path: Path) -> None:
    buffers = world(str(tmp_path), 3, "s")
    add(buffers, 7)
    save(buffers, str(tmp_path))
    close(buffers)
    one = TrajectoryReplayBuffer(sample_window_size=0)
    one.load_checkpoint(f"{tmp_path}/rank_1/")
    assert one.trajectory_ids == [1, 4]
    every = TrajectoryReplayBuffer(sample_window_size=0)
    every.load_checkpoint(str(tmp_path))
    assert every.trajectory_ids == list(range(7))
    merged = TrajectoryReplayBuffer(sample_window_size=0)
    merged.load_checkpoint(f"{tmp_path}/rank_0", world_size=1)
    assert merged.trajectory_ids == list(range(7))
    with pytest.raises(UsageError, match="rank 5"):
        TrajectoryReplayBuffer().load_checkpoint(f"{tmp_path}/rank_5")


def test_ids_of_ranks_that_counted_apart_are_told_apart(tmp_path: Path) -> None:
    """As in archives imported from RLinf, where each rank counts from 0: merged in the order of RLinf's own tool."""
    buffers = [TrajectoryReplayBuffer(world_size=1, session="s") for _ in range(2)]
    for rank, buffer in enumerate(buffers):
        buffer.add_trajectories([make(10 * rank + i) for i in range(3)])
    for rank, buffer in enumerate(buffers):
        buffer._job.world_size = 2
        buffer.save_checkpoint(f"{tmp_path}/rank_{rank}")
    close(buffers)
    merged = TrajectoryReplayBuffer(sample_window_size=0)
    merged.load_checkpoint(f"{tmp_path}/rank_0", world_size=1)
    assert merged.trajectory_ids == [0, 1, 2, 3, 4, 5]
    names = [e.weights.uuid for e in merged._contents.entries.values()]
    assert names == [f"weights-{i}" for i in (0, 10, 1, 11, 2, 12)]
    assert merged.add_trajectories([make(99)]) == [6]


def test_a_rank_needs_to_know_its_world(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"{tmp_path}/rank_2")
    with pytest.raises(UsageError, match="world_size="):
        buffer.add_trajectories([make(0)])
    with pytest.raises(UsageError, match="not one of a world of 2"):
        TrajectoryReplayBuffer(world_size=2).save_checkpoint(f"{tmp_path}/rank_2")
    assert not any(tmp_path.iterdir())


def test_a_world_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        buffers.append(TrajectoryReplayBuffer(auto_save_path=f"{tmp_path}/rank_{rank}"))
        assert buffers[-1].add_trajectories([make(rank)]) == [rank]
        buffers[-1].save_checkpoint(f"{tmp_path}/rank_{rank}")
    found = archive.open(tmp_path).checkpoints.latest
    assert found is not None
    assert (found.world_size, found.session) == (2, "job-7-0")
    for buffer in buffers:
        buffer.load_checkpoint(f"{tmp_path}/rank_{buffer._job.own_rank}")
        buffer.save_checkpoint(f"{tmp_path}/rank_{buffer._job.own_rank}")  # a second writer of the same job
    newer = archive.open(tmp_path).checkpoints.latest
    assert newer is not None
    assert (newer.step, newer.session, len(newer.episodes)) == (1, "job-7-0-2", 2)
    close(buffers)


def test_a_checkpoint_in_a_folder_of_its_own_each_time(tmp_path: Path) -> None:
    """As RLinf's runner has it: .../global_step_N/.../rank_0."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"{tmp_path}/live/rank_0", cache_size=1) as buffer:
        for step in (10, 20):
            buffer.add_trajectories([make(step), make(step + 1)])
            buffer.save_checkpoint(f"{tmp_path}/global_step_{step}/actor/rank_0")
        buffer.add_trajectories([make(30)])
        buffer.save_checkpoint(f"{tmp_path}/global_step_10/actor/rank_0")
    for step, expected in ((20, {10, 11, 20, 21}), (10, {10, 11, 20, 21, 30})):
        other = TrajectoryReplayBuffer(sample_window_size=0)
        other.load_checkpoint(f"{tmp_path}/global_step_{step}/actor/rank_0")
        assert everything(other) == expected
    assert len(archive.open(f"{tmp_path}/global_step_10/actor").episodes) == 5  # the first two were there already


def worker(url: str, store: str, rank: int, world_size: int, resume: bool) -> None:
    """One of RLinf's workers, in a process of its own, which knows its place from torch alone."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"{url}/rank_{rank}", sample_window_size=100)
    if resume:
        buffer.load_checkpoint(f"{url}/rank_{rank}", world_size=world_size)
    for step in range(4):
        buffer.add_trajectories([make((100 if resume else 0) + 10 * step + rank)])
        assert len(buffer.sample(8)["rewards"]) == 8
        if step % 2 == 1:
            buffer.save_checkpoint(f"{url}/rank_{rank}")
    buffer.close()
    dist.destroy_process_group()


def test_the_workers_own_calls_with_a_process_group(tmp_path: Path) -> None:
    url = str(tmp_path / "archive")
    for size in (1, 2):
        answers_in_processes(worker, [(url, str(tmp_path / f"{size}"), rank, size, size > 1) for rank in range(size)])
    found = archive.open(url).checkpoints
    assert [(ck.world_size, len(ck.episodes)) for ck in found] == [(1, 2), (1, 4), (2, 8), (2, 12)]
    merged = TrajectoryReplayBuffer(sample_window_size=0)
    merged.load_checkpoint(url)
    expected = {10 * s for s in range(4)} | {100 + 10 * s + r for s in range(4) for r in range(2)}
    assert everything(merged) == expected


def test_from_rlinfs_folders_and_back(tmp_path: Path) -> None:
    """Four ranks of RLinf, imported, gone on with by two, exported: RLinf's own buffers load them."""
    _, theirs = rlinf()
    adapter = pytest.importorskip("archive.adapters.rlinf")
    source = DATA / "rlinf"
    arc = archive.create(tmp_path / "archive")
    ck = adapter.import_checkpoint(str(source), arc)
    expected = sum(len(theirs_at(theirs, source / f"rank_{r}")) for r in range(4))
    assert len(ck.episodes) == expected
    buffers = [TrajectoryReplayBuffer(world_size=2, session="s", sample_window_size=0) for _ in range(2)]
    for rank, buffer in enumerate(buffers):
        buffer.load_checkpoint(f"{arc.url}/rank_{rank}")
        assert buffer.sample(8)["actions"].shape[0] == 8
    ids = [b.trajectory_ids for b in buffers]
    assert sorted(i for some in ids for i in some) == list(range(expected))
    made = save(buffers, arc.url)
    close(buffers)
    again = TrajectoryReplayBuffer(world_size=2, sample_window_size=0)
    again.load_checkpoint(f"{arc.url}/rank_1")
    assert again.trajectory_ids == ids[1]  # ids that were told apart stay
    adapter.export_checkpoint(made, str(tmp_path / "out"))
    for rank in range(2):
        peer = theirs_at(theirs, tmp_path / "out" / f"rank_{rank}")
        assert sorted(peer._trajectory_id_list) == ids[rank]
        assert peer.sample(8)["actions"].shape[0] == 8


def theirs_at(theirs: Any, path: Path) -> Any:
    buffer = theirs()
    buffer.load_checkpoint(str(path))
    buffer.close()
    return buffer


def test_rlinfs_own_trajectories_go_in(tmp_path: Path) -> None:
    kind, _ = rlinf()
    given = make(0, kind=kind)
    given.intervene_flags[:2] = True
    with TrajectoryReplayBuffer() as buffer, TrajectoryReplayBuffer() as demo:
        buffer.add_trajectories([given])
        demo.add_trajectories([x for t in [given] for x in t.extract_intervene_traj() or []])
        assert len(demo) == 2
        assert demo.sample(3)["intervene_flags"].dtype == torch.bool


def test_a_lost_rank_is_named_by_the_next_call(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(world_size=2, rank=0, session="s")
    buffer.add_trajectories([make(0)])
    buffer.save_checkpoint(f"{tmp_path}/rank_0", timeout_s=0.2)
    with pytest.raises(RanksMissingError, match="rank 1"):
        sample_for_a_while(buffer)
    buffer.close()
