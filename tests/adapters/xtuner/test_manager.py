"""XTuner's agent loop managers through the archive: samplers, progress, prompts put back, locks."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from archive.adapters import xtuner
from archive.adapters.xtuner import rollback
from archive.base.errors import UsageError
from tests.support.backends import make_backend
from tests.support.xtuner_buffers import (
    Status,
    StorageItem,
    buffer,
    contents,
    fresh,
    group_of,
    share_of,
)
from tests.support.xtuner_managers import (
    PROMPTS,
    AgentLoopManager,
    DisaggAgentLoopManager,
    ManagerStatus,
    manager,
    saved,
)


async def produce(m: Any, count: int, model_step: int = 3, task: int = 0) -> list[int]:
    """Draws prompts, answers them, and puts them into the buffer; which they were."""
    runner, drawn = m.task_runners[task], []
    for _ in range(count):
        group = await runner.sampler.sample(runner.task_name)
        drawn.append(group[0].extra_fields["index"])
        for r in group:
            r.response, r.response_ids, r.logprobs, r.status = "yes", [5, 6], [-0.5, -1.0], Status.COMPLETED
            r.response_model_steps, r.reward, r.tokens = [model_step] * 2, {"score": 1.0}, [*r.prompt_ids, 5, 6]
        await m.replay_buffer.put(group, runner.task_name)
        if hasattr(m, "_produce_progress"):
            m._produce_progress.produced_samples[runner.task_name] += len(group)
            m._produce_progress.produced_tokens[runner.task_name] += 4
    return drawn


async def consume(m: Any, count: int, task: str = "math") -> list[int]:
    groups = await m.replay_buffer.get(count, task, Status.COMPLETED)
    if hasattr(m, "_produce_progress"):
        m._produce_progress.consumed_samples[task] += len(groups)
        m._produce_progress.next_consumer_step += 1
    return [g[0].extra_fields["index"] for g in groups]


@pytest.mark.parametrize("kind", [AgentLoopManager, DisaggAgentLoopManager])
def test_a_manager_goes_on_where_it_was(kind: type) -> None:
    m = manager(kind, ("math", "code"))
    asyncio.run(produce(m, 6))
    asyncio.run(produce(m, 3, task=1))
    asyncio.run(consume(m, 2))
    ck = saved(m, fresh())
    again = manager(kind, ("math", "code"))
    step = asyncio.run(xtuner.restore(again, share_of(ck)))
    assert (step, step.report.episodes, step.report.notes) == (5, 7, ())
    assert contents(again.replay_buffer) == contents(m.replay_buffer)
    for task in (0, 1):  # into the next epoch too
        assert asyncio.run(produce(again, 9, task=task)) == asyncio.run(produce(m, 9, task=task))
    assert contents(again.replay_buffer) == contents(m.replay_buffer)
    assert again.task_runners[0].sampler.cur_epoch == 1


def test_progress_comes_back_and_the_producer_waits() -> None:
    m = manager()
    asyncio.run(produce(m, 4))
    asyncio.run(consume(m, 1))
    m._produce_progress.target_samples["math"] = 7
    ck = saved(m, fresh(), model_step=4)
    assert ck.progress["status"] == "UPDATE_WEIGHT_AND_ABORT"
    again = manager()
    progress = again._produce_progress
    assert asyncio.run(xtuner.restore(again, share_of(ck))) == 4
    assert again._produce_progress is progress, "strategies hold on to it"
    assert progress.state_dict() == m._produce_progress.state_dict()
    assert again._status is ManagerStatus.UPDATE_WEIGHT_AND_ABORT
    assert again._update_event.is_set()
    assert again._model_step == 4


def test_without_the_buffer_no_prompt_is_skipped() -> None:
    m = manager()
    drawn = asyncio.run(produce(m, 6))
    trained = asyncio.run(consume(m, 1))
    before, live = contents(m.replay_buffer), m._produce_progress.state_dict()
    ck = saved(m, fresh(), no_save_replay_buffer=True)
    assert (ck.replay_saved, len(ck.episodes)) == (False, 0)
    assert contents(m.replay_buffer) == before, "the live groups keep their responses"
    assert {k: ck.progress[k] for k in live} == rollback(live)
    assert m._produce_progress.state_dict() == live
    assert [u["task_name"] for u in ck.unconsumed] == ["math"] * 5
    again = manager()
    step = asyncio.run(xtuner.restore(again, share_of(ck)))
    assert step.report.counts == {"put_back": 5}
    assert asyncio.run(again.replay_buffer.count("math", Status.ABORTED)) == 5
    items: list[StorageItem] = asyncio.run(again.replay_buffer._storage.get({}))
    assert {(r.response, tuple(r.response_ids or ()), r.reward, r.seq_staleness) for i in items for r in i.item} == {
        ("", (), None, 0)
    }
    assert all(r.tokens == r.prompt_ids for i in items for r in i.item)
    rest = asyncio.run(produce(again, PROMPTS - 1))
    assert sorted(rest + trained) == list(range(PROMPTS)), "each prompt of the epoch once"
    assert rest[:5] == [i for i in drawn if i not in trained]


def test_prompts_that_were_put_back_are_saved_by_the_next_checkpoint() -> None:
    m = manager()
    asyncio.run(produce(m, 4))
    arc = fresh()
    share = share_of(saved(m, arc, no_save_replay_buffer=True))
    again = manager()
    asyncio.run(xtuner.restore(again, share))
    with archive.open(arc.url).writer(resume=share) as w:
        ck = asyncio.run(xtuner.save(again, w, step=6)).result()
    third = manager()
    asyncio.run(xtuner.restore(third, share_of(ck)))
    assert contents(third.replay_buffer) == contents(again.replay_buffer)
    assert ck.replay_saved


def test_what_was_trained_on_or_given_up_is_not_put_back() -> None:
    m = manager()
    for i, status in enumerate(Status):
        asyncio.run(m.replay_buffer.put(group_of(i), "math", status))
    ck = saved(m, fresh(), no_save_replay_buffer=True)
    assert [u["group_id"] for u in ck.unconsumed] == [0, 1, 2, 3], "init, completed, aborted, expired"


def test_pending_rollouts_are_refused() -> None:
    m = manager()
    m.task_runners[0].produce_strategy.pending = 3
    with pytest.raises(UsageError, match=r"math: 3.*pause_produce"):
        saved(m, fresh())


def test_tasks_may_be_renamed_added_and_gone() -> None:
    m = manager(tasks=("math", "code"))
    drawn = asyncio.run(produce(m, 3))
    asyncio.run(produce(m, 2, task=1))
    asyncio.run(consume(m, 1))
    ck = saved(m, fresh())
    again = manager(tasks=("maths", "new"))
    step = asyncio.run(xtuner.restore(again, share_of(ck), tasks={"math": "maths"}))
    assert sorted(asyncio.run(produce(again, PROMPTS - 3)) + drawn) == list(range(PROMPTS))
    assert again._produce_progress.consumed_samples == {"maths": 1, "new": 0}
    assert again._produce_progress.target_samples == {"maths": 0, "new": 0}
    assert asyncio.run(again.replay_buffer.count("maths", Status.COMPLETED)) == 7
    assert [re.search(r"'(\w+)'", note)[1] for note in step.report.notes] == ["new", "code"]  # type: ignore[index]


def test_a_bare_buffer_is_no_manager_and_many_managers_are_not_merged() -> None:
    rb = buffer()
    asyncio.run(rb.put(group_of(1), "math"))
    with fresh().writer() as w:
        ck = asyncio.run(xtuner.save(rb, w, step=1)).result()
    again = manager()
    with pytest.raises(UsageError, match=r"restore manager\.replay_buffer"):
        asyncio.run(xtuner.restore(again, share_of(ck)))
    assert len(again.replay_buffer) == 0
    share = resharding.plan(ck, world_size=2).share(0)
    asyncio.run(xtuner.restore(again.replay_buffer, share))


@pytest.mark.parametrize("skip", [False, True])
def test_two_managers_get_back_what_was_their_own(skip: bool) -> None:
    """Prompts that were drawn and samples that were trained on are counted by rank, also where a plan moves groups."""
    managers, arc = [manager(), manager()], fresh()
    writers = [arc.writer(rank, 2, session="s") for rank in range(2)]
    for rank, (m, w) in enumerate(zip(managers, writers, strict=True)):
        asyncio.run(produce(m, 3 + rank))
        asyncio.run(consume(m, 1 + rank))
        pending = asyncio.run(xtuner.save(m, w, step=5, progress={"mine": rank}, no_save_replay_buffer=skip))
    ck = pending.result(60)
    for w in writers:
        w.close()
    for plan in (resharding.plan(ck, world_size=2), resharding.plan(ck, world_size=2, max_length=100, num_envs=50)):
        for rank, m in enumerate(managers):
            again = manager()
            asyncio.run(xtuner.restore(again, plan.share(rank)))
            assert again._produce_progress.consumed_samples == {"math": 1 + rank}
            assert again._produce_progress.produced_samples == {"math": 0 if skip else 2 * (3 + rank)}
            assert again.task_runners[0].sampler._consumed_samples == m.task_runners[0].sampler._consumed_samples
    for world_size in (1, 3):
        with pytest.raises(
            UsageError, match=r"2 ranks saved a manager each.*divided or merged: plan with world_size=2"
        ):
            asyncio.run(xtuner.restore(manager(), resharding.plan(ck, world_size=world_size).share(0)))


def test_one_manager_is_not_restored_on_two_ranks_which_would_draw_the_same() -> None:
    m = manager()
    asyncio.run(produce(m, 5))
    share = resharding.plan(saved(m, fresh()), world_size=2).share(1)
    again = manager()
    with pytest.raises(UsageError, match=r"1 rank saved a manager.*restore manager\.replay_buffer only"):
        asyncio.run(xtuner.restore(again, share))
    assert len(again.replay_buffer) == 0
    asyncio.run(xtuner.restore(again.replay_buffer, share))


def test_groups_that_are_made_after_a_resume_have_their_update_count() -> None:
    """The step that `restore` gives is what XTuner notes of each token."""
    m, arc = manager(), fresh()
    again, ck = manager(), saved(m, arc, model_step=7)
    share = share_of(ck)
    step = asyncio.run(xtuner.restore(again, share))
    asyncio.run(produce(again, 1, step))
    asyncio.run(produce(again, 1, np.int64(step)))  # type: ignore[arg-type]
    with archive.open(arc.url).writer(resume=share) as w:
        after = asyncio.run(xtuner.save(again, w, step=8)).result(60)
    assert [ep.update_counts for ep in after.episodes] == [(7, 8)] * 2
    third = manager()
    asyncio.run(xtuner.restore(third, share_of(after)))
    kinds = [
        {type(v) for v in i.item[0].response_model_steps} for i in asyncio.run(third.replay_buffer._storage.get({}))
    ]
    assert kinds == [{int}, {np.int64}]


def test_a_save_waits_for_the_lock_and_holds_it_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    m, arc = manager(), fresh()
    held: list[bool] = []
    asyncio.run(produce(m, 2))

    async def run(w: Any) -> Any:
        async with m.replay_buffer._lock:
            saving = asyncio.ensure_future(xtuner.save(m, w, step=1))
            await asyncio.sleep(0.05)
            assert not saving.done()
        pending = await saving
        stopped = asyncio.ensure_future(xtuner.save(m, w, step=2))
        while not m.replay_buffer._lock.locked():
            await asyncio.sleep(0)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        return pending

    with arc.writer() as w:
        make = w.checkpoint

        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(0.1)
            held.append(m.replay_buffer._lock.locked())
            return make(*args, **options)

        monkeypatch.setattr(w, "checkpoint", slow)
        assert asyncio.run(run(w)).result().step == 1
    assert held == [True, True], "a save that is cancelled too"
    assert not m.replay_buffer._lock.locked()


def test_the_example_runs(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    text = (xtuner.__doc__ or "").split("\n\n")[1]
    code = "\n".join(line[4:] for line in text.splitlines())
    assert len(code.splitlines()) <= 15
    backend = make_backend(request, "moto", tmp_path)
    for last in (2, 4):

        async def train_one(m: Any, step: int) -> None:
            await produce(m, 2, step)
            await consume(m, 1)

        arc = archive.open(backend.url, create=True, storage_options=backend.storage_options)
        names: dict[str, Any] = {
            "arc": arc, "ck": arc.checkpoints.latest, "manager": manager(), "train_one": train_one, "steps": last,
            "interval": 1, "xtuner": xtuner, "resharding": resharding,
        }  # fmt: skip
        body = "async def main():\n" + "\n".join(f"    {line}" for line in code.splitlines()) + "\n    w.close()\n"
        exec(body, names)
        asyncio.run(names["main"]())
    latest = archive.open(backend.url, storage_options=backend.storage_options).checkpoints.latest
    assert latest is not None
    assert (latest.step, len(latest.episodes)) == (4, 4)
