"""What was journaled comes back as a checkpoint: by hand, before a plain restart, once for all who ask."""

from __future__ import annotations

import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base import NotFoundError, SupersededError, layout
from tests.support.archives import fresh, looked_up_again
from tests.support.journals import copy_of, die
from tests.support.ticks import NEVER_S


def episode(n: int, base: int = 0) -> dict[str, Any]:
    return {"obs": np.arange(base, base + n, dtype=np.int64), "reward": np.ones(n, np.float32)}


def ids(checkpoint: Any) -> list[str]:
    return list(checkpoint.episodes.table["episode_id"].to_pylist())


def crashed(arc: archive.Archive | None = None, **options: Any) -> archive.Archive:
    """An archive whose job has died after a checkpoint and a tick."""
    arc = arc or fresh()
    w = arc.writer(journal_s=NEVER_S, **options)
    w.add_episode(episode(5), episode_id="a")
    w.add_episode(episode(4, 10), episode_id="b")
    columns = {"p": np.arange(9.0), "kind": np.array(["x"] * 9), "n": np.arange(9), "half": np.ones(9, np.float16)}
    w.checkpoint(
        100, state={"x": np.arange(3), "k": 4}, columns=columns, progress={"n": 1}, metrics={"r": 2.0}, wait=True
    )
    w.add_episode(episode(3, 20), episode_id="c")
    w.remove(["a"])
    w.journal(columns={"p": {"b": np.full(4, 7.0)}}, progress={"n": 2})
    w.sync()
    w.add_episode(episode(9, 30), episode_id="lost")
    die(w)
    return arc.refresh()


def test_columns_states_and_progress_come_along(caplog: pytest.LogCaptureFixture) -> None:
    arc = crashed()
    caplog.set_level(logging.INFO, "archive")
    made = arc.recover()
    assert ids(made) == ["b", "c"]
    np.testing.assert_array_equal(made.column("p", 0), [7, 7, 7, 7, np.nan, np.nan, np.nan])
    assert made.column("kind", 0).tolist() == ["x"] * 4 + [""] * 3
    assert made.column("n", 0).tolist() == [5, 6, 7, 8, 0, 0, 0]
    assert np.isnan(made.column("half", 0)[4:]).all()
    assert made.column("half", 0).dtype == np.float16
    state = made.state(0)
    assert (state["k"], state["x"].tolist()) == (4, [0, 1, 2])
    assert made.progress == {"n": 2}
    assert made.metrics == {"r": 2.0}
    told = caplog.text
    assert "recovered 1 journal objects of rank 0, with 3 steps of 1 episodes, up to number 2: there is no" in told
    assert "column 'p' of buffer 'replay', rank 0: 3 steps were journaled without a value" in told


