"""Pure, no I/O: a rollout as the blocks of a conversation that a page draws, within a number of bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from archive.views import budget, texts, tokens
from archive.views.markup import shown
from archive.views.rollouts import ROLES, Array, Rollout, Track

Block = dict[str, Any]
MIN_TOKENS_LEFT = 8  # of a block that is cut; fewer say nothing
MAX_PART = 2000  # characters of what isn't text in a message: an image, a call


def blocks_of(rollout: Rollout, decode: tokens.Decode | None) -> list[Block]:
    """What was said, in order; of tokens their texts, and what is known of each."""
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
    """The same with its tokens, or characters, [start, stop)."""
    parts = {name: block[name][start:stop] for name in ("text", "pieces", "ids") if name in block}
    known = {name: block[name] for name in ("signals", "masks") if name in block}
    return block | parts | {n: {key: v[start:stop] for key, v in values.items()} for n, values in known.items()}


def _said(name: str, value: Any, step: int | None) -> Iterator[Block]:
    """A text of that role, or messages."""
    parts = [(name, value)] if isinstance(value, str) else [(message["role"], _body(message)) for message in value]
    for role, text in parts:
        yield {"step": step, "role": role, "kind": _kind(role), "text": text}


def _kind(role: str) -> str:
    """Whose words these are, for the colour beside them."""
    rank = ROLES.get(role.lower())
    return {0: "system", 1: "user", 2: "tool", None: "tool"}.get(rank, "assistant")


def _body(message: Mapping[str, Any]) -> str:
    """What a message says; of what is no text, what it is."""
    content = message["content"]
    said = [_part(one) for one in content] if isinstance(content, list) else [_part(content)]
    said += [f"{key}: {v if isinstance(v, str) else _json(v)}" for key, v in texts.beside_content(message).items()]
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
        size = budget.json_bytes(block) + 1
        if size <= left:
            kept.append(block)
            left -= size
            continue
        part = _beginning(block, left / size)
        if part and budget.json_bytes(part) + 1 <= left:
            kept.append(part)
        rest = len(blocks) - number
        return kept, f"the conversation: the last {rest} of {len(blocks)} parts, or most of the first of them"
    return kept, ""


def _beginning(block: Block, share: float) -> Block | None:
    """That share of a block, a bit less; None of what would say nothing."""
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
