"""Replay buffers of RLlib's that were saved and restored draw what the one that was never stopped draws."""

from __future__ import annotations

import copy
import uuid
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from tests.support.rllib_episodes import KINDS, Envs, check_same, contents, draw, is_multi, play, prioritize

from archive.adapters import rllib  # isort: skip (Ray is there)


def made(kind: Any, seed: int, moves: int = 12, capacity: int = 60) -> tuple[Any, Envs, np.random.Generator]:
    """A buffer that was used, and what went into it."""
    buffer, rng = kind(capacity=capacity), np.random.default_rng(seed)
    buffer.rng = np.random.default_rng(seed)
    envs = Envs(seed, multi=is_multi(buffer))
    play(buffer, envs, rng, moves)
    return buffer, envs, rng


def url() -> str:
    return f"memory://rllib-{uuid.uuid4().hex}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_a_restored_buffer_draws_the_same(kind: Any, seed: int) -> None:
    never_stopped, envs, rng = made(kind, seed)
    assert never_stopped._num_episodes_evicted
    with archive.create(url()).writer() as w:
        ck = rllib.save(never_stopped, w, step=1).result()
    again = kind(capacity=60)
    report = rllib.restore(again, ck, 0)
    assert (report.episodes, report.notes) == (len(never_stopped.episodes), ())
    check_same(contents(never_stopped), contents(again))
    for _ in range(3):
        pieces, losses = envs.pieces(3), np.random.default_rng(rng.integers(2**32))
        for one in (never_stopped, again):
            one.add(copy.deepcopy(pieces))
        for _ in range(4):
            check_same(draw(never_stopped, 5), draw(again, 5))
            prioritize(never_stopped, copy.deepcopy(losses))
            prioritize(again, losses)
    check_same(contents(never_stopped), contents(again))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_buffer_and_an_episode_without_steps_come_back(kind: Any) -> None:
    envs, buffer = Envs(0, multi=is_multi(kind())), kind(capacity=60)
    for step in range(2):
        with archive.create(url()).writer() as w:
            ck = rllib.save(buffer, w, step=step).result()
        again = kind(capacity=60)
        rllib.restore(again, ck, 0)
        check_same(contents(buffer), contents(again))
        shares = [resharding.plan(ck, world_size=2).share(rank) for rank in range(2)]
        assert sum(rllib.restore(kind(capacity=60), share).episodes for share in shares) == len(buffer.episodes)
        buffer.add(envs.pieces(3))
        buffer.add(envs.begun())
        buffer.add(envs.pieces(3))
