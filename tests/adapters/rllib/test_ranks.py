"""Replay buffers of M learners go on as those of N: each step keeps its priority, nothing is lost, nothing doubled."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import CapacityError
from tests.support.rllib_episodes import (
    KINDS,
    Envs,
    check_same,
    contents,
    draw,
    is_multi,
    is_prioritized,
    play,
    priorities,
    prioritize,
)

from archive.adapters import rllib  # isort: skip (Ray is there)


class World:
    """The learners of one job at a time, each with a buffer and environments."""

    def __init__(self, kind: Any, seed: int, ranks: int, capacity: int = 40) -> None:
        self.kind, self.capacity, self._number = kind, capacity, seed * 1000
        self.rng = np.random.default_rng(seed)
        self.url = f"memory://rllib-{uuid.uuid4().hex}"
        self.arc = archive.create(self.url)
        self.start(ranks, None)

    def start(self, ranks: int, plan: Any) -> None:
        self.buffers = [self.kind(capacity=self.capacity) for _ in range(ranks)]
        shares = [plan.share(rank) if plan else None for rank in range(ranks)]
        for buffer, share in zip(self.buffers, shares, strict=True):
            if share is not None:
                rllib.restore(buffer, share)
        session = uuid.uuid4().hex
        self.writers = [
            self.arc.writer(rank=rank, world_size=ranks, session=session, resume=share)
            for rank, share in enumerate(shares)
        ]
        self._number += 10
        self.envs = [Envs(self._number + rank, multi=is_multi(self.buffers[0])) for rank in range(ranks)]

    def play(self, moves: int) -> None:
        for buffer, envs in zip(self.buffers, self.envs, strict=True):
            play(buffer, envs, self.rng, moves)

    def save(self, step: int) -> Any:
        pending = [rllib.save(b, w, step=step) for b, w in zip(self.buffers, self.writers, strict=True)]
        found = [one.result() for one in pending]
        return found[0]

    def stop(self) -> None:
        for writer in self.writers:
            writer.close()

    @property
    def episodes(self) -> dict[str, Any]:
        found = [(episode.id_, episode) for buffer in self.buffers for episode in buffer.episodes]
        assert len(dict(found)) == len(found)
        return dict(found)

    @property
    def priorities(self) -> dict[Any, Any]:
        found = [item for buffer in self.buffers for item in priorities(buffer).items()]
        assert len(dict(found)) == len(found)
        return dict(found)

    def total(self, name: str) -> int:
        return sum(getattr(buffer, name) for buffer in self.buffers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 12))])
def test_priorities_stay_with_their_steps(kind: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World(kind, seed, int(rng.integers(1, 4)))
    for round_ in range(3):
        world.play(int(rng.integers(1, 5)))
        ck, ranks = world.save(round_), int(rng.integers(1, 4))
        before = [contents(buffer) for buffer in world.buffers]
        episodes, known = world.episodes, world.priorities if is_prioritized(world.buffers[0]) else {}
        counted = {name: world.total(name) for name in ("_num_timesteps_added", "sampled_timesteps", "_num_timesteps")}
        world.stop()
        if ranks != len(before):
            world.capacity = counted["_num_timesteps"] // ranks + 40
        world.start(ranks, resharding.plan(ck, world_size=ranks))
        if ranks == len(before):
            for one, buffer in zip(before, world.buffers, strict=True):
                check_same(one, contents(buffer))
        check_same(episodes, world.episodes)
        if known:
            check_same(known, world.priorities)
        assert {name: world.total(name) for name in counted} == counted
        for buffer in world.buffers:
            if len(buffer):
                draw(buffer, 3)
    world.stop()


def test_what_does_not_fit_is_an_error_and_only_a_plan_drops() -> None:
    world = World(KINDS[1], 0, 3, capacity=60)
    world.play(10)
    ck = world.save(1)
    world.stop()
    held = [list(buffer.episodes) for buffer in world.buffers]
    one = KINDS[1](capacity=60)
    with pytest.raises(CapacityError, match="room for 60; plan with capacity=60"):
        rllib.restore(one, resharding.plan(ck, world_size=1).share(0))
    assert not one.episodes
    plan = resharding.plan(ck, world_size=1, capacity=60)
    report = rllib.restore(one, plan.share(0))
    assert 0 < report.steps == len(one) <= 60
    assert plan.dropped["capacity"]["steps"] == sum(len(episode) for some in held for episode in some) - report.steps
    whole = {episode.id_: episode for some in held for episode in some}
    for episode in one.episodes:
        check_same(whole[episode.id_], episode)


@pytest.mark.parametrize("kind", KINDS[1::2])
def test_learners_may_have_the_same_episodes(kind: Any) -> None:
    world = World(kind, 3, 2)
    episodes = Envs(1, multi=is_multi(world.buffers[0])).pieces(6)
    for buffer in world.buffers:
        buffer.add(episodes)
        draw(buffer, 4)
        prioritize(buffer, world.rng)
    ck = world.save(1)
    world.stop()
    for rank, buffer in enumerate(world.buffers):
        same = kind(capacity=40)
        assert rllib.restore(same, ck, rank).counts["renamed"] == 0
        check_same(contents(buffer), contents(same))
    both = kind(capacity=400)
    report = rllib.restore(both, resharding.plan(ck, world_size=1).share(0))
    assert report.counts["renamed"] == len(episodes)
    assert len(priorities(both)) == sum(len(priorities(buffer)) for buffer in world.buffers)
    for one in world.buffers:
        for at, priority in priorities(one).items():
            assert priority in (priorities(both)[at], priorities(both)[f"{at[0]}#2", *at[1:]])
    with world.arc.writer(resume=resharding.plan(ck, world_size=1).share(0)) as w:
        later = rllib.save(both, w, step=2).result()
    again = kind(capacity=400)
    assert rllib.restore(again, later, 0).counts["renamed"] == 0  # they were written under their new ids
    check_same(contents(both), contents(again))
