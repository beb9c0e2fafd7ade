"""Pure, no I/O: which fields of an episode are a language rollout (tokens, what goes with them, messages,
texts of roles).

A step is a turn with lists of tokens, or one token, or a whole rollout of a group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from archive.fields import Ragged
from archive.views.texts import is_message

Array = np.ndarray[Any, Any]
PARTS = "prompt|query|response|completion|answer|output|generated"
TOKENS = re.compile(rf"((all|full|input|{PARTS})_)?(tokens?|token_ids?)|(input|{PARTS})_ids|responses|prompts")
ASKED = re.compile(r"(prompt|query|input)s?(_|$)")
OF_TOKENS = re.compile(r"logp|log_p|prob|adv|mask|entropy|kl|value|return|reward|ratio|loss")
SCALARS = re.compile(r"reward|advantage|return|score|value|logp|log_p")
MAX_SCALARS = 6
ROLES = {
    "system": 0, "prompt": 1, "question": 1, "instruction": 1, "query": 1, "user": 1, "observation": 2, "obs": 2,
    "environment": 2, "feedback": 2, "tool": 2, "tool_result": 2, "thought": 3, "reasoning": 3, "response": 4,
    "completion": 4, "answer": 4, "output": 4, "generation": 4, "assistant": 4, "action": 4, "tool_call": 5,
}  # fmt: skip
SAID_ONCE = ("messages", "conversation", "prompt", "question", "instruction")  # of an episode's metadata


class Track(NamedTuple):
    """Token ids, and what is known of each: of `rows[t]` the last `len(values[t])` tokens."""

    path: str
    rows: list[Array]
    signals: dict[str, list[Array]]
    masks: dict[str, list[Array]]

    @property
    def asked(self) -> bool:
        """Whether it is what the model was given."""
        return bool(ASKED.match(_name(self.path)))


class Rollout(NamedTuple):
    """What is shown as a conversation. `flat`: a step is a token, and the tracks have one row of all."""

    tracks: list[Track]
    messages: dict[str, list[list[dict[str, Any]]]]  # field -> of each step the messages that are new
    spoken: dict[str, list[str]]  # field named by a role -> text of each step
    scalars: dict[str, Array]
    opening: list[tuple[str, Any]]  # (name, text or messages) of the episode as such
    flat: bool
    steps: int

    @property
    def paths(self) -> set[str]:
        """Fields that need not be shown otherwise."""
        values = {name for t in self.tracks for name in (*t.signals, *t.masks)}
        return {*self.messages, *self.spoken, *(values if not self.flat else ())}


def find(parts: Mapping[str, Any], whole: Mapping[str, Any], metadata: Any, steps: int) -> Rollout | None:
    """The rollout that these fields are; None of what is none. `whole`: fields of the episode and not of its steps."""
    lines = {path: leaf for path, leaf in parts.items() if _is_line(leaf, steps)}
    tracks = _tracks({path: rows for path, leaf in parts.items() if len(rows := _rows(leaf)) == steps})
    of_tokens = [] if tracks else _tracks({path: [leaf] for path, leaf in lines.items()})
    flat = bool(of_tokens)
    messages = {path: _new_ones(leaf) for path, leaf in parts.items() if _has_messages(leaf, steps)}
    spoken = {path: texts for path, leaf in parts.items() if (texts := _spoken(path, leaf, steps)) is not None}
    opening = [
        *_of_metadata(metadata),
        *((p, text) for p, leaf in whole.items() if (text := _opening(p, leaf)) is not None),
    ]
    if not (tracks or flat or messages or spoken):
        return None
    scalars = {} if flat else {path: leaf for path, leaf in lines.items() if SCALARS.search(_name(path))}
    return Rollout(
        tracks or of_tokens, messages, spoken, dict(list(scalars.items())[:MAX_SCALARS]), opening, flat, steps
    )


def _name(path: str) -> str:
    return path.rpartition("/")[2].lower()


def _rows(leaf: Any) -> list[Array]:
    """Numbers of each step, where there are several."""
    rows = leaf.split() if isinstance(leaf, Ragged) else leaf
    if not isinstance(rows, list) and not (isinstance(rows, np.ndarray) and rows.ndim == 2):
        return []
    sound = all(isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind in "biuf" for row in rows)
    return list(rows) if sound else []


def _is_line(leaf: Any, steps: int) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.ndim == 1 and leaf.dtype.kind in "biuf" and len(leaf) == steps > 0


def _tracks(lists: Mapping[str, list[Array]]) -> list[Track]:
    """Fields of token ids, what the model was given first, each with the fields that are as long."""
    ids = [p for p, rows in lists.items() if TOKENS.fullmatch(_name(p)) and all(r.dtype.kind in "iu" for r in rows)]
    found = [Track(path, lists[path], {}, {}) for path in ids if any(len(row) for row in lists[path])]
    found.sort(key=lambda track: not track.asked)
    for path, rows in lists.items():
        if path in ids or (owner := _owner(path, rows, found)) is None:
            continue
        (owner.masks if _is_mask(path, rows) else owner.signals)[path] = rows
    return found


def _owner(path: str, rows: list[Array], tracks: list[Track]) -> Track | None:
    """The tokens that these numbers are of: as many at each step, or the last of them,
    as of a prompt with its answer."""
    fits = [t for t in tracks if all(len(a) == len(b) for a, b in zip(rows, t.rows, strict=True))]
    if not fits and any(map(len, rows)) and OF_TOKENS.search(_name(path)):
        fits = [t for t in tracks if all(len(a) <= len(b) for a, b in zip(rows, t.rows, strict=True))]
        fits = [t for t in fits if all(len(a) or not len(b) for a, b in zip(rows, t.rows, strict=True))]
    asked = bool(ASKED.match(_name(path)))
    return next((t for t in fits if t.asked is asked), fits[-1] if fits else None)


def _is_mask(path: str, rows: list[Array]) -> bool:
    yes_or_no = all(row.dtype == np.bool_ or bool(((row == 0) | (row == 1)).all()) for row in rows)
    return yes_or_no and ("mask" in _name(path) or rows[0].dtype == np.bool_)


def _has_messages(leaf: Any, steps: int) -> bool:
    if not isinstance(leaf, list) or len(leaf) != steps:
        return False
    return any(map(_listed, leaf)) and all(value is None or value == [] or _listed(value) for value in leaf)


def _listed(value: Any) -> list[dict[str, Any]]:
    """A value as messages; none if it isn't any."""
    messages = [value] if is_message(value) else value
    return messages if isinstance(messages, list) and messages and all(map(is_message, messages)) else []


