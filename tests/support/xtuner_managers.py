"""Agent loop managers of the shape of XTuner's, to test where it can't be installed."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import numpy as np

import archive
from archive.adapters import xtuner
from tests.support.xtuner_buffers import (
    PandasStorage,
    ReplayBuffer,
    RolloutState,
    StalenessReplayPolicy,
    Status,
)


class Dataloader:
    """Prompts in an order that is shuffled anew each epoch."""

    def __init__(self, size: int, make: Callable[[int], RolloutState]) -> None:
        self._size, self._make, self.epoch, self._at = size, make, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self._at = epoch, 0

    def __iter__(self) -> Iterator[list[RolloutState]]:
        order = np.random.default_rng(self.epoch).permutation(self._size)
        while self._at < self._size:
            self._at += 1
            yield [self._make(int(order[self._at - 1]))]

    def get_state_dict(self) -> dict[str, Any]:
        return {"sampler": {"epoch": self.epoch, "step": self._at}, "dataset": {}, "total_consumed_samples": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._at = state["sampler"]["epoch"], state["sampler"]["step"]


class Sampler:
    def __init__(self, dataloader: Dataloader, prompt_repeat_k: int, replay_buffer: ReplayBuffer) -> None:
        self.dataloader, self.prompt_repeat_k, self.replay_buffer = dataloader, prompt_repeat_k, replay_buffer
        self.dataloader_iter: Iterator[list[RolloutState]] | None = None
        self.cur_epoch = self._consumed_samples = 0

    async def sample(self, task_name: str, group_status: list[Status] | None = None) -> list[RolloutState]:
        for status in [Status.ABORTED] if group_status is None else group_status:
            waiting = await self.replay_buffer.get(1, task_name=task_name, group_status=status)
            if waiting:
                return waiting[0]
        return self.sample_from_dataloader()

    def sample_from_dataloader(self) -> list[RolloutState]:
        self.dataloader_iter = self.dataloader_iter or iter(self.dataloader)
        data = next(self.dataloader_iter, None)
        if data is None:
            self.cur_epoch += 1
            self.dataloader.set_epoch(self.cur_epoch)
            self.dataloader_iter = iter(self.dataloader)
            data = next(self.dataloader_iter)
        group = [copy.deepcopy(data[0]) for _ in range(self.prompt_repeat_k)]
        for i, rollout in enumerate(group):
            rollout.group_id = self._consumed_samples
            rollout.rollout_id = rollout.uid = self._consumed_samples * self.prompt_repeat_k + i
        self._consumed_samples += 1
        return group


class Strategy:
    def __init__(self) -> None:
        self.pending = 0

    def pending_task_count(self) -> int:
        return self.pending

    def is_valid_sample_fn(self, group: list[RolloutState]) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class TaskRunner:
    task_name: str
    produce_strategy: Strategy
    sampler: Sampler
    agent_loop: Any = None


class AgentLoopManager:
    def __init__(self, task_runners: list[TaskRunner], replay_buffer: ReplayBuffer) -> None:
        self.task_runners, self.replay_buffer = task_runners, replay_buffer
        self.task_names = [t.task_name for t in task_runners]


class ManagerStatus(Enum):
    NORMAL = auto()
    UPDATE_WEIGHT_AND_ABORT = auto()
    EXPIRED_BATCH = auto()
    FINISH = auto()


@dataclasses.dataclass
class Progress:
    consumed_samples: dict[str, int]
    target_samples: dict[str, int]
    raw_rewards_sum: dict[str, float]
    raw_rewards_count: dict[str, int]
    produced_samples: dict[str, int]
    produced_tokens: dict[str, int]
    failed_samples: dict[str, int]
    filtered_samples: dict[str, int]
    producer_future_step: int = 1
    next_consumer_step: int = 1
    target_upto_future_step: int = 0
    produce_time_s: float = 0.0

    @classmethod
    def build(cls, tasks: list[str]) -> Progress:
        names = [f.name for f in dataclasses.fields(cls)][:8]
        return cls(**{n: dict.fromkeys(tasks, 0.0 if n == "raw_rewards_sum" else 0) for n in names})

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, copy.copy(state[field.name]))


class DisaggAgentLoopManager(AgentLoopManager):
    def __init__(self, task_runners: list[TaskRunner], replay_buffer: ReplayBuffer) -> None:
        super().__init__(task_runners, replay_buffer)
        self._update_event, self._finish_event = asyncio.Event(), asyncio.Event()
        self._model_step, self._pause_time_s, self._status = 0, 0.0, ManagerStatus.NORMAL
        self._produce_progress = Progress.build(self.task_names)

    async def pause_produce(self) -> None:
        self._status = ManagerStatus.UPDATE_WEIGHT_AND_ABORT
        self._update_event.set()

    async def continue_produce(self, model_step: int) -> None:
        self._model_step, self._status = model_step, ManagerStatus.NORMAL
        self._update_event.clear()


PROMPTS = 8


def prompt(number: int) -> RolloutState:
    message = [{"role": "user", "content": f"prompt {number}"}]
    return RolloutState(message=message, prompt_ids=[number], extra_fields={"index": number})


def manager(
    kind: type = DisaggAgentLoopManager, tasks: tuple[str, ...] = ("math",), storage: type | None = None
) -> Any:
    rb = ReplayBuffer(StalenessReplayPolicy(), (storage or PandasStorage)())
    return kind([TaskRunner(t, Strategy(), Sampler(Dataloader(PROMPTS, prompt), 2, rb)) for t in tasks], rb)


def saved(m: Any, arc: archive.Archive, step: int = 5, **options: Any) -> Any:
    async def run() -> Any:
        await m.pause_produce()
        return await xtuner.save(m, w, step=step, **options)

    with arc.writer() as w:
        return asyncio.run(run() if hasattr(m, "pause_produce") else xtuner.save(m, w, step=step, **options)).result(60)
