"""ALF's replay buffer into an archive and back: the same bits on the same ranks, every step once on others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import archive
import resharding
from archive.adapters import alf
from archive.base.errors import CapacityError, FieldError, UsageError
from tests.support.alf_buffer import (
    DEFAULT_RETURN,
    FIRST,
    LAST,
    MID,
    ReplayBuffer,
    assert_same,
    check_row,
    fresh,
    priority,
    returns_of,
    run,
    saved,
    steps_in_shards,
)
from tests.support.backends import make_backend
from tests.support.worlds import STORES, WORLDS, save_world, shares

# -- the same ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("envs", "length"), [(3, 16), (2, 8), (1, 5), (5, 7)])
@pytest.mark.parametrize("count", [1, 7, 16, 17, 40])
def test_same_ranks_bit_for_bit(envs: int, length: int, count: int) -> None:
    rb = run(ReplayBuffer(envs, length, mini_batch_length=2, ignored=1), count)
    other = run(ReplayBuffer(envs, length), 9, seed=5)  # what ALF's first train_iter() has left there
    report = alf.restore(other, saved(rb), rank=0, existing="replace", unfinished="continue")
    assert_same(rb, other)
    assert report.steps == int(rb._current_size.sum())


def test_rows_of_unequal_length_and_none_come_back() -> None:
    rb = run(ReplayBuffer(3, 8), [20, 3, 0])
    other = ReplayBuffer(3, 8)
    report = alf.restore(other, saved(rb), rank=0, unfinished="continue")
    assert_same(rb, other)
    assert report.counts["empty_rows"] == 1
    assert "env rows 2 are empty" in str(report)


def test_a_buffer_without_priorities_and_episode_info() -> None:
    rb, other = (ReplayBuffer(2, 8, prioritized=False, episodic=False) for _ in range(2))
    alf.restore(other, saved(run(rb, 13)), rank=0, unfinished="continue")
    assert_same(rb, other)


def test_several_buffers_in_one_checkpoint() -> None:
    arc, buffers = fresh(), {"replay": run(ReplayBuffer(2, 8), 5), "demo": run(ReplayBuffer(1, 32), 20, seed=2)}
    with arc.writer(0, 1) as w:
        ck = alf.save(buffers, w, step=3, progress={"iter": 3}).result(60)
    others = {"replay": ReplayBuffer(2, 8), "demo": ReplayBuffer(1, 32)}
    reports = alf.restore(others, ck, rank=0, unfinished="continue")
    assert {name: report.steps for name, report in reports.items()} == {"replay": 10, "demo": 20}
    for name, rb in buffers.items():
        assert_same(rb, others[name])
    assert ck.progress == {"iter": 3}


def test_the_restored_buffer_goes_on_as_the_saved_one() -> None:
    rb, other = run(ReplayBuffer(2, 8), 11), ReplayBuffer(2, 8)
    alf.restore(other, saved(rb), rank=0, unfinished="continue")
    other.kinds = [list(kinds) for kinds in rb.kinds]
    for one in (rb, other):
        for env in range(2):
            one.add(env, 500 + env, FIRST, 1.0)
            one.add(env, 600 + env, LAST, 0.0)
    assert_same(rb, other)


# -- saves that follow -------------------------------------------------------------------------------------------------


def test_a_second_save_uploads_only_what_is_new() -> None:
    arc, rb = fresh(), run(ReplayBuffer(3, 16), 10)
    with arc.writer(0, 1) as w:
        alf.save(rb, w, step=1).result(60)
        assert steps_in_shards(arc) == 30
        for env in range(3):
            rb.add(env, 900 + env, FIRST, 1.0)
        ck = alf.save(rb, w, step=2).result(60)
    assert steps_in_shards(arc) == 33
    other = ReplayBuffer(3, 16)
    alf.restore(other, ck, rank=0, unfinished="continue")
    assert_same(rb, other)


@pytest.mark.parametrize("unfinished", ["continue", "close"])
def test_a_save_after_a_restore_uploads_only_what_is_new(unfinished: str) -> None:
    arc = fresh()
    ck = saved(run(ReplayBuffer(3, 16), [20, 17, 16]), arc=arc)
    before = steps_in_shards(arc)
    other = ReplayBuffer(3, 16)
    share = resharding.plan(ck, world_size=1).share(0)
    alf.restore(other, share, unfinished=unfinished)
    for env in range(3):
        other.kinds[env] = [(FIRST, 1.0)] * int(other._current_pos[env])
        other._keep_episodic_info = False
        other.add(env, 900 + env, FIRST if unfinished == "close" else MID, 1.0)
    with archive.open(arc.url).writer(resume=share) as w:
        later = alf.save(other, w, step=2).result(60)
    assert steps_in_shards(arc) == before + 3
    again = ReplayBuffer(3, 16)
    alf.restore(again, later, rank=0, unfinished="continue")
    for name in ("step_type", "observation|number", "env_id"):
        assert torch.equal(again.field(name), other.field(name)), name  # what was closed in the buffer is closed again


@pytest.mark.parametrize("plan", [{}, {"policy": "by_trajectory", "unfinished": "continue"}])
def test_an_episode_closed_on_restore_ends_in_the_archive_with_the_next_save(plan: dict[str, Any]) -> None:
    arc, rb = fresh(), ReplayBuffer(1, 8)
    rb.add(0, 1, FIRST, 1.0)
    rb.add(0, 2, MID, 1.0)
    share = resharding.plan(saved(rb, arc=arc), world_size=1, **plan).share(0)
    alf.restore(rb, share, existing="replace")
    assert rb.field("step_type")[0, :2].tolist() == [FIRST, LAST]
    with archive.open(arc.url).writer(resume=share) as w:
        ck = alf.save(rb, w, step=2).result(60)
    (episode,) = ck.episodes
    assert (episode.complete, episode.reason) == (True, "closed on restore")
    assert episode.read()["time_step"]["step_type"].tolist() == [FIRST, MID]  # as it was


@pytest.mark.parametrize("refill", [0, 3, 5, 12, 30])
def test_a_cleared_buffer_starts_anew_and_positions_in_the_archive_go_on(refill: int) -> None:
    """ALF's clear() sets positions to 0; steps that then come to the same position are other steps."""
    arc, rb = fresh(), run(ReplayBuffer(2, 8), 5)
    with arc.writer(0, 1) as w:
        alf.save(rb, w, step=1).result(60)
        rb.clear()
        if refill:
            run(rb, refill, seed=3)
        ck = alf.save(rb, w, step=2).result(60)
        other = ReplayBuffer(2, 8)
        alf.restore(other, ck, rank=0, unfinished="continue")
        expected = {
            n for env in range(2) for n in (300_000 + env * 1000 + i for i in range(max(0, refill - 8), refill))
        }
        assert returns_of([other]).keys() == expected
        assert torch.equal(other._current_pos, rb._current_pos)
        for env in range(2):
            for slot in rb.live(env):
                assert other._indexed_pos[env, slot] == rb._indexed_pos[env, slot]
        before = steps_in_shards(arc)
        alf.save(rb, w, step=3).result(60)
        assert steps_in_shards(arc) == before


