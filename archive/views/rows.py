"""Pure, no I/O: a page's table of episodes as columns, small enough for a hundred thousand of them;
the script draws it."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from archive.views.markup import Markup, cut, section, tag

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS = 200_000
MAX_BYTES = 16_000_000  # of the rows on the page, packed
MAX_TEXT = 60  # characters of an id or a name
MAX_METADATA = 120
COLUMNS = (  # of the table of episodes; what it is to the reader; how it is shown
    ("episode_id", "episode", "text"), ("length", "steps", "number"), ("return", "return", "number"),
    ("complete", "complete", "flag"), ("run", "run", "name"), ("weights", "weights", "name"),
    ("update_count_max", "update count", "number"), ("buffer", "buffer", "name"), ("rank", "rank", "number"),
    ("env_id", "env row", "number"), ("commit", "commit", "number"), ("metadata", "metadata", "text"),
)  # fmt: skip
LABEL = "label."  # columns of what was said of episodes later, after all others
SPREAD = ("return", "steps", "update count")  # histograms that follow what is filtered


def listed(found: pa.Table) -> tuple[Markup, dict[str, Any]]:
    """The place of the table on the page, and what the script draws in it: the newest rows,
    as many as there is room for."""
    if not found.num_rows:
        return Markup(""), {}
    most = MAX_ROWS
    packed = _packed(found.slice(max(0, found.num_rows - most)))
    while len(packed) > MAX_BYTES and most > 1:
        most = int(min(most, found.num_rows) * MAX_BYTES / len(packed) * 0.95) or 1
        packed = _packed(found.slice(max(0, found.num_rows - most)))
    left = max(0, found.num_rows - most)
    note = f"the newest {most} of {found.num_rows}: filter() chooses others" if left else ""
    content = [
        tag("div", id="spread", class_="spread"),
        tag("div", tag("span", id="count"), tag("button", "Show all", id="clear", type="button"), _HINT, class_="bar"),
        tag("div", tag("table", tag("thead"), tag("tbody"), class_="rows"), id="rows", tabindex=0),
        tag("figcaption", note) if note else "",
        tag("noscript", "The rows are drawn by this page's own script, which is switched off here."),
    ]
    return section("Episodes", *content), {"rows": packed, "spread": list(SPREAD)}


_HINT = tag(
    "span", "Press a column's name to sort. Filter by text, or by numbers as in >10, <=5, 3..7, =0.", class_="more"
)


def _packed(found: pa.Table) -> str:
    """The columns as JSON, deflated; base64."""
    chosen = [*COLUMNS, *((name, name, _kind(found, name)) for name in found.column_names if name.startswith(LABEL))]
    columns = [{"name": shown, "kind": kind} | _column(found, name, kind) for name, shown, kind in chosen]
    kept = [c for c in columns if any(v is not None for v in c["values"])]
    text = json.dumps({"count": found.num_rows, "columns": kept}, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def _kind(found: pa.Table, name: str) -> str:
    """How a column of labels is shown, by the type of its values."""
    import pyarrow as pa

    kind = found.schema.field(name).type
    return "flag" if pa.types.is_boolean(kind) else "text" if pa.types.is_string(kind) else "number"


def _column(found: pa.Table, name: str, kind: str) -> dict[str, Any]:
    if name == "weights":
        return _coded([", ".join(w or ()) or None for w in found["model_weights_uuids"].to_pylist()])
    values = found[name].to_pylist()
    if kind == "name":
        return _coded(values)
    if kind == "text":
        most = MAX_METADATA if name == "metadata" else MAX_TEXT
        return {"values": [None if v is None else cut(str(v), most) for v in values]}
    if kind == "flag":
        return {"values": [None if v is None else int(v) for v in values]}
    return {"values": [_number(v) for v in values]}


def _number(value: Any) -> Any:
    """As JSON has it: what is no finite number is not there; seven digits of the others."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.7g}") if value - value == 0 else None


def _coded(values: Sequence[str | None]) -> dict[str, Any]:
    """Names as numbers into a list of them."""
    places: dict[str, int] = {}
    codes = [None if v is None else places.setdefault(v, len(places)) for v in values]
    return {"values": codes, "names": [cut(name, MAX_TEXT) for name in places]}
