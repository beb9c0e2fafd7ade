"""Pure, no I/O: marks that tell which prompt of a ledger a rollout is of, and which of its siblings.

A mark lies in `extra_fields`, which XTuner hands on wherever rollouts go: through Ray, into buffers, into copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from archive.adapters.xtuner import groups
from archive.base import UsageError

MARK = "archive.prompt"  # of `extra_fields`: [key, sibling]
PROMPT = "prompt"  # of an episode's metadata: the key
KEPT = "kept"  # of an episode's metadata: attributes of its group when it was written

EXPIRED = "expired"  # the status of groups that are too old
ENDED = ("trained", "dropped")  # states of prompts that are done with


class Prompt(NamedTuple):
    """A prompt that is not done with. parts: the episodes of finished rollouts beside it."""

    siblings: int
    parts: list[str]


class Held(NamedTuple):
    """A group in the replay buffer."""

    key: str
    status: str
    group: Sequence[Any]


def mark(group: Sequence[Any], key: str) -> int:
    """Say of each rollout that it is of this prompt; how many siblings there are.

    An agent's turns may be several entries of one rollout: they are one sibling.
    """
    numbers: dict[Any, int] = {}
    for i, rollout in enumerate(group):
        extra = getattr(rollout, "extra_fields", None)
        if not isinstance(extra, dict):
            raise UsageError(f"a {type(rollout).__name__} has no extra_fields, in which its prompt could be noted")
        own = getattr(rollout, "rollout_id", None)
        sibling = numbers.setdefault(("none", i) if own is None else own, len(numbers))
        rollout.extra_fields = {**extra, MARK: [key, sibling]}
    return len(numbers)


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
    return sorted(s for s, entries in siblings_of(group).items() if all(map(groups.is_completed, entries)))


def about(group: Sequence[Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What the metadata of a group's episode says of its prompt; nothing if it is not marked."""
    key = key_of(group)
    return {} if key is None else {PROMPT: key, KEPT: dict(attributes)}


def _mark(rollout: Any) -> Any:
    extra = getattr(rollout, "extra_fields", None)
    return extra.get(MARK) if isinstance(extra, dict) else None
