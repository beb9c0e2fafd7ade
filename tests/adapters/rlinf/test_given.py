"""What a TrajectoryReplayBuffer is given and keeps: odd trajectories, weights, and roots written in several ways."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import archive
from archive.adapters import rlinf as adapter
from archive.base.errors import ArchiveError, FieldError, StateError, UsageError
from archive.buffers import TrajectoryReplayBuffer
from tests.support.backends import make_backend
from tests.support.rlinf_objects import saved_trees
from tests.support.trajectories import check_batch, everything, make, rlinf, same


def saving(root: Any, **options: Any) -> TrajectoryReplayBuffer:
    return TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"{root}/rank_0", **options)


def weights(root: Any) -> list[tuple[str | None, int | None]]:
    return [(e.model_weights_uuid, e.update_count) for e in archive.open(root).episodes]


@pytest.mark.parametrize("auto_save", [False, True])
def test_weights_of_the_caller_go_wherever_the_trajectory_goes(tmp_path: Path, auto_save: bool) -> None:
    path = f"{tmp_path}/a/rank_0"
    with TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=path, cache_size=1) as buffer:
        for i in range(2):
            buffer.add_trajectories([make(i)], model_weights_uuid=f"w{i}", model_update_count=100 + i)
        buffer.save_checkpoint(path)
        buffer.clear_cache()
        buffer.save_checkpoint(f"{tmp_path}/b/rank_0")
    loaded = TrajectoryReplayBuffer()
    loaded.load_checkpoint(f"{tmp_path}/b/rank_0")
    loaded.save_checkpoint(f"{tmp_path}/c/rank_0")
    loaded.close()
    for name in "abc":
        assert weights(tmp_path / name) == [("w0", 100), ("w1", 101)]
        found = archive.open(tmp_path / name).episodes.filter(update_count=101, model_weights_uuid="w1")
        assert [e.metadata["model_update_count"] for e in found] == [101]


def test_weights_may_be_attributes_or_no_text(tmp_path: Path) -> None:
    kind, _ = rlinf()
    given, plain, known = make(0, kind=kind), make(1, kind=kind), uuid.uuid4()
    given.model_weights_uuid, given.model_update_count = "mine", 7  # no fields of RLinf's class
    plain.model_weights_id = known
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([given, plain])
    assert weights(tmp_path) == [("mine", 7), (str(known), None)]


@pytest.mark.parametrize("auto_save", [False, True])
def test_arrays_are_taken_as_tensors_are(tmp_path: Path, auto_save: bool) -> None:
    def arrays(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: arrays(value) for key, value in node.items()}
        return np.asarray(node) if hasattr(node, "numpy") and "bfloat16" not in str(node.dtype) else node

    with TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=f"{tmp_path}/rank_0") as buffer:
        assert buffer.add_trajectories([arrays(vars(make(0))), make(1)]) == [0, 1]
        assert everything(buffer) == {0, 1}
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
        one, other = buffer.trajectory_ids, [ep.metadata["T"] for ep in archive.open(tmp_path).episodes]
        assert (one, other) == ([0, 1], [4, 4])


def test_batches_of_any_dtype_from_memory_and_archive(tmp_path: Path) -> None:
    def with_depth(i: int, steps: int) -> Any:
        made = make(i, steps)
        shape, names = (steps, 2), ("uint16", "uint32", "uint64", "complex64", "float8_e5m2", "float16")
        tensors = {n: torch.arange(2 * steps).reshape(shape).to(getattr(torch, n)) for n in names}
        made.curr_obs |= tensors | {f"{n}s": t[..., None].clone() for n, t in tensors.items()}
        return made

    without = make(2)
    batches = []
    for cache_size in (0, 1, 3):  # all in the archive, some, all in memory
        options = {"cache_size": cache_size, "missing": 3, "sample_window_size": 0}
        with saving(tmp_path / str(cache_size), **options) as buffer:
            buffer.add_trajectories([with_depth(0, 4), with_depth(1, 6), without])
            buffer.flush()
            batches.append(buffer.sample(50, replace=True))
    assert batches[0]["curr_obs"]["uint16"].dtype == torch.uint16
    for batch in batches[1:]:
        for name, value in batches[0]["curr_obs"].items():
            assert torch.equal(value.view(torch.uint8), batch["curr_obs"][name].view(torch.uint8)), name


def test_fields_are_named_by_text() -> None:
    given = make(0)
    given.curr_obs[3] = given.rewards
    with pytest.raises(FieldError, match="curr_obs/3"):
        TrajectoryReplayBuffer().add_trajectories([given])


@pytest.mark.parametrize("auto_save", [False, True])
def test_if_one_cannot_be_kept_none_is_added(tmp_path: Path, auto_save: bool) -> None:
    bad = make(1)
    bad.curr_obs["camera"] = object()
    with TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=f"{tmp_path}/rank_0") as buffer:
        with pytest.raises(StateError, match="curr_obs/camera"):
            buffer.add_trajectories([make(0), bad])
        assert len(buffer) == 0
        assert buffer.add_trajectories([make(0)]) == [0]
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    assert len(archive.open(tmp_path).episodes) == 1


@pytest.mark.parametrize("given", [make(0), vars(make(0)), [None], [3], ["rewards"], [{"reward": 1}], 7])
def test_what_is_no_list_of_trajectories_is_refused(given: Any) -> None:
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(UsageError, match="trajector"):
        buffer.add_trajectories(given)
    assert len(buffer) == 0
    assert buffer.add_trajectories(None) == []  # what extract_intervene_traj() gives where nobody intervened


def test_a_root_is_the_same_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second writer of the same archive would end the first one's session, and upload all again."""
    monkeypatch.chdir(tmp_path)
    spellings = ["a/rank_0", f"{tmp_path}/a/rank_0/", f"file://{tmp_path}//a/rank_00", tmp_path / "a" / "rank_0"]
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=spellings[0]) as buffer:
        for i, path in enumerate(spellings):
            buffer.add_trajectories([make(i)])
            buffer.save_checkpoint(path)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=spellings[1]) as buffer:
        buffer.load_checkpoint(spellings[2])
        buffer.save_checkpoint(spellings[0])
    assert len(archive.open("a").episodes) == len(spellings)


