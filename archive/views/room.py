"""Pure, no I/O: how the bytes of a page are dealt out to what it shows, and what had to be left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from archive.base import MAX_PAGE_BYTES as MAX_PAGE_BYTES


def dealt(needs: Mapping[str, int], room: int) -> dict[str, int]:
    """Bytes for each: what it needs, or its equal share of what those of small needs leave."""
    out: dict[str, int] = {}
    left = max(0, room)
    for number, name in enumerate(sorted(needs, key=lambda one: needs[one])):
        out[name] = min(needs[name], left // (len(needs) - number))
        left -= out[name]
    return out


def json_bytes(value: Any) -> int:
    """Bytes of a value as it stands in a page."""
    text = as_script(value)
    return len(text)


def as_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
