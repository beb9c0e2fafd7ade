"""Shared plans: made by one rank, read by the others in part; the same shares as each rank's own plan has."""

from __future__ import annotations

import itertools
import json
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import archive
import resharding
from archive.base.errors import DeadlineError, UsageError
from archive.testing import assert_whole, trace
from resharding import groups, terms
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


def few(name: str, episodes: int = 12) -> tuple[archive.Archive, archive.Checkpoint]:
    """An archive of one rank with whole episodes of two steps."""
    arc = archive.create(f"memory://shared-{name}")
    with arc.writer(session="first") as w:
        for i in range(episodes):
            w.add_episode({"x": np.full(2, i)}, episode_id=f"e{i}")
        return arc, w.checkpoint(0).result()


def alike(one: Any, other: Any) -> None:
    """Two shares have the same episodes, steps and places."""
    assert [ep.id for ep in one] == [ep.id for ep in other]
    assert [data["x"].tolist() for data in one.read()] == [data["x"].tolist() for data in other.read()]
    np.testing.assert_array_equal(one.layout.position, other.layout.position)


def ids(plan: Any, ranks: int) -> list[str]:
    return [ep.id for rank in range(ranks) for ep in plan.share(rank)]


@pytest.mark.parametrize("kind", ["expression", "array", "set"])
def test_plans_of_other_arguments_are_other_plans(kind: str) -> None:
    """Also where their texts are the same, as long arrays and expressions leave out what is in their middle."""
    _, ck = few(f"terms-{kind}", 1500)
    chosen = [f"e{i}" for i in range(1500) if i % 5]
    for some in (chosen, ["e700" if one == "e701" else one for one in chosen]):
        filters = {"expression": pc.field("episode_id").isin(some), "array": {"episode_id": np.array(some)}}
        told = filters.get(kind, {"episode_id": set(some)})
        shared = resharding.shared_plan(ck, 2, rank=0, session="next", filter=told)
        assert ids(shared, 2) == some


def test_arguments_are_the_same_by_value() -> None:
    assert terms.digest_of(2, {"filter": {"a": (1, 2), "b": None}}) == terms.digest_of(
        2, {"filter": {"b": None, "a": [1, 2]}}
    )
    assert terms.digest_of(2, {"filter": np.array([1, 2])}) != terms.digest_of(
        2, {"filter": np.array([1, 2], np.int32)}
    )
    assert terms.digest_of(2, {"filter": np.array(["a", None])}) != terms.digest_of(2, {"filter": np.array(["a", "b"])})
    assert terms.digest_of(2, {"filter": pa.array(["a"])}) != terms.digest_of(2, {"filter": pa.array(["b"])})
    with pytest.raises(UsageError, match=r"filter= has a builtins.function, by which ranks cannot tell"):
        terms.digest_of(2, {"filter": lambda ep: True})


def test_a_group_answers_for_all_ranks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(groups, "GROUP_ROWS", 1)
    _, ck = few("answers")
    plan = resharding.plan(ck, 3, max_episodes=2)
    shared = resharding.shared_plan(ck, 3, rank=0, session="next", max_episodes=2)
    caplog.clear()
    shared.share(0)
    assert "drops 12 of 24 steps, of 6 episodes" in caplog.text
    assert "_planned" not in vars(shared), "a share that is read asks for no whole plan"
    share = shared.share(1)
    part = share.plan
    for rank in range(3):
        alike(part.share(rank), plan.share(rank))
    assert (part.steps, part.episodes, part.moved, part.cost()) == (plan.steps, plan.episodes, plan.moved, plan.cost())
    assert (part, part.to_json(), str(part)) == (plan, plan.to_json(), str(plan))
    assert part.dropped_episodes() == plan.dropped_episodes()
    np.testing.assert_array_equal(share.dropped.stream, plan.share(1).dropped.stream)
    assert part.share(1).plan is part


def test_the_whole_plan_is_of_the_checkpoint_that_was_planned() -> None:
    """Also when its session has gone on meanwhile."""
    arc = journaled("whole")
    shared = [shared_by(arc.url, rank) for rank in range(2)]
    writers = [archive.open(arc.url).writer(resume=one.share(rank), session="next") for rank, one in enumerate(shared)]
    made = [w.checkpoint(2) for w in writers]
    assert [one.result().step for one in made] == [2, 2]
    for w in writers:
        w._end()
    for rank, one in enumerate(shared):
        whole, part = one.whole(), one.share(rank).plan
        assert whole.checkpoint.number == part.checkpoint.number
        assert [ep.id for ep in whole.share(1)] == ["b"]
        assert (whole.seen, whole.origin) == (part.seen, part.origin)


