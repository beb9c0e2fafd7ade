"""XTuner's buffers for tests: rollouts that name themselves, and what a buffer holds, by value."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import torch

import archive
import resharding
from archive.adapters import xtuner
from tests.support.xtuner_models import (
    FunctionCall,
    NaiveStorage,
    ReplayBuffer,
    RolloutState,
    SampleParams,
    StalenessReplayPolicy,
    Status,
    StorageItem,
    ToolCall,
)

_names = itertools.count()


def fresh() -> archive.Archive:
    return archive.create(f"memory://xtuner-{next(_names)}")


def buffer(storage: type = NaiveStorage, policy: type = StalenessReplayPolicy) -> ReplayBuffer:
    return ReplayBuffer(policy(), storage())


def rollout(group: int, i: int, count: int = 5, **given: Any) -> RolloutState:
    rng = np.random.default_rng(group * 100 + i)
    ids = rng.integers(0, 150_000, count).tolist()
    values: dict[str, Any] = {
        "group_id": group, "rollout_id": group * 10 + i,
        "message": [{"role": "user", "content": f"question {group} é"}], "prompt_ids": [1, 2, group],
        "tokens": [1, 2, group, *ids], "response": f"answer {group}.{i}", "response_ids": ids,
        "logprobs": rng.normal(size=count).tolist(), "response_mask": [1] * count,
        "response_model_steps": [3] * (count - 1) + [4 + i], "reward": {"score": float(i)}, "status": Status.COMPLETED,
        "finish_reason": "stop", "seq_staleness": 1, "sample_params": SampleParams(temperature=0.5),
        "tool_calls": [ToolCall(id="a", function=FunctionCall(name="f", arguments={"x": (1, 2.5)}))],
    }  # fmt: skip
    return RolloutState(**(values | given))


def group_of(number: int, size: int = 2, **given: Any) -> list[RolloutState]:
    return [rollout(number, i, **given) for i in range(size)]


def plain(value: Any) -> Any:
    """A value that compares by bits and types."""
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value).__name__, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
    if hasattr(type(value), "model_fields"):
        fields = {k: plain(getattr(value, k)) for k in type(value).model_fields}
        return (type(value), fields, sorted(value.model_fields_set))
    if isinstance(value, (list, tuple)):
        return (type(value), [plain(v) for v in value])
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return (type(value), repr(value))


def contents(rb: ReplayBuffer) -> list[Any]:
    items: list[StorageItem] = asyncio.run(rb._storage.get({}))
    return [
        (int(i.uid), int(i.timestamp_id), i.task_name, i.status, int(i.staleness), [plain(r) for r in i.item])
        for i in items
    ]


def saved(rb: ReplayBuffer, w: Any, step: int = 1, **options: Any) -> Any:
    return asyncio.run(xtuner.save(rb, w, step=step, **options)).result(60)


def share_of(ck: Any) -> Any:
    return resharding.plan(ck, world_size=ck.world_size).share(0)


def uploaded(arc: archive.Archive, after: int) -> int:
    return len(
        archive.open(arc.url).episodes.table.filter(archive.open(arc.url).episodes.table["commit"].to_numpy() > after)
    )
