"""RLinf's own TrajectoryReplayBuffer and ours, given the same calls: the same answers, and errors of the same kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import archive
from archive.adapters import rlinf as adapter
from archive.base.errors import ArchiveError, CapacityError, NotFoundError, UsageError
from archive.buffers import TrajectoryReplayBuffer
from tests.support.trajectories import check_batch, everything, make, rlinf, saving


def both(count: int, **options: Any) -> tuple[Any, Any]:
    """Their buffer and ours, with the same trajectories."""
    kind, theirs = rlinf()
    made = theirs(**options), TrajectoryReplayBuffer(**options)
    for buffer in made:
        buffer.add_trajectories([make(i, kind=kind) for i in range(count)])
    return made


def same_batch(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in one:
        if isinstance(one[key], dict):
            same_batch(one[key], other[key])
        else:
            assert torch.equal(one[key], other[key]), key


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the kind of its error."""
    try:
        return call()
    except Exception as error:
        return type(error)


# -- how many


@pytest.mark.parametrize("window", [0, 2, 100])
@pytest.mark.parametrize("asked", [1, 8, 16, 17, 1024])
def test_as_many_as_the_window_has(window: int, asked: int) -> None:
    theirs, ours = both(3, sample_window_size=window or 100)
    theirs.sample_window_size = ours.sample_window_size = window
    expected, found = theirs.sample(asked), ours.sample(asked)
    assert len(found["rewards"]) == min(asked, 8 * min(3, window or 3))
    same_batch(expected, found)
    same_batch(theirs.sample_chunks(asked), ours.sample_chunks(asked))


def test_more_than_there_is_only_where_asked_for() -> None:
    buffer = TrajectoryReplayBuffer(seed=3)
    buffer.add_trajectories([make(0)])
    check_batch(buffer.sample(1024), 8)
    check_batch(buffer.sample(1024, replace=True), 1024)
    with pytest.raises(UsageError, match="at least 1"):
        buffer.sample()


# -- nothing to sample, nothing to load


def test_nothing_to_sample_is_a_runtime_error() -> None:
    theirs, ours = both(0)
    assert outcome(lambda: theirs.sample(4)) is RuntimeError
    for ask in (ours.sample, ours.sample_chunks):
        with pytest.raises(RuntimeError, match="empty") as caught:
            ask(4)
        assert isinstance(caught.value, CapacityError)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_folder_that_is_not_there_is_a_file_not_found_error(tmp_path: Path, distributed: bool) -> None:
    theirs, ours = both(0)
    for buffer in (theirs, ours):
        with pytest.raises(FileNotFoundError):
            buffer.load_checkpoint(str(tmp_path / "gone" / "rank_0"), distributed, 0, 1)
    with pytest.raises(NotFoundError, match="gone"):
        ours.load_checkpoint(tmp_path / "gone" / "rank_0")


def test_a_folder_of_rlinf_and_an_empty_archive_are_file_not_found_errors(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / "metadata.json").write_text(json.dumps({"size": 0}))
    with pytest.raises(FileNotFoundError, match="import_checkpoint"):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "rank_0")
    archive.create(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no trajectories") as caught:
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "empty")
    assert isinstance(caught.value, NotFoundError)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_is_none_of_them_is_a_value_error(tmp_path: Path, rank: int) -> None:
    theirs, ours = both(2)
    theirs.save_checkpoint(str(tmp_path / "theirs"))
    ours.save_checkpoint(str(tmp_path / "ours"))
    for buffer, name in ((theirs, "theirs"), (ours, "ours")):
        with pytest.raises(ValueError, match="rank"):
            buffer.load_checkpoint(str(tmp_path / name), is_distributed=True, local_rank=rank, world_size=3)


# -- the documented flow of a demonstration: collect with auto_save, and load the folder; nobody calls save_checkpoint


def test_what_auto_save_left_is_loaded_without_a_checkpoint(tmp_path: Path) -> None:
    kind, theirs = rlinf()
    loaded = []
    for buffer, root in ((theirs, tmp_path / "theirs"), (TrajectoryReplayBuffer, tmp_path / "ours")):
        made = buffer(auto_save=True, auto_save_path=str(root / "demos"))
        made.add_trajectories([make(i, kind=kind) for i in range(5)])
        made.close()
        loaded.append(buffer())
        loaded[-1].load_checkpoint(str(root / "demos"), is_distributed=False)
    assert [len(b) for b in loaded] == [5, 5]
    assert loaded[0].get_stats() == loaded[1].get_stats()
    same_batch(loaded[0].sample(1024), loaded[1].sample(1024))


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_what_auto_save_left_is_dealt_out_as_rlinf_deals_it(tmp_path: Path, world: int) -> None:
    kind, theirs = rlinf()
    for buffer, root in ((theirs, tmp_path / "theirs"), (TrajectoryReplayBuffer, tmp_path / "ours")):
        with_auto_save = buffer(auto_save=True, auto_save_path=str(root))
        with_auto_save.add_trajectories([make(i, kind=kind) for i in range(5)])
        with_auto_save.close()
    for rank in range(world):
        one, other = theirs(), TrajectoryReplayBuffer()
        one.load_checkpoint(str(tmp_path / "theirs"), True, rank, world)
        other.load_checkpoint(str(tmp_path / "ours"), True, rank, world)
        assert other.trajectory_ids == one._trajectory_id_list
        if len(one):
            same_batch(one.sample(1024), other.sample(1024)) if world == 1 else None
            assert everything(other) == set(one._trajectory_id_list)


