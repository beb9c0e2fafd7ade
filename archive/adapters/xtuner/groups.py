"""Pure, no I/O: a group of rollouts as the fields and metadata of one episode; one step is one rollout.

Tokens and other long lists of numbers, arrays and tensors become ragged fields of one entry a rollout; the rest is
JSON:
metadata, or where it is long the text field `long`.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from archive.adapters.xtuner.encoding import LONG_FIELD, Encoder, Resolve
from archive.base import jsontree

FORMAT = 1
COMPLETED = "completed"  # the status of what can be trained on
MAX_SHORT = 512  # characters of JSON: what is longer is no metadata


class Encoded(NamedTuple):
    """A group as an episode."""

    fields: dict[str, Any]
    metadata: dict[str, Any]
    updates: list[int] | None  # newest model step of each rollout


def fingerprint(group: Sequence[Any]) -> str:
    """Of all content but `VOLATILE`. Object refs stand for what they refer to, and are not resolved."""
    encoder = Encoder(len(group), None)
    return encoder.digest([encoder.rollout(i, rollout) for i, rollout in enumerate(group)])


def is_completed(rollout: Any) -> bool:
    """Whether its response is there, whole."""
    return bool(plain(getattr(rollout, "status", None)) == COMPLETED)


def volatile(group: Sequence[Any]) -> list[list[Any]]:
    """Status and staleness of each rollout."""
    return [[plain(getattr(r, "status", None)), getattr(r, "seq_staleness", None)] for r in group]


def plain(status: Any) -> Any:
    """The value of a status."""
    return status.value if isinstance(status, enum.Enum) else status


def encode(group: Sequence[Any], task_name: str, resolve: Resolve) -> Encoded:
    """The group as an episode; `resolve` gives what object refs refer to."""
    encoder = Encoder(len(group), resolve)
    rows = [encoder.rollout(i, rollout) for i, rollout in enumerate(group)]
    common, own = _factored([row for row, _ in rows])
    long_common, common = _split(common)
    parts = [_split(row) for row in own]
    about = {
        "format": FORMAT,
        "common": common,
        "rollouts": [short for _, short in parts],
        "unset": [unset for _, unset in rows],
    }
    group_id = getattr(group[0], "group_id", None) if group else None
    metadata = {"task_name": task_name, "group_id": group_id, "size": len(group), "xtuner": about}
    long = [{"own": long, "common": long_common if i == 0 else {}} for i, (long, _) in enumerate(parts)]
    texts = np.array([jsontree.dumps(v, where="group") for v in long], object)
    return Encoded(encoder.fields(group) | {LONG_FIELD: texts}, metadata, _updates(group))


def _updates(group: Sequence[Any]) -> list[int] | None:
    steps = [list(getattr(r, "response_model_steps", None) or []) for r in group]
    if not any(steps) or not all(isinstance(v, numbers.Integral) for s in steps for v in s):
        return None
    newest = max(int(v) for s in steps for v in s)
    return [max(map(int, s), default=newest) for s in steps]


def _factored(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all rows have in common, and what each has of its own."""
    if len(rows) < 2:
        return {}, [dict(row) for row in rows]
    texts = [{k: jsontree.dumps(v, where=k) for k, v in row.items()} for row in rows]
    shared = {k for k, text in texts[0].items() if all(t.get(k) == text for t in texts[1:])}
    return {k: rows[0][k] for k in rows[0] if k in shared}, [
        {k: v for k, v in row.items() if k not in shared} for row in rows
    ]


def _split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(long, short) of some fields."""
    long = {k: v for k, v in values.items() if len(jsontree.dumps(v, where=k)) > MAX_SHORT}
    return long, {k: v for k, v in values.items() if k not in long}
