"""Open, headless and empty episodes over checkpoints and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps, value_of


def test_an_open_episode_goes_on_across_checkpoints_and_resumes_as_one() -> None:
    arc = fresh()
    names: set[str] = set()
    at = 0
    resume = None
    for session in range(3):
        with arc.writer(resume=resume) as w:
            for part in range(2):
                w.append(steps(range(at, at + 5)), env_ids=2, first=at == 0, last=(session, part) == (2, 1))
                at += 5
                ck = w.checkpoint(at).result()
                names.update(e.id for e in ck.episodes)
                assert serials(ck) == list(range(at))
                assert ck.discarded == {}
        arc = reopened(arc)
        resume = arc.checkpoints.latest
    assert len(names) == 1
    (episode,) = arc.episodes
    assert (episode.length, episode.complete, episode.env_id) == (30, True, 2)
    assert episode.total_reward == sum(range(30)) * 0.5
    assert resume is not None
    assert serials(resume) == list(range(30))
    assert [e.complete for e in arc.checkpoints["step-20"].episodes] == [False]


def test_what_ends_after_the_call_is_open_in_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background writes segments while the caller goes on and closes the episode."""
    import threading

    from archive.write import blocks, works

    gate, assemble = threading.Event(), blocks.assemble

    def held_up(*args: Any) -> Any:
        gate.wait(20)
        return assemble(*args)

    monkeypatch.setattr(works, "assemble", held_up)
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(5)), env_ids=[0] * 5)
        w.append(steps([100]), env_ids=[1])
        pending = w.checkpoint(1)
        w.close_episodes([0], terminated=True, truncated=False, reason="late")
        w.append(steps([101]), env_ids=[1], first=[True])
        gate.set()
        first = pending.result()
        assert [(e.complete, e.reason) for e in first.episodes] == [(False, None), (False, None)]
        second = w.checkpoint(2).result()
    assert [(e.complete, e.reason) for e in second.episodes] == [(True, "late"), (False, "interrupted"), (False, None)]
    with reopened(arc).writer(resume=first) as w:
        w.append(steps([5]), env_ids=[0], last=[True])
        third = w.checkpoint(3).result()
    assert serials(third) == [0, 1, 2, 3, 4, 5, 100]


def test_an_open_episode_whose_steps_have_all_left_is_closed_where_it_was() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(8)), env_ids=3)
        w.evict(3, before=8)
        w.checkpoint(1).result()
    arc = reopened(arc)
    with arc.writer(resume=arc.checkpoints.latest) as w:
        assert w.live.num_rows == 0
        assert len(w.close_episodes(reason="over")) == 1
        w.append(steps([8, 9]), env_ids=3)
        ck = w.checkpoint(2).result()
    assert serials(ck) == [8, 9]
    begun, closed = sorted(reopened(arc).episodes, key=lambda e: e.length)
    assert (closed.env_id, closed.length, closed.reason, closed.complete) == (3, 8, "over", True)
    assert (begun.env_id, begun.length) == (3, 2)


def test_a_resumed_episode_without_live_steps_goes_on_headless() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(8)), env_ids=3)
        w.evict(3, before=8)
        w.checkpoint(1).result()
    arc = reopened(arc)
    with arc.writer(resume=arc.checkpoints.latest) as w:
        w.append(steps([8, 9]), env_ids=3, last=True)
        kept, dropped = w.checkpoint(2).result(), w.checkpoint(3, incomplete="drop").result()
    (episode,) = reopened(arc).episodes
    assert (episode.length, episode.complete) == (10, True)
    assert serials(kept) == [8, 9]
    assert serials(dropped) == []
    assert dropped.discarded == {"headless": {"episodes": 1, "steps": 2}}


def test_an_open_episode_of_no_env_row_whose_first_steps_left_is_headless() -> None:
    with fresh().writer() as w:
        w.add_episode(steps(range(5)), last=False)
        w.add_episode(steps([5, 6]), last=False)
        w.evict(-1, positions=np.array([0, 1]))
        dropped = w.checkpoint(1, incomplete="drop").result().discarded
    assert dropped == {"headless": {"episodes": 1, "steps": 3}, "open": {"episodes": 1, "steps": 2}}


def test_an_episode_without_steps_is_live_until_it_is_removed() -> None:
    arc = fresh()
    with arc.writer() as w:
        empty = w.add_episode(steps([]))
        full = w.add_episode(steps([1, 2]))
        first = w.checkpoint(1, columns={"p": value_of([1, 2])}, attributes={"tag": {empty: 1}}).result()
    assert [(e.id, e.length) for e in first.episodes] == [(empty, 0), (full, 2)]
    arc = reopened(arc)
    with arc.writer(resume=arc.checkpoints.latest) as w:
        assert w.live["length"].to_pylist() == [0, 2]
        second = w.checkpoint(2).result()
        w.remove(empty)
        third = w.checkpoint(3).result()
    assert [(e.id, e.length) for e in second.episodes] == [(empty, 0), (full, 2)]
    assert [(e.id, e.length) for e in third.episodes] == [(full, 2)]
    assert reopened(arc).checkpoints["step-1"].episodes[empty].attributes == {"tag": 1}


def test_what_belongs_to_the_whole_episode_outlives_its_first_segment(tmp_path: Path) -> None:
    """Its steps left the buffer; a field on the free axis lies with them, and is still the episode's."""
    arc = archive.create(tmp_path / "whole")
    schema = archive.Schema(axes={"goal": "free", "done": "free"})
    with arc.writer(schema=schema) as w:
        fields = {"goal": np.float32(3), "done": np.arange(6)}
        w.append({"x": np.arange(4), **fields}, env_ids=0, first=True)
        w.flush()
        w.append({"x": np.arange(4, 9), "goal": np.float32(3), "done": np.arange(0)}, env_ids=0, last=True)
        w.evict(0, before=6)
        checkpoint = w.checkpoint(1, wait=True).result()
    (episode,) = checkpoint.episodes
    (data,) = checkpoint.episodes.read()
    for found in (data, episode.read()):
        assert found["x"].tolist() == [6, 7, 8]
        assert found["done"].tolist() == [0, 1, 2, 3, 4, 5]
        assert found["goal"] == 3
    assert episode.read(start=1, stop=2)["done"].tolist() == [0, 1, 2, 3, 4, 5]
