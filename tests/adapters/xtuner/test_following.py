"""XTuner's prompts in a ledger: what crashes leave comes back, each prompt is trained on once, none is skipped."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import archive
import resharding
from archive.adapters import xtuner
from archive.adapters.xtuner import live
from tests.support.xtuner_buffers import NaiveStorage, PandasStorage, Status, contents, fresh, group_of
from tests.support.xtuner_jobs import SIBLINGS, TASK, Loop, generate, job, resumed, trained, which
from tests.support.xtuner_managers import DisaggAgentLoopManager


def die(w: Any) -> None:
    """The process is gone, and all that was not durable."""
    w._end()


async def several(m: Any, count: int) -> None:
    for _ in range(count):
        await generate(m)


def items(m: Any) -> list[Any]:
    return asyncio.run(m.replay_buffer._storage.get({}))


def held(m: Any, status: Status) -> list[int]:
    return sorted(which(item.item[0])[0] for item in items(m) if item.status == status)


def all_of(m: Any, loop: Loop) -> list[int]:
    """Train on whatever is left of the epoch."""

    async def rest() -> list[int]:
        sampler, out = m.task_runners[0].sampler, []
        while sampler._consumed_samples < 8 or await m.replay_buffer.count(TASK, Status.ABORTED):
            await generate(m)
        while batch := await trained(m, 2):
            out += batch
        return out

    return asyncio.run(rest())


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("storage", [NaiveStorage, PandasStorage])
def test_what_was_finished_comes_back_and_what_was_not_is_made_again(skip: bool, storage: type) -> None:
    arc, loop = fresh(), Loop()
    m = job(loop=loop, storage=storage)

    async def begin() -> list[int]:
        w, _, _ = await resumed(arc.url, m)
        await several(m, 3)
        first = await trained(m, 1)
        pending = await xtuner.save(m, w, step=1, no_save_replay_buffer=skip, progress={"trained": first})
        pending.result()
        await several(m, 2)
        await trained(m, 2)  # which the checkpoint's weights know nothing of
        await m.task_runners[0].sampler.sample(TASK)  # under way when all ends
        w.sync()
        die(w)
        return first

    first = asyncio.run(begin())
    more = Loop()
    again = job(loop=more, storage=storage)
    w, _, known = asyncio.run(resumed(arc.url, again))
    assert known == first
    finished = sorted({index for index, _ in loop.made} - set(first))
    assert len(finished) == 4
    assert held(again, Status.COMPLETED) == finished, "with those that were trained on after the checkpoint"
    assert len(held(again, Status.ABORTED)) == 1
    assert all(r.response_model_steps == [3, 3] for i in items(again) if i.status == Status.COMPLETED for r in i.item)
    rest = all_of(again, more)
    assert sorted(rest + known) == list(range(8)), "each prompt once"
    assert not set(more.made) & set(loop.made), "no rollout is made twice"
    w.close()


def test_siblings_that_were_finished_are_used_again() -> None:
    arc = fresh()

    async def begin() -> Loop:
        gate = asyncio.Event()

        async def wait(index: int, sibling: int) -> None:
            if sibling:
                await gate.wait()

        loop = Loop(wait)
        m = job(loop=loop)
        w, _, _ = await resumed(arc.url, m)
        tasks = [asyncio.ensure_future(generate(m)) for _ in range(2)]
        while sum(loop.made.values()) < 2:
            await asyncio.sleep(0)
        w.sync()
        die(w)
        for task in tasks:
            task.cancel()
        return loop

    before = asyncio.run(begin())
    after = Loop()
    m = job(loop=after)
    w, report, _ = asyncio.run(resumed(arc.url, m))
    assert (report.episodes, report.counts["partly"]) == (2, 2)
    one = items(m)[0]
    assert [r.status for r in one.item] == [Status.COMPLETED, Status.ABORTED]
    assert one.item[0].response == f"answer {which(one.item[0])}"
    assert sorted(all_of(m, after)) == list(range(8))
    assert not set(after.made) & set(before.made)
    assert sum(after.made.values()) == 8 * SIBLINGS - 2
    ledger = w.ledger("prompts")
    assert ledger.counts == {"drawn": 0, "started": 0, "sealed": 0, "trained": 8, "dropped": 0}
    w.close()


def test_what_was_given_up_does_not_come_back() -> None:
    arc = fresh()
    m = job()

    async def begin() -> None:
        strategy = m.task_runners[0].produce_strategy
        strategy.is_valid_sample_fn = lambda group: which(group[0])[0] % 2 == 0
        w, _, _ = await resumed(arc.url, m)
        await several(m, 4)
        failed = await m.task_runners[0].sampler.sample(TASK)
        for rollout in failed:
            rollout.status = Status.FAILED
        await m.replay_buffer.put(failed, TASK)
        w.sync()
        die(w)

    asyncio.run(begin())
    kept = held(m, Status.COMPLETED)
    again = job()
    w, _, _ = asyncio.run(resumed(arc.url, again))
    assert held(again, Status.COMPLETED) == kept
    assert held(again, Status.ABORTED) == []
    assert w.ledger("prompts").counts["dropped"] == 5 - len(kept)
    w.close()


def test_what_expired_is_made_again() -> None:
    arc, m = fresh(), job()

    async def begin() -> None:
        w, _, _ = await resumed(arc.url, m)
        await several(m, 2)
        await m.replay_buffer.refresh_staleness(9, 4)
        w.sync()
        assert w.ledger("prompts").counts["sealed"] == 0
        die(w)

    asyncio.run(begin())
    loop = Loop()
    again = job(loop=loop)
    w, _, _ = asyncio.run(resumed(arc.url, again))
    assert len(items(again)) == 2
    assert all(r.response in ("", None) for i in items(again) for r in i.item)
    w.close()


def test_rollouts_that_were_cancelled_are_made_again_in_the_same_session() -> None:
    async def run() -> list[int]:
        gate = asyncio.Event()

        async def wait(index: int, sibling: int) -> None:
            if not gate.is_set():
                await asyncio.sleep(3600)

        m = job(loop=Loop(wait))
        w, _, _ = await resumed(fresh().url, m)
        tasks = [asyncio.ensure_future(generate(m)) for _ in range(3)]
        while m.task_runners[0].sampler._consumed_samples < 3:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gate.set()
        for _ in range(8):
            await generate(m)
        out = await trained(m, 8)
        w.close()
        return out

    assert sorted(asyncio.run(run())) == list(range(8))


def test_a_save_follows_where_the_writer_keeps_a_journal_and_a_restore_ends_it() -> None:
    arc, m = fresh(), job()
    plain = fresh()

    async def run() -> None:
        await several(m, 2)
        with plain.writer() as w:
            await xtuner.save(m, w, step=1)
            assert live.memory(m.replay_buffer).follower is None
        with arc.writer(journal_s=3600.0) as w:
            ck = (await xtuner.save(m, w, step=1)).result()
            assert w.ledger("prompts").counts["sealed"] == 2
            await several(m, 1)
            assert w.ledger("prompts").counts["sealed"] == 3
        share = resharding.plan(ck, world_size=1, tails="ignore").share(0)
        await xtuner.restore(m, share, existing="replace")
        assert live.memory(m.replay_buffer).follower is None
        assert len(m.replay_buffer) == 2

    asyncio.run(run())


def test_a_followed_buffer_without_a_journal_is_kept_by_its_checkpoints() -> None:
    arc, m = fresh(), job()

    async def run() -> list[int]:
        with arc.writer() as w:
            await xtuner.follow(m, w, ledger="tasks")
            await several(m, 3)
            first = await trained(m, 1)
            pending = await xtuner.save(m, w, step=1, no_save_replay_buffer=True)
            pending.result()
        return first

    first = asyncio.run(run())
    again = job()
    found = archive.open(arc.url)
    share = resharding.plan(found.checkpoints["step-1"], world_size=1).share(0)
    with found.writer(resume=share) as w:
        asyncio.run(xtuner.restore(again, share, writer=w, ledger="tasks"))
        assert len(held(again, Status.COMPLETED)) == 2
        assert not set(held(again, Status.COMPLETED)) & set(first)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("skip", [False, True])
def test_two_owners_prompts_go_to_as_many_as_there_are(ranks: int, skip: bool) -> None:
    arc = fresh()
    managers = [job(), job()]
    writers = [archive.open(arc.url).writer(r, 2, session="one", journal_s=3600.0) for r in range(2)]

    async def begin(m: Any, w: Any) -> None:
        await xtuner.follow(m, w)
        await several(m, 3)
        (await xtuner.save(m, w, step=1, no_save_replay_buffer=skip)).result()
        await several(m, 2)
        group = await m.task_runners[0].sampler.sample(TASK)
        await m.task_runners[0].agent_loop.generate_sample(group[0])
        w.sync()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: asyncio.run(begin(*one)), zip(managers, writers, strict=True)))
    for w in writers:
        die(w)
    wanted = sorted(["completed aborted"] * 2 + ["completed completed"] * 10)
    assert sorted(shared(arc.url, ranks, "two").values()) == wanted
    assert sorted(shared(arc.url, 2, "three").values()) == wanted, "dead again before anything was saved"
    assert sorted(shared(arc.url, 2, "four").values()) == wanted


def shared(url: str, ranks: int, session: str) -> dict[str, str]:
    """Prompt -> status of its rollouts, of so many buffers that go on together; then they die."""
    plan = resharding.plan(archive.open(url).recover(), world_size=ranks)
    seen: dict[str, str] = {}
    writers = []
    for rank in range(ranks):
        rb, share = job().replay_buffer, plan.share(rank)
        asyncio.run(xtuner.restore(rb, share))
        writers.append(archive.open(url).writer(resume=share, session=session, journal_s=3600.0))
        asyncio.run(xtuner.follow(rb, writers[-1]))
        for item in asyncio.run(rb._storage.get({})):
            key = item.item[0].extra_fields["archive.prompt"][0]
            assert key not in seen
            seen[key] = " ".join(r.status.value for r in item.item)
    for w in writers:
        w.sync()
        die(w)
    return seen


def test_a_disaggregated_manager_says_which_step_took_a_batch() -> None:
    arc, m = fresh(), job(kind=DisaggAgentLoopManager)

    async def begin() -> None:
        w, _, _ = await resumed(arc.url, m)
        await several(m, 3)
        m._produce_progress.next_consumer_step = 7
        first = await trained(m, 2)
        m._produce_progress.consumed_samples[TASK] += 2
        (await xtuner.save(m, w, step=7, no_save_replay_buffer=True)).result()
        rows = archive.open(arc.url).ledger("prompts").rows.to_pylist()
        assert [r["update_count"] for r in rows if r["state"] == "trained"] == [7, 7]
        assert len(first) == 2
        await several(m, 1)
        w.sync()
        die(w)

    asyncio.run(begin())
    again = job(kind=DisaggAgentLoopManager)
    w, _, _ = asyncio.run(resumed(arc.url, again))
    assert again._produce_progress.consumed_samples == again._produce_progress.target_samples == {TASK: 2}
    assert len(held(again, Status.COMPLETED)) == 2
    assert again.task_runners[0].sampler._consumed_samples == 4
    w.close()


@pytest.mark.parametrize(("aged", "saved"), [(False, False), (True, False), (True, True), (False, True)])
def test_contents_are_the_same_as_in_the_buffer_that_was_lost(aged: bool, saved: bool) -> None:
    arc, m = fresh(), job()

    async def begin() -> None:
        w, _, _ = await resumed(arc.url, m)
        await several(m, 3)
        await m.replay_buffer.put(group_of(70, status=Status.COMPLETED), TASK)  # drawn by nobody who is followed
        if aged:
            await m.replay_buffer.refresh_staleness(7, 100)
        if saved:
            (await xtuner.save(m, w, step=1)).result()
            await m.replay_buffer.refresh_staleness(6 + aged, 100)
        w.sync()
        die(w)

    asyncio.run(begin())
    again = job()
    w, _, _ = asyncio.run(resumed(arc.url, again))
    parts = 2 if aged or saved else 3  # ageing sets a field that nobody had set
    found, wanted = (
        [(*c[2:5], [one[:parts] for one in c[5]]) for c in contents(rb.replay_buffer)] for rb in (again, m)
    )
    assert found == wanted
    w.close()
