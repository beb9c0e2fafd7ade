"""A plan takes in what was journaled beyond the newest checkpoint, archives it, or leaves it behind: as it is asked."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest

import archive
import resharding
from tests.support.archives import fresh

RANKS = 4


def steps(count: int, value: int) -> dict[str, np.ndarray]:
    return {"obs": np.full((count, 3), value), "reward": np.ones(count, np.float32)}


def crashed(arc: archive.Archive) -> archive.Checkpoint:
    """A job of RANKS ranks that saved two episodes a rank, and journaled one more; its checkpoint."""
    writers = [arc.writer(rank=rank, world_size=RANKS, session="first", journal_s=3600.0) for rank in range(RANKS)]
    for rank, w in enumerate(writers):
        for i in range(2):
            w.add_episode(steps(4, 10 * rank + i), episode_id=f"saved-{rank}-{i}")
    saved = [w.checkpoint(100) for w in writers]
    for one in saved:
        one.result()
    for rank, w in enumerate(writers):
        w.add_episode(steps(6, 10 * rank + 9), episode_id=f"tail-{rank}")
        w.sync()
        crash = RuntimeError("the job ends")
        w.__exit__(type(crash), crash, None)
    arc.refresh()
    return arc.checkpoints["step-100"]


def live(plan: resharding.Plan) -> list[str]:
    shares = [plan.share(rank) for rank in range(plan.world_size)]
    return sorted(ep.id for share in shares for ep in share)


def resumed(arc: archive.Archive, plan: resharding.Plan) -> Sequence[str]:
    """The ids of all episodes that the archive shows after the plan's ranks have gone on."""
    writers = [arc.writer(resume=plan.share(rank), session="second") for rank in range(plan.world_size)]
    saved = [w.checkpoint(200) for w in writers]
    for one in saved:
        one.result()
    arc.refresh()
    current = arc.episodes.table["episode_id"].to_pylist()
    return sorted(current)


SAVED = sorted(f"saved-{rank}-{i}" for rank in range(RANKS) for i in range(2))
TAIL = sorted(f"tail-{rank}" for rank in range(RANKS))


@pytest.mark.parametrize("tails", ["live", None])
@pytest.mark.parametrize("world_size", [1, 3, RANKS])
def test_live_is_in_the_buffers_of_any_number_of_ranks(world_size: int, tails: str | None) -> None:
    arc = fresh()
    plan = resharding.plan(crashed(arc), world_size=world_size, tails=tails)
    assert live(plan) == sorted(SAVED + TAIL)
    assert resumed(arc, plan) == sorted(SAVED + TAIL)
    assert sorted(arc.checkpoints.latest.episodes.table["episode_id"].to_pylist()) == sorted(SAVED + TAIL)


def test_archive_keeps_episodes_and_no_buffer_holds_them() -> None:
    arc = fresh()
    plan = resharding.plan(crashed(arc), world_size=3, tails="archive")
    assert live(plan) == SAVED
    assert resumed(arc, plan) == sorted(SAVED + TAIL)
    assert sorted(arc.checkpoints.latest.episodes.table["episode_id"].to_pylist()) == SAVED


def test_ignore_commits_nothing() -> None:
    arc = fresh()
    ck = crashed(arc)
    before = arc.head.number
    plan = resharding.plan(ck, world_size=3, tails="ignore")
    assert live(plan) == SAVED
    assert arc.refresh().head.number == before
    assert resumed(arc, plan) == SAVED


def test_all_ranks_make_the_same_plan_and_one_commit() -> None:
    arc = fresh()
    ck = crashed(arc)
    plans = [resharding.plan(archive.open(arc.url).checkpoints["step-100"], world_size=3) for _ in range(3)]
    assert plans[0] == plans[1] == plans[2]
    assert arc.refresh().head.number == ck.number + 1
    assert resharding.plan(arc.checkpoints.latest, world_size=3) == plans[0]


def resumed_in_turn(arc: archive.Archive, **options: str) -> list[str]:
    """The ids that three ranks begin with, each of which has journaled something before the next one plans."""
    ids: list[str] = []
    for rank in range(3):
        mine = archive.open(arc.url)
        plan = resharding.plan(mine.checkpoints.latest, world_size=3, **options)
        w = mine.writer(resume=plan.share(rank), session="second", journal_s=3600.0)
        ids += set(w.live["episode_id"].to_pylist())
        w.add_episode(steps(3, rank))
        w.sync()
    return sorted(ids)


def test_a_rank_that_is_late_plans_what_the_others_went_on_from() -> None:
    arc = fresh()
    crashed(arc)
    assert resumed_in_turn(arc, session="second") == sorted(SAVED + TAIL)


def test_a_late_rank_finds_its_session_as_torchrun_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arc = fresh()
    crashed(arc)
    monkeypatch.setattr("resharding.planner.named_session", lambda run: "second")
    assert resumed_in_turn(arc) == sorted(SAVED + TAIL)


def test_a_late_rank_that_planned_something_else_is_refused() -> None:
    arc = fresh()
    crashed(arc)
    with pytest.raises(archive.UsageError, match=r"another rank of session 'second'.*plan\(checkpoint, session="):
        resumed_in_turn(arc)
    assert resumed_again(arc) == sorted(SAVED + TAIL)


def resumed_again(arc: archive.Archive) -> list[str]:
    """The ids that another start of the job begins with, but for what was added by the one before."""
    plan = resharding.plan(archive.open(arc.url).checkpoints.latest, world_size=3, session="third")
    return [name for name in live(plan) if not name.startswith("second-")]


def test_a_plan_that_archives_survives_pickle_and_json() -> None:
    arc = fresh()
    ck = crashed(arc)
    plan = resharding.plan(ck, world_size=3, tails="archive")
    for again in (pickle.loads(pickle.dumps(plan)), resharding.Plan.from_json(plan.to_json(), ck)):
        assert again == plan
        assert again.share(0).to_resume().origin == plan.share(0).to_resume().origin
    assert plan != resharding.plan(ck, world_size=3, tails="ignore")


def test_an_earlier_checkpoint_has_no_tail() -> None:
    arc = fresh()
    earlier = crashed(arc)
    with arc.writer(resume=resharding.plan(earlier, world_size=1).share(0), session="second", journal_s=3600.0) as w:
        w.checkpoint(200, wait=True)
    arc.refresh()
    assert live(resharding.plan(earlier, world_size=2)) == SAVED
    with pytest.raises(archive.UsageError, match=r"not the newest whole one"):
        resharding.plan(earlier, world_size=2, tails="live")


def test_an_archive_as_of_a_commit_stays_as_it_is() -> None:
    arc = fresh()
    ck = crashed(arc)
    pinned = archive.open(arc.url, commit=arc.head.number)
    assert live(resharding.plan(pinned.checkpoints["step-100"], world_size=2)) == SAVED
    assert arc.refresh().head.number == ck.number


def test_without_a_journal_nothing_is_looked_for() -> None:
    arc = fresh()
    with arc.writer() as w:
        w.add_episode(steps(3, 1), episode_id="a")
        w.checkpoint(1, wait=True)
    requests = []
    for tails in ("ignore", None):
        mine = archive.open(arc.url)
        before = mine.io_stats()
        assert live(resharding.plan(mine.checkpoints["step-1"], world_size=2, tails=tails)) == ["a"]
        requests.append((mine.io_stats() - before).requests)
    assert requests[0] == requests[1]


def test_an_unknown_word_is_refused() -> None:
    arc = fresh()
    with pytest.raises(archive.UsageError, match="tails='all'"):
        resharding.plan(crashed(arc), world_size=2, tails="all")