def test_the_root_of_memory_and_its_spellings() -> None:
    name = uuid.uuid4().hex
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=f"memory://{name}/rank_0") as buffer:
        buffer.add_trajectories([make(0)])
        buffer.save_checkpoint(f"memory:///{name}//rank_0")
    assert len(archive.open(f"memory://{name}").episodes) == 1
    with pytest.raises(ArchiveError, match="memory://"):
        TrajectoryReplayBuffer().load_checkpoint("memory://")


def test_a_path_may_bring_its_storage_options(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """As a UPath does."""
    backend = make_backend(request, "moto", tmp_path)
    root = backend.url.removeprefix("s3://")
    path = SimpleNamespace(protocol="s3", path=f"{root}/rank_0", storage_options=backend.storage_options)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path) as buffer:
        buffer.add_trajectories([make(0)])
        buffer.save_checkpoint(path)
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(path)
    check_batch(again.sample(5), 5)


def test_moved_trajectories_are_listed_as_rlinf_lists_them(tmp_path: Path) -> None:
    """Newest last, by id, in whichever order they were moved: RLinf samples the end of its list."""
    _, theirs = rlinf()
    url = str(tmp_path / "archive")
    for size, session in ((4, "a"), (3, "b")):
        buffers = [TrajectoryReplayBuffer(world_size=size, session=session, sample_window_size=0) for _ in range(size)]
        for rank, buffer in enumerate(buffers):
            if session == "b":
                buffer.load_checkpoint(f"{url}/rank_{rank}")
            else:
                buffer._job.rank = rank
                buffer.add_trajectories([make(i * size + rank) for i in range(3)])
        for rank, buffer in enumerate(buffers):
            buffer.save_checkpoint(f"{url}/rank_{rank}")
        ids = [b.trajectory_ids for b in buffers]
        for buffer in buffers:
            buffer.close()
    ck = archive.open(url).checkpoints.latest
    assert ck is not None
    live = [e.metadata["trajectory_id"] for e in ck.episodes]
    assert live != [i for some in ids for i in some]  # they lie in another order
    adapter.export_checkpoint(ck, tmp_path / "out")
    for rank in range(3):
        loaded = theirs(cache_size=2, sample_window_size=2)
        loaded.load_checkpoint(str(tmp_path / "out" / f"rank_{rank}"))
        loaded.close()
        restored = theirs(cache_size=2, sample_window_size=2)
        report = adapter.restore(restored, ck, rank=rank)
        assert report.counts["not_in_cache"] == len(ids[rank]) - 2
        assert loaded._trajectory_id_list == ids[rank]
        assert restored._trajectory_id_list == ids[rank][-2:]
        for made in (loaded, restored):
            assert list(made._flat_trajectory_cache.cache) == ids[rank][-2:]
    cut = adapter.split(ck, archive.open(url), 2, rank=1)
    adapter.export_checkpoint(cut, tmp_path / "cut")
    found = saved_trees(tmp_path / "cut")
    assert len(found) == 2
    for number, tree in enumerate(found.values()):
        same(tree["rewards"], make(ids[1][number]).rewards)


def test_ranks_that_split_their_own_folders_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TrajectoryReplayBuffer(world_size=1) as buffer:
        buffer.add_trajectories([make(i) for i in range(4)])
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    buffers = [TrajectoryReplayBuffer(session="s", sample_window_size=0) for _ in range(2)]
    for rank, each in enumerate(buffers):
        each.load_checkpoint(f"{tmp_path}/rank_0", True, rank, 2)
        each.save_checkpoint(f"{tmp_path}/rank_{rank}")
    for each in buffers:
        each.close()
    assert not caplog.records
    TrajectoryReplayBuffer().load_checkpoint(f"{tmp_path}/rank_1", is_distributed=True, local_rank=0, world_size=2)
    assert not caplog.records
    TrajectoryReplayBuffer().load_checkpoint(f"{tmp_path}/rank_1", is_distributed=True, local_rank=1, world_size=2)
    assert "nobody has the rest" in caplog.text
