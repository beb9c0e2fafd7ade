"""Pure, no I/O: what goes back to the browser: JSON, Arrow's IPC stream, bytes, or text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from archive.base import one_line

if TYPE_CHECKING:
    import pyarrow as pa

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
BYTES = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Reply:
    """A body, what it is, and facts beside it, which go as headers `X-<name>`."""

    body: bytes
    kind: str = JSON
    status: int = 200
    facts: Mapping[str, str] = field(default_factory=dict)


def json_reply(document: Any, status: int = 200) -> Reply:
    """A JSON document; numbers that JSON has none of become the texts "NaN", "Infinity" and "-Infinity"."""
    return Reply(json.dumps(_plain(document), allow_nan=False, default=str).encode(), status=status)


def arrow_reply(table: pa.Table, **facts: Any) -> Reply:
    """A table as Arrow's IPC stream, which app/arrow.js reads: columns of double, bool and utf8, no dictionaries.

    Integers become doubles, times seconds since 1970, and lists and all else JSON texts.
    """
    import pyarrow as pa

    from archive.view.web.columns import plain_columns

    sink = pa.BufferOutputStream()
    flat = plain_columns(table)
    with pa.ipc.new_stream(sink, flat.schema) as stream:
        stream.write_table(flat.combine_chunks())
    return Reply(sink.getvalue().to_pybytes(), ARROW, facts=_headers(facts))


def bytes_reply(body: bytes, **facts: Any) -> Reply:
    """Bytes as they are, as of pictures."""
    return Reply(body, BYTES, facts=_headers(facts))


def text_reply(text: str, kind: str = "text/plain; charset=utf-8", status: int = 200) -> Reply:
    """A text, such as a page."""
    return Reply(text.encode(), kind, status)


def _headers(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts as JSON in ASCII, which is all that headers may have."""
    return {name: one_line(json.dumps(_plain(value), allow_nan=False)) for name, value in facts.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
