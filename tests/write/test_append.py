"""Streams of env rows: where episodes begin and end, what is live, which weights made them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import archive
from archive import Schema
from archive.base.errors import ClosedError, DuplicateEpisodeError, FieldError, NotFoundError, UsageError
from tests.support.archives import fresh, reopened, segment_rows


def facts(arc: archive.Archive, *columns: str) -> list[tuple[Any, ...]]:
    """These columns of the episodes' table, in order of env row and age."""
    rows = reopened(arc).episodes.table.to_pylist()
    return [tuple(row[c] for c in columns) for row in sorted(rows, key=lambda r: (r["env_id"] or 0, r["episode_id"]))]


def values(arc: archive.Archive) -> list[list[int]]:
    """The field t of all episodes, by env row and age."""
    episodes = sorted(reopened(arc).episodes, key=lambda e: (e.env_id or 0, e.id))
    return [e.read("t")["t"].tolist() for e in episodes]


def test_vector_env_steps() -> None:
    arc = fresh()
    with arc.writer() as w:
        for t in range(4):
            positions = w.append({"t": np.array([t, 10 + t, 20 + t])}, last=[t == 1, False, t == 3])
            assert positions.tolist() == [t] * 3
        assert w.live.select(["env_id", "position", "length"]).to_pylist() == [
            {"env_id": 0, "position": 0, "length": 2},
            {"env_id": 0, "position": 2, "length": 2},
            {"env_id": 1, "position": 0, "length": 4},
            {"env_id": 2, "position": 0, "length": 4},
        ]
    assert values(arc) == [[0, 1], [2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    assert facts(arc, "complete", "length", "env_id") == [(True, 2, 0), (False, 2, 0), (False, 4, 1), (True, 4, 2)]


def test_a_run_of_one_env() -> None:
    arc = fresh()
    with arc.writer() as w:
        assert w.append({"t": np.arange(3)}, env_ids=7, first=True).tolist() == [0, 1, 2]
        assert w.append({"t": np.arange(3, 5)}, env_ids=7, last=True).tolist() == [3, 4]
        w.append({"t": np.arange(5, 9)}, env_ids=7, last=[False, True, False, False], truncated=[0, 1, 0, 0])
        w.append({"t": np.arange(1)}, env_ids=np.int64(8), terminated=True)
    assert values(arc) == [[0, 1, 2, 3, 4], [5, 6], [7, 8], [0]]
    got = facts(arc, "complete", "terminated", "truncated")
    assert got == [(True, None, None), (True, None, True), (False, None, None), (True, True, None)]


def test_rows_of_any_envs_in_any_mix() -> None:
    arc = fresh()
    with arc.writer() as w:
        positions = w.append({"t": np.arange(6)}, env_ids=[5, 2, 5, 5, 2, 9], last=[0, 0, 1, 0, 0, 0])
        assert positions.tolist() == [0, 0, 1, 2, 1, 0]
        assert w.append({"t": np.arange(6, 8)}, env_ids=[2, 5]).tolist() == [2, 3]
    assert values(arc) == [[1, 4, 6], [0, 2], [3, 7], [5]]


def test_terminated_and_truncated_end_episodes() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(4)}, terminated=[1, 0, 1, 0], truncated=[0, 1, 1, 0])
    got = facts(arc, "terminated", "truncated", "complete")
    assert got == [(True, False, True), (False, True, True), (True, True, True), (None, None, False)]


def test_headless_open_and_interrupted_stay_what_they_are() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(4)}, env_ids=0, first=[0, 0, 1, 0], last=[0, 1, 0, 0])  # headless, then open
        w.append({"t": np.arange(4, 6)}, env_ids=0, first=True)  # first without a last before
    rows = segment_rows(arc)
    assert [(r["first"], r["last"], r["reason"]) for r in rows] == [
        (False, True, None), (True, False, "interrupted"), (True, False, None),
    ]  # fmt: skip
    assert facts(arc, "complete", "reason") == [(False, None), (False, "interrupted"), (False, None)]
    assert values(arc) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("commit", [False, True])
def test_an_interruption_is_recorded_though_its_steps_are_committed(commit: bool) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(3)}, env_ids=0)
        if commit:
            w.commit()
            assert facts(arc, "reason", "complete") == [(None, False)]
        w.append({"t": np.arange(3, 5)}, env_ids=0, first=True)
    assert facts(arc, "reason", "complete", "length") == [("interrupted", False, 3), (None, False, 2)]
    assert values(arc) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("commit", [False, True])