def journaled(name: str) -> archive.Archive:
    """An archive whose writer died with an episode in its journal, beyond its checkpoint."""
    arc = archive.create(f"memory://shared-{name}")
    with arc.writer(journal_s=NEVER_S, session="first") as w:
        w.add_episode({"x": np.arange(3)}, episode_id="a")
        w.checkpoint(1).result()
        w.add_episode({"x": np.arange(4)}, episode_id="b")
        w.sync()
        w._journal = None
        w._end()
    return arc


def shared_by(url: str, rank: int) -> resharding.SharedPlan:
    """The plan that a rank gets which opens the archive now."""
    latest = archive.open(url).checkpoints.latest
    assert latest is not None
    return resharding.shared_plan(latest, 2, rank=rank, session="next")


def test_a_rank_that_opens_the_archive_after_the_recovery_shares_the_plan() -> None:
    """And so does a start of the same name that dies and is repeated."""
    arc = journaled("late")
    for _ in range(2):
        assert [[ep.id for ep in shared_by(arc.url, rank).share(rank)] for rank in range(2)] == [["a"], ["b"]]


@pytest.mark.parametrize("part", [0.5, 0.001, None])
def test_who_finds_a_damaged_group_or_none_plans_anew(part: float | None, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of its tables, and in its index."""
    arc, ck = few(f"damage-{part}")
    resharding.shared_plan(ck, 2, rank=0, session="next")
    (key,) = (one.key for one in arc.storage.scan("plans") if one.key.endswith(".zip"))
    data = bytearray(arc.storage.get(key))
    if part is None:
        arc.storage.delete([key])
    else:
        data[100 + int(len(data) * part)] ^= 1
        arc.storage.put(key, bytes(data))
    shared = resharding.shared_plan(ck, 2, rank=1, session="next")
    caplog.clear()
    alike(shared.share(1), resharding.plan(ck, 2).share(1))
    assert len(shared.share(0)) == len(shared.whole().share(0)) == 6
    assert [record.message for record in caplog.records if "this rank plans by itself" in record.message] == [
        caplog.records[0].message
    ]


@pytest.mark.parametrize(
    "changed",
    [{"firsts": []}, {"firsts": [1]}, {"firsts": [0, 0]}, {"firsts": [0, 2]}, {"plan": "../../x"}, {"world_size": 7}],
    ids=str,
)
def test_a_damaged_text_is_no_plan(changed: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    arc, ck = few(f"text-{changed}".replace("/", "-").replace(" ", ""))
    resharding.shared_plan(ck, 2, rank=0, session="next")
    (key,) = (one.key for one in arc.storage.scan("plans") if one.key.endswith(".json"))
    arc.storage.put(key, json.dumps(json.loads(arc.storage.get(key)) | changed).encode())
    assert len(ids(resharding.shared_plan(ck, 2, rank=1, session="next"), 2)) == 12
    assert caplog.text.count("this rank plans by itself") == 1


STRANGE = [
    ("pieces", "hi", 10**6), ("pieces", "hi", 9),
    ("pieces", "lo", -1), ("pieces", "rank", 9), ("pieces", "env", 9), ("pieces", "at", -7),
    ("units", "steps", 10**9), ("units", "rank", 99), ("units", "number", 0), ("units", "open", 2),
    ("parts", "target", 0), ("parts", "unit", 0), ("parts", "env", -5), ("parts", "position", -1), ("parts", "hi", 3),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "column", "value"), STRANGE)
def test_a_group_of_what_is_not_there_is_damage(
    kind: str, column: str, value: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, ck = few(f"strange-{kind}-{column}-{value}", 6)
    monkeypatch.setattr(groups, "GROUP_ROWS", 1)
    arrays = groups._arrays

    def changed(*given: Any) -> dict[str, Any]:
        made = arrays(*given)
        made[kind][:, getattr(groups, kind.upper()).index(column)] = value
        if (column, value) == ("hi", 9):  # consistent, but beyond the segment
            made["units"][:, groups.UNITS.index("steps")] = value
        return made

    monkeypatch.setattr(groups, "_arrays", changed)
    share = resharding.shared_plan(ck, 2, rank=0, session="next").share(1)
    assert "has places that are not there" in caplog.text
    alike(share, resharding.plan(ck, 2).share(1))


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
