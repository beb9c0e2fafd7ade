"""Resharding beforehand: another archive has the same checkpoint, saved by as many ranks as will resume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import AlreadyExistsError, UsageError
from tests.support.ranks import _names, assert_sound, checkpoint, close, numbers, priority, resumed, world


@pytest.mark.parametrize(("ranks", "copy"), [(3, False), (5, True), (4, False)])
def test_each_rank_has_its_share(ranks: int, copy: bool) -> None:
    arc, ck = world()
    plan = resharding.plan(ck, world_size=ranks)
    to = f"memory://resaving-{next(_names)}"
    made = resharding.reshard(arc, plan, to, copy=copy)
    found = archive.open(to, allow_bases=() if copy else [arc.url]).checkpoints.latest
    assert found is not None
    assert (found.number, found.world_size, found.step, found.name) == (made.number, ranks, 7, "step-7")
    assert (found.progress, found.metrics) == (ck.progress, ck.metrics)
    again = resharding.plan(found, world_size=ranks)
    assert again.is_identity
    for rank in range(ranks):
        old, new = plan.share(rank), again.share(rank)
        np.testing.assert_array_equal(numbers(new), numbers(old))
        assert new.attributes == old.attributes
        np.testing.assert_array_equal(new.layout.env_id, old.layout.env_id)
    states = {rank: {"rank": rank, "step": 7} for rank in range(4)}
    wanted = states[1] if ranks == 4 else {"source_states": states}
    assert found.state(1) == wanted


def test_a_job_goes_on_from_it() -> None:
    arc, ck = world()
    to = f"memory://resaving-{next(_names)}"
    resharding.reshard(arc, resharding.plan(ck, world_size=2), to, copy=True)
    found = archive.open(to).checkpoints.latest
    ranks = resumed(to, resharding.plan(found, world_size=2), "second", itertools.count(10_000))
    for rank in ranks:
        rank.run(3)
    after = checkpoint(ranks, 8)
    close(ranks)
    steps = sum(len(rank.live) for rank in ranks)
    assert sum(e.length for e in after.episodes) == steps
    for rank in range(2):
        for data in after.episodes.filter(rank=rank).read():
            assert_sound(data)
        np.testing.assert_array_equal(after.column("priority", rank), priority(ranks[rank].live))


def test_it_takes_an_archive_of_its_own() -> None:
    arc, ck = world(2)
    plan = resharding.plan(ck, world_size=3)
    to = f"memory://resaving-{next(_names)}"
    with archive.create(to).writer() as w:
        w.add_episode({"reward": np.zeros(2)})
    before = archive.open(to).head.number
    with pytest.raises(AlreadyExistsError, match="has a run 'main' already"):
        resharding.reshard(arc, plan, to, copy=True)
    assert archive.open(to).head.number == before


def test_a_checkpoint_without_buffers_has_nothing_to_reshard() -> None:
    arc = archive.create(f"memory://resaving-{next(_names)}")
    with arc.writer() as w:
        ck = w.checkpoint(1, save_replay=False).result()
    with pytest.raises(UsageError, match="nothing to reshard"):
        resharding.reshard(arc, resharding.plan(ck, world_size=2), "memory://resaving-nowhere")
