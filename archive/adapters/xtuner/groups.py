"""Pure, no I/O: groups of rollouts, one an episode and each rollout a step; the prompts that they answer, and XTuner's
counters of them.

Tokens and other long lists of numbers, arrays and tensors become ragged fields of one entry a rollout; the rest is
JSON: metadata, or where it is long the text field `long`. Marks tell which prompt of a ledger a rollout is of, and
which of its siblings; a mark lies in `extra_fields`, which XTuner hands on wherever rollouts go: through Ray, into
buffers, into copies.
"""

from __future__ import annotations

import enum
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from archive.adapters.xtuner.codec import LONG_FIELD, Encoder, Resolve, construct, values_of
from archive.base import UsageError, jsontree
from archive.fields import Ragged

FORMAT = 1
COMPLETED = "completed"  # the status of what can be trained on
RETRY = "aborted"  # the status of which samplers take groups again before they draw new prompts
EXPIRED = "expired"  # the status of groups that are too old
DONE = frozenset({"archived", "failed", "filtered"})  # trained on, or given up
MAX_SHORT = 512  # characters of JSON: what is longer is no metadata

MARK = "archive.prompt"  # of `extra_fields`: [key, sibling]
PROMPT = "prompt"  # of an episode's metadata: the key
KEPT = "kept"  # of an episode's metadata: attributes of its group when it was written
_NONE = ("response_mask", "routed_experts", "finish_reason", "reward", "error_msg", "tool_calls", "input_ids", "labels")
_EMPTY: dict[str, Any] = {"response_ids": [], "logprobs": [], "response_model_steps": []}
_STRIPPED: dict[str, Any] = {**dict.fromkeys(_NONE), **_EMPTY, "response": "", "seq_staleness": 0}


# -- a group as an episode ---------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """A group as an episode."""

    fields: dict[str, Any]
    metadata: dict[str, Any]
    updates: list[int] | None  # newest model step of each rollout


def fingerprint(group: Sequence[Any]) -> str:
    """A digest of all content but `VOLATILE`. Object refs stand for what they refer to, and are not resolved."""
    return Encoder(group, None).digest()


def plain(status: Any) -> Any:
    """The value of a status."""
    return status.value if isinstance(status, enum.Enum) else status


def is_completed(rollout: Any) -> bool:
    """True if its response is there, whole."""
    return bool(plain(getattr(rollout, "status", None)) == COMPLETED)


def volatile(group: Sequence[Any]) -> list[list[Any]]:
    """Status and staleness of each rollout."""
    return [[plain(getattr(r, "status", None)), getattr(r, "seq_staleness", None)] for r in group]


def encode(group: Sequence[Any], task_name: str, resolve: Resolve) -> Encoded:
    """The group as an episode; `resolve` gives what object refs refer to."""
    encoder = Encoder(group, resolve)
    common, own = _factored([row for row, _ in encoder.rows])
    long_common, common = _split(common)
    parts = [_split(row) for row in own]
    about = {
        "format": FORMAT,
        "common": common,
        "rollouts": [short for _, short in parts],
        "unset": [unset for _, unset in encoder.rows],
    }
    group_id = getattr(group[0], "group_id", None) if group else None
    metadata = {"task_name": task_name, "group_id": group_id, "size": len(group), "xtuner": about}
    long = [{"own": long, "common": long_common if i == 0 else {}} for i, (long, _) in enumerate(parts)]
    texts = np.array([jsontree.dumps(v, where="group") for v in long], object)
    return Encoded(encoder.fields() | {LONG_FIELD: texts}, metadata, _updates(group))


def _updates(group: Sequence[Any]) -> list[int] | None:
    steps = [list(getattr(r, "response_model_steps", None) or []) for r in group]
    if not any(steps) or not all(isinstance(v, numbers.Integral) for s in steps for v in s):
        return None
    newest = max(int(v) for s in steps for v in s)
    return [max(map(int, s), default=newest) for s in steps]