def _new_ones(leaf: list[Any]) -> list[list[dict[str, Any]]]:
    """Of each step the messages that the step before does not have, where each repeats the whole history."""
    out: list[list[dict[str, Any]]] = []
    before: list[dict[str, Any]] = []
    for value in leaf:
        now = _listed(value)
        repeats = len(now) >= len(before) > 0 and now[: len(before)] == before
        out.append(now[len(before) :] if repeats else now)
        before = now or before
    return out


def _spoken(path: str, leaf: Any, steps: int) -> list[str] | None:
    if _name(path) not in ROLES or not isinstance(leaf, (list, np.ndarray)) or len(leaf) != steps:
        return None
    texts = leaf.tolist() if isinstance(leaf, np.ndarray) else leaf
    return texts if texts and all(isinstance(text, str) for text in texts) else None


def _of_metadata(metadata: Any) -> Iterator[tuple[str, Any]]:
    for name in SAID_ONCE if isinstance(metadata, Mapping) else ():
        if (text := _opening(name, metadata.get(name))) is not None:
            yield name, text


def _opening(path: str, value: Any) -> Any:
    """Text or messages of the whole episode."""
    value = value.item() if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "OUT" else value
    if _name(path) in SAID_ONCE and isinstance(value, str) and value:
        return value
    return _listed(value) or None
