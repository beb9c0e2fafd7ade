"""Pure, no I/O: a rollout as the blocks of a conversation that a page draws, within a number of bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from archive.views import budget, tokens
from archive.views.markup import shown
from archive.views.rollouts import ROLES, Array, Rollout, Track

Block = dict[str, Any]
MIN_TOKENS_LEFT = 8  # of a block that is cut; fewer say nothing
MAX_PART = 2000  # characters of what isn't text in a message: an image, a call


def blocks_of(rollout: Rollout, decode: tokens.Decode | None) -> list[Block]:
    """What was said, in order; of tokens their texts, and what is known of each."""
    out = [block for name, value in rollout.told for block in _spoken_by(name, value, None)]
    if rollout.flat:
        return out + [block for track in rollout.tracks for block in _stretches(track, decode)]
    every: list[list[Any]] = [
        *rollout.messages.values(),
        *rollout.spoken.values(),
        *(track.rows for track in rollout.tracks),
    ]
    steps = len(every[0])
    before: list[int] = []
    for step in range(steps):
        turn, before = _turn(rollout, step, before, decode)
        numbers = {name: shown(values[step].item()) for name, values in rollout.scalars.items()}
        if turn and numbers:
            turn[0]["numbers"] = numbers
        out += turn
    return _without_repeats(out)


def _turn(
    rollout: Rollout, step: int, before: list[int], decode: tokens.Decode | None
) -> tuple[list[Block], list[int]]:
    """The blocks of a step, and the ids of all its tokens."""
    ranked: list[tuple[int, Block]] = []
    for path, messages in rollout.messages.items():
        ranked += [(0, block) for block in _spoken_by(path, messages[step], step)]
    for path, texts in rollout.spoken.items():
        name = path.rpartition("/")[2]
        ranked.append((ROLES[name.lower()], {"step": step, "role": name, "kind": _kind(name), "text": texts[step]}))
    ids: list[int] = []
    for track in rollout.tracks:
        now = track.rows[step].tolist()
        known = len(before) if before and now[: len(before)] == before else 0
        ids += now
        if now:
            rank = ROLES["prompt"] if track.asked else ROLES["response"]
            ranked.append((rank, _tokens(track, step, known, len(now), decode) | {"step": step}))
    ranked.sort(key=lambda one: one[0])
    return [block for _, block in ranked], ids


def _tokens(track: Track, row: int, start: int, stop: int, decode: tokens.Decode | None) -> Block:
    """Tokens [start, stop) of a row; those before are what was shown already."""
    ids = track.rows[row]
    said = tokens.pieces(ids[start:stop].tolist(), decode)
    kind = "user" if track.asked else "assistant"
    block: Block = {"role": track.path, "kind": kind, "pieces": said, "signals": {}, "masks": {}}
    if decode is None:
        block["bare"] = True  # ids, which want a space between them
    else:
        block["ids"] = ids[start:stop].tolist()
    if start:
        block["before"] = start
    for name, values in track.signals.items():
        block["signals"][name] = [_short(v) for v in _aligned(values[row], len(ids), start, stop)]
    for name, values in track.masks.items():
        block["masks"][name] = "".join(
            "?" if v is None else str(int(v)) for v in _aligned(values[row], len(ids), start, stop)
        )
    return block


def _aligned(values: Array, count: int, start: int, stop: int) -> list[Any]:
    """One a token; None for the first tokens, where there are fewer values."""
    every: list[Any] = [None] * (count - len(values))
    every += values.tolist()
    return every[start:stop]


def _short(value: Any) -> Any:
    """A number with three digits; what JSON has none for as text."""
    if value is None:
        return None
    return float(f"{value:.3g}") if np.isfinite(value) else str(float(value))


def _stretches(track: Track, decode: tokens.Decode | None) -> Iterator[Block]:
    """Tokens that are a step each, cut where the mask changes: what was given, and what was made."""
    length = len(track.rows[0])
    mask = next(iter(track.masks.items()), None)
    changes = np.flatnonzero(np.diff(mask[1][0].astype(np.int8))) + 1 if mask else np.zeros(0, np.int64)
    edges = [0, *changes.tolist(), length]
    whole = _tokens(track, 0, 0, length, decode)
    for start, stop in itertools.pairwise(edges):
        name = track.path if mask is None else f"{track.path}, {mask[0]} {int(mask[1][0][start])}"
        given = track.asked if mask is None else not mask[1][0][start]
        part: Block = {name: whole[name][start:stop] for name in ("pieces", "ids") if name in whole}
        part |= {"bare": True} if "bare" in whole else {}
        yield part | {
            "role": name, "kind": "user" if given else "assistant", "step": start, "each": True,
            "signals": {key: values[start:stop] for key, values in whole["signals"].items()},
            "masks": {key: bits[start:stop] for key, bits in whole["masks"].items()},
        }  # fmt: skip


def _spoken_by(name: str, value: Any, step: int | None) -> Iterator[Block]:
    if isinstance(value, str):
        yield {"step": step, "role": name, "kind": _kind(name), "text": value}
        return
    for message in value:
        role = message["role"]
        yield {"step": step, "role": role, "kind": _kind(role), "text": _body(message)}


def _kind(role: str) -> str:
    """Whose words these are, for the colour beside them."""
    rank = ROLES.get(role.lower())
    return {0: "system", 1: "user", 2: "tool", None: "tool"}.get(rank, "assistant")


def _body(message: Mapping[str, Any]) -> str:
    """What a message says; of what is no text, what it is."""
    content = message["content"]
    said = [_part(one) for one in content] if isinstance(content, list) else [_part(content)]
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    said += [f"{key}: {value if isinstance(value, str) else _json(value)}" for key, value in rest.items()]
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
        gone = len(blocks) - number
        return kept, f"the conversation: the last {gone} of {len(blocks)} parts, or most of the first of them"
    return kept, ""


def _beginning(block: Block, share: float) -> Block | None:
    """That share of a block, a bit less."""
    said = block["pieces"] if "pieces" in block else block["text"]
    count = int(len(said) * share * 0.9)
    if count < MIN_TOKENS_LEFT:
        return None
    cut = {**block, "more": len(said) - count}
    if "pieces" not in block:
        return {**cut, "text": said[:count]}
    cut["signals"] = {name: values[:count] for name, values in block["signals"].items()}
    cut["ids"] = block.get("ids", [])[:count]
    return {**cut, "pieces": said[:count], "masks": {name: bits[:count] for name, bits in block["masks"].items()}}


def about(rollout: Rollout) -> dict[str, Any]:
    """Names of what tokens can be coloured and dimmed by, the likeliest first, with the range of each signal's values."""
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
