"""Shared plans: made by one rank, read by the others in part; the same shares as each rank's own plan has."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.base.errors import CorruptStateError, DeadlineError, UsageError
from archive.testing import assert_whole, trace
from resharding import groups
from resharding import shared as sharing
from tests.support.ranks import checkpoint, close, numbers, resumed, world
from tests.support.ticks import NEVER_S


def same(one: Any, other: Any) -> None:
    """Two shares of one rank have the same steps, columns and places, and a writer goes on from them alike."""
    np.testing.assert_array_equal(numbers(one), numbers(other))
    for name in ("env_id", "position", "length", "open", "headless", "source_rank", "source_env"):
        np.testing.assert_array_equal(getattr(one.layout, name), getattr(other.layout, name), err_msg=name)
    assert one.attributes == other.attributes
    assert one.next_positions == other.next_positions
    assert one.seed == other.seed
    assert one.progress == other.progress
    assert [ep.id for ep in one] == [ep.id for ep in other]
    mine, theirs = one.to_resume(), other.to_resume()
    assert (mine.checkpoint, mine.seen, mine.origin, mine.run) == (
        theirs.checkpoint,
        theirs.seen,
        theirs.origin,
        theirs.run,
    )
    for name, buffer in theirs.buffers.items():
        assert mine.buffers[name].open_episodes == buffer.open_episodes
        assert [e.id for e in mine.buffers[name].episodes] == [e.id for e in buffer.episodes]
        np.testing.assert_array_equal(mine.buffers[name].runs.lo, buffer.runs.lo)
    assert mine.holders() == theirs.holders()


@pytest.mark.parametrize("rows", [1, 1 << 16])
@pytest.mark.parametrize("ranks", [3, 4, 5])
@pytest.mark.parametrize("options", [{}, {"policy": "interleaved", "incomplete": "drop"}, {"max_length": 5}], ids=str)
def test_shares_are_those_of_the_plan(
    ranks: int, rows: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "GROUP_ROWS", rows)
    _, ck = world()
    plan = resharding.plan(ck, world_size=ranks, **options)
    made = [resharding.shared_plan(ck, ranks, rank=rank, session="next", **options) for rank in range(ranks)]
    for rank, shared in enumerate(made):
        share = shared.share(rank)
        same(share, plan.share(rank))
        same(pickle.loads(pickle.dumps(share)), plan.share(rank))
        assert share.plan.dropped == plan.dropped
        assert len(share.checkpoint.episodes) == len(ck.episodes)
    assert made[-1].whole() == plan


def test_a_job_goes_on_from_it() -> None:
    arc, ck = world()
    shared = resharding.shared_plan(ck, 3, rank=0, session="next")
    assert shared.checkpoint.number == ck.number
    ranks = resumed(arc.url, shared, "next", itertools.count(10_000))
    for rank in ranks:
        rank.run(3)
    after = checkpoint(ranks, 8)
    close(ranks)
    assert sum(e.length for e in after.episodes) == sum(len(rank.live) for rank in ranks)


def test_a_rank_reads_its_group_and_no_table() -> None:
    arc, ck = world()
    resharding.shared_plan(ck, 3, rank=0, session="next")
    latest = archive.open(arc.url).checkpoints.latest
    assert latest is not None
    with trace(arc) as seen:
        share = resharding.shared_plan(latest, 3, rank=1, session="next").share(1)
        share.read()
    assert {row.key.partition("/")[0] for row in seen.rows} == {"plans", "shards"}
    assert seen.count("get", "plans/") == 2
    assert seen.count("list") == 0
    assert seen.count("any", "manifest/") == 0


def test_a_recovered_checkpoint_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run with a journal the first rank recovers what lies beyond the checkpoint; the others take its plan."""
    arc = archive.create("memory://shared-journal")
    with arc.writer(journal_s=NEVER_S) as w:
        w.add_episode({"x": np.arange(3)}, episode_id="a")
        ck = w.checkpoint(1).result()
        w.add_episode({"x": np.arange(4)}, episode_id="b")
        w.sync()
        w._journal = None
        w._end()
    shared = [resharding.shared_plan(ck, 2, rank=rank, session="next").share(rank) for rank in range(2)]
    assert [[ep.id for ep in share] for share in shared] == [["a"], ["b"]]
    assert {share.checkpoint.number for share in shared} == {shared[0].checkpoint.number}
    assert shared[0].checkpoint.number > ck.number
    writers = [arc.refresh().writer(resume=share, session="next") for share in shared]
    for w in writers:
        w._end()


def test_ranks_that_plan_different_checkpoints_are_told() -> None:
    arc, ck = world()
    resharding.shared_plan(ck, 2, rank=0, session="next")
    w = arc.writer(resume=ck, rank=0, world_size=4, session="again")
    other = w.checkpoint(9, partial=True).result()
    w._end()
    with pytest.raises(UsageError, match="have all ranks take the same checkpoint"):
        resharding.shared_plan(other, 2, rank=1, session="next")


def test_a_rank_waits_for_the_plan_and_the_next_in_line_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ck = world()
    monkeypatch.setattr(sharing, "STEP_IN_S", 0.05)
    share = resharding.shared_plan(ck, 2, rank=1, session="next").share(1)
    same(share, resharding.plan(ck, world_size=2).share(1))
    monkeypatch.setattr(sharing, "STEP_IN_S", 100.0)
    monkeypatch.setattr(sharing, "TIMEOUT_S", 0.2)
    with pytest.raises(DeadlineError, match="rank 0 of session 'alone' has not made the plan"):
        resharding.shared_plan(ck, 2, rank=1, session="alone")


@pytest.mark.parametrize("part", [0.5, 0.001])
def test_a_damaged_group_is_told(part: float) -> None:
    """In the middle of its tables, and in its index."""
    arc, ck = world()
    resharding.shared_plan(ck, 2, rank=0, session="next")
    (folder,) = (name for name in arc.storage.list("plans/next") if name.endswith("/"))
    key = f"plans/next/{folder}00000.zip"
    data = bytearray(arc.storage.get(key))
    data[100 + int(len(data) * part)] ^= 1
    arc.storage.put(key, bytes(data))
    with pytest.raises(CorruptStateError, match="damaged"):
        resharding.shared_plan(ck, 2, rank=1, session="next").share(1)


def test_a_prune_deletes_what_a_session_that_is_over_shared() -> None:
    arc, ck = world()
    shared = resharding.shared_plan(ck, 2, rank=0, session="next")
    ranks = resumed(arc.url, shared, "next", itertools.count(10_000))
    close(ranks)
    held = {one.key for one in arc.storage.scan("plans")}
    assert len(held) == 2
    arc.refresh().prune(older_than="0s", dry_run=False, force=True)
    assert {one.key for one in arc.storage.scan("plans")} == held, "its session may go on"
    newest = arc.refresh().checkpoints.latest
    assert newest is not None
    close(resumed(arc.url, resharding.plan(newest, world_size=2), "later", itertools.count(20_000)))
    arc.refresh().prune(older_than="0s", dry_run=False, force=True)
    assert not list(arc.storage.scan("plans"))
    assert_whole(arc.refresh())
