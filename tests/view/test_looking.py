"""One episode as the browser asks for it: its fields, pictures, curves and values; what that reads."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

import archive
from archive.base import UsageError
from archive.testing import trace
from archive.view import answers
from archive.view import pictures as cameras
from archive.view import shown as shown_module
from archive.view.shown import Shown
from tests.support.shown import SIDE, ask, film, looked_at

MB = 2**20


@pytest.fixture
def shown(archive_url: str) -> Shown:
    return Shown(looked_at(archive_url))


def test_an_episode_says_what_its_fields_are_and_who_made_it(shown: Shown) -> None:
    found = ask(answers.episode, shown, id="e3")
    kinds = {field["name"]: field["kind"] for field in found["fields"]}
    assert kinds == {
        "obs/front": "frames", "obs/wrist": "frames", "obs/state": "curve", "reward": "curve", "task": "text",
    }  # fmt: skip
    assert found["metadata"] == {"task": "push", "seed": 3}
    (part,) = found["parts"]
    assert (part["start"], part["stop"], part["model_weights_uuids"]) == (0, 30, ["weights-1"])
    with shown.arc.writer() as w:
        mixed = {"model_weights_uuid": ["p31", "p31", "p26", "p31"], "update_count": [31, 31, 26, 31]}
        w.add_episode({"reward": np.zeros(4)}, episode_id="mixed", **mixed)
    found = ask(answers.episode, Shown(shown.arc.refresh()), id="mixed")["parts"]
    told = [(p["start"], p["stop"], p["model_weights_uuids"], p["update_count_max"]) for p in found]
    assert told == [(0, 2, ["p31"], 31), (2, 3, ["p26"], 26), (3, 4, ["p31"], 31)]


def test_pictures_are_those_that_were_archived_whichever_way_their_channels_lie(shown: Shown) -> None:
    for field, seed in (("obs/front", 6), ("obs/wrist", 7)):
        body, facts = ask(answers.pictures, shown, id="e3", field=field, start=4, stop=9)
        assert facts["Shape"] == [5, SIDE, SIDE + 4]
        assert body == film(30, seed)[4:9].tobytes()
    with pytest.raises(UsageError, match="no pictures"):
        ask(answers.pictures, shown, id="e3", field="reward")
    with pytest.raises(UsageError, match="steps 0 to 29"):
        ask(answers.pictures, shown, id="e3", field="obs/front", start=30)


def test_scrubbing_reads_each_chunk_once(archive_url: str) -> None:
    arc = archive.create(archive_url)
    pictures = np.random.default_rng(0).integers(0, 256, (200, 64, 64, 3), np.uint8)  # which nothing compresses
    with arc.writer(chunk_bytes=10 * 64 * 64 * 3) as w:
        w.add_episode({"image": pictures}, episode_id="long")
    shown = Shown(archive.open(archive_url))
    ask(answers.pictures, shown, id="long", field="image", start=0)
    with trace(shown.arc) as there:
        ask(answers.pictures, shown, id="long", field="image", start=105)
    assert there.requests == 1
    assert there.bytes_in <= 1.2 * 10 * 64 * 64 * 3
    with trace(shown.arc) as again:
        for start in (103, 107, 100):
            body, _ = ask(answers.pictures, shown, id="long", field="image", start=start, stop=start + 3)
            assert body == pictures[start : start + 3].tobytes()
    assert again.requests == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_looking_at_many_episodes_takes_no_more_memory_than_at_some(
    archive_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_module, "KEPT_BYTES", 32 * MB)
    monkeypatch.setattr(cameras, "HELD_BYTES", 10 * MB)
    arc = archive.create(archive_url)
    pictures = np.random.default_rng(0).integers(0, 256, (8, 512, 680, 3), np.uint8)  # 8 MB
    with arc.writer(chunk_bytes=MB) as w:
        for n in range(14):
            w.add_episode({"image": pictures}, episode_id=f"e{n}")
    shown = Shown(archive.open(archive_url))
    ask(answers.pictures, shown, id="e0", field="image", start=0, stop=8)
    before = _resident()
    for n in range(14):
        ask(answers.pictures, shown, id=f"e{n}", field="image", start=0, stop=8)
        assert _resident() - before < 64 * MB
    with trace(shown.arc) as again:
        for n in (12, 13, 12):
            ask(answers.pictures, shown, id=f"e{n}", field="image", start=0, stop=8)
    assert again.requests == 0  # as one goes back and forth


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_curves_are_the_numbers_and_what_follows_from_rewards(shown: Shown) -> None:
    found = ask(answers.curves, shown, id="e3", gamma=0.5)
    lines = {(line["field"], line["part"]): line for line in found["curves"]}
    assert lines["reward", ""]["y"] == [3.0] * 30
    assert lines["return to go", ""]["y"][0] == pytest.approx(90.0)
    assert lines["discounted 0.5", ""]["y"][0] == pytest.approx(6.0)
    assert [part for field, part in lines if field == "obs/state"] == ["0", "1", "2"]
    with pytest.raises(UsageError, match="gamma"):
        ask(answers.curves, shown, id="e3", gamma="2")


def test_a_long_curve_keeps_its_peaks(archive_url: str) -> None:
    values = np.zeros(50_000)
    values[12_345] = 7.0
    arc = archive.create(archive_url)
    with arc.writer() as w:
        w.add_episode({"x": values}, episode_id="long")
    (line,) = ask(answers.curves, Shown(arc), id="long")["curves"]
    assert len(line["y"]) < 5000
    assert line["x"][int(np.argmax(line["y"]))] == 12_345


def test_values_of_steps_are_texts(shown: Shown) -> None:
    found = ask(answers.steps, shown, id="e1", start=2, stop=4)
    assert found["values"]["task"] == ["push <b>1</b>"] * 2
    assert found["values"]["reward"] == ["1", "1"]
    assert "obs/front" not in found["values"]


def test_first_pictures_are_small_and_episodes_without_any_are_left_out(shown: Shown) -> None:
    with shown.arc.writer(run="first") as w:
        w.add_episode({"x": np.zeros(3)}, episode_id="blind")
    body, facts = ask(answers.strip, shown, ids=["e0", "blind", "e1"])
    assert (facts["Shape"], facts["Ids"]) == ([2, SIDE, SIDE + 4], ["e0", "e1"])
    assert body == film(30, 0)[:1].tobytes() + film(30, 2)[:1].tobytes()
