"""Jobs of the shape of XTuner's: prompts drawn, rollouts made at once, batches trained on, checkpoints; and killed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import archive
import resharding
from archive.adapters import xtuner
from tests.support.xtuner_managers import AgentLoopManager, Dataloader, Sampler, Strategy, TaskRunner, prompt
from tests.support.xtuner_models import NaiveStorage, ReplayBuffer, RolloutState, StalenessReplayPolicy, Status

SIBLINGS = 2
TASK = "math"


class Loop:
    """An agent loop that answers; `made` are the rollouts that it made, as (prompt, sibling)."""

    def __init__(self, wait: Callable[[int, int], Any] | None = None) -> None:
        self.made: Counter[tuple[int, int]] = Counter()
        self.model_step = 3
        self._wait = wait

    async def generate_sample(self, rollout: RolloutState, **_: Any) -> RolloutState:
        if rollout.status == Status.COMPLETED:  # as rollout workers do it
            return rollout
        name = which(rollout)
        if self._wait is not None:
            await self._wait(*name)
        self.made[name] += 1
        ids = [100 + name[0], name[1]]
        rollout.response, rollout.response_ids, rollout.logprobs = f"answer {name}", ids, [-0.5, -1.0]
        rollout.response_model_steps, rollout.reward = [self.model_step] * 2, {"score": float(name[1])}
        rollout.tokens, rollout.status = [*(rollout.prompt_ids or []), *ids], Status.COMPLETED
        return rollout

    async def generate_group(self, group: list[RolloutState], **options: Any) -> list[RolloutState]:
        made = await asyncio.gather(*(self.generate_sample(rollout, **options) for rollout in group))
        for rollout in made:
            rollout.extra_fields["group_generate_time_s"] = 0.5
        return list(made)

    async def pause(self) -> None:
        pass


def which(rollout: RolloutState) -> tuple[int, int]:
    """(prompt, sibling) of a rollout."""
    assert rollout.rollout_id is not None
    return rollout.extra_fields["index"], rollout.rollout_id % SIBLINGS


def job(size: int = 8, loop: Loop | None = None, kind: type = AgentLoopManager, storage: type = NaiveStorage) -> Any:
    """A manager of one task with so many prompts."""
    rb = ReplayBuffer(StalenessReplayPolicy(), storage())
    sampler = Sampler(Dataloader(size, prompt), SIBLINGS, rb)
    return kind([TaskRunner(TASK, Strategy(), sampler, loop or Loop())], rb)


async def generate(m: Any) -> None:
    """Draw one prompt (or take one again), have it answered, and put it into the buffer, as a producer does it."""
    runner = m.task_runners[0]
    group = await runner.sampler.sample(runner.task_name, group_status=[Status.ABORTED])
    await put_generated(m, await runner.agent_loop.generate_group(group, enable_partial_rollout=True))


async def put_generated(m: Any, group: list[RolloutState]) -> None:
    runner = m.task_runners[0]
    if any(r.status == Status.FAILED for r in group):
        return
    if all(r.status == Status.COMPLETED for r in group) and not runner.produce_strategy.is_valid_sample_fn(group):
        return
    await m.replay_buffer.put(group, runner.task_name)


async def trained(m: Any, count: int) -> list[int]:
    """Take a batch to train on; which prompts."""
    batch = (await m.replay_buffer.take_batch({TASK: count}))[TASK]
    assert all(r.status == Status.COMPLETED and r.response == f"answer {which(r)}" for g in batch for r in g)
    return [which(group[0])[0] for group in batch]


async def resumed(url: str, m: Any, journal_s: float = 3600.0, **options: Any) -> tuple[Any, Any, list[int]]:
    """(writer, report, prompts that the weights were trained on) of a job that goes on, or begins."""
    arc = archive.open(url, create=True, **options)
    try:
        ck = arc.recover()
    except archive.NotFoundError:
        ck = None
    share = None if ck is None else resharding.plan(ck, world_size=1).share(0)
    if share is not None:
        await xtuner.restore(m, share)
    w = arc.writer(rank=0, world_size=1, resume=share, journal_s=journal_s)
    report = await xtuner.follow(m, w)
    return w, report, list((ck.progress or {}).get("trained", [])) if ck is not None else []
