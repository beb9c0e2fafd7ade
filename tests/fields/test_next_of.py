"""Fields that repeat the next row of another are stored once, and read back as they were given."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import archive
from archive import Schema
from archive.base.errors import FieldError
from archive.write import slabs
from tests.support.archives import fresh, identical, reopened, segment_rows
from tests.support.sampling import examples

SCHEMA = Schema(next_of={"next/obs": "obs", "next/word": "word"})


def kept_rows(arc: archive.Archive, field: str = "next/obs") -> list[int]:
    """How many rows of the field each segment keeps."""
    return [e["rows"] for row in segment_rows(arc) for e in row["extents"] or () if e["field"] == field]


def steps(obs: Any, following: Any) -> dict[str, Any]:
    words = np.array([str(x) for x in obs], object)
    return {
        "obs": obs,
        "word": words,
        "next": {"obs": following, "word": np.array([str(x) for x in following], object)},
    }


def shifted(obs: Any) -> Any:
    return np.concatenate([obs[1:], obs[-1:] + 1])


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.bfloat16, np.longdouble, "S4"], ids=str)
def test_only_the_last_row_is_kept(dtype: Any) -> None:
    arc = fresh()
    obs = np.arange(12).reshape(6, 2).astype(dtype)
    nest = steps(obs, obs[[1, 2, 3, 4, 5, 5]])
    with arc.writer(schema=SCHEMA) as w:
        w.add_episode(nest)
    assert (kept_rows(arc), kept_rows(arc, "next/word")) == ([1], [1])
    got = reopened(arc).episodes[0]
    assert identical(got.read(), nest)
    for start in range(7):
        for stop in range(start, 7):
            assert identical(got.read("next/obs", start, stop)["next"]["obs"], nest["next"]["obs"][start:stop])


def test_bits_decide_not_values() -> None:
    obs = np.array([0.0, 0.0, np.nan, np.nan, 5.0])
    following = np.array([-0.0, np.nan, np.nan, 5.0, 6.0])
    following[2:3].view(np.uint64)[:] ^= 1  # another NaN than the one it would repeat
    arc = fresh()
    with arc.writer(schema=SCHEMA) as w:
        w.add_episode(steps(obs, following))
    assert kept_rows(arc) == [3]  # -0.0, the other NaN and the last
    assert identical(reopened(arc).episodes[0].read()["next"]["obs"], following)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12), st.data())
def test_any_exceptions_are_kept(rows: list[tuple[int, bool]], data: st.DataObject) -> None:
    obs = np.array([value for value, _ in rows], np.int16)
    following = np.array([9 if odd else v for v, (_, odd) in zip(shifted(obs), rows, strict=True)], np.int16)
    arc = fresh()
    with arc.writer(schema=SCHEMA) as w:
        w.add_episode(steps(obs, following))
        w.add_episode(steps(following, obs))
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    got = [e.read(start=start, stop=stop)["next"]["obs"] for e in reopened(arc).episodes]
    assert identical(got, [following[start:stop], obs[start:stop]])


def test_rows_of_a_vector_env_with_autoreset() -> None:
    """At a reset obs[t+1] belongs to the next episode, and next/obs[t] is the old one's last."""
    arc = fresh()
    with arc.writer(schema=SCHEMA) as w:
        for t in range(9):
            obs = np.array([100 + t, 200 + t])
            done = np.array([t % 3 == 2, t % 4 == 3])
            w.append(steps(obs, np.where(done, obs + 50, obs + 1)), terminated=done)
    got = reopened(arc).episodes
    assert len(got) == 6
    for e in got:
        read = e.read()
        assert read["next"]["obs"][:-1].tolist() == read["obs"][1:].tolist()
        assert read["next"]["obs"][-1] == read["obs"][-1] + (50 if e.complete else 1)
        assert read["next"]["word"].tolist() == [str(x) for x in read["next"]["obs"]]
    assert kept_rows(arc) == [1] * 6


