"""Pure, no I/O: JSON that a bucket holds, read back. Whatever is no JSON, too deep or too long is an error.

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


def parse(text: bytes | str, *, what: str, error: type[IntegrityError], max_depth: int | None = None) -> Any:
    """The value of a JSON text; `error` names `what` where it is none, or is nested deeper than that."""
    try:
        value = json.loads(text)
    except RecursionError as e:
        raise error(f"{what} is nested too deeply: it is damaged, or not what its name says") from e
    except ValueError as e:
        raise error(f"{what} is not JSON ({e!s:.{_QUOTED}}): it is damaged") from e
    if max_depth is not None and _is_deeper(value, max_depth):
        raise error(f"{what} is nested more than {max_depth} levels deep: it is damaged, or not what its name says")
    return value


def parse_object(
    text: bytes | str, *, what: str, error: type[IntegrityError], max_depth: int | None = None
) -> dict[str, Any]:
    """The object of a JSON text, else an error as of `parse`. What is in it is checked by a record."""
    value = parse(text, what=what, error=error, max_depth=max_depth)
    if type(value) is not dict:
        raise error(f"{what} is not what it should be (it is no object): it is damaged")
    return value


def check_size(data: bytes, max_bytes: int, *, what: str, error: type[IntegrityError]) -> bytes:
    """`data` itself, if it has at most `max_bytes`: read one byte more than that, and no more, to know."""
    if len(data) > max_bytes:
        raise error(f"{what} has more than {max_bytes} bytes, which none has: it is damaged, or not what its name says")
    return data


def _is_deeper(value: Any, levels: int) -> bool:
    """True if lists and objects are nested more than so many levels."""
    level = [value]
    for _ in range(levels + 1):
        nodes = [node for node in level if isinstance(node, (dict, list))]
        if not nodes:
            return False
        level = [child for node in nodes for child in (node.values() if isinstance(node, dict) else node)]
    return any(isinstance(node, (dict, list)) for node in level)