def test_two_ranks_that_left_no_checkpoint(tmp_path: Path) -> None:
    """Each rank takes its own; a job of another size shares all out."""
    for rank in range(2):
        made = TrajectoryReplayBuffer(
            auto_save=True, auto_save_path=f"{tmp_path}/rank_{rank}", world_size=2, session=f"s{rank}"
        )
        made.add_trajectories([make(10 * rank + i) for i in range(3)])
        made.close()
    for rank in range(2):
        own = TrajectoryReplayBuffer()
        own.load_checkpoint(f"{tmp_path}/rank_{rank}", world_size=2)
        assert everything(own) == {10 * rank + i for i in range(3)}
    whole = TrajectoryReplayBuffer()
    whole.load_checkpoint(f"{tmp_path}/rank_0", world_size=1)
    assert everything(whole) == {0, 1, 2, 10, 11, 12}
    part = TrajectoryReplayBuffer()
    part.load_checkpoint(f"{tmp_path}/rank_2", world_size=3)
    assert len(part) == 2


def test_a_run_goes_on_from_what_auto_save_left(tmp_path: Path) -> None:
    """Ids go on, what is saved next has all, and it uploads the new ones only where it refers to the old."""
    with saving(tmp_path) as first:
        first.add_trajectories([make(0), make(1)])
    again = saving(tmp_path)
    again.load_checkpoint(f"{tmp_path}/rank_0")
    assert again.add_trajectories([make(2)]) == [2]
    again.save_checkpoint(f"{tmp_path}/rank_0").result()
    again.close()
    assert everything(again) == {0, 1, 2}
    once_more = TrajectoryReplayBuffer()
    once_more.load_checkpoint(f"{tmp_path}/rank_0")
    assert everything(once_more) == {0, 1, 2}


def test_a_checkpoint_is_loaded_rather_than_what_came_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saving(tmp_path) as buffer:
        buffer.add_trajectories([make(0)])
        buffer.save_checkpoint(f"{tmp_path}/rank_0").result()
        buffer.add_trajectories([make(1)])
    loaded = TrajectoryReplayBuffer()
    loaded.load_checkpoint(f"{tmp_path}/rank_0")
    assert everything(loaded) == {0}


# -- what its workers call besides


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_flattening_a_trajectory(extra: int) -> None:
    kind, _ = rlinf()
    theirs, ours = both(0)
    given = make(3, steps=4, extra=extra, kind=kind)
    expected, found = theirs._flatten_trajectory(given), ours._flatten_trajectory(given)
    assert found.keys() == expected.keys()
    same_batch(expected, found)
    assert len(ours) == 0
    with pytest.raises(ArchiveError, match="no trajectory"):
        ours._flatten_trajectory(object())


# -- memory


@pytest.mark.parametrize("cache_size", [0, 1, 3])
def test_the_cache_is_bounded_before_anything_is_committed(tmp_path: Path, cache_size: int) -> None:
    """What does not fit is committed at once, so that it can be read again."""
    with saving(tmp_path, cache_size=cache_size, auto_save_interval_s=3600.0) as buffer:
        for i in range(8):
            buffer.add_trajectories([make(i)])
            assert buffer.get_stats()["cache_size"] <= cache_size
        buffer.flush()
        assert buffer.get_stats()["cache_size"] == cache_size
        assert everything(buffer) == set(range(8))


# -- its folders


def test_a_folder_that_outlived_its_window_is_imported_and_the_rest_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With auto_save its save_checkpoint copies the last window, and lists all."""
    kind, theirs = rlinf()
    made = theirs(auto_save=True, auto_save_path=str(tmp_path / "live"), sample_window_size=2)
    made.add_trajectories([make(i, kind=kind) for i in range(5)])
    made.close()
    made.sample(4)
    made._checkpoint_executor = ThreadPoolExecutor(1)
    made.save_checkpoint(str(tmp_path / "saved"))
    made._checkpoint_executor.shutdown()
    ck = adapter.import_checkpoint(tmp_path / "saved", archive.create(tmp_path / "arc"))
    assert sorted(e.metadata["trajectory_id"] for e in ck.episodes) == [3, 4]
    (problem,) = adapter.problems(ck)
    assert (problem.kind, "3 oldest trajectories of 5" in problem.why) == ("outlived", True)
    assert "3 oldest trajectories of 5" in caplog.text


@pytest.mark.parametrize("kind", ["pt", "pkl"])
def test_files_keep_their_kind(tmp_path: Path, kind: str) -> None:
    cls, theirs = rlinf()
    made = theirs(sample_window_size=5, trajectory_format=kind)
    made.add_trajectories([make(i, kind=cls) for i in range(2)])
    made.save_checkpoint(str(tmp_path / "saved"))
    ck = adapter.import_checkpoint(tmp_path / "saved", archive.create(tmp_path / "arc"), allow_pickle=True)
    adapter.export_checkpoint(ck, tmp_path / "out")
    names = [sorted(f.name for f in (tmp_path / where).iterdir()) for where in ("saved", "out")]
    assert names[0] == names[1]
    again = theirs(sample_window_size=5)
    again.load_checkpoint(str(tmp_path / "out"))
    assert again.trajectory_format == kind
    same_batch(made.sample(16), again.sample(16))
