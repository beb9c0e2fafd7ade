"""What left a buffer since the tick before is journaled, so that live steps follow from the journal alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import archive
from archive.base import ColumnError
from archive.maintain import verify
from tests.support.archives import fresh, looked_up_again
from tests.support.ticks import NEVER_S, gone, group, journal, left_of, live_of, steps


@pytest.mark.parametrize("seed", range(6))
def test_live_steps_follow_from_the_journal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    for _ in range(60):
        act(w, rng)
        if rng.random() < 0.3:
            w.sync()
            assert left_of(arc, w.session) == live_of(w)
    ck = w.checkpoint(1).result()
    w.close()
    again = arc.writer(resume=ck, journal_s=NEVER_S)
    for _ in range(40):
        act(again, rng)
        if rng.random() < 0.3:
            again.sync()
            assert left_of(arc, again.session) == live_of(again)
    again.close()


def act(w: Any, rng: np.random.Generator) -> None:
    """One random call."""
    env = int(rng.integers(3))
    last = w.next_position(env)
    ids = [i for i in w.live["episode_id"].to_pylist() if i]
    which = int(rng.integers(8))
    if which < 3:
        n = int(rng.integers(1, 6))
        w.append(steps(n), env_ids=env, last=[False] * (n - 1) + [bool(rng.random() < 0.4)])
    elif which == 3:
        w.add_episode(steps(int(rng.integers(1, 6))))
    elif which == 4:
        w.evict(env, before=int(rng.integers(last + 1)))
    elif which == 5 and last:
        w.evict(env, positions=rng.integers(0, last, 3))
    elif which == 6 and last:
        start = int(rng.integers(last))
        w.evict(env, positions=(start, last))
    elif which == 7 and ids:
        w.remove(ids[int(rng.integers(len(ids)))])
        if rng.random() < 0.1:
            w.clear()


def test_a_ring_says_one_range_an_env_row_and_tick() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    envs = np.arange(16)
    for t in range(200):
        w.append({"x": np.zeros((16, 2), np.float32)}, env_ids=envs)
        if t >= 50:
            with w.exclusive() as inner:
                inner.evict_before(envs, np.full(16, t - 49))
        if t % 40 == 39:
            w.sync()
    w.sync()
    last = journal(arc, w.session)[-1].index.gone["replay"]
    assert sorted(last) == [(w.session, 0, env, 110, 150) for env in range(16)]
    assert left_of(arc, w.session) == live_of(w)
    w.close()


def test_replaced_revisions_are_gone() -> None:
    arc = fresh()
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode(steps(3), episode_id="a")
        w.sync()
        w.add_episode(steps(4), episode_id="a", replace=True)
        w.sync()
        assert gone(arc, w.session) == {"replay": [(w.session, 0, -1, 0, 3)]}
        assert left_of(arc, w.session) == live_of(w) == {(w.session, 0, -1, p) for p in range(3, 7)}


def test_several_buffers_say_what_left_each() -> None:
    arc = fresh()
    with arc.writer(journal_s=NEVER_S) as w:
        demo = w.buffer("demo")
        for buffer in (w, demo):
            buffer.append(steps(5), env_ids=1)
        demo.evict(1, before=2)
        w.sync()
        assert gone(arc, w.session) == {"demo": [(w.session, 0, 1, 0, 2)]}
        assert left_of(arc, w.session, "demo") == live_of(w, "demo")


def test_a_resumed_rank_says_first_what_it_holds_also_if_that_is_nothing() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(5), env_ids=1)
        w.evict(1, before=2)
        ck = w.checkpoint(1).result()
        w.clear()
        empty = w.checkpoint(2).result()
    with arc.writer(resume=ck, journal_s=NEVER_S) as again:
        again.sync()
        first = journal(arc, again.session)[0]
        assert (first.index.rows, first.index.resumed_from) == ({"live": 1}, ck.number)
        assert left_of(arc, again.session) == live_of(again)
        assert arc.head.runs["main"].journal == {0: 0}
    with arc.writer(resume=looked_up_again(empty), journal_s=NEVER_S) as again:
        again.sync()
        assert [one.index.rows for one in journal(arc, again.session)] == [{"live": 0}]


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_are_journaled_by_address() -> None:
    arc = fresh()
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode(steps(3), episode_id="a")
        w.add_episode(steps(2), episode_id="b")
        w.sync()
        w.journal({"priority": {"a": np.array([1, 2, 3], np.float32)}}, {"status": {"a": 1}}, {"n": 1})
        w.journal({"priority": {"b": np.array([4, 5], np.float32)}}, {"status": {"b": 2}}, {"n": 2})
        w.journal({"priority": {"a": np.array([6, 7, 8], np.float32)}}, {"status": {"a": None}})
        w.buffer("demo").add_episode(steps(2), episode_id="c")
        w.journal(columns={"tag": {"c": [1, 2]}}, buffer="demo")
        w.sync()
        entry = journal(arc, w.session)[1].index
        said = entry.columns["replay"]["priority"]
        assert (said.dtype, said.steps) == ("<f4", ((w.session, 0, -1, 0, 3), (w.session, 0, -1, 3, 5)))
        assert entry.columns["demo"]["tag"].steps == ((w.session, 0, -1, 0, 2),)
        assert entry.attributes == {"replay": {"status": '{"a":null,"b":2}'}}
        assert entry.progress == '{"n":2}'
        found = group(arc, w.session, 1)
        assert found[said.array][:].tolist() == [6, 7, 8, 4, 5]
        assert found["obs"][:].tolist() == [0, 1]
        assert journal(arc, w.session)[0].index.progress is None
    assert archive.open(arc.url).episodes["c"].read()["obs"].tolist() == [0, 1]
    assert verify(archive.open(arc.url), deep=True).sound


@pytest.mark.parametrize(
    ("columns", "attributes"),
    [
        ({"p": {"unknown": [1.0]}}, None),
        ({"p": {"a": [1.0]}}, None),
        ({"p": np.zeros(4)}, None),
        ({"p": {"a": np.zeros(3), "b": np.zeros((2, 2))}}, None),
        (None, {"status": {"unknown": 1}}),
    ],
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_said(columns: Any, attributes: Any) -> None:
    arc = fresh()
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode(steps(3), episode_id="a")
        w.add_episode(steps(2), episode_id="b")
        w.sync()
        with pytest.raises(ColumnError):
            w.journal(columns, attributes, progress={"n": 1})
        with pytest.raises(archive.UsageError, match=r"no buffer 'other'.*w\.buffer"):
            w.journal(buffer="other")
        w.sync()
        assert len(journal(arc, w.session)) == 1
