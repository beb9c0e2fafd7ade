"""Faults that RLinf's own buffer has, one by one, and that this one must not have; and what is refused."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import archive
from archive.base.errors import CapacityError, ClosedError, FieldError, NotFoundError, StorageError, UsageError
from archive.buffers import TrajectoryReplayBuffer
from tests.support.trajectories import (
    Trajectory,
    check_batch,
    everything,
    loaded,
    make,
    number,
    rlinf,
    same,
    sample_for_a_while,
    saved_trees,
    saving,
    trajectories_of,
)

# -- 1, 2: a checkpoint before the first sample, or after sampling a small window


@pytest.mark.parametrize("sampled", [False, True])
def test_1_2_a_checkpoint_has_all_trajectories_whatever_was_sampled(tmp_path: Path, sampled: bool) -> None:
    with saving(tmp_path, sample_window_size=2) as buffer:
        buffer.add_trajectories([make(i) for i in range(5)])
        if sampled:
            assert trajectories_of(buffer.sample(16), 16) <= {3, 4}
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    with loaded(tmp_path, sample_window_size=0) as other:
        assert len(other) == 5
        assert everything(other) == {0, 1, 2, 3, 4}


# -- 3: a checkpoint after a resume


@pytest.mark.parametrize("auto_save", [False, True])
def test_3_a_checkpoint_after_a_resume_has_what_was_resumed(tmp_path: Path, auto_save: bool) -> None:
    options = {"auto_save": auto_save, "auto_save_path": f"{tmp_path}/rank_0", "sample_window_size": 0}
    for i in range(3):
        with TrajectoryReplayBuffer(**options) as buffer:
            if i:
                buffer.load_checkpoint(f"{tmp_path}/rank_0")
            buffer.add_trajectories([make(2 * i), make(2 * i + 1)])
            buffer.save_checkpoint(f"{tmp_path}/rank_0")
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.load_checkpoint(f"{tmp_path}/rank_0")
        assert everything(buffer) == {0, 1, 2, 3, 4, 5}
        assert buffer.trajectory_ids == [0, 1, 2, 3, 4, 5]
    arc = archive.open(tmp_path)
    assert len(arc.episodes) == 6  # nothing was written twice


def test_3_a_checkpoint_elsewhere_has_what_was_resumed_too(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with saving(first) as buffer:
        buffer.add_trajectories([make(i) for i in range(3)])
        buffer.save_checkpoint(f"{first}/rank_0")
    with saving(second, sample_window_size=0) as buffer:
        buffer.load_checkpoint(f"{first}/rank_0")
        buffer.add_trajectories([make(3)])
        buffer.save_checkpoint(f"{second}/rank_0")
    with loaded(second, sample_window_size=0) as buffer:
        assert buffer.trajectory_ids == [0, 1, 2, 3]
        assert everything(buffer) == {0, 1, 2, 3}


# -- 4: what left the memory is not listed


def test_4_evicted_trajectories_are_neither_listed_nor_saved(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(sample_window_size=3) as buffer:
        buffer.add_trajectories([make(i) for i in range(5)])
        assert buffer.trajectory_ids == [2, 3, 4]
        assert buffer.get_stats() == {"num_trajectories": 3, "total_samples": 24, "cache_size": 3}
        assert everything(buffer) == {2, 3, 4}
        assert buffer.is_ready(5)  # five were collected, which is what a warm-up asks
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
        buffer.add_trajectories([make(5)])
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    arc = archive.open(tmp_path)
    ids = [[e.metadata["trajectory_id"] for e in ck.episodes] for ck in arc.checkpoints]
    assert ids == [[2, 3, 4], [3, 4, 5]]


# -- 5: what is no transition survives


@pytest.mark.parametrize("auto_save", [False, True])
def test_5_extra_rows_of_dones_and_what_is_no_transition_survive(tmp_path: Path, auto_save: bool) -> None:
    given = make(1, steps=6, extra=2)
    given.prev_values = torch.arange(16.0).reshape(8, 2, 1)  # a row more at the end of each epoch
    given.forward_inputs["static"] = torch.arange(5)
    given.curr_obs["task"] = ["open the drawer", "close it"]
    given.curr_obs["nested"] = {"deep": number(1, 6, 2), "none": None, "empty": {}}
    with TrajectoryReplayBuffer(auto_save=auto_save, auto_save_path=f"{tmp_path}/rank_0") as buffer:
        buffer.add_trajectories([given])
        batch = buffer.sample(200, replace=True)
        numbers = torch.tensor(check_batch(batch, 200))
        step = numbers % 10000 // 100
        values = given.prev_values.reshape(2, 4, 2, 1)[:, :3].reshape(6, 2, 1)
        assert torch.equal(batch["prev_values"][:, 0], values[step, numbers % 100, 0])
        assert torch.equal(batch["curr_obs"]["nested"]["deep"][:, 0], numbers.float())
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    (tree,) = saved_trees(tmp_path)
    assert tree["dones"].shape == (8, 2, 1)
    same(tree, dict(vars(given)))


# -- 6: other fields than the others have


def test_6_a_missing_or_an_extra_field_is_refused_and_nothing_is_added() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=2)
    buffer.add_trajectories([make(0), make(1)])
    before = buffer.get_stats(), buffer.trajectory_ids
    lacking, more, wider = make(2), make(2), make(2)
    lacking.actions = None
    more.curr_obs["depth"] = number(2, 4, 2)
    wider.actions = wider.actions.repeat(1, 1, 2)
    for odd, word in ((lacking, "lacks field 'actions'"), (more, "has field 'curr_obs/depth'"), (wider, "actions")):
        with pytest.raises(FieldError, match=word):
            buffer.add_trajectories([make(3), odd])
    assert (buffer.get_stats(), buffer.trajectory_ids) == before
    assert everything(buffer) == {0, 1}
    assert buffer.add_trajectories([make(2)]) == [2]


@pytest.mark.parametrize("missing", ["skip", 7])
def test_6_fields_that_some_lack_are_left_out_or_filled_in(missing: Any, tmp_path: Path) -> None:
    lacking = make(1)
    lacking.actions = None
    with saving(tmp_path, missing=missing, cache_size=0) as buffer:
        buffer.add_trajectories([make(0), lacking])
        for _ in ("in memory", "in the archive"):
            batch = buffer.sample(100, replace=True)
            n = batch["prev_logprobs"]
            if missing == "skip":
                assert "actions" not in batch
            else:
                of_second = (n >= 10000)[:, 0]
                assert 0 < of_second.sum() < 100
                assert (batch["actions"][of_second] == 7).all()
                assert torch.equal(batch["actions"][~of_second], torch.cat([n, -n], -1)[~of_second])
            buffer.flush()
        assert buffer.get_stats()["cache_size"] == 0


# -- 7: loading into a used buffer, clear()


def test_7_loading_into_a_used_buffer_replaces_what_it_has(tmp_path: Path) -> None:
    with saving(tmp_path / "a") as buffer:
        buffer.add_trajectories([make(7), make(8)])
        buffer.save_checkpoint(f"{tmp_path}/a/rank_0")
    with saving(tmp_path / "b") as buffer:
        buffer.add_trajectories([make(i) for i in range(5)])
        assert everything(buffer) == {0, 1, 2, 3, 4}
        buffer.save_checkpoint(f"{tmp_path}/b/rank_0")
        buffer.load_checkpoint(f"{tmp_path}/a/rank_0")
        assert everything(buffer) == {7, 8}
        buffer.load_checkpoint(f"{tmp_path}/b/rank_0")
        assert everything(buffer) == {0, 1, 2, 3, 4}
        buffer.add_trajectories([make(5)])
        buffer.save_checkpoint(f"{tmp_path}/b/rank_0")
    with loaded(tmp_path / "b") as buffer:
        assert everything(buffer) == {0, 1, 2, 3, 4, 5}


def test_7_a_cleared_buffer_is_empty_and_goes_on(tmp_path: Path) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([make(0), make(1)])
        buffer.sample(4)
        buffer.clear()
        assert (len(buffer), buffer.total_samples, buffer.is_ready(1)) == (0, 0, False)
        with pytest.raises(CapacityError, match="empty"):
            buffer.sample(1)
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
        assert buffer.add_trajectories([make(2)]) == [2]
        assert everything(buffer) == {2}
        buffer.save_checkpoint(f"{tmp_path}/rank_0")
    assert [len(ck.episodes) for ck in archive.open(tmp_path).checkpoints] == [0, 1]


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
