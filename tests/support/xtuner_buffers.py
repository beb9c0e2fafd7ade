"""Replay buffers of the shape of XTuner's, to test where it can't be installed: rollouts that name themselves, and what
a buffer holds, by value."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

import archive
import resharding
from archive.adapters import xtuner


class Status(Enum):
    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


class SampleParams(BaseModel):
    model_config = ConfigDict(extra="forbid")
    temperature: float = 1.0
    max_tokens: int = 2048
    stops: list[str] = []


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: Any = Field(default_factory=dict)


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class StageStatus(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"


class StageRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    status: StageStatus = StageStatus.PENDING
    score: float | None = None


class AgentRolloutItem(BaseModel):
    """What agent loops keep in `extra_fields["rollout_item"]`; no field is declared with it."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    id: str
    task_root: Path | None = None
    infer: StageRecord = Field(default_factory=StageRecord)
    judgers: dict[str, StageRecord] = Field(default_factory=dict)
    _started: float | None = PrivateAttr(default=None)


class RolloutState(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    group_id: int | None = None
    message: list[dict[str, Any]]
    prompt_ids: list[int] | None = None
    mm_info: dict[str, Any] | None = None
    session_id: int | None = None
    tokens: list[int] | None = None
    tools: list[Any] | None = None
    sample_params: SampleParams = SampleParams()
    response: str | None = None
    tool_calls: list[ToolCall] | None = None
    response_ids: list[int] | None = None
    logprobs: list[float] | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    response_mask: list[int] | None = None
    response_model_steps: list[int] | None = None
    seq_staleness: int = 0
    input_ids: list[int] | None = None
    labels: list[int] | None = None
    reward: dict[str, Any] | None = None
    rollout_id: int | None = None
    uid: int | None = None
    task_name: str | None = None
    status: Status = Status.INIT
    error_msg: str | None = None
    position_ids: np.ndarray[Any, Any] | None = None
    extra_fields: dict[str, Any] = {}

    def model_post_init(self, context: Any) -> None:
        if self.rollout_id is not None:
            self.uid = self.rollout_id


@dataclasses.dataclass
class StorageItem:
    item: list[RolloutState]
    uid: int
    timestamp_id: int
    task_name: str
    status: Status
    staleness: int


def _meets(item: Any, query: Mapping[str, Any]) -> bool:
    for key, wanted in query.items():
        if key == "$and":
            if not all(_meets(item, q) for q in wanted):
                return False
        elif isinstance(wanted, dict):
            if getattr(item, key) not in wanted["$in"]:
                return False
        elif getattr(item, key) != wanted:
            return False
    return True


class _Counting:
    def __init__(self) -> None:
        self._uid_gen: Iterator[int] = itertools.count(1)
        self._timestamp_id_gen: Iterator[int] = itertools.count(1)

    def _stamped(self, item: StorageItem) -> StorageItem:
        return dataclasses.replace(item, uid=next(self._uid_gen), timestamp_id=next(self._timestamp_id_gen))


class NaiveStorage(_Counting):
    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int, StorageItem] = {}

    async def put(self, item: StorageItem) -> int:
        stored = self._stamped(item)
        self._items[stored.uid] = stored
        return stored.uid

    async def get(self, query: Mapping[str, Any]) -> list[StorageItem]:
        return [i for i in self._items.values() if _meets(i, query)]

    async def delete(self, uids: list[int]) -> None:
        for uid in uids:
            self._items.pop(uid, None)

    async def update(self, items: list[StorageItem]) -> None:
        self._items |= {i.uid: i for i in items}

    def __len__(self) -> int:
        return len(self._items)


