"""After histories at random, killed anywhere: what is recovered is what the model held at the last whole tick."""

from __future__ import annotations

from typing import Any

import pytest

import archive
import resharding
from tests.support.archives import fresh
from tests.support.journals import Job, check, copy_of, cut, die, expected, job, whole

NOTHING: Any = ({}, None)


def recovered_after_each_kill(arc: archive.Archive, ranks: list[Job]) -> None:
    """Cut every rank's journal wherever it may end, and compare."""
    entry = arc.refresh().head.runs["main"]
    for rank, one in enumerate(ranks):
        first, last = entry.journal[rank], one.w._pipeline.number
        for number in range(first, last):
            left = copy_of(arc)
            cut(left, one.w.session, rank, number)
            if whole(one, number) == 0 and len(ranks) == 1:
                assert left.recover() is None
                continue
            made = left.recover()
            for other, held in enumerate(ranks):
                end = number if other == rank else held.w._pipeline.number
                check(made, other, *expected(held, end))


@pytest.mark.parametrize("seed", range(12))
def test_a_rank_without_a_checkpoint(seed: int) -> None:
    arc = fresh()
    one = job(arc, seed)
    one.seen[0] = NOTHING
    one.act(20)
    one.tick()
    die(one.w)
    recovered_after_each_kill(arc, [one])
    made = arc.recover()
    check(made, 0, one.held, one.progress)
    assert made.step == 0
    assert made.state(0) is None


@pytest.mark.parametrize("seed", range(12))
def test_after_a_checkpoint_and_a_commit(seed: int) -> None:
    arc = fresh()
    one = job(arc, seed)
    one.act(8)
    one.checkpoint(5).result(30)
    one.tick()
    one.act(6)
    one.w.commit()
    one.tick()
    one.act(6)
    one.tick()
    die(one.w)
    recovered_after_each_kill(arc, [one])
    made = arc.recover()
    check(made, 0, one.held, one.progress)
    assert made.step == 5
    assert made.state(0, "demo") == {"at": 5, "name": "demo"}
    assert made.name.startswith("step-5+tail-")


@pytest.mark.parametrize("seed", range(6))
def test_two_ranks_that_die_resume_and_die_again(seed: int) -> None:
    arc = fresh()
    ranks = [job(arc, 2 * seed + r, rank=r, world_size=2, session="first") for r in range(2)]
    for one in ranks:
        one.act(6)
    pending = [one.checkpoint(7) for one in ranks]
    for p in pending:
        p.result(30)
    for one in ranks:
        one.tick()
        one.act(5)
        one.tick()
    die(*(one.w for one in ranks))
    recovered_after_each_kill(arc, ranks)
    made = arc.recover()
    again = [
        job(archive.open(arc.url), 50 + r, one.held, resume=made, rank=r, world_size=2, session="second")
        for r, one in enumerate(ranks)
    ]
    for one, before in zip(again, ranks, strict=True):
        one.progress = before.progress
        one.seen[0] = ({name: held.copy() for name, held in one.held.items()}, before.progress)
        one.tick()
        one.act(6)
        one.tick()
    again[1].progress = None
    die(*(one.w for one in again))
    recovered_after_each_kill(arc, again)
    last = arc.refresh().recover()
    for rank, one in enumerate(again):
        check(last, rank, one.held, again[0].progress)
    third = [arc.writer(resume=s) for s in _shares(last)]
    live = sum(sum(w.live["length"].to_pylist()) for w in third)
    assert live == sum(len(one.held["replay"].order) for one in again)


def _shares(checkpoint: Any) -> list[Any]:
    plan = resharding.plan(checkpoint, 1)
    return [plan.share(0)]
