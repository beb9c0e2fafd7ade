"""Pure, no I/O: JSON that a bucket holds, read back. Whatever is no JSON, too deep, too long or of another shape is an error.

The one place where the library's own documents (archive.json, commits, staged indexes, zarr.json, schemas, claims) are
parsed: whoever reads one says what it is and which error that makes.
"""

from __future__ import annotations

import json
from typing import Any

from archive.base.errors import IntegrityError

MAX_DEPTH = 64  # of documents that the library makes; none has ten levels
MAX_SMALL_BYTES = 65_536  # archive.json, claims, answers to requests: none has a thousand
_QUOTED = 80

Shape = Any
"""What a value must be: a type or a tuple of types; [shape] for a list; {str: shape} for an object of any keys;
{"key": shape, "key?": shape} for an object with at least these keys, but for those with a question mark."""


def parse(
    text: bytes | str, *, what: str, error: type[IntegrityError], shape: Shape = None, max_depth: int | None = None
) -> Any:
    """The value of a JSON text; `error` names `what` where it is none, or not of this shape."""
    try:
        value = json.loads(text)
    except RecursionError as e:
        raise error(f"{what} is nested too deeply: it is damaged, or not what its name says") from e
    except ValueError as e:
        raise error(f"{what} is not JSON ({e!s:.{_QUOTED}}): it is damaged") from e
    if max_depth is not None and _is_deeper(value, max_depth):
        raise error(f"{what} is nested more than {max_depth} levels deep: it is damaged, or not what its name says")
    if shape is not None and (problem := misshapen(value, shape)):
        raise error(f"{what} is not what it should be ({problem}): it is damaged")
    return value


def check_size(data: bytes, max_bytes: int, *, what: str, error: type[IntegrityError]) -> bytes:
    """`data` itself, if it has at most `max_bytes`: read one byte more than that, and no more, to know."""
    if len(data) > max_bytes:
        raise error(f"{what} has more than {max_bytes} bytes, which none has: it is damaged, or not what its name says")
    return data


def misshapen(value: Any, shape: Shape, at: str = "") -> str:
    """Where a value is not of a shape, in words; empty if it is."""
    if isinstance(shape, list):
        if type(value) is not list:
            return f"{at or 'it'} is no list"
        return next((found for i, one in enumerate(value) if (found := misshapen(one, shape[0], f"{at}[{i}]"))), "")
    if isinstance(shape, dict):
        return _misshapen_object(value, shape, at)
    right = isinstance(value, shape) and (type(value) is not bool or _has(shape, bool))
    return "" if right else f"{at or 'it'} is {value!r:.{_QUOTED}}"


def _misshapen_object(value: Any, shape: dict[Any, Shape], at: str) -> str:
    if type(value) is not dict:
        return f"{at or 'it'} is no object"
    if str in shape:
        pairs = ((key, shape[str]) for key in value)
        return next((found for key, one in pairs if (found := misshapen(value[key], one, _below(at, key)))), "")
    for key, one in shape.items():
        name = key.removesuffix("?")
        if name not in value and name == key:
            return f"{_below(at, name)} is not there"
        if name in value and (found := misshapen(value[name], one, _below(at, name))):
            return found
    return ""


def _below(at: str, key: str) -> str:
    return f"{at}.{key:.{_QUOTED}}" if at else f"{key:.{_QUOTED}}"


def _has(shape: Shape, kind: type) -> bool:
    return kind in (shape if isinstance(shape, tuple) else (shape,))


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than so many levels."""
    level = [value]
    for _ in range(levels + 1):
        nodes = [node for node in level if isinstance(node, (dict, list))]
        if not nodes:
            return False
        level = [child for node in nodes for child in (node.values() if isinstance(node, dict) else node)]
    return any(isinstance(node, (dict, list)) for node in level)
