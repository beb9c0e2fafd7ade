"""Minari, d3rlpy's and D4RL's files, LeRobot: into an archive and back,
checked with the real packages where they install."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import archive
from archive.adapters import lerobot, minari, npz
from archive.base.errors import FieldError, IntegrityError, NotFoundError, UpgradeError, UsageError
from tests.support.archives import fresh
from tests.support.backends import make_backend
from tests.support.dataset_files import LENGTHS, flat, same, write_flat, write_lerobot
from tests.support.worlds import STORES

# -- Minari ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_minari_dataset_there_and_back(pen: Any) -> None:
    ck = minari.import_dataset("hand/pen-v0", fresh())
    assert (ck.name, len(ck.episodes)) == ("hand-pen-v0", 3)
    assert [(e.terminated, e.truncated, e.metadata["seed"]) for e in ck.episodes] == [
        (True, False, 7), (False, True, 8), (None, None, 9),
    ]  # fmt: skip
    assert [e.complete for e in ck.episodes] == [True, True, False]
    assert ck.episodes[2].read()["observations"]["image"].shape == (6, 8, 8, 3)
    assert ck.progress["minari"]["algorithm_name"] == "expert"
    again = minari.export_dataset(ck, "hand/pen-again-v1", author="somebody")
    assert again.observation_space == pen.observation_space
    assert again.action_space == pen.action_space
    for old, new in zip(pen.iterate_episodes(), again.iterate_episodes(), strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations", "infos"):
            same(getattr(old, name), getattr(new, name))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_some_episodes_of_another_origin_to_minari(pen: Any) -> None:
    arc = fresh()
    with arc.writer(0, 1) as w:
        for n in LENGTHS:
            obs = np.arange(n + 1, dtype=np.float32)[:, None]
            w.add_episode({"obs": obs[:-1], "next": {"obs": obs[1:]}, "action": np.arange(n), "reward": np.ones(n)})
    made = minari.export_dataset(arc.refresh().episodes[:2], "hand/some-v0", next_observations="next/obs")
    assert [e.observations[:, 0].tolist() for e in made.iterate_episodes()] == [[0, 1, 2, 3], [0, 1]]
    with pytest.raises(FieldError, match="Minari has one more"):
        minari.export_dataset(arc, "hand/more-v0")
    with pytest.raises(FieldError, match="which field has the rewards"):
        minari.export_dataset(arc, "hand/more-v0", next_observations="next/obs", rewards="gain")
    with pytest.raises(NotFoundError, match="no episodes"):
        minari.export_dataset(arc.episodes[:0], "hand/more-v0")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_follows_the_last_step_is_known_from_next_of(pen: Any) -> None:
    arc = fresh()
    schema = archive.Schema(next_of={"next/obs/x": "obs/x", "next/obs/seen.all": "obs/seen.all"})
    with arc.writer(0, 1, schema=schema) as w:
        for n in LENGTHS:
            obs = {"x": np.arange(n + 1.0)[:, None], "seen.all": np.arange(n + 1) * 2}
            first, after = ({key: value[at] for key, value in obs.items()} for at in (slice(None, -1), slice(1, None)))
            w.add_episode({"obs": first, "next": {"obs": after}, "action": np.arange(n), "reward": np.ones(n)})
        w.checkpoint(1, "all", wait=True)
    arc = arc.refresh()
    assert arc.episodes.next_of == {
        ("next", "obs", "x"): ("obs", "x"),
        ("next", "obs", "seen.all"): ("obs", "seen.all"),
    }
    for number, source in enumerate((arc, arc.checkpoints["all"], arc.episodes[:3])):
        made = minari.export_dataset(source, f"hand/followed{number}-v0")
        for episode, n in zip(made.iterate_episodes(), LENGTHS, strict=True):
            assert episode.observations["x"][:, 0].tolist() == list(range(n + 1))
            assert episode.observations["seen.all"].tolist() == list(range(0, 2 * n + 1, 2))
    # a field that has one row more itself needs nothing else
    mixed = fresh()
    with mixed.writer(0, 1, schema=archive.Schema(next_of={"after": "obs/x"}, axes={"obs/y": "offset"})) as w:
        obs = {"x": np.arange(3), "y": np.arange(4)}
        w.add_episode({"obs": obs, "after": np.arange(1, 4), "action": np.arange(3), "reward": np.ones(3)})
    (only,) = minari.export_dataset(mixed.refresh(), "hand/mixed-v0").iterate_episodes()
    assert [only.observations[key].tolist() for key in "xy"] == [[0, 1, 2, 3]] * 2


# -- npz and HDF5 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
def test_flat_files_there_and_back(suffix: str, tmp_path: Path) -> None:
    arrays = flat()
    ck = npz.import_dataset(write_flat(tmp_path / f"hopper{suffix}", arrays), fresh())
    assert ck.name == "hopper"
    assert [e.length for e in ck.episodes] == list(LENGTHS)
    assert [(e.terminated, e.truncated, e.complete) for e in ck.episodes] == [
        (True, False, True), (False, True, True), (None, None, False),
    ]  # fmt: skip
    same(ck.episodes[2].read()["infos"]["qpos"], arrays["infos/qpos"][4:])
    assert ck.progress["npz"]["left_out"] == ["metadata"]
    npz.export_dataset(ck, tmp_path / f"again{suffix}", layout="flat")
    other = npz.import_dataset(tmp_path / f"again{suffix}", fresh())
    for old, new in zip(ck.episodes, other.episodes, strict=True):
        for name in ("observations", "actions", "rewards"):
            same(old.read([name]), new.read([name]))
        assert (old.terminated is True, old.length) == (new.terminated, new.length)


def test_files_by_episode_are_those_of_d3rlpy(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    ck = npz.import_dataset(write_flat(tmp_path / "hopper.npz", flat()), fresh())
    npz.export_dataset(ck, tmp_path / "d.h5")
    with h5py.File(tmp_path / "d.h5") as file:
        assert [name.decode() for name in file["columns"][()]] == ["observations", "actions", "rewards", "terminated"]
        assert (file["version"][()].decode(), int(file["num_episodes"][()])) == ("2.1", 3)
        assert file["rewards_2"].shape == (5, 1)
        assert [bool(file[f"terminated_{i}"][()]) for i in range(3)] == [True, False, False]
    other = npz.import_dataset(tmp_path / "d.h5", fresh())
    for old, new in zip(ck.episodes, other.episodes, strict=True):
        same(old.read(["observations", "actions"]), new.read(["observations", "actions"]))
    with h5py.File(tmp_path / "d.h5", "a") as file:
        del file["actions_1"]
    with pytest.raises(IntegrityError, match="episode 1 of the file has no actions"):
        npz.import_dataset(tmp_path / "d.h5", fresh())


def test_d3rlpy_itself_reads_and_writes_them(tmp_path: Path) -> None:
    dataset = pytest.importorskip("d3rlpy.dataset", reason="d3rlpy is not installed", exc_type=ImportError)
    arc = fresh()
    with arc.writer(0, 1) as w:
        for n in LENGTHS:
            obs = {"a": np.ones((n, 2), np.float32), "b": np.full((n, 1, 4, 4), n, np.uint8)}
            w.add_episode({"obs": obs, "action": np.ones((n, 1), np.float32), "reward": np.ones(n)}, terminated=True)
    npz.export_dataset(arc.refresh(), tmp_path / "d.h5")
    with (tmp_path / "d.h5").open("rb") as file:
        buffer = dataset.ReplayBuffer.load(file, dataset.InfiniteBuffer())
    assert [len(e) for e in buffer.episodes] == list(LENGTHS)
    assert [list(map(np.shape, e.observations)) for e in buffer.episodes] == [[(n, 2), (n, 1, 4, 4)] for n in LENGTHS]
    assert buffer.sample_transition_batch(4).rewards.shape == (4, 1)
    with (tmp_path / "e.h5").open("w+b") as file:
        buffer.dump(file)
    again = npz.import_dataset(tmp_path / "e.h5", fresh())
    assert sorted(again.episodes[1].read()["observations"]) == ["0", "1"]
    assert [e.terminated for e in again.episodes] == [True] * 3


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    arc = fresh()
    (tmp_path / "noise.npz").write_bytes(b"PK noise")
    (tmp_path / "text.csv").write_text("1,2")
    np.savez(tmp_path / "objects.npz", observations=np.array([{}], object))
    for error, match, name in [
        (IntegrityError, "no readable .npz", "noise.npz"), (IntegrityError, "allow_pickle", "objects.npz"),
        (UsageError, "must end in", "text.csv"), (OSError, "gone.npz", "gone.npz"),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            npz.import_dataset(tmp_path / name, arc)
    np.savez(tmp_path / "half.npz", observations=np.zeros(3), rewards=np.zeros(3))
    with pytest.raises(FieldError, match="has no 'actions'"):
        npz.import_dataset(tmp_path / "half.npz", arc)
    assert not arc.refresh().checkpoints


# -- LeRobot -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
def test_a_lerobot_dataset_there_and_back(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    ck = lerobot.import_dataset(write_lerobot(tmp_path / "pusht"), fresh())
    assert (ck.name, ck.progress["lerobot"]["robot_type"]) == ("pusht", "arm")
    first, second = ck.episodes
    assert first.metadata == {"episode_index": 0, "tasks": ["push", "pull"]}
    assert second.metadata == {"episode_index": 1, "task": "pull"}
    steps = first.read()
    assert steps["observation"]["state"].tolist() == [[0, 0.5], [1, 0.5], [2, 0.5], [3, 0.5]]
    assert (steps["grid"].shape, steps["next"]["done"].dtype, steps["task_index"].tolist()) == (
        (4, 2, 2),
        bool,
        [0, 0, 1, 1],
    )
    root = make_backend(request, store, tmp_path)
    lerobot.export_dataset(ck, root.url, storage_options=root.storage_options)
    again = lerobot.import_dataset(root.url, fresh(), storage_options=root.storage_options)
    for old, new in zip(ck.episodes, again.episodes, strict=True):
        same(old.read(), new.read())
        assert old.metadata == new.metadata
    with pytest.raises(UsageError, match="has a dataset already"):
        lerobot.export_dataset(ck, root.url, storage_options=root.storage_options)


def test_exported_files_read_as_lerobot_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr("archive.adapters.lerobot.dataset.FILE_BYTES", 200)
    arc = fresh()
    with arc.writer(0, 1) as w:
        for i, n in enumerate(LENGTHS):
            steps = {"observation": {"state": np.full((n, 3), i, np.float32)}, "action": np.arange(n, dtype=np.float32)}
            w.add_episode(steps, metadata={"task": f"task {i % 2}"})
    lerobot.export_dataset(arc.refresh(), tmp_path / "d", fps=10, robot_type="arm")
    info = json.loads((tmp_path / "d/meta/info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 9, 2)
    assert info["features"]["observation.state"] == {"dtype": "float32", "shape": [3], "names": None}
    tasks = pandas.read_parquet(tmp_path / "d/meta/tasks.parquet")
    assert tasks.loc["task 1"].task_index == 1
    episodes = pandas.read_parquet(tmp_path / "d/meta/episodes")
    assert episodes["tasks"].map(list).tolist() == [["task 0"], ["task 1"], ["task 0"]]
    frames = []
    for i, about in episodes.iterrows():
        place = {"chunk_index": about["data/chunk_index"], "file_index": about["data/file_index"]}
        data = pandas.read_parquet(tmp_path / "d" / info["data_path"].format(**place))
        part = data[data["episode_index"] == i]
        assert part["index"].tolist() == list(range(about["dataset_from_index"], about["dataset_to_index"]))
        assert part["timestamp"].tolist() == [float(np.float32(t) / np.float32(10)) for t in range(about["length"])]
        frames += np.stack(part["observation.state"]).tolist()
    assert np.array(frames)[:, 0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert len(list((tmp_path / "d/data/chunk-000").iterdir())) > 1
    stats = json.loads((tmp_path / "d/meta/stats.json").read_text())["observation.state"]
    assert (stats["min"], stats["max"], stats["count"]) == ([0] * 3, [2] * 3, [9])
    assert stats["mean"] == pytest.approx([11 / 9] * 3)
    assert stats["std"] == pytest.approx([float(np.array(frames)[:, 0].std())] * 3)


def test_what_lerobot_has_and_this_does_not_read_is_refused(tmp_path: Path) -> None:
    arc, old = fresh(), write_lerobot(tmp_path / "old", codebase_version="v2.1")
    with pytest.raises(UpgradeError, match=r"version v2\.1"):
        lerobot.import_dataset(old, arc)
    features = {"action": {"dtype": "float32", "shape": [1]}, "cam": {"dtype": "video", "shape": [3, 4, 4]}}
    video = write_lerobot(tmp_path / "video", features=features)
    with pytest.raises(UsageError, match=r"cam.*on_video='skip'"):
        lerobot.import_dataset(video, arc)
    ck = lerobot.import_dataset(video, arc, on_video="skip")
    assert ck.progress["lerobot"]["left_out"] == ["cam"]
    assert sorted(ck.episodes[1].read()) == ["action"]
    (tmp_path / "old/meta/info.json").write_text(
        (tmp_path / "video/meta/info.json").read_text().replace('"cam"', '"x"')
    )
    table = pq.read_table(old / "data/chunk-000/file-001.parquet")
    pq.write_table(table.slice(1), old / "data/chunk-000/file-001.parquet")
    before = len(arc.refresh().episodes)
    with pytest.raises(FieldError, match="has 2 steps of episode 1, not 3"):
        lerobot.import_dataset(old, arc, on_video="skip")
    assert len(arc.refresh().episodes) == before  # nothing of it
    with pytest.raises(UsageError, match="Give fps="):
        lerobot.export_dataset(arc, io.StringIO("x"))


def test_lerobot_itself_reads_them(tmp_path: Path) -> None:
    real = pytest.importorskip(
        "lerobot.datasets.lerobot_dataset", reason="lerobot is not installed", exc_type=ImportError
    )
    lerobot.export_dataset(lerobot.import_dataset(write_lerobot(tmp_path / "pusht"), fresh()), tmp_path / "again")
    dataset = real.LeRobotDataset("some/body", root=tmp_path / "again")
    assert (dataset.num_episodes, dataset.num_frames, dataset.fps) == (2, 7, 10)
    assert (dataset[2]["task"], dataset[2]["observation.state"].tolist()) == ("pull", [2, 0.5])
    assert dataset[6]["grid"].tolist() == [[2, 1], [2, 3]]