def test_a_jump_of_positions_is_a_gap_and_never_glued(commit: bool) -> None:
    arc = fresh()
    with arc.writer() as w:
        assert w.append({"t": np.arange(3)}, env_ids=0, positions=[4, 5, 6]).tolist() == [4, 5, 6]
        if commit:
            w.commit()
        w.append({"t": np.arange(3, 7)}, env_ids=0, positions=[9, 10, 12, 13])
        assert [(r["position"], r["length"]) for r in w.live.to_pylist()] == [(4, 3), (9, 2), (12, 2)]
    assert facts(arc, "reason", "complete") == [("gap", False), ("gap", False), (None, False)]
    assert values(arc) == [[0, 1, 2], [3, 4], [5, 6]]
    firsts = [r["first"] for r in segment_rows(arc) if r["length"]]
    assert firsts == [True, False, False]  # what was skipped may have been the beginning


def test_a_first_after_a_jump_is_a_whole_episode() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(2)}, env_ids=0, last=True)
        w.append({"t": np.arange(2)}, env_ids=0, positions=[7, 8], first=True, last=True)
    assert facts(arc, "complete") == [(True,), (True,)]


def test_positions_only_grow() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(3)}, env_ids=0)
        for bad in ([2, 3, 4], [0, 1, 2], [5, 5, 6], [7, 6, 8], [-1, 0, 1]):
            with pytest.raises(UsageError, match="positions only grow"):
                w.append({"t": np.arange(3)}, env_ids=0, positions=bad)
        assert w.append({"t": np.arange(3)}, env_ids=0).tolist() == [3, 4, 5]
    assert values(arc) == [[0, 1, 2, 0, 1, 2]]


def test_episodes_follow_their_ids() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(4)}, env_ids=0, episode_ids=["a", "a", "b", "b"])
        w.append({"t": np.arange(4, 6)}, env_ids=0, episode_ids=["b", "c"])
        w.append({"t": np.arange(2)}, env_ids=[1, 0], episode_ids=["d", None])
    got = {e.id: (e.read()["t"].tolist(), e.reason) for e in reopened(arc).episodes}
    assert got == {"a": ([0, 1], "interrupted"), "b": ([2, 3, 4], "interrupted"), "c": ([5, 1], None), "d": ([0], None)}


def test_one_id_may_stand_for_a_whole_run() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(2)}, env_ids=3, episode_ids="run", last=True)
        with pytest.raises(DuplicateEpisodeError, match="'run'"):
            w.append({"t": np.arange(2)}, env_ids=3, episode_ids="run")
    assert [e.id for e in reopened(arc).episodes] == ["run"]


def test_a_refused_call_leaves_nothing_behind() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(2)}, env_ids=0, episode_ids="x")
        before = w.live
        with pytest.raises(DuplicateEpisodeError, match="'a'"):
            w.append({"t": np.arange(4)}, env_ids=[1, 1, 0, 1], episode_ids=["a", "b", "c", "a"])
        for wrong in (
            {"env_ids": [0, 1]}, {"env_ids": [-1, 0, 1]}, {"env_ids": [0.5, 1, 2]}, {"last": [True]},
            {"episode_ids": ["a"]}, {"model_weights_uuid": ["a"]}, {"update_count": [1]}, {"update_count": 2**63},
            {"update_count": 1.5}, {"update_count": "nofield"}, {"metadata": 3}, {"episode_ids": ["\ud800", "b", "c"]},
        ):  # fmt: skip
            with pytest.raises(UsageError):
                w.append({"t": np.arange(3)}, **wrong)
        with pytest.raises(NotFoundError, match="'a'"):
            w.remove("a")
        assert w.live.equals(before)
        w.append({"t": np.arange(3)}, env_ids=[1, 1, 1], episode_ids=["a", "b", "c"])
    assert {e.id for e in reopened(arc).episodes} == {"x", "a", "b", "c"}


def test_close_episodes_at_once_and_after_a_commit() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(3), "reward": np.ones(3)}, metadata={"k": 1}, model_weights_uuid="u", update_count=4)
        assert len(w.close_episodes([1], reason="lost")) == 1
        w.commit()
        assert len(w.close_episodes(terminated=False)) == 2
        assert w.close_episodes() == w.close_episodes([0, 99]) == []
    assert facts(arc, "complete", "terminated", "truncated", "reason") == [
        (True, False, True, None), (True, None, True, "lost"), (True, False, True, None),
    ]  # fmt: skip
    assert [r["length"] for r in segment_rows(arc)] == [1, 1, 1, 0, 0]
    assert facts(arc, "length", "return", "update_count_min", "metadata") == [(1, 1.0, 4, '{"k":1}')] * 3
    assert {e.model_weights_uuid for e in reopened(arc).episodes} == {"u"}
    assert values(arc) == [[0], [1], [2]]


def test_a_closed_env_row_begins_a_new_episode() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(2)}, env_ids=0)
        w.close_episodes(0)
        w.append({"t": np.arange(2, 4)}, env_ids=0)
        with pytest.raises(UsageError, match="env 0 has an open episode"):
            w.add_episode({"t": np.arange(2)}, env_id=0)
        w.close_episodes(0)
        w.add_episode({"t": np.arange(4, 6)}, env_id=0)
    assert values(arc) == [[0, 1], [2, 3], [4, 5]]
    assert facts(arc, "complete") == [(True,)] * 3


