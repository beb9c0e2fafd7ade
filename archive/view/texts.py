"""Pure, no I/O: the text of each step: strings, messages and JSON as people read them,
tokens and other numbers in short."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from archive.fields import Ragged
from archive.view.notebook import shown

MAX_CHARS = 8_000_000  # of one field's steps together
MAX_STEP_CHARS = 20_000
MAX_NUMBERS = 400_000  # of one field's steps together
MAX_STEP_NUMBERS = 2_000


class Texts(NamedTuple):
    """The text of each step, and whether somebody wrote it or it is numbers."""

    steps: list[str]
    written: bool


def as_texts(leaf: Any) -> Texts | None:
    """The text of each step of any field; None of one without steps."""
    values = leaf.split() if isinstance(leaf, Ragged) else leaf
    if not isinstance(values, (list, np.ndarray)) or not len(values):
        return None
    chars = max(200, min(MAX_STEP_CHARS, MAX_CHARS // len(values)))
    numbers = max(8, min(MAX_STEP_NUMBERS, MAX_NUMBERS // len(values)))
    steps = [shortened(readable(value, numbers), chars) for value in values]
    return Texts(steps, not _is_numbers(values))


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _is_numbers(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind not in "OUST"
    return all(isinstance(value, np.ndarray) and value.dtype.kind not in "OUST" for value in values)


def readable(value: Any, numbers: int = MAX_STEP_NUMBERS) -> str:
    """One value as people read it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return repr(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUT":
        return "\n".join(readable(entry, numbers) for entry in value.reshape(-1).tolist())
    if isinstance(value, np.ndarray) and value.ndim:
        return _numbers(value.reshape(-1), numbers)
    if isinstance(value, (np.ndarray, np.generic)):
        return _number(value.item())
    if is_message(value) or (isinstance(value, list) and value and all(map(is_message, value))):
        return "\n\n".join(map(_message, value if isinstance(value, list) else [value]))
    return _json(value, indent=1)


def _numbers(values: Any, most: int) -> str:
    """The count of numbers, their spread, and the first of them."""
    kept = " ".join(map(_number, values[:most].tolist()))
    count = f"{len(values)} value{'' if len(values) == 1 else 's'}"
    if values.dtype == np.bool_:
        count += f", {int(values.sum())} true"
    elif values.dtype.kind == "f" and (finite := values[np.isfinite(values)]).size:
        count += f", {shown(float(finite.min()))} … {shown(float(finite.max()))}"
    return f"{count}\n{kept}{' …' if len(values) > most else ''}"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.5g}" if isinstance(value, (float, complex)) else str(value)


def is_message(value: Any) -> bool:
    """Return whether it is a part of a conversation."""
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def beside_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a message beside its role and its content, such as the call of a tool."""
    return {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}


def _message(message: dict[str, Any]) -> str:
    content, rest = message["content"], beside_content(message)
    said = [content if isinstance(content, str) else _json(content), *([_json(rest)] if rest else [])]
    return "\n".join([f"[{message['role']}]", *said])


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