def test_a_shrunken_buffer_keeps_its_newest_steps() -> None:
    rb = run(ReplayBuffer(2, 8), 12)
    rb._current_size -= 3  # as remove_up_to() does
    other = ReplayBuffer(2, 8)
    alf.restore(other, saved(rb), rank=0, unfinished="continue")
    assert returns_of([other]) == returns_of([rb])


def test_what_is_copied_is_what_was_there_when_save_returned() -> None:
    arc, rb = fresh(), run(ReplayBuffer(2, 8), 6)
    with arc.writer(0, 1) as w:
        expected = returns_of([rb])
        pending = alf.save(rb, w, step=1)
        run(rb, 8, seed=4)
        ck = pending.result(60)
    other = ReplayBuffer(2, 8)
    alf.restore(other, ck, rank=0)
    assert returns_of([other]) == expected


# -- other ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_every_step_is_somewhere_once_with_its_priority_and_return(
    store: str, world: tuple[int, int], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root = make_backend(request, store, tmp_path)
    sources = [run(ReplayBuffer(3, 16), [9, 23, 16], seed=rank) for rank in range(world[0])]
    ck = save_world(root.url, sources, alf.save, storage_options=root.storage_options)
    targets = []
    for share in shares(ck, world[1], num_envs=2, max_length=64):
        targets.append(ReplayBuffer(2, 64))
        report = alf.restore(targets[-1], share)
        assert report.counts["dropped_steps"] == 0
    assert returns_of(targets) == returns_of(sources)
    for rb in targets:
        for env in range(2):
            check_row(rb, env)


