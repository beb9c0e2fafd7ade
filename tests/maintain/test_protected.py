"""What no policy lets go of: each protection by itself, and what would be lost without it."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive import Keep
from tests.support.archives import fresh
from tests.support.checkpoints import serials, steps
from tests.support.letting_go import Ring, all_told, remove_forgotten

NEWEST, BUFFERS = "newest whole of its run", "newest of its run with buffers"


def _forget(arc: archive.Archive, keep: Keep | None, **how: Any) -> dict[str, tuple[str, ...]]:
    """Forget, and delete what that let go of; name -> why it stayed."""
    plan = arc.refresh().forget(keep, **{"episodes": "unreferenced", "dry_run": False} | how)
    if plan.made is not None:
        remove_forgotten(arc)
    return {one.name: one.reasons for one in plan.checkpoints if one.stays}


def test_the_newest_whole_one_of_each_run() -> None:
    arc = fresh()
    rings = [Ring(arc, run=run) for run in ("a", "b")]
    for ring in rings:
        ring.turns(6)
    plan = arc.refresh().forget(Keep(best=("return", "max")), episodes="unreferenced", run="a", dry_run=False)
    kept = {one.name: one.reasons for one in plan.checkpoints if one.stays and one.run == "a"}
    assert kept == {"step-3": ("greatest return",), "step-5": (BUFFERS, NEWEST)}
    remove_forgotten(arc)
    assert [ck.name for ck in arc.refresh().checkpoints.of("a")] == ["step-3", "step-5"]
    assert len(arc.checkpoints.of("b")) == 6
    assert serials(rings[0].turn()) == list(range(40, 70))


def test_a_policy_is_of_each_run_by_itself() -> None:
    arc = fresh()
    Ring(arc, run="early").turns(3)
    Ring(arc, run="late").turns(4)
    _forget(arc, Keep(last=2))
    assert [(ck.run, ck.name) for ck in arc.refresh().checkpoints] == [
        ("early", "step-1"), ("early", "step-2"), ("late", "step-2"), ("late", "step-3"),
    ]  # fmt: skip


def test_the_newest_with_its_buffers() -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(3)
    ring.turn(save_replay=False, unconsumed=[1])
    assert _forget(arc, Keep(last=1)) == {"step-2": (BUFFERS,), "step-3": ("last 1", NEWEST)}
    latest = archive.open(arc.url).checkpoints.latest
    assert latest is not None
    found = latest(replay=True)
    assert found is not None
    assert serials(found) == list(range(30))
    assert serials(ring.turn()) == list(range(20, 50))


def test_what_the_newest_session_went_on_from() -> None:
    arc = fresh()
    Ring(arc).turns(5)
    ring = Ring(arc, begin=50, resume=arc.refresh().checkpoints["step-1"])
    kept = _forget(arc, Keep(last=1))
    assert kept == {
        "step-4": ("last 1", BUFFERS, NEWEST),
        "step-1": ("the newest session of run 'main' went on from it",),
    }
    assert serials(ring.turn()) == [*range(20), *range(500, 510)]
    assert set(_forget(arc, Keep(last=1))) == {"step-50"}, "it has one of its own by now"
    assert serials(archive.open(arc.url).checkpoints["step-50"]) == [*range(20), *range(500, 510)]


def test_a_fork_keeps_what_it_began_at() -> None:
    arc = fresh()
    Ring(arc).turns(5)
    ring = Ring(arc, begin=50, run="fork", fork_from=arc.refresh().checkpoints["step-1"])
    assert set(_forget(arc, Keep(last=1))) == {"step-1", "step-4"}
    assert serials(ring.turn()) == [*range(20), *range(500, 510)]


def test_a_fork_keeps_what_it_began_at_also_where_a_compaction_had_published_that_again() -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(3)
    ring.w.evict(0, before=5)  # half of a shard
    ring.w.checkpoint(3).result()
    ring.made += 1
    assert resharding.compact(arc.refresh(), min_alive=1.0).commit is not None
    began = arc.refresh().checkpoints.latest
    assert began is not None
    assert (began.name, began.number) == ("step-3", arc.head.number)
    fork = Ring(arc, begin=50, run="fork", fork_from=began)
    ring.turns(3)
    assert set(_forget(arc, Keep(last=1))) == {"step-3", "step-6"}
    assert serials(fork.turn()) == [*range(10, 30), *range(500, 510)]


def test_what_a_session_wrote_since_its_newest_checkpoint() -> None:
    arc = fresh()
    ring = Ring(arc)
    ring.turns(3)
    for _ in range(2):
        ring.turn(save=False)
        ring.w.commit()
    _forget(arc, Keep(last=1))
    assert serials(ring.turn()) == list(range(30, 60))
    assert len(arc.refresh().episodes) == 6


def test_all_that_a_session_without_a_checkpoint_wrote() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(range(5)), episode_id="e")
        w.commit()
        assert _forget(arc, None) == {}
        assert serials(w.checkpoint(1).result()) == [0, 1, 2, 3, 4]


def test_an_open_episode_that_a_checkpoint_dropped() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.append(steps(range(10)), env_ids=0, last=[i == 9 for i in range(10)])
        w.append(steps(range(10, 15)), env_ids=1)
        w.checkpoint(1, incomplete="drop").result()
        _forget(arc, Keep(last=1))
        w.append(steps(range(15, 20)), env_ids=1, last=[i == 4 for i in range(5)])
        assert serials(w.checkpoint(2).result()) == list(range(20))
    assert [(e.length, e.complete) for e in archive.open(arc.url).episodes] == [(10, True), (10, True)]


@pytest.mark.parametrize("between", ["nothing", "a resume", "a recovery beside it"])
def test_what_a_checkpoint_left_out_and_the_next_one_has(between: str) -> None:
    arc = fresh()
    w = arc.writer(journal_s=3600)
    for env in range(3):
        w.append(steps(range(10 * env, 10 * env + 10)), env_ids=env, last=[i == 9 for i in range(10)])
    if between == "a resume":
        w.checkpoint(1).result()
        w.close()
        w = arc.refresh().writer(resume=arc.checkpoints.latest)
    w.evict(0, before=4)
    w.evict(1, positions=[9])
    w.evict(2, before=10)
    dropped = w.checkpoint(2, incomplete="drop").result()
    assert (serials(dropped), sum(of["episodes"] for of in dropped.discarded.values())) == ([], 2)
    if between == "a recovery beside it":
        w.append(steps([30]), env_ids=0, last=True)
        w.sync()
        assert serials(archive.open(arc.url).recover()) == [30]
    _forget(arc, Keep(last=1))
    since = [30] if between == "a recovery beside it" else []
    assert serials(w.checkpoint(3).result()) == [*range(4, 10), *since, *range(10, 19)]
    w.clear()
    w.checkpoint(4, incomplete="drop").result()
    w.close()
    _forget(arc, Keep(last=1))
    assert len(arc.refresh().episodes) == 0


@pytest.mark.parametrize("resumes", [1, 2])
def test_an_open_episode_that_was_taken_over_without_a_live_step(resumes: int) -> None:
    arc = fresh()
    w = arc.writer()
    w.append(steps(range(3)), env_ids=0, episode_ids=["open"] * 3)
    w.append(steps(range(3, 5)), env_ids=1, last=True)
    w.evict(0, before=3)
    for number in range(resumes):
        ck = w.checkpoint(number).result()
        w.close()
        w = archive.open(arc.url).writer(resume=ck)
    _forget(arc, Keep(last=1))
    w.append(steps(range(5, 7)), env_ids=0, last=[False, True])
    w.commit()
    assert archive.open(arc.url).episodes["open"].read()["serial"].tolist() == [0, 1, 2, 5, 6]
    w.close()


def test_a_policy_without_whole_checkpoints_says_why_it_wants_none() -> None:
    arc = fresh()
    with arc.writer(rank=1, world_size=2, session="half") as w:
        w.append(steps(range(3)))
        w.checkpoint(1, partial=True).result()
    with pytest.raises(archive.UsageError, match="none of them is whole"):
        arc.refresh().forget(Keep(last=1))


def test_what_tags_name() -> None:
    arc = fresh()
    ring = Ring(arc, held=1)
    ring.turns(3)
    arc.refresh().tag("paper", arc.checkpoints["step-0"])
    ring.turns(2)
    kept = _forget(arc, Keep(last=1))
    assert kept == {"step-0": ("tag 'paper'",), "step-4": ("last 1", BUFFERS, NEWEST)}
    assert serials(archive.open(arc.url).checkpoints["step-0"]) == list(range(10))
    assert serials(archive.open(arc.url, commit="paper").checkpoints["step-0"]) == list(range(10))


def test_a_checkpoint_tagged_after_forgetting_went_over_it() -> None:
    arc = fresh()
    ring = Ring(arc, held=1)
    ring.turns(3)
    _forget(arc, Keep(last=2))
    arc.refresh().tag("paper", arc.checkpoints["step-1"])
    ring.turns(2)
    assert _forget(arc, Keep(last=1))["step-1"] == ("tag 'paper'",)
    assert serials(archive.open(arc.url).checkpoints["step-1"]) == list(range(10, 20))


def test_all_that_there_was_as_of_a_tagged_commit() -> None:
    arc = fresh()
    with arc.writer(run="other") as w:
        w.add_episode(steps(range(900, 905)), episode_id="loose")
        w.clear()
        w.checkpoint(0).result()
        w.checkpoint(1).result()
        w.add_episode(steps(range(800, 805)), episode_id="loose, too")
        w.commit()
        w.clear()
    arc.refresh().tag("then", arc.head.number)
    with arc.writer(run="other") as w:
        w.add_episode(steps(range(905, 910)), episode_id="later")
        w.clear()
        w.checkpoint(2).result()
        w.checkpoint(3).result()
    assert set(_forget(arc, Keep(last=1))) == {"step-0", "step-1", "step-3"}
    assert {e.id for e in archive.open(arc.url).episodes} == {"loose", "loose, too"}
    assert len(archive.open(arc.url, commit="then").episodes.read()) == 2


def test_a_tag_made_between_plan_and_commit() -> None:
    arc = fresh()
    ring = Ring(arc, held=1)
    ring.turns(3)
    plan = arc.refresh().forget(Keep(last=1), episodes="unreferenced")
    archive.open(arc.url).tag("paper", archive.open(arc.url).checkpoints["step-0"])
    with pytest.raises(archive.errors.ConflictError, match="plan again"):
        plan.commit()
    assert len(arc.refresh().checkpoints) == 3


def test_what_another_archive_refers_to() -> None:
    arc = fresh()
    Ring(arc, held=1).turns(2)
    url = f"memory://{uuid.uuid4().hex}"
    resharding.merge([arc.refresh()], to=url)
    before = all_told(arc)[0]
    Ring(arc, begin=50).turns(2)
    plan = arc.refresh().forget(Keep(last=1), episodes="unreferenced")
    assert {g.reason: g.episodes for g in plan.episodes}["referred to by other archives"] == 2
    _forget(arc, Keep(last=1))
    other = archive.open(url, allow_bases=True)
    np.testing.assert_equal([e.read() for e in other.episodes], [data for _, data in before.values()])
    assert before.keys() <= {e.id for e in archive.open(arc.url).episodes}


def test_a_partial_one_that_is_newer_than_all_whole_ones() -> None:
    arc = fresh()
    writers = [arc.writer(rank=r, world_size=2, session="s") for r in (0, 1)]
    writers[0].checkpoint(0, name="older", partial=True).result()
    for step in range(2):
        for rank, w in enumerate(writers):
            w.append(steps(range(step * 20 + rank * 10, step * 20 + rank * 10 + 5)), env_ids=rank)
        for pending in [w.checkpoint(step) for w in writers]:
            pending.result()
    writers[0].checkpoint(2, partial=True).result()
    kept = _forget(arc, Keep(last=1))
    assert kept == {"step-1": ("last 1", BUFFERS, NEWEST), "step-2": ("newer than the newest whole of its run",)}
    for w in writers:
        w.close()


def test_an_episode_that_a_kept_checkpoint_has_open_stays_though_none_of_its_steps_is_live() -> None:
    arc = fresh()
    w = arc.writer(session="first")
    w.append(steps(range(5)), env_ids=0, first=[True] + [False] * 4, episode_ids="open")
    w.add_episode(steps(range(3)), episode_id="other")
    w.evict(env_id=0, before=5)
    kept = w.checkpoint(1).result()
    w.close()
    archive.open(arc.url).writer(session="second").close()  # does not go on from it, so it does not see the episode
    arc.refresh().forget(keep=archive.Keep(last=1), episodes="unreferenced").commit()
    arc = archive.open(arc.url)
    assert "open" in arc.episodes.table["episode_id"].to_pylist()
    with arc.writer(resume=arc.checkpoints.of("main").latest, session="third") as again:
        again.append(steps(range(5, 8)), env_ids=0)
    assert archive.open(arc.url).episodes["open"].length == 8
    assert kept.number == arc.checkpoints.latest.number
