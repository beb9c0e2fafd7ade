"""Datasets with odd content: strings, empty episodes, arrays that don't fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archive.adapters import lerobot, minari, npz
from archive.base.errors import FieldError, IntegrityError, NotFoundError, UsageError
from tests.support.archives import fresh

Episode = tuple[dict[str, Any], dict[str, Any]]


def episode(length: int, width: int = 2, **ends: bool) -> Episode:
    steps = {"observations": np.ones((length, width)), "actions": np.zeros(length), "rewards": np.ones(length)}
    return steps, ends


def archived(*episodes: Episode) -> Any:
    with fresh().writer() as w:
        for steps, ends in episodes:
            w.add_episode(steps, **ends)
        return w.checkpoint(1).result(60)


def ends_of(ck: Any) -> list[tuple[int, Any]]:
    return [(e.length, e.terminated) for e in ck.episodes]


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_an_episode_without_steps_takes_no_end_from_its_neighbour(suffix: str, tmp_path: Path) -> None:
    ck = archived(episode(3, terminated=True), episode(0), episode(2, truncated=True))
    npz.export_dataset(ck, tmp_path / f"x{suffix}")
    assert ends_of(npz.import_dataset(tmp_path / f"x{suffix}", fresh())) == [(3, True), (2, False)]
    with pytest.raises(NotFoundError, match="no episodes with steps"):
        npz.export_dataset(archived(episode(0)), tmp_path / f"y{suffix}")


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
@pytest.mark.parametrize("kind", [object, str])
def test_strings_are_written_without_pickle(suffix: str, kind: type, tmp_path: Path) -> None:
    texts = {"observations": np.array(["a", "ünd"], kind)}
    npz.export_dataset(archived(({**episode(2)[0], **texts}, {})), tmp_path / f"x{suffix}")
    again = npz.import_dataset(tmp_path / f"x{suffix}", fresh()).episodes[0].read()
    assert again["observations"].tolist() == ["a", "ünd"]


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_what_the_file_has_no_place_for_is_refused(suffix: str, tmp_path: Path) -> None:
    import ml_dtypes

    steps = {**episode(2)[0], "observations": np.ones((2, 3), ml_dtypes.bfloat16)}
    with pytest.raises(FieldError, match="'observations' is bfloat16"):
        npz.export_dataset(archived((steps, {})), tmp_path / f"x{suffix}")
    with pytest.raises(FieldError, match="observations differ in shape"):
        npz.export_dataset(archived(episode(2), episode(2, 5)), tmp_path / f"x{suffix}", layout="flat")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("odd", "match"),
    [
        ({"terminals": np.zeros(5)}, r"5 terminals and observations of shape \[6, 2\]"),
        ({"observations": np.ones((5, 2))}, r"6 terminals and observations of shape \[5, 2\]"),
        ({"rewards": np.float32(1)}, r"rewards of shape \[\]"),
        ({"timeouts": np.zeros(7)}, r"timeouts of shape \[7\]"),
        ({"rewards/own": np.zeros(6)}, "an array 'rewards' and others below it"),
        (dict.fromkeys(("observations", "actions", "rewards", "terminals"), np.zeros(0)), "no steps"),
    ],
)
def test_a_file_whose_arrays_do_not_fit_together_is_refused(odd: dict[str, Any], match: str, tmp_path: Path) -> None:
    """Rather than imported without its observations."""
    arc = fresh()
    np.savez(tmp_path / "x.npz", **{**episode(6)[0], "terminals": np.zeros(6), **odd})
    with pytest.raises(FieldError, match=match):
        npz.import_dataset(tmp_path / "x.npz", arc)
    assert len(arc.refresh().checkpoints) == 0


# -- LeRobot -----------------------------------------------------------------------------------------------------------


def test_lerobot_gets_no_episode_without_steps(tmp_path: Path) -> None:
    lerobot.export_dataset(archived(episode(3), episode(0), episode(2)), tmp_path / "x", fps=10)
    again = lerobot.import_dataset(tmp_path / "x", fresh())
    assert [(e.length, e.metadata["episode_index"]) for e in again.episodes] == [(3, 0), (2, 1)]
    with pytest.raises(NotFoundError, match="no episodes with steps"):
        lerobot.export_dataset(archived(episode(0)), tmp_path / "y", fps=10)


def test_lerobot_gets_strings_of_any_kind(tmp_path: Path) -> None:
    steps = {"action": np.zeros((2, 1)), "a": np.array(["x", "ü"]), "b": np.array(["x", "yy"], object)}
    lerobot.export_dataset(archived((steps, {})), tmp_path / "x", fps=10)
    again = lerobot.import_dataset(tmp_path / "x", fresh()).episodes[0].read()
    assert (again["a"].tolist(), again["b"].tolist()) == (["x", "ü"], ["x", "yy"])


@pytest.mark.parametrize(
    ("odd", "match"),
    [
        ({"index": np.zeros(2)}, "'index': LeRobot counts it itself"),
        ({"a.b": np.zeros(2), "a": {"b": np.ones(2)}}, r"would be 'a\.b': two fields"),
        ({"task_index": np.array([0, 1])}, r"'task_index' has 2 tasks, .* names \[''\]"),
        ({"words": np.array([["x", "y"]] * 2, object)}, r"'words' of object \[2\]"),
        ({"nothing": np.zeros((2, 0))}, r"'nothing' of float64 \[0\]"),
        ({"task_index": np.zeros((2, 8, 8, 3), np.uint8)}, r"'task_index': LeRobot has a task's number .* rename="),
        ({"timestamp": np.array([1.7e9, 1.7e9 + 0.1])}, r"'timestamp' is not the seconds .* rename="),
        ({"timestamp": np.array([0, np.nan])}, r"'timestamp' is not the seconds .* rename="),
        ({"timestamp": np.zeros((2, 8, 8, 3), np.uint8)}, r"'timestamp' is not the seconds .* rename="),
        ({"cam/front": np.zeros(2)}, r"'cam/front' would be 'cam/front': LeRobot takes no such name; rename="),
    ],
)
def test_lerobot_loses_no_field(odd: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match=match):
        lerobot.export_dataset(archived(({"action": np.zeros((2, 1)), **odd}, {})), tmp_path / "x", fps=10)
    assert not (tmp_path / "x" / "meta").exists()


def test_lerobot_gets_instructions_and_names_and_says_what_it_left_out(tmp_path: Path) -> None:
    steps = {
        "cams": {"front": np.zeros((2, 4))},
        "timestamp": np.array([1.7e9, 1.7e9 + 0.1]),
        "action": np.zeros((2, 1)),
    }
    arc = archived((steps, {"metadata": {"lang": {"en": "push it"}, "scene": 3}}), (steps, {"metadata": {"scene": 4}}))
    rename = {"cams": "observation.images", "timestamp": "wall_time"}
    report = lerobot.export_dataset(arc, tmp_path / "x", fps=10, rename=rename)
    assert report.notes[0].startswith("2 episodes have no task: task='metadata.KEY'")
    assert "'scene' of 2, 'lang' of 1 episodes' metadata" in report.notes[1]
    with pytest.raises(FieldError, match=r"has no metadata\.lang\.en \('scene' in its metadata\)"):
        lerobot.export_dataset(arc, tmp_path / "y", fps=10, rename=rename, task="metadata.lang.en")
    report = lerobot.export_dataset(arc.episodes[:1], tmp_path / "y", fps=10, rename=rename, task="metadata.lang.en")
    assert (report.episodes, report.steps, len(report.notes)) == (1, 2, 1)
    again = lerobot.import_dataset(tmp_path / "y", fresh()).episodes[0]
    assert again.metadata["task"] == "push it"
    assert sorted(again.fields) == ["action", "observation/images/front", "timestamp", "wall_time"]
    with pytest.raises(UsageError, match=r"rename='front': no episode has that field; fields: .*cams/front"):
        lerobot.export_dataset(arc, tmp_path / "z", fps=10, rename={"front": "x"})
    with pytest.raises(UsageError, match=r"task='lang': give where"):
        lerobot.export_dataset(arc, tmp_path / "z", fps=10, task="lang")


# -- Minari ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minaris_own_refusals_are_errors_of_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari", reason="minari is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(NotFoundError, match="'odd/none-v0' is not on this machine"):
        minari.import_dataset("odd/none-v0", fresh())
    steps = {"obs": np.ones((2, 3)), "next": {"obs": np.ones((2, 3))}, "action": np.zeros((2, 1)), "reward": np.ones(2)}
    nothing = {
        "obs": np.ones((0, 3)),
        "next": {"obs": np.ones((0, 3))},
        "action": np.zeros((0, 1)),
        "reward": np.ones(0),
    }
    ck = archived((steps, {}), (nothing, {}))
    made = minari.export_dataset(ck, "odd/taken-v0", next_observations="next/obs")
    assert [len(e.rewards) for e in made.iterate_episodes()] == [2]
    for name in ("odd/taken-v0", "no name"):
        with pytest.raises(UsageError, match=f"Minari does not take this as dataset '{name}'"):
            minari.export_dataset(ck, name, next_observations="next/obs")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["a/b", "a\0b", ".", "", "a.b", "..", "ü %2F"])
def test_minari_reads_back_the_names_that_it_gets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pytest.importorskip("minari", reason="minari is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    obs = {name: np.ones((2, 3)), "x": np.ones((2, 3))}
    arc = archived(({"obs": obs, "next": {"obs": obs}, "action": np.zeros((2, 1)), "reward": np.ones(2)}, {}))
    if name in ("a.b", "..", "ü %2F"):
        minari.export_dataset(arc, "odd/names-v0", next_observations="next/obs")
        (episode,) = real.load_dataset("odd/names-v0").iterate_episodes()
        assert {key: value.shape for key, value in episode.observations.items()} == {name: (3, 3), "x": (3, 3)}
        return
    with pytest.raises(FieldError, match="HDF5 has no name"):
        minari.export_dataset(arc, "odd/names-v0", next_observations="next/obs")
    assert list(tmp_path.iterdir()) == []


def test_names_of_characters_that_are_none_are_an_error(tmp_path: Path) -> None:
    names = np.frombuffer(np.array([0x7FFFFFFF, 65], "<u4").tobytes(), "<U2")
    np.savez(tmp_path / "odd.npz", columns=names, num_episodes=2)
    with pytest.raises(IntegrityError, match=r"no readable \.npz file"):
        npz.import_dataset(tmp_path / "odd.npz", fresh())
