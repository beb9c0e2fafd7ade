"""Kinds of axis: step, offset, ragged, free; and any part of them, over any number of segments and shards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archive
from archive import Ragged, Schema
from archive.base.errors import FieldError
from archive.read.spans import Spans
from archive.write import slabs
from tests.support.archives import fresh, identical, reopened, round_trip

SCHEMA = Schema(
    axes={"obs": "offset", "two": "offset:2", "text": "ragged", "goal": "free", "k": "free"},
    json=["info"],
    next_of={"next": "x"},
)


def episode(steps: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps, 2)).astype(np.float32)
    return {
        "x": x,
        "next": np.concatenate([x[1:], rng.normal(size=(min(steps, 1), 2)).astype(np.float32)]),
        "obs": np.arange(steps + 1) * 10,
        "two": np.arange((steps + 2) * 3).reshape(-1, 3),
        "text": [rng.integers(0, 9, int(n)) for n in rng.integers(0, 4, steps)],
        "words": np.array([f"w{i}" for i in range(steps)], object),
        "info": [{"i": i} for i in range(steps)],
        "goal": np.arange(4.0),
        "k": np.array(3, np.int8),
    }


def part(whole: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """What reading steps [start, stop) gives."""
    extra = {"obs": 1, "two": 2}
    return {n: v if n in ("goal", "k") else v[start : stop + extra.get(n, 0)] for n, v in whole.items()}


def as_appended(whole: dict[str, Any], start: int, stop: int, *, last: bool) -> dict[str, Any]:
    """The same steps as a call of append takes them; free fields come with the first."""
    out = (
        part(whole, start, stop)
        if last
        else {n: v[start:stop] if n not in ("goal", "k") else v for n, v in whole.items()}
    )
    return out | {"goal": whole["goal"] if start == 0 else whole["goal"][:0]}


def check_all_parts(arc: archive.Archive, whole: dict[str, Any], steps: int) -> None:
    got = reopened(arc).episodes[0]
    assert got.length == steps
    assert identical(got.read(), whole)
    for start in range(steps + 1):
        for stop in range(start, steps + 1):
            assert identical(got.read(start=start, stop=stop), part(whole, start, stop)), (start, stop)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_every_part_of_an_episode(steps: int) -> None:
    arc, whole = fresh(), episode(steps)
    with arc.writer(schema=SCHEMA) as w:
        w.add_episode({"x": np.zeros((3, 2), np.float32)})  # not the first in its shard
        w.add_episode(whole)
        w.add_episode(episode(4, 1))
    arc = reopened(arc)
    got = arc.episodes[1]
    for start in range(steps + 1):
        for stop in range(start, steps + 1):
            assert identical(got.read(start=start, stop=stop), part(whole, start, stop)), (start, stop)
    assert identical([e.read() for e in arc.episodes][1:], [whole, episode(4, 1)])
    assert identical(arc.episodes.read()[1:], [whole, episode(4, 1)])


def test_indices_are_those_of_slices() -> None:
    whole = {"x": np.arange(7)}
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(whole)
    got = arc.episodes[0]
    for start, stop in [(-3, None), (0, -2), (-100, 100), (5, 2), (9, 12), (0, None)]:
        assert got.read(start=start, stop=stop)["x"].tolist() == list(range(7))[start:stop]


Between = Callable[[archive.Writer], Any]


@pytest.mark.parametrize(
    "between", [lambda w: None, lambda w: w.flush(), lambda w: w.commit()], ids=["at once", "flush", "commit"]
)
@pytest.mark.parametrize("cuts", [(3,), (1, 2, 3), (1, 6), tuple(range(1, 7))])
def test_every_part_of_an_episode_of_many_segments(cuts: tuple[int, ...], between: Between) -> None:
    arc, whole = fresh(), episode(7)
    with arc.writer(schema=SCHEMA) as w:
        edges = [0, *cuts, 7]
        for start, stop in pairwise(edges):
            w.append(as_appended(whole, start, stop, last=stop == 7), env_ids=2, first=start == 0, last=stop == 7)
            between(w)
    check_all_parts(arc, whole, 7)
    assert reopened(arc).episodes[0].complete


@pytest.mark.parametrize("between", [lambda w: None, lambda w: w.commit()], ids=["at once", "commit"])
def test_extra_rows_may_come_early_and_again(between: Between) -> None:
    """A rollout has T+1 observations each time; the episode goes on from the last."""
    arc = fresh()
    obs, two = np.arange(8) * 10, np.arange(9)
    with arc.writer(schema=Schema(axes={"obs": "offset", "two": "offset:2"})) as w:
        for start, stop in [(0, 3), (3, 4), (4, 7)]:
            nest = {"obs": obs[start : stop + 1], "two": two[start : stop + 2], "t": np.arange(start, stop)}
            w.append(nest, env_ids=0, last=stop == 7)
            between(w)
    got = reopened(arc).episodes[0]
    assert got.read()["obs"].tolist() == obs.tolist()
    for start in range(8):
        for stop in range(start, 8):
            read = got.read(start=start, stop=stop)
            assert (read["obs"].tolist(), read["two"].tolist()) == (
                obs[start : stop + 1].tolist(),
                two[start : stop + 2].tolist(),
            )


@pytest.mark.parametrize("between", [lambda w: None, lambda w: w.commit()], ids=["at once", "commit"])
def test_the_next_steps_rows_go_before_extra_ones(between: Between) -> None:
    arc = fresh()
    with arc.writer(schema=Schema(axes={"obs": "offset"})) as w:
        w.append({"obs": [0, 1, 99], "t": [0, 1]}, env_ids=0)
        between(w)
        w.append({"obs": [2, 3], "t": [2]}, env_ids=0, last=True)
    got = reopened(arc).episodes[0]
    assert [got.read(start=a, stop=b)["obs"].tolist() for a, b in [(0, 3), (0, 2), (1, 1)]] == [
        [0, 1, 2, 3],
        [0, 1, 2],
        [1],
    ]


def test_an_open_episode_keeps_the_extra_rows_that_it_has() -> None:
    arc, schema = fresh(), Schema(axes={"obs": "offset"})
    with arc.writer(schema=schema) as w:
        w.append({"obs": np.arange(4), "t": np.arange(3)}, env_ids=0)
        w.append({"obs": np.arange(3), "t": np.arange(3)}, env_ids=1)
        w.commit()
        assert [len(e.read()["obs"]) for e in arc.episodes] == [4, 3]
        w.close_episodes()
    assert [len(e.read()["obs"]) for e in reopened(arc).episodes] == [4, 3]


@pytest.mark.parametrize("steps", [1, 2, 23, 40])
@pytest.mark.parametrize("max_bytes", [1, 400, 2000])
def test_a_long_episode_lies_in_many_shards(monkeypatch: pytest.MonkeyPatch, steps: int, max_bytes: int) -> None:
    monkeypatch.setattr(slabs, "SHARD_BYTES", max_bytes)
    arc, whole = fresh(), episode(steps)
    with arc.writer(schema=SCHEMA) as w:
        w.add_episode(whole, model_weights_uuid=[f"u{i // 5}" for i in range(steps)], update_count=np.arange(steps))
        w.add_episode(episode(5, 1))
    arc = reopened(arc)
    if max_bytes == 1:
        assert len(arc.shards) == steps + 5
    first, second = arc.episodes
    assert identical(second.read(), episode(5, 1))
    for start, stop in [(0, steps), (0, 1), (steps // 2, steps), (steps // 3, steps - steps // 3), (steps, steps)]:
        assert identical(first.read(start=start, stop=stop), part(whole, start, stop)), (start, stop)
    assert first.model_weights_uuids == [f"u{i}" for i in range((steps + 4) // 5)]
    assert (first.update_counts, first.complete) == ((0, steps), True)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 255), max_size=4), max_size=8), st.data())
def test_ragged_pieces_of_any_length(pieces: list[list[int]], data: st.DataObject) -> None:
    arc = fresh()
    arrays = [np.array(p, np.uint8) for p in pieces]
    with arc.writer(schema=Schema(axes={"x": "ragged"})) as w:
        w.add_episode({"x": arrays, "t": np.zeros(len(pieces))})
    got = reopened(arc).episodes[0]
    start = data.draw(st.integers(0, len(pieces)))
    stop = data.draw(st.integers(start, len(pieces)))
    assert [p.tolist() for p in got.read(start=start, stop=stop)["x"]] == pieces[start:stop]
    flat = got.read(start=start, stop=stop, ragged="flat")["x"]
    assert isinstance(flat, Ragged)
    assert flat.lengths.tolist() == [len(p) for p in pieces[start:stop]]
    assert flat.values.tolist() == [v for p in pieces[start:stop] for v in p]
    assert identical([p.tolist() for p in flat.split()], pieces[start:stop])


def test_ragged_pieces_of_more_dimensions_and_strings() -> None:
    nest = {"boxes": [np.ones((2, 4)), np.ones((0, 4)), np.zeros((1, 4))], "said": [["a", "b"], [], ["c\0"]]}
    got = round_trip(nest, Schema(axes={"said": "ragged"}))
    assert identical(got["boxes"], nest["boxes"])
    assert [p.tolist() for p in got["said"]] == nest["said"]


def test_ragged_rows_of_a_vector_env_are_sorted_with_the_steps() -> None:
    arc = fresh()
    with arc.writer(schema=Schema(axes={"x": "ragged"})) as w:
        for t in range(3):
            w.append({"x": [np.full(t + env, 10 * env + t) for env in range(3)]}, env_ids=[2, 0, 1])
    got = {e.env_id: [p.tolist() for p in e.read()["x"]] for e in reopened(arc).episodes}
    assert got == {env: [[10 * i + t] * (t + i) for t in range(3)] for i, env in enumerate([2, 0, 1])}


@pytest.mark.parametrize(
    ("schema", "bad", "message"),
    [
        (Schema(axes={"x": "ragged"}), {"x": [1, 2]}, "got a number"),
        (Schema(axes={"x": "ragged"}), {"x": 5}, "list of one array a step"),
        (Schema(axes={"x": "ragged"}), {"x": [np.zeros((1, 2)), np.zeros((1, 3))]}, "differ in dtype or"),
        (Schema(axes={"x": "ragged"}), {"x": [np.zeros(1, "i4"), np.zeros(1, "i8")]}, "differ in dtype or"),
        (Schema(axes={"x": "ragged"}, json=["x"]), {"x": [1, 2]}, "not 'ragged'"),
        (Schema(axes={"x": "offset"}), {"x": np.zeros(3), "t": np.zeros(3)}, "3 rows for 3 steps"),
        (Schema(axes={"x": "offset:2"}), {"x": np.zeros(4), "t": np.zeros(3)}, "4 rows for 3 steps"),
        (Schema(json=["x"]), {"x": "text"}, "one value a step"),
    ],
)
def test_wrong_axes_are_refused(schema: Schema, bad: dict[str, Any], message: str) -> None:
    arc = fresh()
    with arc.writer(schema=schema) as w:
        with pytest.raises(FieldError, match=message):
            w.add_episode(bad)
        assert w.live.num_rows == 0
    assert arc.head.number == 1


@pytest.mark.parametrize("axis", ["bogus", "offset:", "offset:x", "offset:-1", "step:2", "ragged:1"])
def test_an_axis_that_there_is_not(axis: str) -> None:
    if axis == "offset:":
        assert Schema(axes={"x": axis}).axis_of(("x",)) == ("offset", 1)
        return
    with pytest.raises(FieldError, match="an axis is one of"):
        Schema(axes={"x": axis})


def test_whole_fields_need_a_run_of_one_episode() -> None:
    arc = fresh()
    with arc.writer(schema=Schema(axes={"k": "free"})) as w:
        for wrong in ({"env_ids": None}, {"env_ids": 0, "first": [0, 1, 0]}, {"env_ids": 0, "last": [0, 1, 0]}):
            with pytest.raises(FieldError, match="'offset' or 'free' axis"):
                w.append({"t": np.arange(3), "k": 1}, **wrong)


def test_free_fields_of_appended_runs_are_joined_and_scalars_are_the_newest() -> None:
    arc = fresh()
    with arc.writer(schema=Schema(axes={"k": "free", "log": "free"})) as w:
        for i in range(3):
            w.append({"t": np.arange(2), "k": i, "log": np.array([i])}, env_ids=0)
            if i == 1:
                w.commit()
    got = reopened(arc).episodes[0].read(start=1, stop=2)
    assert (int(got["k"]), got["log"].tolist(), got["t"].tolist()) == (2, [0, 1, 2], [1])


@pytest.mark.parametrize(
    "values", [np.float16(2), 5, True, np.array("abc"), np.datetime64("2020-01-01"), np.array(1 + 2j), np.array(b"x")]
)
def test_0d_values_of_the_whole_episode(values: Any) -> None:
    got = round_trip({"t": np.zeros(2), "k": values}, Schema(axes={"k": "free"}))["k"]
    assert identical(got, np.asarray(values))


def test_episodes_without_steps_keep_what_belongs_to_the_whole() -> None:
    arc, none, two = fresh(), episode(0), episode(2)
    with arc.writer(schema=SCHEMA) as w:
        for name, nest in (("a", none), ("b", two), ("c", none)):
            w.add_episode(nest, episode_id=name, update_count=7, model_weights_uuid="u")
    arc = reopened(arc)
    assert identical({e.id: e.read() for e in arc.episodes}, {"a": none, "b": two, "c": none})
    assert {(e.update_count, e.model_weights_uuid, e.complete) for e in arc.episodes} == {(7, "u", True)}


def test_json_of_any_kind_per_step() -> None:
    rows = [None, 1.5, "x", [1, [2]], {"a": {"b": None}}, float("nan"), b"raw", (1, 2), 2**80]
    got = round_trip({"j": rows}, Schema(json=["j"]))["j"]
    assert repr(got) == repr(rows)


@pytest.mark.parametrize(
    ("start", "stop", "want"),
    [(0, 6, [False, True]), (0, 2, [True, True]), (4, 4, [False, True]), (3, 3, [True, True]), (0, 0, [True, True])],
)
def test_extra_rows_are_sought_after_the_last_step_read(start: int, stop: int, want: list[bool]) -> None:
    """Also where steps between the parts have left."""
    whole = Spans(np.array([0, 2]), np.array([0, 0]), np.array([0, 5]), np.array([3, 8]))
    cut = whole.cut(np.array([start]), np.array([stop]))
    assert cut.more.tolist() == want
    assert cut.lengths().tolist() == [stop - start]


def test_free_fields_come_once_where_steps_between_have_left() -> None:
    arc = fresh()
    with arc.writer(schema=Schema(axes={"log": "free"})) as w:
        w.append({"t": np.arange(6), "log": np.arange(3)}, env_ids=0, last=True)
        w.evict(0, positions=np.array([2, 3]))
        w.checkpoint(1).result()
    (got,) = reopened(arc).checkpoints["step-1"].episodes.read()
    assert (got["t"].tolist(), got["log"].tolist()) == ([0, 1, 4, 5], [0, 1, 2])
