"""RLinf's live replay buffer: saved, restored into a world of the same size or another, and gone on with."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.adapters import rlinf
from archive.base.errors import IntegrityError, NotFoundError, StorageError, UsageError
from tests.support import rlinf_objects as objects
from tests.support.backends import make_backend
from tests.support.rlinf_objects import assert_same
from tests.support.worlds import STORES, WORLDS, save_world, shares


@pytest.fixture(autouse=True)
def package() -> Any:
    return objects.package()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"memory://rlinf-{request.node.name}"


def saved(url: str, made: Any, **options: Any) -> Any:
    return save_world(url, [made], rlinf.save, **options)


@pytest.mark.parametrize("auto_save", [False, True])
def test_the_same_world_goes_on_exactly(url: str, tmp_path: Path, auto_save: bool) -> None:
    folders = (tmp_path / "a", tmp_path / "b") if auto_save else (None, None)
    one = objects.buffer(range(5), folder=folders[0])
    objects.samples(one, 3)
    np.random.random(7)
    ck = saved(url, one)
    expected_numpy = np.random.random(3)
    other = objects.buffer(folder=folders[1], seed=99)
    report = rlinf.restore(other, ck, rank=0)
    assert report.episodes == (5 if auto_save else 3)
    assert np.array_equal(np.random.random(3), expected_numpy)
    assert_same(objects.plain_state(one), objects.plain_state(other))
    assert_same(objects.samples(one), objects.samples(other))
    for made in (one, other):
        made.add_trajectories([objects.trajectory(7), objects.trajectory(8, steps=9)])
        objects.wait_for_files(made)
    assert_same(objects.samples(one), objects.samples(other))
    one.close()
    other.close()


def test_files_of_a_buffer_with_auto_save_are_written_again(url: str, tmp_path: Path) -> None:
    one = objects.buffer(range(5), folder=tmp_path / "a")
    other = objects.buffer(folder=tmp_path / "b")
    rlinf.restore(other, saved(url, one), rank=0)
    one.close()
    other.close()
    assert_same(objects.saved_trees(tmp_path / "a"), objects.saved_trees(tmp_path / "b"))
    for name in ("metadata.json", "trajectory_index.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_done_fields_keep_their_extra_rows_where_rlinf_has_them(url: str, tmp_path: Path) -> None:
    one = objects.buffer(folder=tmp_path / "a")
    given = objects.tree(3, steps=6, done_rows=2)
    one.add_trajectories([objects.trajectory(3, steps=6, done_rows=2)])
    ck = saved(url, one)
    one.close()
    (ep,) = ck.episodes
    assert ep.length == 6
    assert ep.read(["dones"])["dones"].shape == (8, 2, 1)
    assert ep.fields["dones"].endswith("free")
    assert_same(given["dones"].numpy(), ep.read(["dones"])["dones"])
    wanted = {"trajectory_id": 0, "T": 6, "B": 2, "max_episode_length": 50}
    assert wanted.items() <= ep.metadata.items()


def test_a_save_uploads_only_new_trajectories(url: str) -> None:
    made = objects.buffer(range(3))
    arc = archive.create(url)
    with arc.writer(0, 1) as w:
        rlinf.save(made, w, step=1).result()
        first = arc.episodes.table["episode_id"].to_pylist()
        rlinf.save(made, w, step=2).result()
        assert arc.episodes.table["episode_id"].to_pylist() == first
        made.add_trajectories([objects.trajectory(9)])
        ck = rlinf.save(made, w, step=3).result()
    assert len(arc.episodes) == 4
    assert [ep.metadata["trajectory_id"] for ep in ck.episodes] == [1, 2, 3]  # 0 left the cache
    assert ck.state(0)["lost"].keys() == {0}


def test_after_a_restore_only_new_trajectories_are_uploaded(url: str) -> None:
    ck = saved(url, objects.buffer(range(3)))
    arc = archive.open(url)
    made, share = objects.buffer(), resharding.plan(ck, world_size=1).share(0)
    rlinf.restore(made, share)
    with arc.writer(resume=share, session="second") as w:
        rlinf.save(made, w, step=2).result()
        assert len(arc.episodes) == 3
        made.add_trajectories([objects.trajectory(9)])
        rlinf.save(made, w, step=3).result()
    assert len(arc.episodes) == 4
    again = objects.buffer()
    latest = arc.checkpoints.latest
    assert latest is not None
    rlinf.restore(again, latest, rank=0)
    assert_same(objects.plain_state(made), objects.plain_state(again))


def test_a_number_given_anew_is_another_trajectory(url: str) -> None:
    made = objects.buffer([1, 2])
    with archive.create(url).writer(0, 1) as w:
        rlinf.save(made, w, step=1).result()
        made.clear()
        made.add_trajectories([objects.trajectory(8)])
        ck = rlinf.save(made, w, step=2).result()
    (ep,) = ck.episodes
    assert ep.metadata["trajectory_id"] == 0
    assert np.array_equal(ep.read(["actions"])["actions"], objects.tree(8)["actions"].numpy())


def test_another_archive_gets_everything(url: str) -> None:
    made = objects.buffer(range(3))
    for one in (url, url + "-other"):
        assert len(saved(one, made).episodes) == 3


def test_the_same_ids_in_another_archive_are_others(url: str) -> None:
    one, other = objects.buffer(range(3)), objects.buffer([7, 8, 9])
    saved(url, one, session="same")
    with archive.create(url + "-other").writer(0, 1, session="same") as w:
        rlinf.save(other, w, step=1).result()
        ck = rlinf.save(one, w, step=2).result()
    again = objects.buffer()
    rlinf.restore(again, ck, rank=0)
    assert_same(objects.plain_state(one), objects.plain_state(again))


def test_numbers_of_several_sources_are_given_anew_and_kept(url: str) -> None:
    ck = save_world(url, [objects.buffer(range(4)), objects.buffer([20])], rlinf.save)
    assert [ep.metadata["trajectory_id"] for ep in ck.episodes] == [1, 2, 3, 0]
    (share,) = shares(ck, 1)
    made = objects.buffer(window=9)
    rlinf.restore(made, share)
    assert made._trajectory_id_list == [0, 1, 2, 3]
    with archive.open(url).writer(resume=share, session="second") as w:
        ck = rlinf.save(made, w, step=2).result()
    again = objects.buffer(window=9)
    rlinf.restore(again, ck, rank=0)
    assert_same(objects.plain_state(made), objects.plain_state(again))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("store", STORES)
def test_another_world_gets_every_trajectory_once(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, world: tuple[int, int]
) -> None:
    sources, targets = world
    root = make_backend(request, store, tmp_path)
    made = [objects.buffer(range(10 * rank, 10 * rank + 3 + rank % 2), window=4) for rank in range(sources)]
    ck = save_world(root.url, made, rlinf.save, storage_options=root.storage_options)
    expected = [
        made[rank]._flat_trajectory_cache.get(n) for rank in range(sources) for n in made[rank]._trajectory_id_list
    ]
    got, seeds = [], set()
    for share in shares(ck, targets):
        buffer = objects.buffer(window=20)
        report = rlinf.restore(buffer, share)
        assert report.episodes == len(buffer) == len(share)
        assert buffer.total_samples == 2 * share.steps == 2 * report.steps
        assert len(buffer) == 0 or len(buffer.sample(4)["actions"]) == 4
        assert buffer._trajectory_counter == max(buffer._trajectory_id_list, default=-1) + 1
        got += [buffer._flat_trajectory_cache.get(n) for n in buffer._trajectory_id_list]
        seeds.add(buffer.seed)
    assert_same(expected, got)
    assert len(seeds) == targets


def test_the_next_save_of_another_world_uploads_nothing(url: str) -> None:
    ck = save_world(url, [objects.buffer(range(4 * r, 4 * r + 3)) for r in range(4)], rlinf.save)
    found = []
    for share in shares(ck, 3):
        found.append(objects.buffer(window=10))
        rlinf.restore(found[-1], share)
    arc = archive.open(url)
    before = len(arc.episodes)
    writers = [arc.writer(resume=share, session="second") for share in shares(ck, 3)]
    pending = [rlinf.save(buffer, w, step=2) for buffer, w in zip(found, writers, strict=True)]
    again = [p.result() for p in pending][-1]
    for w in writers:
        w.close()
    assert len(archive.open(url).episodes) == before
    for rank, buffer in enumerate(found):
        other = objects.buffer(window=10, seed=1)
        rlinf.restore(other, again, rank=rank)
        assert_same(objects.plain_state(buffer), objects.plain_state(other))


def test_a_cache_of_another_size_takes_the_newest_and_counts_the_rest(url: str) -> None:
    ck = save_world(url, [objects.buffer(range(3)), objects.buffer(range(3))], rlinf.save)
    small = objects.buffer(window=2)
    (share,) = shares(ck, 1)
    report = rlinf.restore(small, share)
    assert (report.episodes, report.counts["not_in_cache"]) == (2, 4)
    assert small._trajectory_id_list == [4, 5]
    assert "4 not in cache" in str(report)
    assert len(small.sample(5)["actions"]) == 5
    report = rlinf.restore(small, ck, rank=0, existing="replace")  # of the same world
    assert (report.episodes, report.counts["not_in_cache"], small._trajectory_id_list) == (2, 1, [1, 2])
    assert (len(small), small._trajectory_counter, len(small.sample(5)["actions"])) == (2, 3, 5)


def test_what_a_buffer_holds_is_replaced_only_if_asked_to(url: str) -> None:
    ck = saved(url, objects.buffer(range(3)))
    made = objects.buffer([7, 8])
    objects.samples(made, 1)
    before = objects.plain_state(made)
    with pytest.raises(UsageError, match="existing='replace'"):
        rlinf.restore(made, ck, rank=0)
    assert_same(before, objects.plain_state(made))
    rlinf.restore(made, ck, rank=0, existing="replace")
    fresh = objects.buffer()
    rlinf.restore(fresh, ck, rank=0)
    assert_same(objects.plain_state(fresh), objects.plain_state(made))
    assert_same(objects.samples(fresh), objects.samples(made))  # no window of what was there before


def test_the_window_of_what_was_there_before_is_forgotten(url: str) -> None:
    ck = save_world(url, [objects.buffer(range(4)), objects.buffer(range(4))], rlinf.save)
    made = objects.buffer([7])
    objects.samples(made, 1)
    made._trajectory_counter = 50
    made.clear()
    made.add_trajectories([])
    report = rlinf.restore(made, shares(ck, 1)[0], existing="replace")
    assert made._window_cache_ids == []
    assert report.episodes == len(made) == 3
    objects.samples(made, 3)


def test_a_share_that_cannot_be_read_leaves_the_buffer_empty(url: str) -> None:
    ck = saved(url, objects.buffer(range(3)))
    storage = archive.open(url).storage
    storage.delete(archive.open(url).shards)
    made = objects.buffer([7, 8])
    with pytest.raises(StorageError):
        rlinf.restore(made, ck, rank=0, existing="replace")
    assert (len(made), made.get_stats()["cache_size"], made._trajectory_index) == (0, 0, {})


def test_files_that_rlinf_is_still_writing_are_waited_for(url: str, tmp_path: Path) -> None:
    made = objects.buffer(range(2), folder=tmp_path)
    made._save_executor.shutdown()
    path = next(tmp_path.glob("trajectory_1_*"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    timer = threading.Timer(0.3, path.write_bytes, [whole])
    timer.start()
    ck = saved(url, made)
    timer.join()
    assert ck.episodes[1].read(["dones"])["dones"].shape == (5, 2, 1)  # of the file: the cache has four rows


def test_several_buffers_in_one_checkpoint(url: str) -> None:
    both = {"replay": objects.buffer(range(3)), "demo": objects.buffer([20, 21], seed=8)}
    with archive.create(url).writer(0, 1) as w:
        ck = rlinf.save(both, w, step=1).result()
    again = {"replay": objects.buffer(), "demo": objects.buffer()}
    reports = rlinf.restore(again, ck, rank=0)
    assert {name: report.episodes for name, report in reports.items()} == {"replay": 3, "demo": 2}
    for name in both:
        assert_same(objects.plain_state(both[name]), objects.plain_state(again[name]))
    with pytest.raises(NotFoundError, match="no buffer 'other'"):
        rlinf.restore({"other": objects.buffer()}, ck, rank=0)


def test_a_file_that_is_gone_stops_a_save_unless_told_to_skip(url: str, tmp_path: Path) -> None:
    made = objects.buffer(range(4), folder=tmp_path)
    made.close()
    made.auto_save = False  # nothing more is on its way: no need to wait
    gone = next(tmp_path.glob("trajectory_1_*"))
    gone.unlink()
    with archive.create(url).writer(0, 1) as w:
        with pytest.raises(IntegrityError, match=r"trajectory 1 .*on_missing='skip'"):
            rlinf.save(made, w, step=1)
        ck = rlinf.save(made, w, step=1, on_missing="skip").result()
    assert [ep.metadata["trajectory_id"] for ep in ck.episodes] == [0, 2, 3]
    assert ck.state(0)["lost"].keys() == {1}


def test_the_class_where_newer_versions_have_it(url: str, package: Any) -> None:
    name = "rlinf.data.storage.replay.buffer"
    spec = importlib.util.spec_from_file_location(name, package.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        made = module.TrajectoryReplayBuffer(sample_window_size=3)
        made.add_trajectories([objects.trajectory(n) for n in range(2)])
        other = type("Ours", (module.TrajectoryReplayBuffer,), {})(sample_window_size=3)
        rlinf.restore(other, saved(url, made), rank=0)
        assert_same(objects.plain_state(made), objects.plain_state(other))
    finally:
        del sys.modules[name]


def test_other_objects_and_options_are_refused(url: str) -> None:
    with archive.create(url).writer(0, 1) as w:
        with pytest.raises(UsageError, match="a TrajectoryReplayBuffer of RLinf is expected, not list"):
            rlinf.save([], w, step=1)
        with pytest.raises(UsageError, match="on_missing='never'"):
            rlinf.save(objects.buffer(), w, step=1, on_missing="never")
        w.add_episode({"rewards": np.zeros(3)})
        ck = w.checkpoint(1).result()
    for source in (ck, *(share for share in shares(ck, 2) if len(share))):
        made = objects.buffer()
        with pytest.raises(UsageError, match="no trajectory"):
            rlinf.restore(made, source, rank=0)
        assert len(made) == 0


def test_the_example_in_the_docstring_runs(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (rlinf.__doc__ or "").split("\n\n")[1:3]
    code = "\n".join(line[4:] for part in lines for line in part.splitlines())
    assert code.count("\n") < 15
    monkeypatch.chdir(tmp_path)
    code = code.replace("logs/replay_buffer", str(objects.FIXTURE))
    names = {"resharding": resharding, "arc": archive.create(url), "rank": 0, "buffer": objects.buffer(window=50)}
    names["trajectories"] = [objects.trajectory_of(next(iter(objects.saved_trees(objects.FIXTURE).values())))]
    # the share of one rank of three: the other two save as well, in jobs of their own
    code = code.replace("world_size=3", "world_size=1")
    exec(code, names)
    again = objects.buffer(window=50)
    again.load_checkpoint(str(tmp_path / "elsewhere" / "replay_buffer"))
    assert len(again) == 13
