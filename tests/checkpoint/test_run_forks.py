"""Runs: a resume goes on as the checkpoint's run, a fork begins another one there, and nobody's newest is another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import archive
import resharding
from archive.base.errors import NotFoundError, SessionInUseError, SupersededError, UsageError
from tests.support.archives import fresh, reopened
from tests.support.checkpoints import serials, steps, value_of


def job(arc: archive.Archive, run: str = "job1", world_size: int = 1) -> archive.Checkpoint:
    """A run with one checkpoint: an env row a rank, open, with priorities and state."""
    writers = [arc.writer(r, world_size, run=run, session=f"{run}-first") for r in range(world_size)]
    pending = []
    for rank, w in enumerate(writers):
        w.append(steps(range(100 * rank, 100 * rank + 4)), env_ids=0, first=[rank == 0, False, False, False])
        columns = {"p": value_of(range(100 * rank, 100 * rank + 4))}
        pending.append(w.checkpoint(1, columns=columns, state={"rank": rank}, progress={"n": 4}))
    made = [p.result() for p in pending][-1]
    for w in writers:
        w.close()
    return made


def test_a_resume_takes_the_run_of_its_checkpoint() -> None:
    arc = fresh()
    ck = job(arc)
    with arc.writer(resume=ck) as w:
        assert w.run == "job1"
    with arc.writer(run="job1", resume=arc.checkpoints.latest) as w:
        assert w.run == "job1"


@pytest.mark.parametrize("of", [lambda ck: ck, lambda ck: resharding.plan(ck, 2).share(1)], ids=["checkpoint", "share"])
@pytest.mark.parametrize("run", ["job2", "main"])
def test_a_resume_under_another_run_is_refused_and_fences_nobody(of: Callable[[Any], Any], run: str) -> None:
    arc = fresh()
    ck = job(arc)
    still = arc.writer(resume=ck, session="still")
    before = reopened(arc).head.number
    with pytest.raises(UsageError, match=rf"'{run}'.*'job1'.*fork_from="):
        arc.writer(run=run, session="new", resume=of(ck))
    assert reopened(arc).head.number == before
    still.append(steps([9]), env_ids=0)
    still.close()
    with arc.writer(run=run, session="new", fork_from=of(ck)) as w:
        assert w.run == run


@pytest.mark.parametrize("given", [{"rank": 1}, {"world_size": 3}, {"rank": 0, "world_size": 4}])
def test_a_rank_that_is_not_the_shares_is_refused(given: dict[str, int]) -> None:
    arc = fresh()
    share = resharding.plan(job(arc), 2).share(0)
    with pytest.raises(UsageError, match="rank 0 of 2"):
        arc.writer(resume=share, session="s", **given)
    with arc.writer(rank=0, world_size=2, session="s", resume=share) as w:
        assert (w.rank, w.world_size) == (0, 2)


def test_a_fork_begins_a_new_run_where_the_other_was() -> None:
    arc = fresh()
    ck = job(arc)
    old = arc.writer(resume=ck, session="old")
    with arc.writer(run="job2", fork_from=ck) as w:
        assert w.run == "job2"
        live = w.live.select(["env_id", "position", "length"]).to_pylist()
        assert live == [{"env_id": 0, "position": 0, "length": 4}]
        w.append(steps([50]), env_ids=0)
        forked = w.checkpoint(2, columns={"p": value_of([0, 1, 2, 3, 50])}, state={"a": 1}).result()
    old.append(steps([9]), env_ids=0)
    went_on = old.checkpoint(2).result()
    old.close()
    now = reopened(arc)
    assert (forked.run, serials(forked), forked.column("p", 0).tolist()) == (
        "job2", [0, 1, 2, 3, 50], value_of([0, 1, 2, 3, 50]).tolist(),
    )  # fmt: skip
    assert (went_on.run, serials(went_on)) == ("job1", [0, 1, 2, 3, 9])
    assert serials(now.checkpoints.of("job2").latest) == [0, 1, 2, 3, 50]
    assert serials(now.checkpoints.of("job1").latest) == [0, 1, 2, 3, 9]
    from_where = {"run": "job1", "name": "step-1", "commit": ck.number}
    assert now.head.runs["job2"].to_json()["forked_from"] == from_where
    assert now.head.runs["job1"].forked_from is None
    opened = next(c for c in now.commits if c.kind == "session" and c.run == "job2")
    assert opened.runs["job2"].to_json()["forked_from"] == from_where


def test_a_fork_to_another_number_of_ranks() -> None:
    arc = fresh()
    plan = resharding.plan(job(arc, world_size=2), 3)
    writers = [arc.writer(run="wide", session="w", fork_from=plan.share(rank)) for rank in range(3)]
    pending = [w.checkpoint(2) for w in writers]
    made = [p.result() for p in pending][-1]
    assert (made.run, made.world_size, sorted(serials(made))) == ("wide", 3, [0, 1, 2, 3, 100, 101, 102, 103])
    for w in writers:
        w.close()
    assert reopened(arc).checkpoints.of("job1").latest.world_size == 2  # type: ignore[union-attr]


def test_forks_that_make_no_sense() -> None:
    arc = fresh()
    ck = job(arc)
    for given, says in [
        ({"fork_from": ck}, "run="),
        ({"fork_from": ck, "run": "job1"}, "resume="),
        ({"fork_from": ck, "resume": ck, "run": "job2"}, "not both"),
    ]:
        with pytest.raises(UsageError, match=says):
            arc.writer(**given)
    for odd in (ck.name, resharding.plan(ck, 1)):
        with pytest.raises(UsageError, match=r"\.result\(\)"):
            arc.writer(resume=odd)
    assert list(reopened(arc).head.runs) == ["job1"]


def test_a_fork_is_not_made_twice_once_it_has_a_checkpoint() -> None:
    """A job that died before its first checkpoint begins again by the same call; later it is resumed."""
    arc = fresh()
    ck = job(arc)
    first = arc.writer(run="job2", session="one", fork_from=ck)
    first.append(steps([50]), env_ids=0)
    first.commit()
    with arc.writer(run="job2", session="two", fork_from=ck) as again:
        assert sum(again.live["length"].to_pylist()) == 4
        first.append(steps([51]), env_ids=0)
        with pytest.raises(SupersededError):
            first.commit()
        again.checkpoint(3, wait=True)
    first._end()
    with pytest.raises(UsageError, match=r"'job2'.*checkpoints\.of\('job2'\)"):
        arc.writer(run="job2", session="three", fork_from=ck)
    with arc.writer(run="job2", session="four", resume=arc.refresh().checkpoints.of("job2").latest) as w:
        assert w.run == "job2"


def test_a_run_that_began_otherwise_is_not_taken_for_a_fork() -> None:
    arc = fresh()
    ck = job(arc)
    arc.writer(run="mine").close()
    with pytest.raises(UsageError, match="'mine' is there"):
        arc.writer(run="mine", fork_from=ck)


def test_a_session_belongs_to_one_run() -> None:
    arc = fresh()
    arc.writer(0, 2, run="a", session="s")
    with pytest.raises(SessionInUseError, match=r"'s'.*run 'a'"):
        arc.writer(1, 2, run="b", session="s")
    assert "b" not in reopened(arc).head.runs


# -- the newest of several runs --------------------------------------------------------------------------------------


def two_runs() -> archive.Archive:
    arc = fresh()
    job(arc)
    job(arc, "job2")
    return arc.refresh()


def test_latest_of_several_runs_asks_which() -> None:
    found = two_runs().checkpoints
    for ask in (
        lambda: found.latest,
        lambda: found.newest(),
        lambda: found.newest(replay=True),
        lambda: found["step-1"],
    ):
        with pytest.raises(UsageError) as raised:
            ask()
        for wanted in ("'job1'", "'job2'", "'step-1'", ".of("):
            assert wanted in str(raised.value)
    assert "2 checkpoints" in repr(found)
    for run in ("job1", "job2"):
        assert found.of(run).latest.run == run  # type: ignore[union-attr]
        assert found.newest(run=run, replay=True).run == run  # type: ignore[union-attr]
        assert found.of(run)["step-1"].run == run
        assert found.of(run).latest(replay=True).run == run  # type: ignore[union-attr, misc]
    assert [ck.run for ck in found] == ["job1", "job2"]
    assert found[-1].run == "job2"
    assert found.of("none").latest is None
    with pytest.raises(NotFoundError):
        found["none"]


def test_a_run_without_checkpoints_leaves_no_doubt() -> None:
    arc = fresh()
    job(arc)
    with arc.writer(run="episodes only") as w:
        w.add_episode(steps([7]))
    assert arc.checkpoints.latest.run == "job1"  # type: ignore[union-attr]


def test_a_name_that_one_run_has_leaves_no_doubt() -> None:
    arc = fresh()
    job(arc)
    with arc.writer(run="job2") as w:
        w.checkpoint(5, "mine", wait=True)
    assert arc.checkpoints["mine"].run == "job2"
    assert arc.checkpoints["step-1"].run == "job1"
