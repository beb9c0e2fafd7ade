"""An ALF buffer that a journal follows: a job that dies between two saves comes back with all that was durable."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import archive
import resharding
from archive.adapters import alf
from tests.support.alf_buffer import FIRST, LAST, ReplayBuffer, assert_same, check_row, returns_of, run
from tests.support.archives import fresh
from tests.support.ticks import NEVER_S, recovered


def job(arc: archive.Archive, rb: Any, counts: list[int], rank: int = 0, world_size: int = 1) -> archive.Writer:
    """A rank that is followed while steps come, a few at each tick."""
    w = arc.writer(rank, world_size, session="first", journal_s=NEVER_S)
    alf.follow(rb, w)
    for i, count in enumerate(counts):
        run(rb, count, seed=10 * rank + i)
        w.sync()
    return w


@pytest.mark.parametrize("saved_first", [True, False])
@pytest.mark.parametrize("counts", [[1], [4, 3], [9, 7, 3], [40, 2], [16, 16]])
def test_the_same_buffer_comes_back_bit_for_bit(counts: list[int], saved_first: bool) -> None:
    arc, rb, other = fresh(), ReplayBuffer(3, 16, mini_batch_length=2, ignored=1), ReplayBuffer(3, 16)
    w = job(arc, rb, counts[:1])
    if saved_first:
        alf.save(rb, w, step=1).result(60)
    for i, count in enumerate(counts[1:]):
        run(rb, count, seed=50 + i)
        w.sync()
    if saved_first and len(counts) == 1:
        run(rb, 1, seed=50)
        w.sync()
    report = alf.restore(other, recovered(w), rank=0, unfinished="continue")
    assert_same(rb, other)
    assert report.steps == int(rb._current_size.sum())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_steps_priorities_and_returns_on_other_ranks(world_size: int) -> None:
    arc, sources = fresh(), [ReplayBuffer(3, 16) for _ in range(2)]
    writers = [job(arc, rb, [9, 4 + rank], rank, 2) for rank, rb in enumerate(sources)]
    plan = resharding.plan(recovered(*writers), world_size=world_size, num_envs=2, max_length=64)
    targets = [ReplayBuffer(2, 64) for _ in range(world_size)]
    for rank, rb in enumerate(targets):
        alf.restore(rb, plan.share(rank))
        for env in range(2):
            check_row(rb, env)
    assert returns_of(targets) == returns_of(sources)


def test_a_buffer_that_was_cleared_since_the_save() -> None:
    arc, rb, other = fresh(), ReplayBuffer(2, 8), ReplayBuffer(2, 8)
    w = job(arc, rb, [11])
    alf.save(rb, w, step=1).result(60)
    rb.clear()
    run(rb, 3, seed=3)
    w.sync()
    alf.restore(other, recovered(w), rank=0, unfinished="continue")
    assert returns_of([other]) == returns_of([rb])
    assert other._current_pos.tolist() == rb._current_pos.tolist()


def test_what_a_restore_closed_is_closed_again() -> None:
    """In the archive such an episode ends with the next save or tick; its last step stays as it was written."""
    arc, rb, second, third = fresh(), *(ReplayBuffer(1, 8) for _ in range(3))
    rb.add(0, 1, FIRST, 1.0)
    w = job(arc, rb, [])
    w.sync()
    share = resharding.plan(recovered(w), world_size=1).share(0)
    alf.restore(second, share)
    assert second.field("step_type")[0, 0] == LAST
    w = archive.open(arc.url).writer(resume=share, session="second", journal_s=NEVER_S)
    alf.follow(second, w)
    w.sync()
    alf.restore(third, recovered(w), rank=0)
    assert third.field("step_type")[0, 0] == LAST


def test_ticks_of_the_journals_own_thread_take_whole_steps() -> None:
    arc, rb, other = fresh(), ReplayBuffer(2, 8), ReplayBuffer(2, 8)
    w = arc.writer(0, 1, journal_s=0.01)
    alf.follow(rb, w)
    assert isinstance(rb._lock, type(threading.RLock()))
    for i in range(20):
        with rb._lock:  # as ALF's own methods do
            run(rb, 1, seed=i)
    w.sync()
    alf.restore(other, recovered(w), rank=0, unfinished="continue")
    assert_same(rb, other)
