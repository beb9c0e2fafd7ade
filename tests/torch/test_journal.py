"""A ring whose writer keeps a journal comes back after a crash as it was at the last tick, on any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import archive
import resharding
from archive.torch import ring
from tests.support.archives import fresh
from tests.support.rings import Ring
from tests.support.ticks import NEVER_S, journal

ENVS, SLOTS = 3, 20


def append(w: archive.Writer, r: Ring) -> dict[str, Any]:
    return ring.append(w, r.buffers, **r.how())


def writer(arc: archive.Archive, rank: int, world_size: int) -> archive.Writer:
    return arc.writer(rank, world_size, session="first", journal_s=NEVER_S)


def crashed(arc: archive.Archive, ranks: int, saved: bool) -> list[Ring]:
    """The rings of a job as they were at the last tick; one more step of each came after it."""
    twins = []
    rings = [Ring(ENVS, SLOTS, seed=rank) for rank in range(ranks)]
    writers = [writer(arc, rank, ranks) for rank in range(ranks)]
    if saved:
        columns = [append(w, r.run([5, 0, 17])) for w, r in zip(writers, rings, strict=True)]
        for pending in [w.checkpoint(1, columns=c) for w, c in zip(writers, columns, strict=True)]:
            pending.result()
    for count in (3, 11, 14):  # around the ring
        for w, r in zip(writers, rings, strict=True):
            append(w, r.run(count))
            r.priority += 1  # of all steps, not only new ones
            append(w, r)
            w.sync()
    twins = copy.deepcopy(rings)
    for w, r in zip(writers, rings, strict=True):
        append(w, r.run(2))
        w._end()
    return twins


def plan_of(arc: archive.Archive, world_size: int, **options: Any) -> resharding.Plan:
    arc.refresh()
    ck = arc.checkpoints.latest or arc.recover()
    assert ck is not None
    return resharding.plan(ck, world_size=world_size, tails="live", **options)


@pytest.mark.parametrize("saved", [True, False])
def test_the_same_ranks_have_the_ring_as_it_was_bit_for_bit(saved: bool) -> None:
    arc = fresh()
    twins = crashed(arc, 2, saved)
    plan = plan_of(arc, 2)
    for rank, twin in enumerate(twins):
        found = ring.fill(plan.share(rank), num_envs=ENVS, max_length=SLOTS, unfinished="continue")
        assert torch.equal(found.pos, twin.pos)
        assert torch.equal(found.size, twin.size)
        assert_same(found, twin)


def assert_same(found: ring.Filled, twin: Ring) -> None:
    live = twin.live
    assert torch.equal(found.live, live)
    assert torch.equal(found.columns["priority"][live], twin.priority[live])
    for path in (("obs", "image"), ("obs", "state"), ("action",), ("reward",), ("t",)):
        mine, other = found.buffers, twin.buffers
        for key in path:
            mine, other = mine[key], other[key]
        assert mine.dtype == other.dtype
        assert torch.equal(mine[live], other[live])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_another_number_of_ranks_has_the_same_steps(before: int, after: int) -> None:
    arc = fresh()
    twins = crashed(arc, before, saved=True)
    plan = plan_of(arc, after, num_envs=2 * ENVS, max_length=2 * SLOTS)
    found = [ring.fill(plan.share(rank), num_envs=2 * ENVS, max_length=2 * SLOTS) for rank in range(after)]
    assert rows(*((f.buffers, f.columns["priority"], f.live) for f in found)) == rows(
        *((t.buffers, t.priority, t.live) for t in twins)
    )


def rows(*some: tuple[Any, torch.Tensor, torch.Tensor]) -> list[Any]:
    """The steps of rings: each step's values to the bit, with its priority."""
    out: list[Any] = []
    for buffers, priority, live in some:
        columns = [
            priority[live], buffers["reward"][live], buffers["obs"]["state"][live].sum(-1),
            buffers["action"][live].float().sum(-1), buffers["obs"]["image"][live].flatten(1).sum(-1),
        ]  # fmt: skip
        out += zip(*(c.double().tolist() for c in columns), strict=True)
    return sorted(out)


def test_the_job_goes_on_and_crashes_again() -> None:
    arc = fresh()
    crashed(arc, 1, saved=True)
    share = plan_of(arc, 1).share(0)
    found = ring.fill(share, num_envs=ENVS, max_length=SLOTS, unfinished="continue")
    again = Ring(ENVS, SLOTS, seed=9)
    again.buffers, again.pos, again.size = found.buffers, found.pos, found.size
    again.priority = found.columns["priority"]
    w = arc.writer(resume=share, session="second", journal_s=NEVER_S)
    append(w, again.run(7))
    w.sync()
    w._end()
    found = ring.fill(plan_of(arc, 1).share(0), num_envs=ENVS, max_length=SLOTS, unfinished="continue")
    assert torch.equal(found.pos, again.pos)
    assert_same(found, again)


def test_values_of_all_steps_take_the_place_of_those_of_some() -> None:
    arc = fresh()
    with arc.writer(session="s", journal_s=NEVER_S) as w:
        w.add_episode({"x": np.arange(3)}, episode_id="a")
        w.add_episode({"x": np.arange(2)}, episode_id="b")
        w.journal(columns={"p": {"a": np.ones(3)}})
        w.journal(columns={"p": np.arange(5.0)})
        w.journal(columns={"p": {"b": np.full(2, 9.0)}})
        w.sync()
        w._end()
    ck = arc.recover()
    assert ck is not None
    np.testing.assert_array_equal(ck.column("p", 0), [0, 1, 2, 9, 9])
    with pytest.raises(archive.ArchiveError, match="5 live steps"), arc.writer(resume=ck, journal_s=NEVER_S) as w:
        w.journal(columns={"p": np.arange(4.0)})


def test_a_ring_is_one_object_a_tick() -> None:
    arc = fresh()
    w = writer(arc, 0, 1)
    r = Ring(ENVS, SLOTS)
    for _ in range(3):
        append(w, r.run(15))
        w.sync()
    assert len(journal(arc, "first")) == 3
    w.close()
