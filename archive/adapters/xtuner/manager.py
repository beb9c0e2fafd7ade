"""XTuner's agent loop managers: where their samplers stand, their progress, and groups stripped to their prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from archive.adapters.xtuner import encoding, groups
from archive.adapters.xtuner.progress import of_tasks
from archive.adapters.xtuner.rollouts import Losses, construct
from archive.base import UsageError
from archive.fields import Ragged

RETRY = "aborted"  # the status of which samplers take groups again before they draw new prompts
DONE = frozenset({"archived", "failed", "filtered"})  # trained on, or given up
_STRIPPED: dict[str, Any] = {
    "response": "", "response_ids": [], "logprobs": [], "response_model_steps": [], "response_mask": None,
    "routed_experts": None, "finish_reason": None, "reward": None, "error_msg": None, "tool_calls": None,
    "input_ids": None, "labels": None, "seq_staleness": 0,
}  # fmt: skip


def is_manager(target: Any) -> bool:
    """Whether it is an agent loop manager, and no replay buffer."""
    return hasattr(target, "task_runners") and hasattr(target, "replay_buffer")


def buffer_of(target: Any) -> Any:
    return target.replay_buffer if is_manager(target) else target


def check_idle(target: Any) -> None:
    """Refuse while rollouts are under way: they are in no buffer."""
    runners = target.task_runners if is_manager(target) else ()
    counts = {task.task_name: task.produce_strategy.pending_task_count() for task in runners}
    pending = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
    if pending:
        raise UsageError(
            f"rollouts are still under way ({pending}); await manager.pause_produce() before the checkpoint"
        )


# -- samplers and progress -----------------------------------------------------------------------------------------


def samplers_state(manager: Any) -> dict[str, Any]:
    """Task -> where its sampler and its dataloader stand."""
    samplers = {task.task_name: task.sampler for task in manager.task_runners}
    return {
        name: {
            "dataloader": sampler.dataloader.get_state_dict(),
            "epoch": int(sampler.cur_epoch),
            "drawn": int(sampler._consumed_samples),
        }
        for name, sampler in samplers.items()
    }


def restore_samplers(manager: Any, saved: Mapping[str, Any]) -> list[str]:
    """Set the samplers of the tasks that were saved; the names of those that were not."""
    for task in manager.task_runners:
        state, sampler = saved.get(task.task_name), task.sampler
        if state is None:
            continue
        sampler.dataloader.load_state_dict(state["dataloader"])
        sampler.dataloader_iter = iter(sampler.dataloader)
        sampler.cur_epoch, sampler._consumed_samples = state["epoch"], state["drawn"]
    return [t.task_name for t in manager.task_runners if t.task_name not in saved]


def progress_of(manager: Any) -> dict[str, Any]:
    """The counters of producer and consumer, where the manager keeps them (in disaggregated mode), and its status."""
    progress = getattr(manager, "_produce_progress", None)
    if progress is None:
        return {}
    return {**progress.state_dict(), "status": manager._status.name}


def go_on(target: Any, cursor: Mapping[str, Any] | None) -> None:
    """Set the samplers that had drawn more by then."""
    if cursor is None or not is_manager(target):
        return
    drawn = {task.task_name: int(task.sampler._consumed_samples) for task in target.task_runners}
    restore_samplers(target, {name: s for name, s in cursor.items() if s["drawn"] > drawn.get(name, s["drawn"])})


def train_step(target: Any) -> int | None:
    """The training step that takes groups now, where a manager keeps count (in disaggregated mode)."""
    progress = getattr(target, "_produce_progress", None)
    return None if progress is None else int(progress.next_consumer_step)


def restore_progress(manager: Any, saved: Mapping[str, Any] | None, model_step: int) -> None:
    """Set the counters, and leave the producer waiting for `continue_produce`."""
    progress = getattr(manager, "_produce_progress", None)
    if progress is None:
        return
    if saved is not None and "next_consumer_step" in saved:
        progress.load_state_dict(of_tasks(saved, [t.task_name for t in manager.task_runners]))
    manager._update_event, manager._finish_event = asyncio.Event(), asyncio.Event()
    manager._update_event.set()
    manager._status = type(manager._status)["UPDATE_WEIGHT_AND_ABORT"]
    manager._pause_time_s, manager._model_step = 0.0, model_step


# -- prompts without what was made of them -------------------------------------------------------------------------


class Prompts(NamedTuple):
    """Groups that were drawn and not trained on."""

    state: list[dict[str, Any]]  # as a state tree
    listed: list[dict[str, Any]]  # for people, and for `ck.unconsumed`


def strip(items: Sequence[Any], resolve: encoding.Resolve) -> Prompts:
    """The prompts of all groups that are still to be trained on; the groups stay as they are."""
    state, listed = [], []
    for item in items:
        if groups.plain(item.status) in DONE or not item.item:
            continue
        stripped = [without_response(r) for r in distinct(item.item)]
        encoded = groups.encode(stripped, item.task_name, resolve)
        state.append(
            {
                "fields": {name: _as_tree(value) for name, value in encoded.fields.items()},
                "metadata": encoded.metadata,
                "volatile": [[RETRY, 0] for _ in stripped],
                "item": {"uid": int(item.uid), "timestamp_id": int(item.timestamp_id), "task_name": item.task_name},
            }
        )
        ids = [getattr(r, "rollout_id", None) for r in stripped]
        listed.append({"task_name": item.task_name, "group_id": encoded.metadata["group_id"], "rollout_ids": ids})
    return Prompts(state, listed)


def distinct(group: Sequence[Any]) -> list[Any]:
    """One of each rollout id: an agent's turns may be several entries of one rollout."""
    known: dict[Any, Any] = {}
    for i, rollout in enumerate(group):
        name = getattr(rollout, "rollout_id", None)
        known.setdefault(("none", i) if name is None else name, rollout)
    return list(known.values())


def without_response(rollout: Any) -> Any:
    """A rollout as it was drawn."""
    values = encoding.values_of(rollout)
    if values is None:
        raise UsageError(f"a rollout is a {type(rollout).__name__}: it has no fields to save")
    reset = {k: list(v) if isinstance(v, list) else v for k, v in _STRIPPED.items() if k in values}
    prompt = values.get("prompt_ids")
    if "tokens" in values:
        reset["tokens"] = None if prompt is None else list(prompt)
    return construct(type(rollout), {**values, **reset}, (), Losses())


def _as_tree(value: Any) -> Any:
    if isinstance(value, Ragged):
        return {"values": value.values, "lengths": value.lengths}
    return value.tolist() if value.dtype.kind == "O" else value


def as_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as an episode's `read` gives them, from the state tree."""
    return {n: Ragged(**value).split() if isinstance(value, dict) else value for n, value in fields.items()}
