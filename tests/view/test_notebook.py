"""What notebooks and figures show: from the tables alone, everything escaped, pictures and curves told apart."""

from __future__ import annotations

import json
import pickle
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fsspec
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import archive
import resharding
from archive.base.errors import FieldError, MissingPackageError
from archive.fields.nests import Ragged
from archive.view import frames, notebook, plots, texts
from tests.support.archives import with_checkpoints

HOSTILE = "<script>alert(1)</script> & \"'"


@pytest.fixture
def arc() -> archive.Archive:
    out = archive.create(f"memory://views-{uuid.uuid4().hex}")
    writers = [out.writer(rank, 2, session="s") for rank in range(2)]
    for rank, w in enumerate(writers):
        for i in range(6):
            steps = {
                "image": np.full((5, 16, 16), i, np.uint8), "reward": np.full(5, i + rank), "action": np.zeros((5, 2))
            }  # fmt: skip
            w.add_episode(steps, model_weights_uuid=f"{HOSTILE}{i // 3}", update_count=i, metadata={"k": HOSTILE})
    for pending in [w.checkpoint(3, progress={"note": HOSTILE}) for w in writers]:
        pending.result(60)
    return out.refresh()


def elements(html: str) -> ElementTree.Element:
    """Parsed as XML, which also says that every element is closed."""
    return ElementTree.fromstring(html)


def views(arc: archive.Archive) -> dict[str, Any]:
    checkpoint = arc.checkpoints.latest
    assert checkpoint is not None
    plan = resharding.plan(checkpoint, world_size=3)
    return {
        "archive": arc,
        "checkpoint": checkpoint,
        "plan": plan,
        "episodes": arc.episodes,
        "episode": arc.episodes[0],
    }


@pytest.mark.parametrize("name", ["archive", "checkpoint", "plan", "episodes", "episode"])
def test_a_notebook_shows_it_without_reading_a_shard(arc: archive.Archive, name: str) -> None:
    shown = views(arc)[name]
    fsspec.filesystem("memory").rm(f"{arc.url}/shards", recursive=True)
    html = shown._repr_html_()
    root = elements(html)
    assert root.get("class") == "trajectories"
    assert not list(root.iter("script"))
    assert "<script>" not in html


def test_an_archive_shows_how_much_and_of_what(arc: archive.Archive) -> None:
    text = "".join(elements(arc._repr_html_()).itertext())
    for wanted in ("step-3", "uncompressed", "imageuint816 x 16step", f"{HOSTILE}0", "update count0 … 5"):
        assert wanted in text
    assert arc.episodes.nbytes == 12 * 5 * (16 * 16 + 8 + 16)
    assert arc.episodes[:2].nbytes == 2 * 5 * (16 * 16 + 8 + 16)
    assert arc.episodes.filter(episode_id="none").nbytes == 0


def test_a_checkpoint_shows_its_ranks(arc: archive.Archive) -> None:
    checkpoint = arc.checkpoints.latest
    assert checkpoint is not None
    assert checkpoint.steps_per_rank == {0: 30, 1: 30}
    bars = [row for row in elements(checkpoint._repr_html_()).iter("tr") if "rank 1" in "".join(row.itertext())]
    assert len(bars) == 1


def test_a_plan_counts_what_moves(arc: archive.Archive) -> None:
    plan = views(arc)["plan"]
    assert sum(plan.moved.values()) == 60
    assert [sum(n for (_, t), n in plan.moved.items() if t == rank) for rank in range(3)] == plan.steps
    assert set(plan.moved) == {(0, 0), (0, 1), (1, 1), (1, 2)}
    rows = ["".join(row.itertext()) for row in elements(plan._repr_html_()).iter("tr")]
    assert [f"{s}{t}{n}" in rows for (s, t), n in plan.moved.items()] == [True] * 4


def test_an_empty_archive_shows_itself() -> None:
    arc = archive.create(f"memory://views-{uuid.uuid4().hex}")
    assert "episodes" in arc._repr_html_()
    assert "steps" in arc.episodes._repr_html_()
    assert len(arc.episodes.plot()) == 2


