"""What is live in a writer's buffers, and which weights made it."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

import resharding
from archive import Archive, Schema
from archive.base.errors import NotFoundError, UsageError
from tests.support.archives import fresh, reopened


def values(arc: Archive) -> list[list[int]]:
    """The field t of all episodes, by env row and age."""
    episodes = sorted(reopened(arc).episodes, key=lambda e: (e.env_id or 0, e.id))
    return [e.read("t")["t"].tolist() for e in episodes]


def test_many_small_appends_are_merged_with_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archive.write.slabs._MERGE_BLOCKS", 8)
    arc = fresh()
    with arc.writer(schema=Schema(axes={"text": "ragged"})) as w:
        for t in range(50):
            w.weights(None if t < 10 else f"w{t // 20}", None if t < 10 else t)
            kind = np.array([f"x{t}"], object) if t % 7 == 3 else None
            w.append({"t": np.array([t]), "text": [np.full(t % 3, t)]}, env_ids=t % 2, model_weights_uuid=kind)
    assert len(reopened(arc).shards) == 1
    even, odd = sorted(reopened(arc).episodes, key=lambda e: e.env_id)
    for e, first in ((even, 0), (odd, 1)):
        got = e.read()
        assert got["t"].tolist() == list(range(first, 50, 2))
        assert [len(p) for p in got["text"]] == [t % 3 for t in range(first, 50, 2)]
        names = [f"x{t}" if t % 7 == 3 else f"w{t // 20}" for t in range(first, 50, 2) if t >= 10 or t % 7 == 3]
        assert e.model_weights_uuids == list(dict.fromkeys(names))
        assert e.update_counts == (10 + first, 49 + first)


def test_weights_of_one_value_of_each_step_and_of_a_field() -> None:
    arc, name = fresh(), uuid.uuid4()
    with arc.writer() as w:
        w.weights(name, 5)
        w.add_episode({"t": np.arange(2)}, episode_id="before")
        w.add_episode({"t": np.arange(2)}, episode_id="given", model_weights_uuid="v", update_count=np.int32(6))
        w.add_episode(
            {"t": np.arange(3)}, episode_id="steps", model_weights_uuid=["a", None, "b"], update_count=[9, 7, 8]
        )
        nest = {"t": np.arange(3), "agent": {"w": ["y", "x", "y"]}, "n": np.array([[3], [1], [2]])}
        w.add_episode(nest, episode_id="field", model_weights_uuid="agent/w", update_count="n")
        w.weights()
        w.add_episode({"t": np.arange(2)}, episode_id="none")
        w.add_episode(
            {"t": np.arange(0)}, episode_id="empty", model_weights_uuid=[], update_count=np.zeros((0, 1), int)
        )
        w.add_episode({"t": np.arange(2)}, episode_id="column", model_weights_uuid=np.array([["p"], ["q"]]))
    got = {e.id: (e.model_weights_uuids, e.update_counts) for e in reopened(arc).episodes}
    assert got == {
        "before": ([str(name)], (5, 6)), "given": (["v"], (6, 7)), "steps": (["a", "b"], (7, 10)),
        "field": (["y", "x"], (1, 4)), "none": ([], None), "empty": ([], None), "column": (["p", "q"], None),
    }  # fmt: skip
    newest = {e.id: (e.model_weights_uuid, e.update_count) for e in reopened(arc).episodes}
    assert newest == {
        "before": (str(name), 5), "given": ("v", 6), "steps": ("b", 8), "field": ("y", 2), "none": (None, None),
        "empty": (None, None), "column": ("q", None),
    }  # fmt: skip
    each = {e.id: [tuple(row.values()) for row in e.weights.to_pylist()] for e in reopened(arc).episodes}
    assert each == {
        "before": [(str(name), 5)] * 2, "given": [("v", 6)] * 2, "steps": [("a", 9), (None, 7), ("b", 8)],
        "field": [("y", 3), ("x", 1), ("y", 2)], "none": [(None, None)] * 2, "empty": [],
        "column": [("p", None), ("q", None)],
    }  # fmt: skip


@pytest.mark.parametrize("flushed", [False, True])
def test_weights_that_come_back_are_those_of_the_newest_steps(flushed: bool) -> None:
    """In one segment or several; of a ring that has evicted some; after a compaction has cut the segment."""
    arc = fresh()
    with arc.writer() as w:
        for t, update in enumerate([31, 31, 26, 31, 26, 31]):
            w.weights(f"p{update}", update)
            w.append({"t": np.array([t]), "wide": np.zeros((1, 100))}, episode_ids="e")
            if flushed:
                w.flush()
        w.evict(env_id=0, positions=np.array([0, 2, 5]))
        w.checkpoint(1).result()
    whole = reopened(arc).episodes["e"]
    assert (whole.model_weights_uuid, whole.update_count) == ("p31", 31)
    assert whole.weights["update_count"].to_pylist() == [31, 31, 26, 31, 26, 31]
    for _ in range(2):
        (live,) = reopened(arc).checkpoints.latest.episodes
        assert live.weights["model_weights_uuid"].to_pylist() == ["p31", "p31", "p26"]
        assert (live.model_weights_uuid, live.update_count) == ("p26", 26)
        assert resharding.compact(reopened(arc), min_alive=1).steps in (0, 3)
    assert reopened(arc).episodes["e"].weights == whole.weights


@pytest.mark.parametrize("bad", [1.5, "x", 2**63, -(2**64), [1, 2], None])
def test_weights_that_are_none_are_refused(bad: Any) -> None:
    arc = fresh()
    with arc.writer() as w:
        if bad is not None:
            with pytest.raises(UsageError, match="update_count"):
                w.weights("u", bad)
        with pytest.raises(UsageError, match="lone surrogate"):
            w.weights("\ud800", 1)


def test_buffers_have_streams_of_their_own() -> None:
    arc = fresh()
    with arc.writer() as w:
        demo = w.buffer("demo")
        for k in range(3):  # their segments are linked each to its own
            assert w.append({"t": np.arange(2) + 10 * k}, env_ids=0).tolist() == [2 * k, 2 * k + 1]
            assert demo.append({"t": np.arange(1) + 100 * k}, env_ids=0).tolist() == [k]
            w.commit()
        demo.evict(0, before=2)
        assert (w.live["length"].to_pylist(), demo.live["length"].to_pylist()) == ([6], [1])
        assert w.buffer("demo").live.equals(demo.live)
        demo.clear()
        assert (w.live.num_rows, demo.live.num_rows, demo.name) == (1, 0, "demo")
    got = {e.buffer: e.read()["t"].tolist() for e in reopened(arc).episodes}
    assert got == {"replay": [0, 1, 10, 11, 20, 21], "demo": [0, 100, 200]}


def test_evicted_steps_stay_in_the_archive() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(6)}, env_ids=0)
        name = w.add_episode({"t": np.arange(0)})
        w.evict(0, before=2)
        w.evict(0, positions=[3, 3, 0])
        w.evict(0, positions=[])
        assert w.live.select(["env_id", "position", "length"]).to_pylist() == [
            {"env_id": None, "position": 0, "length": 0},
            {"env_id": 0, "position": 2, "length": 1},
            {"env_id": 0, "position": 4, "length": 2},
        ]
        for wrong in ({"before": 1, "positions": [1]}, {}, {"positions": [6]}, {"positions": [-1]}):
            with pytest.raises(UsageError):
                w.evict(0, **wrong)  # type: ignore[arg-type]
        w.evict(positions=[0])  # the episode without steps has a position too
        assert w.live["env_id"].to_pylist() == [0, 0]
        with pytest.raises(NotFoundError, match="'nobody'"):
            w.remove(["nobody"])
        assert (w.remove([name]), w.remove(w.live["episode_id"][0].as_py())) == (0, 3)
    assert sorted(values(arc)) == [[], [0, 1, 2, 3, 4, 5]]