class PandasStorage(_Counting):
    """Rows of a frame, and those that were put since it was last looked at."""

    def __init__(self) -> None:
        super().__init__()
        self._df = pd.DataFrame(columns=[f.name for f in dataclasses.fields(StorageItem)])
        self._buffer: list[dict[str, Any]] = []

    async def put(self, item: StorageItem) -> int:
        stored = self._stamped(item)
        self._buffer.append(dict(vars(stored)))
        return stored.uid

    def _flush(self) -> pd.DataFrame:
        if self._buffer:
            more = pd.DataFrame(self._buffer)
            self._df = more if self._df.empty else pd.concat([self._df, more], ignore_index=True)
            self._buffer = []
        return self._df

    async def get(self, query: Mapping[str, Any]) -> list[StorageItem]:
        rows = [StorageItem(**row.to_dict()) for _, row in self._flush().iterrows()]
        return [i for i in rows if _meets(i, query)]

    async def delete(self, uids: list[int]) -> None:
        frame = self._flush()
        self._df = frame[~frame["uid"].isin(uids)]

    async def update(self, items: list[StorageItem]) -> None:
        frame = self._flush()
        for item in items:
            for place in frame.index[frame["uid"] == item.uid]:
                for name in ("status", "staleness", "item"):
                    frame.at[place, name] = getattr(item, name)

    def __len__(self) -> int:
        return len(self._df) + len(self._buffer)


class FIFOReplayPolicy:
    def key(self, item: StorageItem) -> Any:
        return item.timestamp_id

    async def get(self, count: int, query: Mapping[str, Any], storage: Any) -> list[list[RolloutState]]:
        chosen = sorted(await storage.get(query), key=self.key)[:count]
        await storage.delete([i.uid for i in chosen])
        return [i.item for i in chosen]


class StalenessReplayPolicy(FIFOReplayPolicy):
    def key(self, item: StorageItem) -> Any:
        return (-item.staleness, item.timestamp_id)


def group_status(group: list[RolloutState]) -> Status:
    held = {r.status for r in group}
    for status in (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED):
        if status in held:
            return status
    return Status.COMPLETED


class ReplayBuffer:
    def __init__(self, policy: Any, storage_backend: Any) -> None:
        self._policy, self._storage = policy, storage_backend
        self._lock = asyncio.Lock()

    async def put(self, group: list[RolloutState], task_name: str, status: Status | None = None) -> None:
        staleness = max(r.seq_staleness for r in group)
        item = StorageItem(group, 0, 0, task_name, status or group_status(group), staleness)
        async with self._lock:
            await self._storage.put(item)

    async def get(self, batch_size: int, task_name: str, group_status: Status) -> list[list[RolloutState]]:
        async with self._lock:
            query = {"$and": [{"task_name": task_name}, {"status": group_status}]}
            taken: list[list[RolloutState]] = await self._policy.get(batch_size, query, self._storage)
            return taken

    async def take_batch(self, sizes: dict[str, int]) -> dict[str, list[list[RolloutState]]]:
        out: dict[str, list[list[RolloutState]]] = {}
        async with self._lock:
            for name, size in sizes.items():
                query = {"$and": [{"task_name": name}, {"status": Status.COMPLETED}]}
                out[name] = await self._policy.get(size, query, self._storage)
        return out

    async def count(self, task_name: str, group_status: Status) -> int:
        async with self._lock:
            return len(await self._storage.get({"task_name": task_name, "status": group_status}))

    async def refresh_staleness(self, train_step: int, threshold: int) -> None:
        """Ages all groups; rollouts that are too old lose their response and wait to be made again."""
        async with self._lock:
            items = await self._storage.get({"status": {"$in": [Status.COMPLETED, Status.ABORTED, Status.EXPIRED]}})
            for item in items:
                for rollout in item.item:
                    made = rollout.response_model_steps or []
                    rollout.seq_staleness = train_step - min(made) if made else 0
                    if rollout.seq_staleness >= threshold:
                        rollout.status = item.status = Status.EXPIRED
                        rollout.response, rollout.response_ids, rollout.logprobs = "", [], []
                        rollout.response_model_steps, rollout.reward = [], None
                item.staleness = max(r.seq_staleness for r in item.item)
            await self._storage.update(items)

    def __len__(self) -> int:
        return len(self._storage)


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