@pytest.mark.parametrize("saved", [False, True])
def test_every_rank_reads_columns_that_some_ranks_had_no_values_of(
    saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks that never said a value of it, whose buffer began after the checkpoint, or that have other columns."""
    arc = fresh()
    writers = [arc.writer(r, 3, session="one", journal_s=NEVER_S) for r in range(3)]
    if saved:
        writers[0].add_episode(episode(2), episode_id="base")
        columns = [{"p": np.full((2, 2), 5, np.float32)}, {}, {}]
        for pending in [w.checkpoint(1, columns=of) for w, of in zip(writers, columns, strict=True)]:
            pending.result()
    for w in writers:
        w.add_episode(episode(2 + w.rank), episode_id=f"e{w.rank}")
    if not saved:
        writers[0].journal(columns={"p": {"e0": np.full((2, 2), 5, np.float32)}})
    writers[1].journal(columns={"n": {"e1": np.arange(3)}, "word": {"e1": ["x", "y", "z"]}})
    for w in writers:
        w.sync()
    die(*writers)
    made = arc.refresh().recover()
    known = {"base": [5.0, 5.0]} if saved else {"e0": [5.0, 5.0]}
    want = {name: known.get(name, [np.nan] * n) for name, n in [("base", 2), ("e0", 2), ("e1", 3), ("e2", 4)]}
    for world in (1, 2, 3, 5):
        plan = resharding.plan(made, world)
        for share in map(plan.share, range(world)):
            of = [name for name, n in zip(ids(share), share.layout.length.tolist(), strict=True) for _ in range(n)]
            p = share.columns["p"]
            assert (p.dtype, p.shape[1:]) == (np.float32, (2,))
            wanted = [value for ep in ids(share) for value in want[ep]]
            np.testing.assert_array_equal(p[:, 0], wanted)
            assert share.columns["n"].tolist() == [of[:i].count("e1") if e == "e1" else 0 for i, e in enumerate(of)]
            assert share.columns["word"].tolist() == [
                "xyz"[of[:i].count("e1")] if e == "e1" else "" for i, e in enumerate(of)
            ]
    assert "column 'p' of buffer 'replay', rank 2: 4 steps were journaled without a value" in caplog.text


def test_a_recovered_checkpoint_is_one_like_any_other() -> None:
    arc = crashed()
    base = arc.checkpoints.latest
    made = arc.recover()
    assert made.record.recovered is not None
    assert made.record.recovered.base == base.number
    assert base.record.ranks[0].key in made.record.borrowed
    assert arc.checkpoints.latest.number == made.number
    assert arc.recover().number == made.number
    again = pickle.loads(pickle.dumps(made))
    assert again.state(0)["k"] == 4
    plan = resharding.plan(made, 2)
    assert sum(plan.steps) == 7
    assert plan.share(0).source_states[0]["k"] == 4
    with arc.writer(resume=made) as w:
        assert w.live["episode_id"].to_pylist() == ["b", "c"]
        w.add_episode(episode(1), episode_id="e")
        w.checkpoint(200, wait=True)
    assert ids(arc.checkpoints.latest) == ["b", "c", "e"]
    assert sorted(arc.episodes.table["episode_id"].to_pylist()) == ["a", "b", "c", "e"]
    assert arc.refresh().forget(archive.Keep(last=1), dry_run=False)
    arc.prune("0s", dry_run=False, force=True)
    assert arc.refresh().checkpoints.latest.episodes["c"].read()["obs"].tolist() == [20, 21, 22]


def test_what_has_no_env_row_is_not_open_after_a_recovery() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(episode(2), episode_id="a", last=False)
    w.add_episode(episode(2), episode_id="b", last=False, env_id=1)
    w.sync()
    die(w)
    made = arc.refresh().recover()
    assert made.staged(0).index.buffers["replay"].open_episodes == {1: "b"}
    v = arc.writer(resume=made)
    v.add_episode(episode(1), episode_id="c")
    assert v.close_episodes() == ["b"]
    v.commit()
    plan = resharding.plan(looked_up_again(made), 2)
    by_plan = [arc.writer(resume=plan.share(rank), session="two") for rank in range(2)]
    for w in by_plan:
        w.commit()
    rows = {row["episode_id"]: row["reason"] for row in arc.refresh().episodes.table.to_pylist()}
    assert (rows["a"], rows["b"]) == (None, "resumed")


def test_env_rows_that_were_emptied_since_a_resume_keep_their_positions() -> None:
    arc = fresh()
    w = arc.writer()
    w.add_episode(episode(3), env_id=1)
    w.add_episode(episode(2), env_id=2)
    plan = resharding.plan(w.checkpoint(1).result(), 2)
    w.close()
    writers = [arc.writer(resume=plan.share(rank), session="two", journal_s=NEVER_S) for rank in range(2)]
    before = [dict(one.next_positions) for one in (plan.share(rank).buffer("replay") for rank in range(2))]
    for w in writers:
        w.clear()
        w.sync()
    die(*writers)
    made = arc.refresh().recover()
    assert len(made.episodes) == 0
    assert [made.staged(rank).index.buffers["replay"].next_positions for rank in range(2)] == before
    assert sorted(position for of in before for position in of.values()) == [2, 3]


def test_ranks_that_a_plan_has_moved_steps_between_go_on_where_they_stood() -> None:
    arc = fresh()
    writers = [arc.writer(rank, 2, session="one") for rank in range(2)]
    for env in range(4):
        writers[0].add_episode(episode(2 + env), env_id=env)
    pendings = [w.checkpoint(1) for w in writers]
    plan = resharding.plan([one.result() for one in pendings][-1], 2, policy="interleaved")
    shares = [plan.share(rank) for rank in range(2)]
    before = [dict(share.buffer("replay").next_positions) for share in shares]
    assert all(before)
    writers = [arc.writer(resume=share, session="two", journal_s=NEVER_S) for share in shares]
    for w in writers:
        w.sync()
    die(*writers)
    made = arc.refresh().recover()
    assert [made.staged(rank).index.buffers["replay"].next_positions for rank in range(2)] == before


def test_a_session_from_a_checkpoint_that_lacks_a_rank_goes_on_with_no_open_episode_of_it() -> None:
    arc = fresh()
    writers = [arc.writer(rank, 2, session="one") for rank in range(2)]
    writers[0].append(episode(2), env_ids=[0, 0])
    writers[0].clear()
    base = writers[0].checkpoint(1, partial=True).result()
    plan = resharding.plan(base, 2, allow_missing=True)
    before = [dict(plan.share(rank).buffer("replay").next_positions) for rank in range(2)]
    writers = [arc.writer(resume=plan.share(rank), session="two", journal_s=NEVER_S) for rank in range(2)]
    for w in writers:
        w.sync()
    die(*writers)
    made = arc.refresh().recover()
    found = [made.staged(rank).index.buffers.get("replay") for rank in range(2)]
    assert [{} if one is None else one.next_positions for one in found] == before == [{}, {}]
    assert all(one is None or one.open_episodes == {} for one in found)


def test_an_open_episode_of_which_no_step_is_live_stays_open_behind_those_that_are() -> None:
    arc = fresh()
    w = arc.writer()
    w.add_episode(episode(2), episode_id="whole", env_id=0)
    w.append(episode(2), env_ids=[0, 0], episode_ids=["open", "open"])
    w.evict(env_id=0, positions=[2, 3])
    w.checkpoint(1, wait=True)
    w.close()
    w = arc.writer(resume=arc.refresh().checkpoints.latest, journal_s=NEVER_S)
    w.sync()
    die(w)
    made = arc.refresh().recover()
    assert ids(made) == ["whole"]
    assert made.staged(0).index.buffers["replay"].open_episodes == {0: "open"}
    v = arc.writer(resume=made)
    v.append(episode(1), env_ids=[0])
    assert v.live["episode_id"].to_pylist() == ["whole", "open"]


def test_the_base_may_be_forgotten() -> None:
    arc = crashed()
    made = arc.recover()
    arc.forget(archive.Keep(last=1), dry_run=False)
    arc.prune("0s", dry_run=False, force=True)
    found = archive.open(arc.url).checkpoints.latest
    assert found.number == made.number
    assert found.state(0)["k"] == 4
    assert ids(found) == ["b", "c"]


def test_a_plain_restart_loses_nothing() -> None:
    arc = crashed()
    with archive.open(arc.url).writer() as w:
        w.add_episode(episode(2), episode_id="new")
    found = archive.open(arc.url)
    assert set(found.episodes.table["episode_id"].to_pylist()) == {"a", "b", "c", "new"}
    assert found.checkpoints.latest.name.startswith("step-100+tail-")


def test_all_ranks_of_a_plain_restart_recover_once() -> None:
    arc = crashed()
    with ThreadPoolExecutor(4) as pool:
        writers = list(pool.map(lambda r: archive.open(arc.url).writer(r, 4, session="next"), range(4)))
    die(*writers)
    names = archive.open(arc.url).checkpoints.table["name"].to_pylist()
    assert len(names) == 2


def test_a_resume_from_what_is_older_says_what_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    arc = crashed()
    with arc.writer(resume=arc.checkpoints.latest) as w:
        assert w.live["episode_id"].to_pylist() == ["a", "b"]
    assert "has journaled beyond its newest checkpoint (rank 0)" in caplog.text
    caplog.clear()
    recovered = crashed()
    with recovered.writer(resume=recovered.recover()):
        assert "journaled beyond" not in caplog.text


def test_going_back_on_purpose_leaves_nothing_behind_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    for step in (1, 2):
        w.add_episode(episode(2), episode_id=f"e{step}")
        w.checkpoint(step, wait=True)
    w.add_episode(episode(2), episode_id="later")
    w.commit()
    die(w)
    with arc.refresh().writer(resume=arc.checkpoints["step-1"]) as again:
        assert again.live["episode_id"].to_pylist() == ["e1"]
    assert "newer than the one" not in caplog.text


def test_many_recover_at_once() -> None:
    arc = crashed()
    opened = [archive.open(arc.url) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        numbers = set(pool.map(lambda one: one.recover().number, opened))
    assert len(numbers) == 1
    assert len(archive.open(arc.url).checkpoints) == 2


def test_a_session_that_goes_on_is_recovered_again_and_commits_by_itself() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(episode(2), episode_id="a")
    w.sync()
    first = arc.recover()
    assert first.name.startswith("tail-")
    w.add_episode(episode(2), episode_id="b")
    w.sync()
    second = arc.recover()
    assert second.record.recovered.base == first.number
    assert second.name.count("tail-") == 1
    assert ids(second) == ["a", "b"]
    w.add_episode(episode(2), episode_id="c")
    w.checkpoint(5, wait=True)
    assert ids(arc.refresh().checkpoints.latest) == ["a", "b", "c"]
    assert arc.episodes.table["episode_id"].to_pylist() == ["a", "b", "c"]
    assert not arc.tails()
    w.close()


def test_what_is_recovered_again_and_again_has_the_states_of_the_first_checkpoint() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.checkpoint(1, state={"x": np.arange(3), "k": 4}, wait=True)
    for name in "abc":
        w.add_episode(episode(2), episode_id=name)
        w.sync()
        arc.recover()
        state = archive.open(arc.url).checkpoints.latest.state(0)
        assert (state["x"].tolist(), state["k"]) == ([0, 1, 2], 4)
    w.close()


def test_what_a_zombie_writes_after_the_next_session_began_is_refused_and_never_seen() -> None:
    arc = fresh()
    zombie = arc.writer(journal_s=NEVER_S)
    zombie.add_episode(episode(2), episode_id="a")
    zombie.sync()
    other = archive.open(arc.url)
    with other.writer(resume=other.recover()) as w:
        zombie.add_episode(episode(2), episode_id="z")
        with pytest.raises(SupersededError):
            zombie.sync()
        w.add_episode(episode(2), episode_id="b")
    assert not archive.open(arc.url).tails()
    third = archive.open(arc.url)
    with third.writer(resume=third.recover()):
        pass
    with pytest.raises(SupersededError):
        zombie.commit()
    die(zombie)
    found = archive.open(arc.url)
    assert set(found.episodes.table["episode_id"].to_pylist()) == {"a", "b"}


def test_another_session_that_was_opened_meanwhile_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from archive.journal import recovery

    arc = crashed()
    before = arc.checkpoints.latest
    staged = recovery._staged

    def late(*arguments: Any) -> Any:
        archive.open(arc.url).writer(resume=before).close()
        return staged(*arguments)

    monkeypatch.setattr(recovery, "_staged", late)
    assert arc.recover().number == before.number
    assert "was not recovered" in caplog.text
    assert len(archive.open(arc.url).checkpoints) == 1


def test_a_checkpoint_that_was_committed_meanwhile_is_the_new_base(monkeypatch: pytest.MonkeyPatch) -> None:
    from archive.journal import recovery

    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(episode(2), episode_id="a")
    w.sync()
    staged, done = recovery._staged, []

    def late(*arguments: Any) -> Any:
        if not done:
            done.append(w.checkpoint(9, wait=True))
            w.add_episode(episode(3), episode_id="b")
            w.sync()
        return staged(*arguments)

    monkeypatch.setattr(recovery, "_staged", late)
    made = archive.open(arc.url).recover()
    die(w)
    assert made.name.startswith("step-9+tail-")
    assert ids(made) == ["a", "b"]


def test_one_without_buffers_and_ticks_that_was_committed_meanwhile_is_the_newest_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from archive.journal import recovery

    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(episode(2), episode_id="a")
    w.checkpoint(1, wait=True)
    w.checkpoint(2, save_replay=False, wait=True)
    staged, done = recovery._staged, []

    def late(*arguments: Any) -> Any:
        if not done:
            done.append(w.checkpoint(3, save_replay=False, wait=True))
        return staged(*arguments)

    monkeypatch.setattr(recovery, "_staged", late)
    made = archive.open(arc.url).recover()
    die(w)
    assert (made.step, ids(made)) == (3, ["a"])


@pytest.mark.parametrize("name", ["step-5", "tail-end"])
def test_a_recovered_one_is_named_after_the_one_that_it_goes_on_from(name: str) -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.checkpoint(5, name=name, wait=True)
    made = []
    for number in range(2):
        w.add_episode(episode(2), episode_id=f"e{number}")
        w.sync()
        made.append(arc.refresh().recover().name)
    die(w)
    assert made[0].startswith(f"{name}+tail-")
    assert made[1].count("tail-") == 1
    assert made[1].startswith("step-5+tail-") == (name == "step-5")


def test_there_is_nothing_to_recover() -> None:
    arc = fresh()
    with pytest.raises(NotFoundError, match="no run 'main'"):
        arc.tails()
    assert arc.recover() is None
    with arc.writer() as w:
        w.add_episode(episode(2))
        w.checkpoint(1, wait=True)
    assert arc.recover().name == "step-1"
    assert str(arc.tails()).count("\n") == 2


def test_a_pinned_archive_shows_tails_and_adopts_none() -> None:
    arc = crashed()
    pinned = archive.open(arc.url, commit=arc.head.number)
    assert pinned.tails().total.steps == 3
    _, header, *rows = str(pinned.tails()).split("\n")
    for title, count in (("steps", "3"), ("episodes", "1")):
        end = header.index(title) + len(title)
        assert [row[end - 2 : end + 1].strip() for row in rows] == [count, count], "numbers end below their titles"
    with pytest.raises(archive.UsageError):
        pinned.recover()


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("dead", [None, 0])
def test_on_another_number_of_ranks_nothing_is_lost(world: int, dead: int | None) -> None:
    """Two ranks; then another number, of which one may die before its first tick."""
    arc = fresh()
    first = [arc.writer(r, 2, session="first", journal_s=NEVER_S) for r in range(2)]
    for rank, w in enumerate(first):
        for i in range(4):
            w.append({"obs": np.arange(3) + 100 * rank + 10 * i}, env_ids=i, last=[False, False, i % 2 == 0])
    pending = [w.checkpoint(3, columns={"p": np.arange(12.0) + 100 * r}, state={"r": r}) for r, w in enumerate(first)]
    for p in pending:
        p.result(30)
    die(*first)
    arc.refresh()
    base = arc.checkpoints.latest
    plan = resharding.plan(base, world)
    second = [
        archive.open(arc.url).writer(resume=plan.share(r), session="second", journal_s=NEVER_S) for r in range(world)
    ]
    for rank, w in enumerate(second):
        if rank != dead or world == 1:
            w.add_episode({"obs": np.arange(2) + 1000 * (rank + 1)})
            w.sync()
    die(*second)
    made = archive.open(arc.url).recover()
    assert made.world_size == max(world, 2)
    steps = sorted(n for e in made.episodes for n in e.read()["obs"].tolist())
    new = [n for r in range(world) if r != dead or world == 1 for n in (1000 * (r + 1), 1000 * (r + 1) + 1)]
    assert steps == sorted([*(n for e in base.episodes for n in e.read()["obs"].tolist()), *new])
    assert [made.state(r)["r"] for r in range(2)] == [0, 1]
    values = np.concatenate([made.column("p", r) for r in made.ranks if "p" in made.staged(r).index.columns["replay"]])
    assert sorted(values[~np.isnan(values)].tolist()) == [*range(12), *range(100, 112)]
    opened = {n for r in base.ranks for n in base.staged(r).index.buffers["replay"].open_episodes.values()}
    still = {n for r in made.ranks for n in made.staged(r).index.buffers["replay"].open_episodes.values()}
    closed = {e.id for e in made.episodes if e.complete or e.metadata.get("reason")}
    assert opened - closed >= still
    for source in (1, 2, 4):
        again = resharding.plan(made, source)
        assert sum(again.steps) == len(steps)
    with archive.open(arc.url).writer(resume=resharding.plan(made, 1).share(0)) as w:
        assert sum(w.live["length"].to_pylist()) == len(steps)


@pytest.mark.parametrize("order", ["before", "after", "both", "unsaid"])
def test_the_counters_are_those_that_were_said_last(order: str) -> None:
    """A checkpoint without buffers leaves the ticks before it in the tail: they are older than it."""
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(episode(2))
    w.checkpoint(1, progress={"n": 1}, wait=True)
    w.journal(progress={"n": 2})
    w.sync()
    w.journal(progress={"n": 3})
    w.checkpoint(2, progress=None if order == "unsaid" else {"n": 4}, save_replay=False, wait=True)
    if order in ("after", "both"):
        w.journal(progress={"n": 5})
        w.sync()
    if order == "both":
        w.checkpoint(3, progress={"n": 6}, save_replay=False, wait=True)
        w.add_episode(episode(2))
        w.sync()
    die(w)
    made = arc.refresh().recover()
    assert made.progress == {"n": {"before": 4, "after": 5, "both": 6, "unsaid": 3}[order]}


def test_a_checkpoint_without_buffers_says_how_far_training_had_got() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    w.add_episode(episode(2), episode_id="a")
    w.checkpoint(1, progress={"n": 1}, wait=True)
    w.add_episode(episode(2), episode_id="b")
    w.sync()
    w.checkpoint(2, progress={"n": 2}, save_replay=False, unconsumed=["k"], wait=True)
    w.add_episode(episode(2), episode_id="c")
    w.sync()
    die(w)
    made = arc.refresh().recover()
    assert (made.step, made.progress, made.unconsumed) == (2, {"n": 2}, ["k"])
    assert ids(made) == ["a", "b", "c"]
    w = arc.writer(resume=arc.checkpoints[-2], journal_s=NEVER_S)  # the one without buffers
    w.add_episode(episode(2), episode_id="d")
    w.sync()
    die(w)
    made = arc.refresh().recover()
    assert (made.step, made.progress) == (2, {"n": 2})
    assert ids(made) == ["d"]


@pytest.mark.parametrize("journal_s", [NEVER_S, None])
def test_a_checkpoint_without_buffers_after_which_nothing_was_journaled_empties_none(journal_s: float | None) -> None:
    arc = fresh()
    w = arc.writer(journal_s=journal_s)
    prompts = w.ledger("prompts")
    prompts.draw(["k", "l"])
    w.add_episode(episode(2), episode_id="a")
    prompts.seal("k", episode_id="a")
    w.checkpoint(1, state={"n": 1}, columns={"p": np.arange(2.0)}, progress={"n": 1}, wait=True)
    if journal_s is None:
        prompts.train("k")
    w.checkpoint(2, state={"n": 2}, progress={"n": 2}, save_replay=False, wait=True)
    die(w)
    made = arc.refresh().recover()
    assert (made.step, made.progress, made.state(0)["n"], made.replay_saved) == (2, {"n": 2}, 2, True)
    assert ids(made) == ["a"]
    assert made.column("p", 0).tolist() == [0.0, 1.0]
    assert made.ledger("prompts").state("k") == ("sealed" if journal_s else "trained"), "the weights know of it"
    assert arc.recover().number == made.number
    light = arc.checkpoints[-2]
    if journal_s is not None:
        assert resharding.plan(light, 2).checkpoint.number == made.number
    with arc.writer(resume=made) as w:
        assert w.live["episode_id"].to_pylist() == ["a"]
        assert w.ledger("prompts").to_reissue("group") == ["l"]
        w.checkpoint(3, save_replay=False, wait=True)
    again = arc.refresh().recover()
    assert (again.step, ids(again)) == (3, ["a"]), "what the session went on from"


def test_a_rollout_without_steps_that_is_to_be_trained_on_again_was_not_removed_either() -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    prompts = w.ledger("prompts")
    prompts.draw(["p"])
    prompts.seal("p", episode_id=w.add_episode(episode(0), episode_id="of p"))
    w.checkpoint(1, wait=True)
    prompts.train("p")
    w.remove("of p")
    w.sync()
    die(w)
    assert ids(arc.refresh().recover()) == ["of p"]


@pytest.mark.parametrize("world", [1, 3])
def test_what_is_to_be_trained_on_again_was_not_removed_either(world: int) -> None:
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    prompts = w.ledger("prompts")

    def made(key: str, base: int, **more: Any) -> None:
        prompts.seal(key, episode_id=w.add_episode(episode(2, base), episode_id=f"of {key}", **more))

    keys = ["saved", "trained", "removed", "dropped", "ring", "revised", "open"]
    prompts.draw(keys)
    for at, key in enumerate(keys[:-1]):
        made(key, 10 * at, **({"env_id": 0} if key == "ring" else {}))
    prompts.train("saved")
    w.checkpoint(1, wait=True)
    w.remove("of saved")
    prompts.train(["trained", "ring", "revised"])
    w.remove(["of trained", "of ring"])
    prompts.drop("dropped", "bad")
    w.sync()
    made("open", 60)
    w.add_episode(episode(2, 70), episode_id="of revised", replace=True)
    w.remove(["of dropped", "of removed", "of open"])  # that nobody has trained on
    w.sync()
    die(w)
    made_of = arc.refresh().recover()
    to_train = {"trained": 10, "removed": 20, "ring": 40, "revised": 70, "open": 60}
    assert sorted(ids(made_of)) == ["of revised", "of trained"]
    view = made_of.ledger("prompts")
    for shown in (view, pickle.loads(pickle.dumps(view))):
        read = {group.key: [data["obs"].tolist() for data in group.read(["obs"])] for group in shown.to_train()}
        assert read == {key: [[base, base + 1]] for key, base in to_train.items()}
    plan = resharding.plan(made_of, world)
    writers = [arc.writer(resume=plan.share(rank), session="two", journal_s=NEVER_S) for rank in range(world)]
    for w in writers:
        prompts = w.ledger("prompts")
        groups = prompts.to_train()
        read |= {group.key: [data["obs"].tolist() for data in group.read(["obs"])] for group in groups}
        names = [name for group in groups for name in group.episodes]
        live = set(w.live["episode_id"].to_pylist())
        if gone := set(names) - live:
            with pytest.raises(NotFoundError, match="missing='ignore'"):
                w.remove(names)
        assert set(w.live["episode_id"].to_pylist()) == live
        w.remove(names, missing="ignore")
        assert gone <= {"of ring", "of removed", "of open"}
        prompts.train([group.key for group in groups])
    assert read == {key: [[base, base + 1]] for key, base in to_train.items()}
    with ThreadPoolExecutor(world) as pool:
        list(pool.map(lambda w: w.checkpoint(2, wait=True), writers))
    die(*writers)
    after = arc.refresh().recover()
    assert ids(after) == []
    assert after.ledger("prompts").to_train() == []


def test_a_group_is_read_before_it_is_committed() -> None:
    arc = fresh()
    with arc.writer() as w:
        prompts = w.ledger("prompts")
        prompts.draw(["k", "l"], siblings=2)
        w.append(episode(2), env_ids=3, episode_ids="long")
        w.commit()
        w.append(episode(3, 2), env_ids=3, episode_ids="long", last=[False, False, True])
        prompts.seal("k", 0, episode_id="long")
        prompts.seal("k", 1, episode_id=w.add_episode(episode(1, 9)))
        (group,) = prompts.to_train()
        assert [one["obs"].tolist() for one in group.read("obs")] == [[0, 1, 2, 3, 4], [9]]
        number = arc.refresh().head.number
        assert len(prompts.to_train()[0].read()) == 2
        assert arc.refresh().head.number == number, "it is committed once"


def test_archives_of_the_journal_name_the_feature() -> None:
    arc = crashed()
    arc.recover()
    assert layout.JOURNAL in archive.open(arc.url).head.format["features"]
    assert copy_of(arc).checkpoints.latest.state(0)["k"] == 4


@pytest.mark.parametrize("forked", [False, True])
def test_counters_of_a_session_are_not_compared_with_ticks_of_the_one_before(forked: bool) -> None:
    arc = fresh()
    first = arc.writer(session="first", journal_s=NEVER_S)
    for n in range(6):
        first.add_episode(episode(2), episode_id=f"e{n}")
        first.journal(progress={"n": n})
        first.sync()
    saved = first.checkpoint(10, save_replay=False, progress={"n": 10}).result()
    die(first)
    how = {"run": "fork", "fork_from": saved} if forked else {"resume": saved}
    second = arc.refresh().writer(session="second", journal_s=NEVER_S, **how)
    second.add_episode(episode(2), episode_id="new")
    second.journal(progress={"n": 11})
    second.sync()
    die(second)
    assert archive.open(arc.url).recover("fork" if forked else "main").progress == {"n": 11}


@pytest.mark.parametrize("save_replay", [True, False])
def test_a_restart_after_going_back_goes_on_from_the_newest_session(
    save_replay: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of the branch that was left is the newest that was committed; what came after is in a journal."""
    arc = fresh()
    first = arc.writer(session="first", journal_s=NEVER_S)
    first.add_episode(episode(3), episode_id="a")
    first.checkpoint(1, wait=True)
    first.add_episode(episode(3), episode_id="left behind")
    first.checkpoint(2, save_replay=save_replay, wait=True)
    die(first)
    second = arc.refresh().writer(resume=arc.checkpoints["step-1"], session="second", journal_s=NEVER_S)
    second.add_episode(episode(5), episode_id="b")
    second.sync()
    die(second)
    ranks = [archive.open(arc.url) for _ in range(2)]  # both look before one of them recovers
    newest = [one.checkpoints.latest for one in ranks]
    assert {one.name for one in newest} == {"step-2"}
    shares = [resharding.plan(one, world_size=2).share(rank) for rank, one in enumerate(newest)]
    assert "is planned instead" in caplog.text
    assert sorted(ep.id for share in shares for ep in share) == ["a", "b"]
    if save_replay:
        chosen = resharding.plan(newest[0], world_size=1, tails="ignore").share(0)
        assert [ep.id for ep in chosen] == ["a", "left behind"]
