"""A job of very many ranks by the real protocol: what a checkpoint and a redistribution ask of the store, in proportion
to the ranks, and what they take; 1,024 ranks of 10,000 episodes as a soak (`-s` shows the figures)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import archive
import resharding
from archive.base import layout
from tests.support.counted_store import counted_stores
from tests.support.thousand_ranks import EPISODE_BYTES, ManyRanks, measured

SMALL, LARGE = (64, 100, 2), (1024, 10_000, 5)  # ranks, episodes of each, checkpoints that they come in
MAX_COMMIT_BYTES = 1_000_000
GIB = 1 << 30


@pytest.fixture
def stores() -> Iterator[None]:
    with counted_stores():
        yield


@pytest.mark.parametrize("size", [SMALL, pytest.param(LARGE, marks=pytest.mark.soak)], ids=["small", "large"])
def test_a_job_of_many_ranks(size: tuple[int, int, int], stores: None) -> None:
    world, episodes, rounds = size
    job = ManyRanks("counted://job", world, episodes, rounds=rounds)
    job.open()
    opened = job.figures["open"].requests
    assert len(opened.of("sessions/", "create")) == world
    assert len(opened) <= 6 * world + 10
    for number in range(rounds):
        made = job.checkpoint(number)
        _check_joined(job, made.number)
    job.writer._end()
    assert made.episodes.numbers.size == world * episodes
    said = sum(job.store.sized(key) for key in job.store.held if key.startswith("shards/"))
    assert said > 0.9 * (world - 1) * episodes * EPISODE_BYTES
    for target in (world // 2, 2 * world):
        _check_plan(job, target)
    for name, figures in job.figures.items():
        print(f"{name}: {figures}")


def _check_joined(job: ManyRanks, number: int) -> None:
    """One rank has read what each has staged, and little else was asked."""
    asked, world = job.figures["join"].requests, job.world_size
    assert len(asked.of("states/", "get")) <= 2 * world
    assert len(asked.of("states/", "create")) == len(asked.of("commits/", "create")) == 1
    assert len(asked) <= 2 * world + 60
    assert job.store.sized(layout.commit_key(number)) < MAX_COMMIT_BYTES / 2


def _check_plan(job: ManyRanks, target: int) -> None:
    name = f"plan for {target}"
    with measured(job.store) as job.figures[name]:
        latest = archive.open(job.url).checkpoints.latest
        assert latest is not None
        plan = resharding.plan(latest, world_size=target)
        steps = plan.steps
    assert sum(plan.episodes) == job.world_size * job.episodes
    assert max(steps) - min(steps) <= 40
    assert len(job.figures[name].requests) <= 2 * job.world_size + 100
    assert job.figures[name].cpu_s <= 60
    assert job.figures[name].peak_bytes <= 4 * GIB