@given(st.text(), st.text())
def test_markup_is_escaped(text: str, value: str) -> None:
    made = notebook.tag("p", text, notebook.tag("b", text), data_x=value)
    inner = made.removeprefix("<p ").removesuffix("</p>")
    assert "<" not in inner.replace("<b>", "").replace("</b>", "")
    assert made.count('"') == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "want"),
    [
        ((5, 16, 16), np.uint8, (5, 16, 16, 3)),
        ((5, 16, 24, 3), np.uint8, (5, 16, 24, 3)),
        ((5, 3, 16, 24), np.uint8, (5, 16, 24, 3)),
        ((5, 4, 16, 24), np.uint8, (5, 16, 24, 3)),
        ((5, 16, 24, 4), np.uint8, (5, 16, 24, 3)),
        ((5, 16, 24, 1), np.uint8, (5, 16, 24, 3)),
        ((5, 12, 16, 24), np.uint8, (5, 16, 24, 3)),
        ((5, 2, 16, 24, 3), np.uint8, (5, 16, 24, 3)),
        ((5, 16, 24, 7), np.uint8, None),
        ((5, 4, 4), np.uint8, None),
        ((5, 16, 16), np.float32, (5, 16, 16, 3)),
        ((5, 3, 16, 24), np.float16, (5, 16, 24, 3)),
        ((5, 16, 16), np.int64, (5, 16, 16, 3)),
        ((5, 16, 16), np.bool_, (5, 16, 16, 3)),
        ((5, 16, 16), np.complex64, None),
        ((5, 16), np.uint8, None),
        ((0, 16, 16), np.uint8, None),
    ],
)
def test_pictures_are_recognised(shape: tuple[int, ...], dtype: Any, want: tuple[int, ...] | None) -> None:
    made = frames.as_pictures(np.zeros(shape, dtype))
    assert (None if made is None else made.pixels.shape) == want
    assert made is None or made.pixels.dtype == np.uint8


@pytest.mark.parametrize("axis", [1, -1])
def test_of_stacked_frames_the_newest_is_shown(axis: int) -> None:
    made = frames.as_pictures(np.stack([np.full((2, 16, 16), i, np.uint8) for i in range(4)], axis))
    assert made is not None
    assert (made.pixels == 3).all()
    assert made.note == "the newest of 4 frames"
    colored = np.concatenate([np.full((2, 3, 16, 16), i, np.uint8) for i in range(4)], 1)
    assert (frames.as_pictures(colored) or made).note == "the newest of 4 frames"


def test_an_opaque_channel_is_no_frame() -> None:
    picture = np.full((2, 16, 16, 4), 255, np.uint8)
    picture[..., 0] = 7
    made = frames.as_pictures(picture)
    assert made is not None
    assert made.pixels[0, 0, 0].tolist() == [7, 255, 255]
    assert made.note == ""


def test_numbers_become_grey_values() -> None:
    def shown(values: list[float]) -> tuple[list[int], str]:
        film = frames.as_pictures(np.repeat(np.array(values, np.float32), 64).reshape(len(values), 8, 8))
        assert film is not None
        return film.pixels[:, 0, 0, 0].tolist(), film.note

    assert shown([0.0, 0.2, 0.5]) == ([0, 51, 128], "0 (black) … 1 (white)")
    assert shown([-10, 0, 10, np.nan, np.inf]) == ([0, 128, 255, 0, 255], "-10 (black) … 10 (white)")
    assert shown([3, 3])[0] == [0, 0]


def test_curves_and_texts() -> None:
    assert list(frames.as_curves(np.zeros((4, 2, 2))) or {}) == ["0", "1", "2", "3"]
    assert list(frames.as_curves(np.zeros(4, bool)) or {}) == [""]
    assert frames.as_curves(np.zeros((4, 1000))) is None
    assert frames.as_curves(np.array(["a"], object)) is None
    assert frames.as_curves(np.array([2**60])) is None, "its last digits would be others"
    assert list(frames.as_curves(np.zeros((0, 3))) or {}) == ["0", "1", "2"]
    ((name, leaf),) = frames.leaves({"a": np.array([1.5], ml_dtypes.bfloat16)})
    assert (name, leaf.dtype) == ("a", np.float32)


def texts_of(leaf: Any) -> list[str]:
    made = texts.as_texts(leaf)
    assert made is not None
    return made.steps


def test_texts() -> None:
    assert texts_of(np.array(["a", "b"], object)) == ["a", "b"]
    assert texts_of([np.arange(3), np.array([0.5, np.nan])]) == ["3 values\n0 1 2", "2 values, 0.5 … 0.5\n0.5 nan"]
    assert texts_of(Ragged(np.arange(3), np.array([1, 2]))) == ["1 value\n0", "2 values\n1 2"]
    assert texts_of([np.array([True, False])]) == ["2 values, 1 true\n1 0"]
    assert texts_of(np.array([1 + 2j])) == ["1+2j"]
    assert texts_of(np.array([2**60])) == [str(2**60)]
    assert texts.as_texts(np.zeros(0)) is None
    assert texts.as_texts(3) is None


