"""What becomes of unfinished and headless episodes, of ids and priorities, when ALF's buffers are redistributed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import archive
import resharding
from archive.adapters import alf
from archive.base.errors import UsageError
from tests.support.alf_buffer import (
    FIRST,
    LAST,
    MID,
    ReplayBuffer,
    assert_same,
    priority,
    returns_of,
    run,
    steps_in_shards,
    world,
)
from tests.support.places import ROOT
from tests.support.worlds import shares


def row(rb: ReplayBuffer, env: int, field: str) -> list[Any]:
    return [rb.field(field)[env, slot].item() for slot in rb.live(env)]


def unended(world_size: int = 3) -> list[ReplayBuffer]:
    """Rows that end in the middle of an episode and begin with one that lost its start."""
    return [run(ReplayBuffer(2, 8), 22, seed=rank + 1, lengths=(16, 18)) for rank in range(world_size)]


def one_step_returns(rb: ReplayBuffer, env: int) -> list[tuple[int, float]]:
    """(step, its one-step discounted return) of all steps with one, bootstrapping from the value of the next."""
    kinds, rewards, discounts, numbers = (
        row(rb, env, n) for n in ("step_type", "reward", "discount", "observation|number")
    )
    value = [float(n) for n in numbers]
    return [
        (numbers[t], rewards[t + 1] + 0.9 * discounts[t + 1] * value[t + 1])
        for t in range(len(kinds) - 1)
        if kinds[t] != LAST
    ]


@pytest.mark.parametrize("unfinished", ["close", "continue"])
def test_no_target_runs_over_the_seam_into_another_episode(unfinished: str) -> None:
    sources = unended()
    expected = {step: target for rb in sources for env in range(2) for step, target in one_step_returns(rb, env)}
    (share,) = shares(world(sources), 1, num_envs=1, max_length=64, unfinished=unfinished)
    rb = ReplayBuffer(1, 64)
    report = alf.restore(rb, share, unfinished=unfinished)
    got = dict(one_step_returns(rb, 0))
    assert len(got) == len(one_step_returns(rb, 0)) > 20
    assert {step: expected[step] for step in got} == got
    rb.field("step_type")[rb.field("step_type") == LAST] = MID  # what it would be without
    assert any(expected.get(step) != target for step, target in one_step_returns(rb, 0))
    assert report.counts["closed"] == (6 if unfinished == "close" else 5)  # the last one of the row goes on
    assert report.counts["reheaded"] == 5
    assert report.counts["headless"] == 1


def test_closed_steps_keep_their_discount_and_stay_open_in_the_archive() -> None:
    ck = world(unended(1))
    (share,) = shares(ck, 1, num_envs=2, max_length=8)
    rb = ReplayBuffer(2, 8)
    report = alf.restore(rb, share)
    assert report.counts["closed"] == 2
    for env in range(2):
        assert row(rb, env, "step_type")[-1] == LAST
        assert row(rb, env, "discount")[-1] == 1.0
    assert int(shares(ck, 1)[0].layout.open.sum()) == 2


def test_closed_once_is_closed_after_the_next_checkpoint_and_redistribution_too() -> None:
    ck = world(unended(2))
    found = shares(ck, 2, num_envs=2, max_length=8)
    buffers = [ReplayBuffer(2, 8) for _ in found]
    for rb, share in zip(buffers, found, strict=True):
        alf.restore(rb, share)
        rb._keep_episodic_info = False
        rb.add(0, 7_000 + int(share.rank), FIRST, 1.0)
    url = ck.snapshot.storage.url
    before = steps_in_shards(archive.open(url))
    writers = [archive.open(url).writer(resume=share, session="second") for share in found]
    pending = [alf.save(rb, w, step=2) for rb, w in zip(buffers, writers, strict=True)]
    later = pending[0].result(60)
    assert steps_in_shards(archive.open(url)) == before + 2  # what is new
    (share,) = shares(later, 1, num_envs=1, max_length=64)
    one = ReplayBuffer(1, 64)
    alf.restore(one, share)
    numbers, kinds = row(one, 0, "observation|number"), row(one, 0, "step_type")
    assert all(kinds[t] == LAST or numbers[t + 1] == numbers[t] + 1 for t in range(len(kinds) - 1))
    assert kinds[-1] == LAST


def test_to_continue_takes_a_plan_that_continues_and_to_drop_one_that_drops() -> None:
    ck = world(unended(2))
    with pytest.raises(UsageError, match="unfinished='continue'"):
        alf.restore(ReplayBuffer(2, 64), shares(ck, 1, num_envs=2)[0], unfinished="continue")
    with pytest.raises(UsageError, match="unfinished='drop'"):
        alf.restore(ReplayBuffer(2, 64), shares(ck, 1, num_envs=2)[0], unfinished="drop")
    (share,) = shares(ck, 1, num_envs=2, unfinished="drop")
    report = alf.restore(ReplayBuffer(2, 64), share, unfinished="drop")
    assert report.counts["closed"] == 0


def test_discarded_episodes_and_steps_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    sources = [run(ReplayBuffer(2, 16), 24, seed=rank, lengths=(6, 8)) for rank in range(2)]
    total = sum(int(rb._current_size.sum()) for rb in sources)
    incomplete = [
        e for e in world(sources).episodes if not e.complete or e.read()["time_step"]["step_type"][0] != FIRST
    ]
    (share,) = shares(world(sources), 1, num_envs=2, incomplete="drop")
    rb = ReplayBuffer(2, 64)
    with caplog.at_level(logging.INFO, "archive"):
        report = alf.restore(rb, share)
    assert report.steps == total - sum(len(e.read()["action"]) for e in incomplete) > 0
    assert report.counts["dropped_episodes"] == len(incomplete) > 4
    assert report.counts["dropped_steps"] == total - report.steps
    assert " episodes lost " in str(report)
    assert "episodes lost" in caplog.text
    assert (report.counts["reheaded"], report.counts["headless"], report.counts["closed"]) == (0, 0, 0)


def test_a_row_left_empty_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    rb = ReplayBuffer(1, 8)
    rb.add(0, 1, FIRST, 1.0)
    (share,) = shares(world([rb]), 1, num_envs=3, max_length=8)
    report = alf.restore(ReplayBuffer(3, 8), share)
    assert report.counts["empty_rows"] == 2
    assert "env rows 0, 2 are empty" in str(report)
    assert [r.levelname for r in caplog.records if "are empty" in r.message] == ["WARNING"]


def test_env_ids_in_the_data_match_the_row_after_redistribution() -> None:
    sources = [run(ReplayBuffer(4, 8), 20, seed=rank) for rank in range(3)]
    for share in shares(world(sources), 2, num_envs=2, max_length=64):
        for episode, steps in share.stream():  # whoever reads the share
            assert set(steps["time_step"]["env_id"].tolist()) == {episode.env}
        rb = ReplayBuffer(2, 64)
        alf.restore(rb, share)
        for env in range(2):
            assert set(row(rb, env, "env_id")) == {env}
            rb.get_buffer("time_step|env_id")[env, rb.live(env)].max()


def test_env_ids_in_the_data_are_the_row_after_the_next_checkpoint_too() -> None:
    """What the archive holds of them is as the first world wrote it."""
    ck = world([run(ReplayBuffer(2, 16), [20, 13], seed=rank) for rank in range(3)])
    url, first = ck.snapshot.storage.url, [ReplayBuffer(3, 64) for _ in range(2)]
    found = shares(ck, 2, num_envs=3, max_length=64)
    for rb, share in zip(first, found, strict=True):
        alf.restore(rb, share)
    writers = [archive.open(url).writer(resume=share, session="second") for share in found]
    pending = [alf.save(rb, w, step=2) for rb, w in zip(first, writers, strict=True)]
    later = pending[0].result(60)
    plan = resharding.plan(later, world_size=2, num_envs=3, max_length=64)
    assert plan.is_identity
    for rank, rb in enumerate(first):
        again = ReplayBuffer(3, 64)
        alf.restore(again, plan.share(rank), unfinished="continue")
        assert_same(again, rb)
        assert all(set(row(again, env, "env_id")) == {env} for env in range(3))


def test_priorities_survive() -> None:
    sources = [run(ReplayBuffer(2, 16), [20, 13], seed=rank) for rank in range(3)]
    targets = [ReplayBuffer(3, 64) for _ in range(2)]
    for rb, share in zip(targets, shares(world(sources), 2, num_envs=3), strict=True):
        alf.restore(rb, share)
    found = {number: values[0] for number, values in returns_of(targets).items()}
    assert found == {number: priority(number) for number in returns_of(sources)}
    for rb in targets:
        leaves = [rb.leaf(env, slot) for env in range(3) for slot in range(64)]
        assert rb._sum_tree._nnz == sum(leaf > 0 for leaf in leaves)  # without it ALF's importance weights are all 0
        assert float(rb._sum_tree._values[1]) == pytest.approx(sum(leaves))
        assert float(rb._max_tree._values[1]) == max(leaves)


@pytest.mark.parametrize("ranks", [2, 5])
def test_no_step_loses_its_priority_to_the_end_of_another_row(ranks: int) -> None:
    sources = [run(ReplayBuffer(2, 16, mini_batch_length=3), 14, seed=rank) for rank in range(3)]
    buffers = [ReplayBuffer(2, 64) for _ in range(ranks)]
    for rb, share in zip(buffers, shares(world(sources), ranks, num_envs=2, max_length=64), strict=True):
        alf.restore(rb, share)
    assert returns_of(buffers) == returns_of(sources)
    for rb in buffers:
        rb._change_mini_batch_length(3)  # as ALF does when it draws
        for env in range(2):
            assert [rb.leaf(env, slot) for slot in rb.live(env)[-2:]] == [0.0, 0.0]
    longer = [ReplayBuffer(2, 64) for _ in sources]  # where all rows end as they did, nothing is to be drawn first
    for rb, share in zip(longer, shares(world(sources), 3, num_envs=2, max_length=64), strict=True):
        alf.restore(rb, share)
        assert rb._mini_batch_length == 3
    assert returns_of(longer) == returns_of(sources)


def test_a_first_step_that_was_closed_stays_an_episode_of_its_own() -> None:
    rb = ReplayBuffer(1, 8)
    for number, (kind, discount) in enumerate([(FIRST, 1.0), (MID, 1.0), (LAST, 0.0), (FIRST, 1.0)]):
        rb.add(0, number, kind, discount)
    index, ck = rb._indexed_pos.clone(), world([rb])
    for step in (2, 3):
        again, share = ReplayBuffer(1, 8), shares(ck, 1)[0]
        alf.restore(again, share)
        assert row(again, 0, "step_type") == [FIRST, MID, LAST, LAST]
        assert torch.equal(again._indexed_pos, index)
        with archive.open(ck.snapshot.storage.url).writer(resume=share) as w:  # which ends the episode, and adds none
            ck = alf.save(again, w, step=step).result(60)


def test_no_mini_batch_begins_too_near_to_the_end_of_a_row_or_at_its_earliest_steps() -> None:
    sources = [run(ReplayBuffer(2, 16, mini_batch_length=3), 14, seed=rank) for rank in range(2)]
    before = {number: values[0] for number, values in returns_of(sources).items()}
    rb = ReplayBuffer(3, 32, ignored=2)
    alf.restore(rb, shares(world(sources), 1, num_envs=3)[0])
    rb._change_mini_batch_length(3)
    for env in range(3):
        leaves = [rb.leaf(env, slot) for slot in rb.live(env)]
        numbers = row(rb, env, "observation|number")
        assert leaves[:2] == leaves[-2:] == [0.0, 0.0]
        assert leaves[2:-2] == [before[n] for n in numbers[2:-2]]  # zeros at seams between sources included


def test_requested_and_crash_checkpoints_save_every_rank(tmp_path: Path) -> None:
    """Rank 1 is asked, all save; then all crash, and each saves what it has."""
    url = str(tmp_path / "root")
    command = [sys.executable, "-m", "tests.support.alf_rank", url, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen([*command, str(rank), "2"], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
        while not all(pid.exists() and pid.read_text() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(int(pids[1].read_text()), signal.SIGUSR2)
        said = [process.communicate(timeout=60)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert ["ZeroDivisionError: boom" in text for text in said] == [True, True], said
    arc = archive.open(url)
    expected = [set(returns_of([run(ReplayBuffer(2, 8), 5 + rank, seed=rank)])) for rank in range(2)]
    for rank in range(2):
        rb = ReplayBuffer(2, 8)
        alf.restore(rb, arc.checkpoints["asked"], rank=rank)
        assert set(returns_of([rb])) == expected[rank]
    crashed = [ck for ck in arc.checkpoints if ck.name.startswith("crash-ZeroDivisionError")]
    numbers = [e.read()["time_step"]["observation"]["number"].tolist() for ck in crashed for e in ck.episodes]
    assert {n for steps in numbers for n in steps} == set.union(*expected) | {9000, 9001}


def test_the_example_runs() -> None:
    """That of the module's docstring; then once more, going on."""
    code = textwrap.dedent(str(alf.__doc__).partition("```python\n")[2].partition("```")[0])
    assert len(code.splitlines()) <= 15
    url = f"memory://{uuid.uuid4().hex}"
    rb = ReplayBuffer(2, 8)
    calls: list[int] = []

    def train_iter() -> None:
        run(rb, 3, seed=len(calls))
        rb.kinds = [[(FIRST, 1.0)] * int(rb._current_pos[0]) for _ in range(2)]
        calls.append(1)

    rb._keep_episodic_info = False
    algorithm = SimpleNamespace(train_iter=train_iter, _replay_buffer=rb)
    names = {"archive": archive, "resharding": resharding, "alf": alf, "url": url, "algorithm": algorithm}
    exec(code, {**names, "iterations": 1001})
    assert [ck.step for ck in archive.open(url).checkpoints] == [0, 1000]
    kept = set(returns_of([rb]))
    exec(code, {**names, "iterations": 1})
    assert set(returns_of([rb])) == kept  # the checkpoint, not what train_iter() added


@pytest.mark.parametrize(
    ("bounds", "same"),
    [
        ({"num_envs": 2, "max_length": 8}, True), ({"num_envs": 2, "max_length": 100}, True), ({"capacity": 16}, True),
        ({"num_envs": 3}, False), ({"max_length": 7}, False), ({"capacity": 15}, False), ({"max_episodes": 3}, False),
        ({"num_envs": 2, "incomplete": "drop"}, False), ({"num_envs": 2, "unfinished": "close"}, False),
    ],
)  # fmt: skip
def test_a_plan_for_the_size_that_was_saved_moves_nothing(bounds: dict[str, Any], same: bool) -> None:
    """So a job that says the size of its buffers gets them back bit for bit where nothing has changed."""
    sources = unended(2)
    plan = resharding.plan(world(sources), world_size=2, **bounds)
    assert plan.is_identity == same
    for rank in range(2) if same else ():
        rb = ReplayBuffer(2, 8)
        alf.restore(rb, plan.share(rank), unfinished="continue")
        assert_same(rb, sources[rank])
