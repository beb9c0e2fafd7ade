"""A job of very many ranks by the real protocol: what it asks of the store, in proportion to its ranks, and what it
takes; 64 ranks of 100 episodes, and 1,024 of 10,000 as a soak. `-s` shows the figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import archive
import resharding
from archive.base import layout
from archive.checkpoint.checkpoints import Checkpoint
from tests.support.counted_store import counted_stores
from tests.support.sampling import few_of
from tests.support.thousand_ranks import EPISODE_BYTES, ManyRanks, measured
from tests.support.ticks import NEVER_S

SMALL, WIDE, LARGE = (64, 100, 2), (1024, 100, 2), (1024, 10_000, 5)  # ranks, episodes of each, checkpoints of these
MAX_COMMIT_BYTES, MAX_RANK_BYTES = 1_000_000, 50_000_000
GIB = 1 << 30
MINUTE_S = 60


@pytest.fixture
def stores() -> Iterator[None]:
    with counted_stores():
        yield


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", few_of([SMALL, (WIDE,), (LARGE,)], 1), ids=["small", "wide", "large"])
def test_a_job_of_many_ranks(size: tuple[int, int, int], stores: None) -> None:
    world, episodes, rounds = size
    job = ManyRanks("counted://job", world, episodes, rounds=rounds)
    try:
        job.open()
        opened = job.figures["open"].requests
        assert len(opened.of("sessions/", "create")) == world
        assert len(opened) <= 6 * world + 10
        for number in range(rounds):
            _check_joined(job, job.checkpoint(number))
        job.writer._end()
        said = sum(job.store.sized(key) for key in job.store.held if key.startswith("shards/"))
        assert said > 0.9 * (world - 1) * episodes * EPISODE_BYTES
        for target in (world // 2, 2 * world):
            _check_plan(job, target)
        _check_resumed(job, world // 2)
        _check_recovered(job)
        _check_let_go(job)
    finally:
        for name, figures in job.figures.items():
            print(f"{name}: {figures}")


def _latest(job: ManyRanks) -> tuple[archive.Archive, Checkpoint]:
    arc = archive.open(job.url)
    found = arc.checkpoints.latest
    assert found is not None
    return arc, found


def _check_joined(job: ManyRanks, made: Checkpoint) -> None:
    """One rank has read what each has staged, and little else was asked."""
    asked, world = job.figures["join"].requests, job.world_size
    assert len(asked.of("states/", "get")) <= 2 * world
    assert len(asked.of("states/", "create")) == len(asked.of("commits/", "create")) == 1
    assert len(asked) <= 2 * world + 60
    _check_commit(job, made.number)


def _check_commit(job: ManyRanks, number: int) -> None:
    nbytes = job.store.sized(layout.commit_key(number))
    print(f"commit {number}: {nbytes:,} bytes")
    assert nbytes < MAX_COMMIT_BYTES / 2


def _check_plan(job: ManyRanks, target: int) -> None:
    """Planned by one rank, and shared: each other rank reads its part."""
    whole, shared, part = f"plan for {target}", f"shared plan for {target}", f"share of {target}"
    with measured(job.store) as job.figures[whole]:
        plan = resharding.plan(_latest(job)[1], world_size=target)
        steps, episodes = plan.steps, plan.episodes
        del plan
    assert sum(episodes) == job.world_size * job.episodes
    assert max(steps) - min(steps) <= 40
    assert len(job.figures[whole].requests) <= 2 * job.world_size + 100
    with measured(job.store) as job.figures[shared]:
        resharding.shared_plan(_latest(job)[1], target, rank=0, session=f"to-{target}")
    for rank in (1, target - 1):
        arc, latest = _latest(job)
        with measured(job.store) as job.figures[part]:
            share = resharding.shared_plan(latest, target, rank=rank, session=f"to-{target}").share(rank)
            assert (len(share), share.steps) == (episodes[rank], steps[rank])
            assert share.cost()["requests"] > 0
        assert len(job.figures[part].requests) <= 8
        assert job.figures[part].requests.bytes_in <= MAX_RANK_BYTES
        del arc, share
    for name in (whole, shared):
        assert job.figures[name].cpu_s <= MINUTE_S
        assert job.figures[name].peak_bytes <= 4 * GIB


def _check_resumed(job: ManyRanks, target: int) -> None:
    """Each rank of a smaller job goes on from its share, journals a little, and is gone."""
    figures: Any = None
    with measured(job.store) as job.figures[f"resume on {target}"]:
        for rank in range(target):
            arc, latest = _latest(job)
            with measured(job.store) as figures:
                share = resharding.shared_plan(latest, target, rank=rank, session="second").share(rank)
                w = arc.writer(resume=share, session="second", journal_s=NEVER_S)
            w.add_episode({"obs": [[0.0] * 4] * 2, "reward": [1.0, 2.0]}, terminated=True)
            w.sync()
            w._journal = None
            w._end()
    job.figures["the last rank of it"] = figures
    assert figures.requests.bytes_in <= MAX_RANK_BYTES
    assert len(figures.requests) <= 40


def _check_recovered(job: ManyRanks) -> None:
    """All that the ranks had, and journaled, is in a checkpoint that is made for them."""
    with measured(job.store) as job.figures["recovery"]:
        made = archive.open(job.url).recover()
    assert made is not None
    assert made.buffers["replay"]["episodes"] == job.world_size * job.episodes + job.world_size // 2
    _check_commit(job, made.number)


def _check_let_go(job: ManyRanks) -> None:
    with measured(job.store) as job.figures["forget"]:
        archive.open(job.url).forget(keep=archive.Keep(last=1), dry_run=False)
    with measured(job.store) as job.figures["prune"]:
        archive.open(job.url).prune(older_than="0s", dry_run=False, force=True)
    asked = job.figures["prune"].requests
    stored = len(job.store.held)
    assert len(asked.of("", "list")) <= stored / 1000 + 60
    assert len(archive.open(job.url).checkpoints) == 1
