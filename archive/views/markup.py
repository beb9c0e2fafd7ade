"""Pure, no I/O: HTML and SVG with every text and attribute escaped, since names and values come from a bucket."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from archive.base import visible

VOID = frozenset({"br", "hr", "img", "input", "line", "rect", "circle", "path", "polyline", "meta"})
MAX_TEXT = 300


class Markup(str):
    """Text that is HTML already. Only `tag` and `join` make it; everything else is escaped."""

    __slots__ = ()


def join(parts: Iterable[Any]) -> Markup:
    """The parts one after the other; what is not markup is escaped."""
    return Markup("".join(p if isinstance(p, Markup) else html.escape(visible(str(p))) for p in parts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. Attributes that are None are left out; `class_` is class, `data_x` is data-x;
    floats have two digits."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(_attribute(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not children:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def _attribute(value: Any) -> str:
    return f"{round(value, 2):.15g}" if isinstance(value, float) else str(value)


def shown(value: Any, limit: int = MAX_TEXT) -> str:
    """A value as people read it: numbers short, None as a dash, long text cut."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}" if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}" + (" UTC" if value.utcoffset() == timedelta() else "")
    if isinstance(value, (list, tuple)):
        value = ", ".join(shown(v, limit) for v in value) or "-"
    return cut(str(value), limit)


def cut(text: str, most: int) -> str:
    """The text, or its first characters and what says that there were more."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, more: int = 0) -> Markup:
    """A table with a heading; `more` rows were left out."""
    head = tag("tr", *(tag("th", c) for c in columns))
    body = [tag("tr", *(_cell(value) for value in row)) for row in rows]
    if more > 0:
        body.append(tag("tr", tag("td", f"and {more} more", colspan=len(columns), class_="more")))
    return tag("table", tag("thead", head), tag("tbody", *body))


def _cell(value: Any) -> Markup:
    if isinstance(value, Markup):
        return tag("td", value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return tag("td", shown(value), class_="number" if number else None)


def facts(pairs: Mapping[str, Any]) -> Markup:
    """Names and values, one a line; what is not known is left out."""
    known = ((name, value) for name, value in pairs.items() if value is not None and value != [])
    rows = (tag("tr", tag("th", name), tag("td", shown(value))) for name, value in known)
    return tag("table", tag("tbody", *rows), class_="facts")


def section(title: str, *content: Any) -> Markup:
    """A part with a heading; empty if all of its content is."""
    return tag("section", tag("h4", title), *content) if any(content) else Markup("")
