"""Pure, no I/O: how the bytes of a page are dealt out to its parts, and what each makes of its share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from archive.views.markup import Markup

FIELD_BYTES = 500  # of a field's heading and frame


class Shown(NamedTuple):
    """What stands on the page for a part, what the page's script is given for it, and what there was no room for."""

    markup: Markup = Markup("")
    played: Any = None
    left_out: str = ""


class Part(Protocol):
    """What is shown of a field, or of several."""

    kind: str  # name of what the script is given: films, curves, texts, rollout
    path: str  # of the field
    place: str  # on the page: films, rollout, written, curves, numbers
    need: int  # bytes that it takes in full

    def shown(self, most: int) -> Shown:
        """It, or as much of it as fits into about so many bytes."""


def dealt(needs: Mapping[str, int], most: int) -> dict[str, int]:
    """Bytes for each: what it needs, or its equal share of what those of small needs leave."""
    out: dict[str, int] = {}
    left = max(0, most)
    for number, name in enumerate(sorted(needs, key=lambda one: needs[one])):
        out[name] = min(needs[name], left // (len(needs) - number))
        left -= out[name]
    return out


def json_bytes(value: Any) -> int:
    """Bytes of a value as it stands in a page."""
    return len(as_script(value))


def as_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