@pytest.mark.parametrize("commit", [False, True])
def test_over_several_segments_and_shards(monkeypatch: pytest.MonkeyPatch, commit: bool) -> None:
    monkeypatch.setattr(slabs, "SHARD_BYTES", 200)
    arc = fresh()
    obs = np.arange(30)
    following = shifted(obs)
    with arc.writer(schema=SCHEMA) as w:
        for a in range(0, 30, 10):
            w.append(steps(obs[a : a + 10], following[a : a + 10]), env_ids=0, last=a == 20)
            if commit:
                w.commit()
        w.add_episode(steps(obs, following))
    assert len(arc.shards) > 4
    assert set(kept_rows(arc)) == {1}
    for e in reopened(arc).episodes:
        for start, stop in [(0, 30), (9, 11), (4, 23), (29, 30), (10, 10)]:
            assert identical(e.read("next/obs", start, stop)["next"]["obs"], following[start:stop])


def test_unlike_rows_are_all_kept() -> None:
    arc = fresh()
    obs = np.arange(4, dtype=np.float32)
    nests = [
        {"obs": obs, "next": {"obs": obs.astype(np.float64)}},
        {"obs": obs, "next": {"obs": np.ones((4, 3), np.float32)}},
        {"obs": obs, "next": {"obs": ["a", "b", "c", "d"]}},
        {"obs": ["a", "b", "c", "d"], "next": {"obs": obs}},
        {"obs": obs, "next": {"obs": None}},
        {"obs": obs},
    ]
    with arc.writer(schema=SCHEMA) as w:
        for i, nest in enumerate(nests):
            w.add_episode(nest, episode_id=str(i))
    episodes = reopened(arc).episodes
    assert episodes["2"].read()["next"]["obs"].tolist() == ["a", "b", "c", "d"]
    for i in (0, 1, 4, 5):
        assert identical(episodes[str(i)].read(), nests[i])
    assert identical(episodes["3"].read()["next"]["obs"], obs)
    assert episodes["1"].read("next", 1, 3)["next"]["obs"].shape == (2, 3)


def test_reading_the_repeating_field_alone() -> None:
    arc = fresh()
    with arc.writer(schema=SCHEMA) as w:
        w.add_episode(steps(np.arange(5), shifted(np.arange(5))))
    got = reopened(arc).episodes[0].read(["next/obs"], 1, 4)
    assert identical(got, {"next": {"obs": np.array([2, 3, 4])}})


@pytest.mark.parametrize(
    ("axes", "nest", "message"),
    [
        ({}, {"next": {"obs": np.zeros(3)}}, "these steps do not have"),
        ({"obs": "offset"}, {"obs": np.zeros(4), "next": {"obs": np.zeros(3)}}, "'obs' is in Schema.*'offset'"),
        (
            {"next/obs": "offset"},
            {"obs": np.zeros(3), "next": {"obs": np.zeros(4)}},
            "'next/obs' is in Schema.*'offset'",
        ),
        ({"obs": "ragged"}, {"obs": [np.zeros(1)] * 3, "next": {"obs": np.zeros(3)}}, "'obs' is in Schema.*'ragged'"),
        ({"obs": "free"}, {"obs": np.zeros(1), "next": {"obs": np.zeros(3)}}, "'obs' is in Schema.*'free'"),
        ({}, {"obs": None, "next": {"obs": np.zeros(3)}}, "'obs' is in Schema.*'none'"),
    ],
)
def test_what_cannot_be_repeated_is_refused(axes: dict[str, str], nest: dict[str, Any], message: str) -> None:
    arc = fresh()
    schema = Schema(next_of={"next/obs": "obs"}, axes=axes)
    with arc.writer(schema=schema) as w, pytest.raises(FieldError, match=message):
        w.add_episode(nest)


@pytest.mark.parametrize("next_of", [{"a": "b", "b": "c"}, {"c": "b", "b": "a"}, {"a": "a"}, {"a": "b", "b": "a"}])
def test_a_field_that_is_followed_follows_no_other(next_of: dict[str, str]) -> None:
    """Not all of its rows are stored, so nothing could be read from them."""
    with pytest.raises(FieldError, match=r"which is in next_of itself.*leave '[ac]' out"):
        Schema(next_of=next_of)