def test_fewer_slots_keep_the_newest_steps_and_report_the_rest() -> None:
    rb = run(ReplayBuffer(3, 16), 16)
    other = ReplayBuffer(2, 10)
    report = alf.restore(other, shares(saved(rb), 1, num_envs=2, max_length=10)[0])
    assert report.steps == 20
    assert report.counts["dropped_steps"] == 28
    assert report.counts["dropped_episodes"] > 0
    assert "lost 28 steps (max_length)" in str(report)
    kept, all_of_it = returns_of([other]), returns_of([rb])
    assert kept.items() <= all_of_it.items()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_restore_that_does_not_fit_changes_nothing() -> None:
    ck = saved(run(ReplayBuffer(3, 16), 16))
    share = shares(ck, 1)[0]
    narrow = ReplayBuffer(2, 16)
    with pytest.raises(CapacityError, match="num_envs=2"):
        alf.restore(narrow, share)
    odd = ReplayBuffer(3, 16)
    odd.register_buffer("action", torch.zeros(3, 16, 3, dtype=torch.bfloat16))
    with pytest.raises(FieldError, match=r"'action' is torch.bfloat16 \[2\] in the share"):
        alf.restore(odd, share)
    less = ReplayBuffer(3, 16)
    del less.action
    with pytest.raises(FieldError, match="'action' is only in the share"):
        alf.restore(less, share)
    full = run(ReplayBuffer(3, 16), 2)
    with pytest.raises(UsageError, match="already holds 6 steps"):
        alf.restore(full, share)
    with pytest.raises(UsageError, match="existing='over'"):
        alf.restore(full, share, existing="over")
    with pytest.raises(UsageError, match="unfinished='end'"):
        alf.restore(narrow, share, unfinished="end")
    with pytest.raises(UsageError, match="give rank="):
        alf.restore(narrow, ck)
    assert not any(bool(rb._current_size.any()) for rb in (narrow, odd, less))
    assert returns_of([full]) == returns_of([run(ReplayBuffer(3, 16), 2)])


def test_one_of_several_that_does_not_fit_leaves_the_others_alone() -> None:
    arc, buffers = fresh(), {"replay": run(ReplayBuffer(2, 8), 5), "demo": run(ReplayBuffer(1, 8), 8)}
    with arc.writer(0, 1) as w:
        ck = alf.save(buffers, w, step=1).result(60)
    others = {"replay": ReplayBuffer(2, 8), "demo": ReplayBuffer(1, 4)}
    with pytest.raises(CapacityError):
        alf.restore(others, ck, rank=0)
    assert not others["replay"]._current_size.any()


def test_what_is_no_buffer_of_alf_is_refused() -> None:
    w = fresh().writer(0, 1)
    with pytest.raises(UsageError, match="SimpleNamespace is no replay buffer of ALF"):
        alf.save(SimpleNamespace(), w, step=1)
    with pytest.raises(UsageError, match="has no _current_pos"):
        alf.save(torch.nn.Linear(1, 1), w, step=1)
    with pytest.raises(UsageError, match="columns= is what the adapter fills in"):
        alf.save(run(ReplayBuffer(1, 4), 2), w, step=1, columns={"x": np.zeros(2)})
    w.close()
    plan = resharding.plan(saved(run(ReplayBuffer(1, 4), 2)), world_size=1)
    with pytest.raises(UsageError, match=r"a share, plan.share\(rank\), or a checkpoint, not a Plan"):
        alf.restore(ReplayBuffer(1, 4), plan)


def test_defaults_where_the_checkpoint_knows_no_better() -> None:
    ck = saved(run(ReplayBuffer(2, 8, prioritized=False, episodic=False), 6))
    other = ReplayBuffer(2, 8, ignored=1)
    report = alf.restore(other, ck, rank=0)
    assert {n: v[:2] for n, v in returns_of([other]).items()} == {
        e * 1000 + i: (0.0 if i == 0 else 1.0, DEFAULT_RETURN) for e in range(2) for i in range(6)
    }
    assert "no priorities" in str(report)
    assert "no episodic returns" in str(report)
    assert priority(3) != 1.0


def test_an_empty_buffer_and_one_that_is_skipped() -> None:
    arc, rb = fresh(), ReplayBuffer(2, 8)
    with arc.writer(0, 1) as w:
        empty = alf.save(rb, w, step=0).result(60)
        run(rb, 5)
        skipped = alf.save(rb, w, step=1, save_replay=False).result(60)
        ck = alf.save(rb, w, step=2).result(60)
    other = run(ReplayBuffer(2, 8), 3, seed=9)
    report = alf.restore(other, empty, rank=0, existing="replace")
    assert_same(other, ReplayBuffer(2, 8))
    assert (report.steps, report.counts["empty_rows"]) == (0, 2)
    assert (skipped.replay_saved, ck.buffers["replay"]["steps"]) == (False, 10)
    alf.restore(other, ck, rank=0, unfinished="continue")
    assert_same(other, rb)
