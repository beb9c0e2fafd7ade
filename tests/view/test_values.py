"""Numbers of an episode as the browser asks for them: exact where a curve is thinned, fields of any shape as tables,
pictures that are no bytes on one scale."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import archive
from archive.adapters import video
from archive.base import FieldError, MissingPackageError, NotFoundError
from archive.testing import trace
from archive.view import answers
from archive.view.shown import Shown
from tests.support.shown import ask

STEPS = 40


@pytest.fixture
def shown(archive_url: str) -> Shown:
    """One episode of fields of many kinds."""
    rng = np.random.default_rng(0)
    depth = np.arange(STEPS, dtype=np.float32)[:, None, None] * np.ones((1, 9, 12), np.float32)
    depth[:, 0, 0] = -1
    arc = archive.create(archive_url)
    with arc.writer() as w:
        w.add_episode(
            {
                "depth": depth, "matrix": rng.normal(size=(STEPS, 5, 4, 6)), "reward": np.arange(STEPS) / 2,
                "tokens": [np.arange(i % 4) for i in range(STEPS)], "text": [f"<b>{i}</b>" for i in range(STEPS)],
            },
            episode_id="e",
        )  # fmt: skip
    return Shown(archive.open(archive_url))


def test_pictures_of_numbers_keep_one_scale_over_the_episode(shown: Shown) -> None:
    notes, levels = set(), []
    for step in (3, 20, 39, 7):
        body, facts = ask(answers.pictures, shown, id="e", field="depth", start=step)
        notes.add(facts["Note"])
        levels.append(body[-1])
    assert notes == {"-1 (black) … 39 (white)"}
    assert levels == [round((step + 1) * 255 / 40) for step in (3, 20, 39, 7)]


def test_pictures_of_bytes_are_read_alone(archive_url: str) -> None:
    arc = archive.create(archive_url)
    with arc.writer(chunk_bytes=10 * 9 * 9 * 3) as w:
        w.add_episode({"image": np.random.default_rng(0).integers(0, 256, (90, 9, 9, 3), np.uint8)}, episode_id="e")
    shown = Shown(archive.open(archive_url))
    ask(answers.episode, shown, id="e")
    ask(answers.pictures, shown, id="e", field="image", start=0)
    with trace(shown.arc) as there:
        ask(answers.pictures, shown, id="e", field="image", start=55)
    assert there.requests == 1


def test_values_of_a_long_curve_are_exact_around_the_cursor(archive_url: str) -> None:
    values = np.random.default_rng(1).normal(size=(9000, 2))
    arc = archive.create(archive_url)
    with arc.writer() as w:
        w.add_episode({"x": values, "reward": values[:, 0]}, episode_id="long")
    shown = Shown(archive.open(archive_url))
    assert ask(answers.curves, shown, id="long")["curves"][0]["x"] is not None
    found = ask(answers.curves, shown, id="long", start=4000, stop=5500, gamma="1")
    lines = {(line["field"], line["part"]): line for line in found["curves"]}
    assert all(line["x"] is None for line in lines.values())
    assert lines["x", "1"]["y"] == values[4000:5500, 1].tolist()
    assert lines["return to go", ""]["y"][3] == pytest.approx(values[4003:, 0].sum())
    (line, *_) = ask(answers.curves, shown, id="long", start=8990, stop=9999)["curves"]
    assert len(line["y"]) == 10


def test_any_field_is_a_table_of_some_of_its_rows_and_columns(shown: Shown) -> None:
    matrix = shown.arc.episodes["e"].read(["matrix"])["matrix"]
    found = _rows(shown, "matrix", start=38, stop=60, column=100)
    assert (found["all_columns"], found["columns"][0], len(found["columns"])) == (120, "4, 0, 4", 20)
    assert (found["start"], found["count"], found["steps"]) == (38, STEPS, True)
    assert found["rows"][1][0] == f"{matrix[39, 4, 0, 4]:.6g}"
    assert _rows(shown, "tokens", start=1, stop=4)["rows"] == [["0", "", ""], ["0", "1", ""], ["0", "1", "2"]]
    assert _rows(shown, "text", start=2, stop=4)["rows"] == [["<b>2</b>"], ["<b>3</b>"]]
    assert _rows(shown, "reward", start=3)["rows"] == [["1.5"]]
    assert _rows(shown, "depth", start=5)["all_columns"] == 9 * 12
    assert _rows(shown, "reward", start=99)["rows"] == []
    with pytest.raises(NotFoundError, match="no field"):
        _rows(shown, "nothing")


def test_a_field_that_follows_no_step_has_rows_of_its_own(archive_url: str) -> None:
    arc = archive.create(archive_url)
    with arc.writer(schema=archive.Schema(axes={"table": "free"})) as w:
        w.add_episode({"x": np.zeros(2), "table": np.arange(15).reshape(5, 3)}, episode_id="e")
    found = _rows(Shown(arc), "table", start=3, stop=9)
    assert (found["count"], found["steps"]) == (5, False)
    assert found["rows"] == [["9", "10", "11"], ["12", "13", "14"]]


def _rows(shown: Shown, field: str, **given: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(answers.field_rows, shown, id="e", field=field, **given)
    return found


def test_a_camera_kept_as_packets_of_video_is_shown_as_pictures(
    archive_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av", reason="videos need PyAV")
    scene = np.random.default_rng(2).integers(0, 256, (90, 16, 20, 3), np.uint8)
    arc = archive.create(archive_url)
    letters = [np.frombuffer(b"a rollout of bytes", np.uint8)] * len(scene)
    with arc.writer() as w:
        for env, (every, name) in enumerate(((8, "near"), (60, "far"))):
            steps = {"cam": {"top": video.encode(scene, every=every)}, "letters": letters, "reward": np.zeros(90)}
            w.append(steps, env_ids=[env] * 90, last=np.arange(90) == 89, episode_ids=[name] * 90)
        w.evict(0, before=3)
        w.checkpoint(1).result()
    shown = Shown(archive.open(archive_url))
    for name in ("near", "far"):
        kinds = {field["name"]: field["kind"] for field in ask(answers.episode, shown, id=name)["fields"]}
        assert kinds == {"cam/top": "frames", "letters": "tokens", "reward": "curve"}
        for start, stop in ((0, 1), (37, 40), (58, 90), (3, 80), (89, 90)):
            body, facts = ask(answers.pictures, shown, id=name, field="cam/top", start=start, stop=stop)
            found = np.frombuffer(body, np.uint8).reshape(*facts["Shape"], 3)
            np.testing.assert_array_equal(found, scene[start:stop][:64])
        assert "cam/top" not in ask(answers.steps, shown, id=name, start=5)["values"]
    with trace(shown.arc) as there:
        for step in (60, 61, 70):
            ask(answers.pictures, shown, id="far", field="cam/top", start=step)
    assert there.requests <= 1
    body, facts = ask(answers.strip, shown, ids=["near", "far"])
    assert (facts["Field"], facts["Ids"]) == ("cam/top", ["near", "far"])
    np.testing.assert_array_equal(np.frombuffer(body, np.uint8).reshape(*facts["Shape"], 3), scene[[0, 0]])
    saved = shown.arc.checkpoints[0].number
    with pytest.raises(FieldError, match="no key frame at or before step 2"):
        ask(answers.pictures, shown, id="near", field="cam/top", start=2, checkpoint=saved)
    body, _ = ask(answers.pictures, shown, id="near", field="cam/top", start=5, checkpoint=saved)
    assert body == scene[8].tobytes()
    monkeypatch.setitem(sys.modules, "av", None)
    for asked in (
        {"answer": answers.pictures, "id": "near", "field": "cam/top"},
        {"answer": answers.strip, "ids": ["near"]},
    ):
        with pytest.raises(MissingPackageError, match=r"trajectory-archive\[video\]"):
            ask(shown=shown, **asked)
