"""Pure, no I/O: XTuner's counters of producer and consumer, by task renamed, of new tasks begun, and rolled back.

A checkpoint without the replay buffer loses what was produced and not yet consumed, so the counters of the producer go
back to those of the consumer, as XTuner does it. The producer then makes it again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from archive.adapters import Report
from archive.base import UsageError


class RestoredStep(int):
    """The model step at which a manager was saved; `report` says what came back."""

    report: Report


_PRODUCED: dict[str, int | float] = {
    "raw_rewards_sum": 0.0,
    "raw_rewards_count": 0,
    "produced_samples": 0,
    "produced_tokens": 0,
}  # begin at zero where what was produced is lost
_COUNTED = dict.fromkeys(("consumed_samples", "target_samples", "failed_samples", "filtered_samples"), 0)
PER_TASK: dict[str, int | float] = {**_PRODUCED, **_COUNTED}  # counter -> its zero


def rollback(progress: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `progress` with the producer's eight counters rolled back; all other keys are as they were.

    With `consumed_samples` and `next_consumer_step` all eight are set, also those that were absent, one zero for each
    task of `consumed_samples`. With only one or none of the two, a counter that is absent stays absent, and one whose
    source is absent stays as it is; zeros are then for the counter's own tasks.
    """
    known = _from_step(progress) | _from_consumed(progress) | _zeros(progress)
    is_complete = "consumed_samples" in progress and "next_consumer_step" in progress
    return dict(progress) | {key: value for key, value in known.items() if is_complete or key in progress}


def renamed(progress: Any, tasks: Mapping[str, str]) -> Any:
    """The counters with tasks renamed; None for what are no counters."""
    if not isinstance(progress, Mapping):
        return None
    return {
        key: {tasks.get(task, task): count for task, count in value.items()}
        if key in PER_TASK and isinstance(value, Mapping)
        else value
        for key, value in progress.items()
    }


def of_tasks(progress: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    """The counters of these tasks; those of new ones begin at zero."""
    known = {key: progress.get(key, {}) for key in PER_TASK}
    return dict(progress) | {key: {t: known[key].get(t, zero) for t in tasks} for key, zero in PER_TASK.items()}


def _from_step(progress: Mapping[str, Any]) -> dict[str, Any]:
    if "next_consumer_step" not in progress:
        return {}
    try:
        step = operator.index(progress["next_consumer_step"])
    except TypeError as error:
        kind = type(progress["next_consumer_step"]).__name__
        raise UsageError(f"progress.next_consumer_step is a {kind}: give the number of the next step") from error
    return {"producer_future_step": step, "target_upto_future_step": max(0, step - 1)}


def _from_consumed(progress: Mapping[str, Any]) -> dict[str, Any]:
    return {"target_samples": _copy(progress["consumed_samples"])} if "consumed_samples" in progress else {}


def _zeros(progress: Mapping[str, Any]) -> dict[str, Any]:
    zeros: dict[str, Any] = {"produce_time_s": 0.0}
    for key, zero in _PRODUCED.items():
        zeros[key] = _filled(progress.get("consumed_samples", progress.get(key)), zero)
    return zeros


def _copy(counts: Any) -> Any:
    return {task: _copy(count) for task, count in counts.items()} if isinstance(counts, Mapping) else counts


def _filled(tasks: Any, zero: float) -> Any:
    return {task: _filled(count, zero) for task, count in tasks.items()} if isinstance(tasks, Mapping) else zero
