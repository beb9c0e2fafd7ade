"""An episode id means one episode: duplicates are refused, revisions replace what was there,
superseded tails vanish."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import resharding
from archive.base.errors import DuplicateEpisodeError, UsageError
from archive.write import slabs
from tests.support.archives import contents, fresh, reopened, segment_rows
from tests.support.sampling import examples


def steps(n: int, start: int = 0) -> dict[str, Any]:
    return {"t": np.arange(start, start + n)}


def test_duplicates_are_refused_by_everybody() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(2), episode_id="x")
        with pytest.raises(DuplicateEpisodeError, match=r"'x'.*replace=True"):
            w.add_episode(steps(3), episode_id="x")
        with pytest.raises(DuplicateEpisodeError, match="'x'"):
            w.buffer("demo").add_episode(steps(3), episode_id="x")
        with pytest.raises(DuplicateEpisodeError, match="'x'"):
            w.append(steps(1), episode_ids=["x"])
        own = w.add_episode(steps(1))
        with pytest.raises(DuplicateEpisodeError):
            w.add_episode(steps(1), episode_id=own)
        w.add_episode(steps(4), episode_id="x ")  # is another
    with reopened(arc).writer() as w, pytest.raises(DuplicateEpisodeError, match="'x'"):
        w.add_episode(steps(3), episode_id="x")
    assert sorted(len(e["t"]) for e in contents(arc).values()) == [1, 2, 4]


@pytest.mark.parametrize("where", ["same commit", "same session", "other session", "other run"])
@pytest.mark.parametrize("fields", ["same fields", "other fields"])
def test_a_revision_replaces(where: str, fields: str) -> None:
    arc = fresh()
    w = arc.writer()
    w.add_episode({"other": np.zeros(1)}, episode_id="y")  # other fields lie in another shard, written before
    w.add_episode(
        steps(2) | {"reward": np.ones(2)}, episode_id="x", model_weights_uuid="old", metadata={"k": 1}, terminated=True
    )
    if where != "same commit":
        w.commit()
    if where.startswith("other"):
        w.close()
        w = reopened(arc).writer(run="second" if where == "other run" else "main")
    new = {"other": np.arange(3.0)} if fields == "other fields" else steps(3, 10)
    assert w.add_episode(new, episode_id="x", replace=True, update_count=7) == "x"
    w.close()
    episodes = reopened(arc).episodes
    assert sorted(e.id for e in episodes) == ["x", "y"]
    got = episodes["x"]
    assert got.read()[next(iter(new))].tolist() == next(iter(new.values())).tolist()
    assert (got.model_weights_uuids, got.update_count, got.metadata, got.terminated) == ([], 7, {}, None)
    assert got.total_reward is None
    assert len(episodes.filter(model_weights_uuid="old")) == 0
    assert len(segment_rows(arc)) == 3  # the old revision's row is still there, for who goes back in time


def test_a_replaced_revision_is_live_no_more() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(2), episode_id="x", env_id=1)
        w.add_episode(steps(3), episode_id="x", env_id=2, replace=True)
        assert w.live.to_pylist() == [{"env_id": 2, "position": 0, "length": 3, "episode_id": "x"}]
        w.add_episode(steps(4), episode_id="x", replace=True)
        assert w.live["length"].to_pylist() == [4]
        assert w.remove("x") == 4


def test_replacing_what_is_not_there_adds_it() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(2), episode_id="x", replace=True)
        with pytest.raises(DuplicateEpisodeError):
            w.add_episode(steps(2), episode_id="x")
    assert list(contents(arc)) == ["x"]


@pytest.mark.parametrize("max_bytes", [slabs.SHARD_BYTES, 100])
def test_revisions_of_many_segments(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> None:
    monkeypatch.setattr(slabs, "SHARD_BYTES", max_bytes)
    arc = fresh()
    with arc.writer() as w:
        for n in (40, 30, 50, 1):
            w.add_episode(steps(n, n), episode_id="x", replace=n != 40)
            w.add_episode(steps(5), episode_id=f"other-{n}")
            if n == 30:
                w.commit()
    got = contents(arc)
    assert got.pop("x")["t"].tolist() == [1]
    assert [v["t"].tolist() for v in got.values()] == [[0, 1, 2, 3, 4]] * 4


def test_two_writers_at_once_cannot_both_add_an_id() -> None:
    """Both claim it while neither has committed: the second is refused, and nothing of the first is harmed."""
    arc = fresh()
    first, second = arc.writer(run="a"), reopened(arc).writer(run="b")
    for w, n in ((first, 2), (second, 3)):
        w.add_episode(steps(n), episode_id="x")
        w.add_episode(steps(n), episode_id=f"own-{n}")
    first.commit()
    with pytest.raises(DuplicateEpisodeError, match=r"another writer committed an episode 'x'"):
        second.commit()
    assert {k: len(v["t"]) for k, v in contents(arc).items()} == {"x": 2, "own-2": 2}
    second.add_episode(steps(4), episode_id="x", replace=True)  # the way out
    second.close()
    assert {k: len(v["t"]) for k, v in contents(arc).items()} == {"x": 4, "own-2": 2, "own-3": 3}
    first.close()


def test_an_open_episode_is_not_replaced() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(2), env_ids=0, episode_ids="x")
        with pytest.raises(UsageError, match=r"'x' is open.*close_episodes"):
            w.add_episode(steps(3), episode_id="x", replace=True)
        w.close_episodes()
        w.add_episode(steps(3), episode_id="x", replace=True)
        w.append(steps(4), env_ids=0)
    assert sorted(len(v["t"]) for v in contents(arc).values()) == [3, 4]


def test_the_past_keeps_its_revision() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(2), episode_id="x")
        before = w.commit().number
        w.add_episode(steps(3), episode_id="x", replace=True)
        w.append(steps(2), env_ids=0, episode_ids="open")
        between = w.commit().number
        w.append(steps(2, 2), env_ids=0, last=True)
    then, later = reopened(arc, commit=before).episodes, reopened(arc, commit=between).episodes
    assert [len(e.read()["t"]) for e in then] == [2]
    assert {e.id: (e.length, e.complete) for e in later} == {"x": (3, True), "open": (2, False)}
    assert {e.id: (e.length, e.complete) for e in reopened(arc).episodes} == {"x": (3, True), "open": (4, True)}


@pytest.mark.parametrize("commit", [False, True])
@pytest.mark.parametrize("end", ["closed", "interrupted"])
def test_an_end_that_is_recorded_late_does_not_bring_back_a_revision(commit: bool, end: str) -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(2), env_ids=5, episode_ids="x")
        if commit:
            w.commit()
        if end == "closed":
            w.close_episodes()
        else:
            w.append(steps(4), env_ids=5, first=True)
        w.add_episode(steps(3), episode_id="x", replace=True)
    assert contents(arc)["x"]["t"].tolist() == [0, 1, 2]
    assert reopened(arc).episodes["x"].reason is None


ADDED = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from("tu"),
    st.sampled_from([None, 0, 1]),
    st.sampled_from(["", "flush", "commit", "reopen"]),
)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(ADDED, max_size=12))
def test_the_newest_revision_wins_whatever_lies_between(added: list[tuple[str, str, int | None, str]]) -> None:
    arc = fresh()
    w = arc.writer()
    want: dict[str, dict[str, list[int]]] = {}
    for i, (name, field, env, then) in enumerate(added):
        w.add_episode({field: np.array([i])}, episode_id=name, env_id=env, replace=True)
        want[name] = {field: [i]}
        if then == "reopen":
            w.close()
            w = reopened(arc).writer()
        elif then:
            getattr(w, then)()
    w.close()
    assert {k: {n: x.tolist() for n, x in v.items()} for k, v in contents(arc).items()} == want


def test_a_run_that_went_back_to_an_older_checkpoint_goes_on_with_what_was_superseded_since() -> None:
    arc = fresh()
    with arc.writer(0, 1, session="s1") as w:
        w.add_episode(steps(2), episode_id="revised")
        w.append(steps(3), env_ids=0, episode_ids="open")
        w.checkpoint(1)
        w.add_episode(steps(4, 10), episode_id="revised", replace=True)
        w.append(steps(3, 3), env_ids=0)
        w.checkpoint(2)
    back = resharding.plan(reopened(arc).checkpoints["step-1"], world_size=1).share(0)
    with reopened(arc).writer(resume=back, session="s2") as w:
        w.append(steps(1, 100), env_ids=0)
        w.checkpoint(3)
    forth = resharding.plan(reopened(arc).checkpoints["step-2"], world_size=1).share(0)
    with reopened(arc).writer(resume=forth, session="s3") as w:
        w.checkpoint(4)
    want = {
        "step-1": {"revised": [0, 1], "open": [0, 1, 2]},
        "step-2": {"revised": [10, 11, 12, 13], "open": [0, 1, 2, 3, 4, 5]},
        "step-3": {"revised": [0, 1], "open": [0, 1, 2, 100]},
        "step-4": {"revised": [10, 11, 12, 13], "open": [0, 1, 2, 3, 4, 5]},
    }
    for name, episodes in want.items():
        ck = reopened(arc).checkpoints[name]
        assert {e.id: e.read()["t"].tolist() for e in ck.episodes} == episodes, name
        for world_size in (1, 2):
            plan = resharding.plan(ck, world_size=world_size)
            dealt = [e["t"].tolist() for rank in range(world_size) for e in plan.share(rank).read()]
            assert sorted(dealt) == sorted(episodes.values()), name