def test_messages_are_read_as_a_conversation() -> None:
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2", "tools": ["calc"]}]
    assert texts_of([said, said[0], {"a": 1}, None]) == [
        '[user]\n1 + 1?\n\n[assistant]\n2\n{"tools": ["calc"]}', "[user]\n1 + 1?", '{\n "a": 1\n}', "null",
    ]  # fmt: skip
    made = texts.as_texts([said])
    assert made is not None
    assert made.written
    assert not (texts.as_texts([np.arange(3)]) or made).written


def test_long_texts_say_how_long_they_were() -> None:
    (text,) = texts_of(["x" * 30_000])
    assert text == "x" * texts.MAX_STEP_CHARS + "… (30000 characters)"
    (numbers,) = texts_of([np.arange(5000)])
    assert numbers.startswith("5000 values\n0 1 2")
    assert numbers.endswith("1999 …")


def test_values_are_short() -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)
    assert [notebook.shown(v) for v in (at, at.replace(tzinfo=None), True, 1 / 3, [])] == [
        "2026-01-02 03:04:05 UTC", "2026-01-02 03:04:05", "yes", "0.33333", "-",
    ]  # fmt: skip
    assert "b</th>" not in notebook.facts({"a": 1, "b": None})


def test_kinds_are_said_as_numpy_does() -> None:
    assert notebook.kind("<f4[3, 4] step") == ("float32", "3 x 4", "step")
    assert notebook.kind("<M8[ns][] step") == ("datetime64[ns]", "-", "step")
    assert notebook.kind("bfloat16[2] ragged") == ("bfloat16", "2", "ragged")
    assert notebook.kind("json[] step") == ("json", "-", "step")


def test_plots(arc: archive.Archive) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    returns, lengths = arc.episodes.plot()
    assert len(returns.lines[0].get_xdata()) == 12
    np.testing.assert_array_equal(returns.lines[1].get_ydata(), [5 * (i + 0.5) for i in range(6)])
    assert sum(p.get_height() for p in lengths.patches) == 12
    drawn = arc.episodes[3].plot()
    assert [ax.get_ylabel() for ax in drawn] == ["action", "reward", "image"]
    assert [text.get_text() for text in drawn[0].get_legend().get_texts()] == ["0", "1"]
    assert drawn[1].get_legend() is None
    assert arc.episodes[3].plot(["reward"], 1, 3)[0].lines[0].get_ydata().tolist() == [3.0, 3.0]
    bars = views(arc)["plan"].plot()
    assert sum(p.get_width() for p in bars.patches) == 60
    assert len(bars.get_legend().get_texts()) == 2
    many = plots.plan({(i, 0): i + 1 for i in range(12)}, 1, "x")
    assert many.get_legend() is None
    assert [text.get_text() for text in many.texts] == [str(i) for i in range(12)]
    pyplot.close("all")


def labelled() -> archive.Archive:
    arc = with_checkpoints(f"memory://{uuid.uuid4().hex}")
    return arc.label({"e0": {"success": True, "quality": 0.5, "note": "<b>"}, "e2": {"success": False}})


def test_an_episode_shows_its_labels() -> None:
    shown = labelled().episodes["e0"]._repr_html_()
    assert "note = &lt;b&gt;, quality = 0.5, success = True" in shown
    assert "labels" not in labelled().episodes["e1"]._repr_html_()


def test_what_is_exported_has_labels(tmp_path: Path) -> None:
    (name,) = resharding.export(labelled(), tmp_path)
    with np.load(tmp_path / name) as file:
        about = json.loads(str(file["episodes"]))
    assert [row["label.success"] for row in about] == [True, None, False]


def test_a_label_is_drawn() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    axes = labelled().episodes.plot(y="label.quality")
    assert axes[0].get_ylabel() == "label.quality"
    assert axes[0].lines[0].get_ydata()[0] == 0.5
    labelled().episodes.plot(y="label.success")
    with pytest.raises(FieldError, match=r"numbers in .*label\.quality, label\.success"):
        labelled().episodes.plot(y="label.note")


def test_nothing_to_draw_is_an_error() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(FieldError, match="fields="):
        plots.episode({"text": ["a"]}, "x")


def test_plots_say_what_to_install(arc: archive.Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingPackageError, match="plots"):
        arc.episodes.plot()


def test_weights_are_counted_in_order_of_use(arc: archive.Archive) -> None:
    assert notebook.weights_counts(arc.episodes.table) == {f"{HOSTILE}0": 6, f"{HOSTILE}1": 6}


def test_an_episode_pickles(arc: archive.Archive) -> None:
    again = pickle.loads(pickle.dumps(arc.episodes[3]))
    assert again.id == arc.episodes[3].id