def _factored(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields that all rows have in common, and those that each has of its own."""
    if len(rows) < 2:
        return {}, [dict(row) for row in rows]
    texts = [{k: jsontree.dumps(v, where=k) for k, v in row.items()} for row in rows]
    shared = {k for k, text in texts[0].items() if all(t.get(k) == text for t in texts[1:])}
    own = [{k: v for k, v in row.items() if k not in shared} for row in rows]
    return {k: v for k, v in rows[0].items() if k in shared}, own


def _split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The long fields, and the short ones."""
    long = {k: v for k, v in values.items() if len(jsontree.dumps(v, where=k)) > MAX_SHORT}
    return long, {k: v for k, v in values.items() if k not in long}


# -- prompts -----------------------------------------------------------------------------------------------------------


def mark(group: Sequence[Any], key: str) -> int:
    """Note in each rollout that it is of this prompt; the number of siblings.

    An agent's turns may be several entries of one rollout: they are one sibling.
    """
    siblings: dict[Any, int] = {}
    for i, rollout in enumerate(group):
        extra = getattr(rollout, "extra_fields", None)
        if not isinstance(extra, dict):
            raise UsageError(f"a {type(rollout).__name__} has no extra_fields, in which its prompt could be noted")
        rollout.extra_fields = {**extra, MARK: [key, siblings.setdefault(_name(i, rollout), len(siblings))]}
    return len(siblings)


def _name(i: int, rollout: Any) -> Any:
    """The rollout's id, or its place in the group."""
    own = getattr(rollout, "rollout_id", None)
    return ("none", i) if own is None else own


def _mark(rollout: Any) -> Any:
    extra = getattr(rollout, "extra_fields", None)
    return extra.get(MARK) if isinstance(extra, dict) else None


def key_of(group: Iterable[Any]) -> str | None:
    """The prompt that a group is of; None if it was drawn before anybody took note."""
    marks = (_mark(rollout) for rollout in group)
    return next((str(one[0]) for one in marks if one), None)


def siblings_of(group: Iterable[Any]) -> dict[int, list[Any]]:
    """Sibling -> its entries, of those that are marked."""
    out: dict[int, list[Any]] = {}
    for rollout in group:
        if one := _mark(rollout):
            out.setdefault(int(one[1]), []).append(rollout)
    return out


def completed(group: Iterable[Any]) -> list[int]:
    """The siblings that are whole."""
    return sorted(s for s, entries in siblings_of(group).items() if all(map(is_completed, entries)))


def as_drawn(group: Sequence[Any]) -> list[Any]:
    """One rollout of each id, without its response: an agent's turns may be several entries of one rollout."""
    known: dict[Any, Any] = {}
    for i, rollout in enumerate(group):
        known.setdefault(_name(i, rollout), rollout)
    return [without_response(rollout) for rollout in known.values()]


def without_response(rollout: Any) -> Any:
    """A rollout as it was drawn."""
    values = values_of(rollout)
    if values is None:
        raise UsageError(f"a rollout is a {type(rollout).__name__}: it has no fields to save")
    reset = {k: list(v) if isinstance(v, list) else v for k, v in _STRIPPED.items() if k in values}
    prompt = values.get("prompt_ids")
    if "tokens" in values:
        reset["tokens"] = None if prompt is None else list(prompt)
    return construct(type(rollout), {**values, **reset})


def strip(items: Iterable[Any], resolve: Resolve) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The prompts of all groups that are still to be trained on: as a state tree, and for `ck.unconsumed`, as people
    read them. The groups stay as they are."""
    state, listed = [], []
    for item in items:
        if plain(item.status) in DONE or not item.item:
            continue
        stripped = as_drawn(item.item)
        encoded = encode(stripped, item.task_name, resolve)
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
    return state, listed


def _as_tree(value: Any) -> Any:
    if isinstance(value, Ragged):
        return {"values": value.values, "lengths": value.lengths}
    return value.tolist() if value.dtype.kind == "O" else value


def as_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as an episode's `read` gives them, from the state tree."""
    return {n: Ragged(**value).split() if isinstance(value, dict) else value for n, value in fields.items()}


# -- counters of producer and consumer ---------------------------------------------------------------------------------

_PRODUCED: dict[str, int | float] = {
    "raw_rewards_sum": 0.0,
    "raw_rewards_count": 0,
    "produced_samples": 0,
    "produced_tokens": 0,
}  # begin at zero where what was produced is lost
_COUNTED = dict.fromkeys(("consumed_samples", "target_samples", "failed_samples", "filtered_samples"), 0)
_PER_TASK: dict[str, int | float] = {**_PRODUCED, **_COUNTED}  # counter -> its zero


def rollback(progress: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `progress` with the producer's eight counters rolled back; all other keys are as they were.

    A checkpoint without the replay buffer loses what was produced and not yet consumed, so the counters of the producer
    go back to those of the consumer, as XTuner does it. The producer then makes it again. With `consumed_samples` and
    `next_consumer_step` all eight are set, also those that were absent, one zero for each task of `consumed_samples`.
    With only one or none of the two, a counter that is absent stays absent, and one whose source is absent stays as it
    is; zeros are then for the counter's own tasks.
    """
    known: dict[str, Any] = {"produce_time_s": 0.0}
    has_step, has_consumed = "next_consumer_step" in progress, "consumed_samples" in progress
    if has_step:
        step = _whole(progress["next_consumer_step"])
        known |= {"producer_future_step": step, "target_upto_future_step": max(0, step - 1)}
    if has_consumed:
        known["target_samples"] = _copied(progress["consumed_samples"])
    for key, zero in _PRODUCED.items():
        known[key] = _copied(progress.get("consumed_samples", progress.get(key)), zero)
    return dict(progress) | {
        key: value for key, value in known.items() if (has_step and has_consumed) or key in progress
    }


def _whole(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError as error:
        kind = type(step).__name__
        raise UsageError(f"progress.next_consumer_step is a {kind}: give the number of the next step") from error


def _copied(counts: Any, instead: float | None = None) -> Any:
    """The counts, nested below tasks or not; or a number in place of each."""
    if isinstance(counts, Mapping):
        return {task: _copied(count, instead) for task, count in counts.items()}
    return counts if instead is None else instead


def of_tasks(progress: Any, tasks: Sequence[str], renamed: Mapping[str, str]) -> dict[str, Any] | None:
    """The counters of these tasks, by their new names; those of new ones begin at zero. None for what are none."""
    if not isinstance(progress, Mapping) or "next_consumer_step" not in progress:
        return None
    out = dict(progress)
    for key, zero in _PER_TASK.items():
        known = {renamed.get(task, task): count for task, count in progress.get(key, {}).items()}
        out[key] = {task: known.get(task, zero) for task in tasks}
    return out
