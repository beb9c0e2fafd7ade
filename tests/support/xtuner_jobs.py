"""Jobs of the shape of XTuner's: prompts drawn, rollouts made at once, batches trained on, checkpoints; and killed.

Run as a program: a job is killed at its k-th storage operation, the next one too; a third ends it.

Usage: python -m tests.support.xtuner_jobs '{"url": ..., "options": {}, "kills": [[3, 5], ...], "skip": true}' Prints
one JSON line: what each pair of kills led to. Processes are forked off this one, which has only imported things.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 (imported once, ahead of all forks)
import pyarrow.parquet  # noqa: F401
import zarr  # noqa: F401

import archive
import resharding
from archive.adapters import xtuner
from tests.support.kills import die_at
from tests.support.xtuner_buffers import NaiveStorage, ReplayBuffer, RolloutState, StalenessReplayPolicy, Status
from tests.support.xtuner_managers import AgentLoopManager, Dataloader, Sampler, Strategy, TaskRunner, prompt

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


PROMPTS = 10
BATCH = 2


class Log:
    """What a process said before it was killed, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def say(self, *words: Any) -> None:
        self._file.write(json.dumps(words) + "\n")


async def run(url: str, options: dict[str, Any], log: Log, skip: bool, k: int | None) -> None:
    """Train on each prompt of the epoch once; with k, die at the k-th storage operation."""
    loop = Loop()
    m = job(PROMPTS, loop)
    if k is not None:
        die_at(k)
    w, _, known = await resumed(url, m, journal_s=0.01, **options)
    step = len(known) // BATCH
    while await _produced(m, w, loop, log):
        known += await trained(m, BATCH)
        step += 1
        if step % 2 == 0:
            progress = {"trained": known}
            pending = await xtuner.save(m, w, step=step, no_save_replay_buffer=skip, progress=progress)
            pending.result()
    log.say("ended", known)
    w.close()


async def _produced(m: Any, w: Any, loop: Loop, log: Log) -> bool:
    """Make groups until there is more than a batch, and say which rollouts are durable; whether there is any."""
    sampler, buffer = m.task_runners[0].sampler, m.replay_buffer
    while await buffer.count(TASK, Status.COMPLETED) < 2 * BATCH:
        waiting = await buffer.count(TASK, Status.ABORTED)
        left = PROMPTS - sampler._consumed_samples
        if not waiting + left:
            break
        await asyncio.gather(*(generate(m) for _ in range(min(2, waiting + left))))
        w.sync()
        log.say("durable", list(loop.made))
    return bool(await buffer.count(TASK, Status.COMPLETED))


def child(url: str, options: dict[str, Any], path: Path, skip: bool, k: int | None) -> bool:
    """Run it in a process of its own; whether it ended by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(run(url, options, Log(path), skip, k))
        except BaseException:
            Log(path).say("failed", traceback.format_exc())
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1]) != signal.SIGKILL


def outcome(url: str, options: dict[str, Any], kills: list[int], skip: bool) -> dict[str, Any]:
    """Killed at each of these operations, one after the other; then let go on to its end."""
    lines: list[list[list[Any]]] = []
    ended = False
    with tempfile.TemporaryDirectory() as folder:
        for at, k in enumerate([*kills, None]):
            path = Path(folder) / str(at)
            ended = child(url, options, path, skip, k)
            lines.append([json.loads(line) for line in path.read_text().splitlines() if line.endswith("]")])
            if ended:
                break
    said = [words for one in lines for words in one]
    made_twice = Counter(
        name for one in lines for name in {tuple(n) for w, names in one if w == "durable" for n in names}
    )
    return {
        "kills": kills,
        "failed": [words[1] for words in said if words[0] == "failed"],
        "trained": next((words[1] for words in said if words[0] == "ended"), None),
        "made_twice": sorted(name for name, count in made_twice.items() if count > 1),
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    out = [
        outcome(f"{given['url']}/{i}", given["options"], kills, given["skip"]) for i, kills in enumerate(given["kills"])
    ]
    print(json.dumps(out))


if __name__ == "__main__":
    main()
