"""Pure, no I/O: what a request asks for, as values that are checked where they are taken out; and what goes back to the
browser: JSON, Arrow's IPC stream, bytes, or text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from archive.base import UsageError, one_line

MAX_NUMBER = 2**53  # what a browser's numbers hold


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of a request, those of its path among them, and its JSON body."""

    given: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)

    def text(self, name: str, default: str = "") -> str:
        """A text; the default where it is not given."""
        return self.given.get(name, default)

    def needed(self, name: str) -> str:
        """A text that must be given, or a UsageError."""
        if not (text := self.text(name)):
            raise UsageError(f"{name}= is missing in the request: give it")
        return text

    def number(self, name: str, default: int) -> int:
        """A whole number that is not negative, or a UsageError."""
        text = self.text(name)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal()) or len(text) > 16 or int(text) > MAX_NUMBER:
            raise UsageError(f"{name}={text[:40]!r} is no number from 0 to {MAX_NUMBER}")
        return int(text)

    def flag(self, name: str) -> bool:
        """Return whether it is given as 1."""
        return self.text(name) == "1"

    def names(self, name: str) -> list[str]:
        """Several texts, given as a JSON list of them; none where it is not given."""
        return _texts(name, self.text(name)) if self.text(name) else []

    def document(self) -> Any:
        """The body as JSON, or a UsageError."""
        return _parsed("the request's body", self.body)


def _texts(name: str, text: str) -> list[str]:
    found = _parsed(f"{name}=", text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise UsageError(f"{name}= is no JSON list of texts")
    return found


def _parsed(what: str, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{what} is no JSON: {e}") from e


LONGEST = 2000  # characters of a text in a table; names are shorter


def plain_columns(table: pa.Table) -> pa.Table:
    """The table with columns of double, bool and utf8 alone; of long texts the beginning."""
    return pa.table({name: _short(_plain(table[name])) for name in table.column_names})


def _short(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if column.type != pa.string() or (pc.max(pc.binary_length(column)).as_py() or 0) <= LONGEST:
        return column
    return pc.utf8_slice_codeunits(column, 0, LONGEST)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_boolean(kind) or kind == pa.string():
        return column
    if pa.types.is_large_string(kind):
        return column.cast(pa.string())
    if pa.types.is_timestamp(kind):
        return pc.divide(column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).cast(pa.float64()), 1e6)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.cast(pa.float64(), safe=False)
    return pa.chunked_array([pa.array([_text(value) for value in column.to_pylist()], pa.string())])


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(value, default=str)


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
    return Reply(json.dumps(_as_json(document), allow_nan=False, default=str).encode(), status=status)


def arrow_reply(table: pa.Table, **facts: Any) -> Reply:
    """A table as Arrow's IPC stream, which app/arrow.js reads: columns of double, bool and utf8, no dictionaries.

    Integers become doubles, times seconds since 1970, and lists and all else JSON texts.
    """
    import pyarrow as pa

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
    return {name: one_line(json.dumps(_as_json(value), allow_nan=False)) for name, value in facts.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _as_json(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(one) for one in value]
    return value
