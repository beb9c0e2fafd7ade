"""More faults that RLinf's own buffer has: generators, half saved data, lost errors, restarts; and what is refused."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archive
from archive.base.errors import ClosedError, FieldError, NotFoundError, StorageError, UsageError
from archive.buffers import TrajectoryReplayBuffer
from tests.support.trajectories import (
    Trajectory,
    check_batch,
    everything,
    loaded,
    make,
    rlinf,
    same,
    sample_for_a_while,
    saved_trees,
    saving,
)

# -- 8: the random generator


def test_8_draws_go_on_where_they_were(tmp_path: Path) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([make(i) for i in range(4)])
        first = check_batch(buffer.sample(32), 32)
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
        following = [check_batch(buffer.sample(32), 32) for _ in range(3)]
    with loaded(tmp_path, seed=99) as other:
        assert [check_batch(other.sample(32), 32) for _ in range(3)] == following
        assert first not in following
        assert other.seed == 1234


def test_8_ranks_draw_differently_and_global_generators_are_left_alone() -> None:
    states = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()
    drawn = []
    for rank in range(3):
        buffer = TrajectoryReplayBuffer(auto_save_path=f"memory://nowhere/rank_{rank}")
        buffer.add_trajectories([make(0, steps=50)])
        drawn.append(check_batch(buffer.sample(64), 64))
    assert len({tuple(d) for d in drawn}) == 3
    now = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()
    assert now == states


def test_8_rank_0_draws_what_rlinf_draws() -> None:
    kind, theirs = rlinf()
    logging.disable(logging.INFO)
    ours, peer = TrajectoryReplayBuffer(seed=5), theirs(seed=5)
    for buffer in (ours, peer):
        buffer.add_trajectories([make(i, kind=kind) for i in range(4)])
    for _ in range(3):
        a, b = ours.sample(20), peer.sample(20)
        assert a.keys() == b.keys()
        same(a, b)
    logging.disable(logging.NOTSET)


# -- 9: readers see a checkpoint or none


def test_9_what_is_half_saved_is_never_seen(tmp_path: Path) -> None:
    buffers = [TrajectoryReplayBuffer(world_size=2, rank=r, session="s") for r in range(2)]
    for rank, buffer in enumerate(buffers):
        buffer.add_trajectories([make(rank)])
    buffers[0].save_checkpoint(f"{tmp_path}/rank_0")
    assert archive.open(tmp_path).checkpoints.latest is None
    with pytest.raises(NotFoundError, match="save_checkpoint"):
        TrajectoryReplayBuffer().load_checkpoint(f"{tmp_path}/rank_0")
    buffers[1].save_checkpoint(f"{tmp_path}/rank_1")
    found = archive.open(tmp_path).checkpoints.latest
    assert found is not None
    assert (found.world_size, len(found.episodes)) == (2, 2)
    for buffer in buffers:
        buffer.close()


# -- 10: errors in the background, and changes after adding


@pytest.mark.parametrize("auto_save", [False, True])
def test_10_what_is_changed_after_adding_does_not_change_what_was_added(tmp_path: Path, auto_save: bool) -> None:
    with saving(tmp_path, sample_window_size=0, auto_save=auto_save) as buffer:
        given = make(3)
        buffer.add_trajectories([given])
        for tensor in (*(v for v in vars(given).values() if isinstance(v, torch.Tensor)), *given.curr_obs.values()):
            tensor.fill_(1)
        given.curr_obs.clear()
        assert everything(buffer) == {3}
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    with loaded(tmp_path, cache_size=0) as other:
        assert everything(other) == {3}
    (tree,) = saved_trees(tmp_path)
    same(tree, dict(vars(make(3))))


def test_10_a_failed_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    buffer = saving(tmp_path, auto_save_interval_s=0.2, sample_window_size=0)  # so that it fails once, and not again
    buffer.add_trajectories([make(0)])
    buffer.flush()
    folder = tmp_path / "shards"
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("in the way")
    buffer.add_trajectories([make(1)])
    with pytest.raises((StorageError, OSError), match="shards"):
        sample_for_a_while(buffer)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    buffer.save_checkpoint(f"{tmp_path}/rank_0").result()
    buffer.close()
    with loaded(tmp_path, sample_window_size=0) as other:
        assert everything(other) == {0, 1}


# -- 11: a restart in the same place


def test_11_a_restart_without_loading_overwrites_nothing(tmp_path: Path) -> None:
    with saving(tmp_path) as buffer:
        assert buffer.add_trajectories([make(0), make(1)]) == [0, 1]
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    with saving(tmp_path) as buffer:
        assert buffer.add_trajectories([make(2)]) == [2]
        assert everything(buffer) == {2}
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    arc = archive.open(tmp_path)
    assert [ck.name for ck in arc.checkpoints] == ["step-0", "step-1"]
    assert [[e.metadata["trajectory_id"] for e in ck.episodes] for ck in arc.checkpoints] == [[0, 1], [2]]
    assert len(arc.episodes) == 3


def test_11_what_was_auto_saved_outlives_a_job_that_did_not_checkpoint(tmp_path: Path) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([make(0), make(1)])
    assert len(archive.open(tmp_path).episodes) == 2


def test_11_the_oldest_leave_a_buffer_that_is_bounded(tmp_path: Path) -> None:
    with saving(tmp_path, max_trajectories=2, sample_window_size=0) as buffer:
        buffer.add_trajectories([make(i) for i in range(5)])
        assert buffer.trajectory_ids == [3, 4]
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    with loaded(tmp_path) as other:
        assert everything(other) == {3, 4}


# -- 12: window 0, no seed, more than there is


@pytest.mark.parametrize("auto_save", [False, True])
def test_12_window_0_is_all(tmp_path: Path, auto_save: bool) -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0, auto_save=auto_save, auto_save_path=f"{tmp_path}/rank_0")
    buffer.add_trajectories([make(i) for i in range(12)])
    assert everything(buffer) == set(range(12))
    buffer.close()


def test_12_no_seed_draws_differently_each_time() -> None:
    drawn = set()
    for _ in range(3):
        buffer = TrajectoryReplayBuffer(seed=None)
        buffer.add_trajectories([make(0, steps=50)])
        drawn.add(tuple(check_batch(buffer.sample(50), 50)))
    assert len(drawn) == 3


def test_12_more_than_there_is_is_what_there_is_or_asked_for() -> None:
    buffer = TrajectoryReplayBuffer(seed=3)
    buffer.add_trajectories([make(0)])
    fresh = TrajectoryReplayBuffer(seed=3)
    fresh.add_trajectories([make(0)])
    assert check_batch(buffer.sample(9), 8) == check_batch(fresh.sample(8), 8)
    check_batch(buffer.sample(100, replace=True), 100)
    with pytest.raises(UsageError, match="at least 1"):
        buffer.sample()


# -- what else is refused, and what it says


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"auto_save": True}, "auto_save_path"), ({"sample_window_size": -1}, "sample_window_size"),
        ({"cache_size": -1}, "cache_size"), ({"trajectory_format": "json"}, "trajectory_format"),
        ({"max_trajectories": 0}, "max_trajectories"), ({"missing": "?"}, "missing"),
    ],
)  # fmt: skip
def test_arguments_are_checked(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        TrajectoryReplayBuffer(**options)


def test_trajectories_without_steps_are_passed_over_and_odd_ones_refused() -> None:
    buffer = TrajectoryReplayBuffer()
    assert buffer.add_trajectories([]) == []
    assert buffer.add_trajectories([Trajectory(), make(0, steps=0, extra=0)]) == []
    uneven = make(1, steps=5)
    uneven.dones = torch.zeros(7, 2, 1, dtype=torch.bool)
    with pytest.raises(FieldError, match="epochs"):
        buffer.add_trajectories([uneven])
    with pytest.raises(FieldError, match="T, B"):
        buffer.add_trajectories([{"rewards": torch.zeros(3)}])
    assert len(buffer) == 0


def test_a_closed_buffer_says_so(tmp_path: Path) -> None:
    buffer = saving(tmp_path)
    buffer.add_trajectories([make(0)])
    buffer.close()
    buffer.close()
    for call in (
        lambda: buffer.add_trajectories([make(1)]),
        lambda: buffer.save_checkpoint(f"{tmp_path}/rank_0"),
        lambda: buffer.load_checkpoint(f"{tmp_path}/rank_0"),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert everything(buffer) == {0}


def test_a_folder_of_rlinf_is_told_from_an_archive(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "metadata.json").write_text(json.dumps({"size": 0}))
    with pytest.raises(NotFoundError, match="import_checkpoint"):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "rank_0")
