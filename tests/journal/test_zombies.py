"""Processes of a session that was recovered, or replaced, and that go on: what they write is taken in once, or never;
and ranks that are late for a session."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import archive
import resharding
from tests.support.archives import fresh
from tests.support.prompt_checks import check_end, check_recovered
from tests.support.prompt_deaths import Fates, Life
from tests.support.prompt_job import NEVER_S, Job, Rank, expected, last

FIRST = Job("first", 4, 2)


def lived(url: str, job: Job) -> Life:
    """A session whose processes still run."""
    life = Life(url, job, Fates(None))
    life.live()
    assert not life.errors
    return life


def go_on(rank: Rank) -> list[Any]:
    """One more prompt, as far as it goes, and what is durable of it by its own saying."""
    told: list[Any] = []
    rank._tell = told.extend
    for key in rank.draw():
        rank.make(key, 0)
    rank.sync()
    return told


def test_what_comes_after_a_recovery_is_taken_in_by_the_next_one() -> None:
    arc = fresh()
    life = lived(arc.url, FIRST)
    before = check_recovered(arc.url, life.told)
    told = [fact for rank in life.ranks[:2] for fact in go_on(rank)]
    made = {fact[1] for fact in told if fact[0] == "episode"}
    assert made
    after = check_recovered(arc.url, [*life.told, *told])
    assert after.number > before.number
    assert made <= set(after.episodes.table["episode_id"].to_pylist())
    life.bury()
    final = Life(arc.url, last(FIRST, "second", 3), Fates(None))
    final.run()
    assert not final.errors
    assert check_end(arc.url, together=True) == 0


def test_what_comes_after_the_next_session_began_is_never_seen_and_cannot_be_committed() -> None:
    arc = fresh()
    zombies = lived(arc.url, FIRST)
    second = lived(arc.url, replace(FIRST, session="second", world_size=3, batches=1))
    made = [name for rank in zombies.ranks for kind, name, *_ in go_on(rank) if kind == "episode"]
    assert made
    for rank in zombies.ranks:
        with pytest.raises(archive.SupersededError):
            rank.commit()
        with pytest.raises(archive.SupersededError):
            rank.checkpoint()
    second.bury()
    check_recovered(arc.url, [*zombies.told, *second.told])
    third = Life(arc.url, last(FIRST, "third", 2), Fates(None))
    third.run()
    assert not third.errors
    for rank in zombies.ranks:
        with pytest.raises(archive.SupersededError):
            rank.commit()
    zombies.bury()
    assert check_end(arc.url, together=True) == 0
    assert not set(made) & set(arc.refresh().episodes.table["episode_id"].to_pylist())


def test_a_rank_that_plans_when_the_session_is_under_way_is_told() -> None:
    """Its plan would be one of what the others have journaled since, so that steps would be held twice."""
    arc = fresh()
    w = arc.writer(journal_s=NEVER_S)
    for at in range(6):
        w.add_episode(expected(f"p0-{at}", 0))
    w.checkpoint(1, wait=True)
    w.add_episode(expected("p1-0", 0))
    w.sync()
    plan = resharding.plan(arc.checkpoints.latest, world_size=3)
    first = archive.open(arc.url).writer(resume=plan.share(0), session="next", journal_s=NEVER_S)
    first.add_episode(expected("p1-1", 0))
    first.sync()
    late = archive.open(arc.url)
    share = resharding.plan(late.checkpoints.latest, world_size=3).share(1)
    with pytest.raises(archive.UsageError, match="have all ranks plan before any of them opens its writer"):
        late.writer(resume=share, session="next", journal_s=NEVER_S)
    second = archive.open(arc.url).writer(resume=plan.share(1), session="next", journal_s=NEVER_S)
    assert second.live.num_rows == plan.episodes[1]
    for writer in (w, first, second):
        writer._end()
