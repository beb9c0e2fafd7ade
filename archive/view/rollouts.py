"""Pure, no I/O: which fields of an episode are a language rollout (tokens and their numbers, messages, texts of roles),
and the blocks of a conversation that are drawn of it, within a number of bytes.

A step is a turn with lists of tokens, or one token, or a whole rollout of a group.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from archive.fields import Ragged
from archive.view import tokens
from archive.view.bundle import json_bytes
from archive.view.notebook import shown
from archive.view.texts import beside_content, is_message

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
        """Return whether the model was given it."""
        return bool(ASKED.match(_name(self.path)))


class Rollout(NamedTuple):
    """A conversation to show. `flat`: a step is a token, and the tracks have one row of all."""

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
    """The messages of each step that the step before does not have, where each repeats the whole history."""
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


Block = dict[str, Any]
MIN_TOKENS_LEFT = 8  # of a block that is cut; fewer say nothing
MAX_PART = 2000  # characters of what isn't text in a message: an image, a call


def blocks_of(rollout: Rollout, decode: tokens.Decode | None) -> list[Block]:
    """Blocks of all messages and tokens, in order, with what is known of each token."""
    out = [block for name, value in rollout.opening for block in _said(name, value, None)]
    if rollout.flat:
        return out + [block for track in rollout.tracks for block in _stretches(track, decode)]
    before: list[int] = []
    for step in range(rollout.steps):
        turn, before = _turn(rollout, step, before, decode)
        numbers = {name: shown(values[step].item()) for name, values in rollout.scalars.items()}
        if turn and numbers:
            turn[0]["numbers"] = numbers
        out += turn
    return _without_repeats(out)


def _turn(
    rollout: Rollout, step: int, before: list[int], decode: tokens.Decode | None
) -> tuple[list[Block], list[int]]:
    """The blocks of a step, and the ids of all its tokens; of those `before` are not shown again."""
    ranked = [(0, block) for path, messages in rollout.messages.items() for block in _said(path, messages[step], step)]
    for path, spoken in rollout.spoken.items():
        name = path.rpartition("/")[2]
        ranked += [(ROLES[name.lower()], block) for block in _said(name, spoken[step], step)]
    ids: list[int] = []
    for track in rollout.tracks:
        now = track.rows[step].tolist()
        known = len(before) if before and now[: len(before)] == before else 0
        ids += now
        if now:
            rank = ROLES["prompt"] if track.asked else ROLES["response"]
            ranked.append((rank, _tokens(track, step, known, decode) | {"step": step}))
    ranked.sort(key=lambda one: one[0])
    return [block for _, block in ranked], ids


def _tokens(track: Track, row: int, start: int, decode: tokens.Decode | None) -> Block:
    """The tokens of a row from `start` on; those before are what was shown already."""
    ids = track.rows[row].tolist()
    given: Block = {"bare": True} if decode is None else {"ids": ids[start:]}  # bare ids want a space between them

    def aligned(values: Array) -> list[Any]:  # one a token; None for the first, where there are fewer values
        return [*[None] * (len(ids) - len(values)), *values.tolist()][start:]

    return {
        "role": track.path,
        "kind": "user" if track.asked else "assistant",
        "pieces": tokens.pieces(ids[start:], decode),
        "signals": {name: [_short(v) for v in aligned(rows[row])] for name, rows in track.signals.items()},
        "masks": {name: "".join(map(_bit, aligned(rows[row]))) for name, rows in track.masks.items()},
        **given,
        **({"before": start} if start else {}),
    }


def _bit(value: Any) -> str:
    return "?" if value is None else str(int(value))


def _short(value: Any) -> Any:
    """A number with three digits; what JSON has none for as text."""
    if value is None:
        return None
    return float(f"{value:.3g}") if np.isfinite(value) else str(float(value))


def _stretches(track: Track, decode: tokens.Decode | None) -> Iterator[Block]:
    """Tokens that are a step each, cut where the mask changes: what was given, and what was made."""
    mask = next(iter(track.masks.items()), None)
    changes = np.flatnonzero(np.diff(mask[1][0].astype(np.int8))) + 1 if mask else np.zeros(0, np.int64)
    whole = _tokens(track, 0, 0, decode)
    for start, stop in itertools.pairwise([0, *changes.tolist(), len(track.rows[0])]):
        name = track.path if mask is None else f"{track.path}, {mask[0]} {int(mask[1][0][start])}"
        given = track.asked if mask is None else not mask[1][0][start]
        kind = "user" if given else "assistant"
        yield _cut(whole, start, stop) | {"role": name, "kind": kind, "step": start, "each": True}


def _cut(block: Block, start: int, stop: int) -> Block:
    """The block with its tokens, or characters, [start, stop)."""
    parts = {name: block[name][start:stop] for name in ("text", "pieces", "ids") if name in block}
    known = {name: block[name] for name in ("signals", "masks") if name in block}
    return block | parts | {n: {key: v[start:stop] for key, v in values.items()} for n, values in known.items()}


def _said(name: str, value: Any, step: int | None) -> Iterator[Block]:
    """A text of that role, or messages."""
    parts = [(name, value)] if isinstance(value, str) else [(message["role"], _body(message)) for message in value]
    for role, text in parts:
        yield {"step": step, "role": role, "kind": _kind(role), "text": text}


def _kind(role: str) -> str:
    """The kind of speaker, for the colour beside the words."""
    rank = ROLES.get(role.lower())
    return {0: "system", 1: "user", 2: "tool", None: "tool"}.get(rank, "assistant")


def _body(message: Mapping[str, Any]) -> str:
    """The text of a message; of other content a short description."""
    content = message["content"]
    said = [_part(one) for one in content] if isinstance(content, list) else [_part(content)]
    said += [f"{key}: {v if isinstance(v, str) else _json(v)}" for key, v in beside_content(message).items()]
    return "\n".join(filter(None, said))


def _part(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    text = content.get("text") if isinstance(content, dict) else None
    return text if isinstance(text, str) else _json(content)


def _json(value: Any) -> str:
    return shown(json.dumps(value, ensure_ascii=False, default=str), MAX_PART)


def _without_repeats(blocks: list[Block]) -> list[Block]:
    """Long text that an earlier step has word for word is named by that step."""
    first: dict[tuple[str, str], Any] = {}
    for block in blocks:
        text = block.get("text", "")
        known = first.setdefault((block["role"], text), block["step"])
        if len(text) > 80 and known != block["step"]:
            block["same"] = known
            block["text"] = ""
    return blocks


def fitted(blocks: list[Block], most: int) -> tuple[list[Block], str]:
    """The first blocks, of at most so many bytes; and what was left out."""
    kept: list[Block] = []
    left = most
    for number, block in enumerate(blocks):
        size = json_bytes(block) + 1
        if size <= left:
            kept.append(block)
            left -= size
            continue
        part = _beginning(block, left / size)
        if part and json_bytes(part) + 1 <= left:
            kept.append(part)
        rest = len(blocks) - number
        return kept, f"the conversation: the last {rest} of {len(blocks)} parts, or most of the first of them"
    return kept, ""


def _beginning(block: Block, share: float) -> Block | None:
    """A share of a block, a bit less; None of what would say nothing."""
    length = len(block["pieces"] if "pieces" in block else block["text"])
    count = int(length * share * 0.9)
    return None if count < MIN_TOKENS_LEFT else _cut(block, 0, count) | {"more": length - count}


def about(rollout: Rollout) -> dict[str, Any]:
    """Names of what tokens can be coloured and dimmed by, the likeliest first,
    with the range of each signal's values."""
    signals: dict[str, dict[str, Any]] = {}
    for name in sorted({n for t in rollout.tracks for n in t.signals}, key=_liking):
        every = np.concatenate([r for t in rollout.tracks for r in t.signals.get(name, [])]).astype(np.float64)
        finite = every[np.isfinite(every)]
        low, high = np.percentile(finite, (1, 99)).tolist() if len(finite) else (0.0, 0.0)
        signals[name] = {"low": _short(low), "high": _short(high), "chance": _is_logprob(name)}
    masks = sorted({n for t in rollout.tracks for n in t.masks}, key=lambda n: ("attention" in n, n))
    return {"signals": signals, "masks": masks}


def _is_logprob(name: str) -> bool:
    last = name.rpartition("/")[2].lower()
    return "logp" in last or "log_p" in last


def _liking(name: str) -> tuple[bool, bool, str]:
    return not _is_logprob(name), "adv" not in name.lower(), name