def test_add_episode_may_be_headless_or_open_and_go_on() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"t": np.arange(2)}, env_id=4, first=False)
        name = w.add_episode({"t": np.arange(2, 4)}, env_id=4, last=False)
        w.commit()
        w.append({"t": np.arange(4, 6)}, env_ids=4, last=True)
        w.add_episode({"t": np.arange(2)}, last=False)
    rows = facts(arc, "env_id", "complete", "length")
    assert sorted(rows, key=str) == [(4, False, 2), (4, True, 4), (None, False, 2)]
    assert reopened(arc).episodes[name].read()["t"].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("commit", [False, True])
def test_fields_do_not_change_within_an_episode(commit: bool) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append({"t": np.arange(2)}, env_ids=0, episode_ids="a")
        if commit:
            w.commit()
        for other in (
            {"t": np.arange(2.0)},
            {"t": np.zeros((2, 1), int)},
            {"u": np.arange(2)},
            {"t": np.arange(2), "u": np.arange(2)},
        ):
            with pytest.raises(FieldError, match="open episode 'a'"):
                w.append(other, env_ids=0)
        w.append({"u": np.arange(2)}, env_ids=1)  # another env row's may differ
        w.append({"t": np.arange(2, 4)}, env_ids=0)
        w.append({"t": np.arange(2.0)}, env_ids=0, first=True)  # and so may the next episode's
        w.append({"v": np.arange(2)}, env_ids=0, episode_ids="b")
        w.append({"w": np.arange(2)}, env_ids=0, positions=[50, 51])
    assert reopened(arc).episodes["a"].read()["t"].tolist() == [0, 1, 2, 3]
    assert sorted(facts(arc, "env_id", "length")) == [(0, 2), (0, 2), (0, 2), (0, 4), (1, 2)]


def test_nothing_added_is_nothing_committed() -> None:
    arc = fresh()
    with arc.writer() as w:
        assert w.append({"t": np.zeros((0, 2))}, env_ids=[]).tolist() == []
        assert w.append({"t": np.zeros((0, 2))}, env_ids=3, last=True).tolist() == []
        number = w.commit().number
    assert number == reopened(arc).head.number == 1
    assert len(reopened(arc).episodes) == 0


def test_a_closed_writer_says_so() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"t": np.arange(2)})
    w.close()
    for call in (
        lambda: w.add_episode({"t": np.arange(2)}),
        w.commit,
        w.flush,
        w.clear,
        lambda: w.live,
        w.close_episodes,
    ):
        with pytest.raises(ClosedError):
            call()
    assert len(reopened(arc).episodes) == 1


def test_an_exception_within_commits_nothing() -> None:
    arc = fresh()

    def fails() -> None:
        with arc.writer() as w:
            w.add_episode({"t": np.arange(2)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(reopened(arc).episodes) == 0


def test_steps_that_are_independent_are_kept_as_such() -> None:
    arc = fresh()
    with arc.writer(schema=Schema(unit="step", env_id="env", episode_id=["traj"], reward="r")) as w:
        w.append({"env": np.arange(3), "traj": np.arange(3), "r": np.ones(3)}, env_ids=0)
    got = reopened(arc).episodes[0]
    assert got.total_reward == 3.0
    row = segment_rows(arc)[0]
    assert '"unit":"step"' in row["schema"]
    assert '"env_id":["env"],"episode_id":["traj"]' in row["schema"].replace('"fields"', "")
    with pytest.raises(FieldError, match="'episode' or 'step'"):
        Schema(unit="row")


def test_an_episode_that_begins_without_steps_ends_with_its_last_one() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode({"t": np.zeros(0, np.int64)}, env_id=1, episode_id="x", last=False)
        w.append({"t": np.array([7])}, env_ids=1)
        w.close_episodes([1], terminated=True)
    (row,) = reopened(arc).episodes.table.to_pylist()
    assert (row["episode_id"], row["length"], row["complete"], row["terminated"]) == ("x", 1, True, True)
    assert reopened(arc).episodes[0].read()["t"].tolist() == [7]


def test_of_what_kind_fields_are_is_taken_back_with_a_refused_call() -> None:
    arc = fresh()
    with arc.writer(schema=archive.Schema(axes={"token": "ragged"})) as w:
        w.add_episode({"token": [[1, 2], [3]]}, episode_id="a")
        refused = contextlib.suppress(NotFoundError)
        with refused, w.exclusive() as inner:
            inner.add_episode({"token": [[0.5], [1.5]]}, episode_id="b")
            inner.remove("nobody")
        w.add_episode({"token": [[], []]}, episode_id="c")
    read = {e.id: e.read()["token"] for e in reopened(arc).episodes}
    assert [one.dtype for one in read["c"]] == [np.dtype(np.int64)] * 2
