"""Pure, no I/O: text that comes from a bucket or a user, made safe to print, log and raise; tables, and the log.

Names, ids and messages may hold characters that act rather than show: escape sequences that write the clipboard or
clear the screen, marks that turn the direction of what follows, halves of characters that no encoder takes. Everything
that is printed, logged or raised goes through `visible`; it changes nothing in text that only shows.
"""

from __future__ import annotations

import json
import logging
import traceback
import unicodedata
from collections.abc import Container, Iterable, Sequence
from typing import Any

logger = logging.getLogger("archive")  # the one that all rooms log by
MAX_PAGE_BYTES = 16_000_000  # of a page, by default

_LAID_OUT = frozenset("\n\t")
_JOINERS = frozenset("\u200c\u200d")  # scripts and emoji need them
_SHOWN = frozenset(("Zs", "Co", "Cn"))  # not "printable" to Python, but no terminal acts on them


def visible(text: str) -> str:
    """`text` with each character that acts written as Python would escape it; lines and tabs stay."""
    return text if text.isprintable() else "".join(c if _stays(c) else _escaped(c) for c in text)


def one_line(text: str) -> str:
    """The same as `visible`, lines and tabs too: for what is one line whatever it holds."""
    return text if text.isprintable() else "".join(c if _stays(c) and c not in _LAID_OUT else _escaped(c) for c in text)


def as_json(value: Any, *, indent: int | None = None) -> str:
    """A JSON document that shows its text, and in which nothing acts; it means the same to a parser."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    # json escapes C0 itself, and outside of its strings there are lines only
    return text if text.isprintable() else "".join(c if _stays(c) else _in_json(c) for c in text)


def size(nbytes: float) -> str:
    """Bytes in the form for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def tabulate(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Container[str] = ()) -> list[str]:
    """The lines of a table: the columns' names, and a line a row; nothing at all without rows. A cell is one line of
    visible text, "-" for None; cells of the columns named in `right` end below one another."""
    lines = [["-" if value is None else one_line(str(value)) for value in row] for row in rows]
    if not lines:
        return []
    lines.insert(0, list(columns))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.rjust if name in right else str.ljust for name in columns]
    return [
        "  ".join(f(cell, width) for f, cell, width in zip(align, line, widths, strict=True)).rstrip() for line in lines
    ]


class _Visible(logging.Filter):
    """A filter that writes messages, a line each, and tracebacks out, once, with nothing in them that acts."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = one_line(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = visible("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True


def make_visible() -> None:
    """Make the logger "archive" pass on only text that does not act on a terminal."""
    if not any(type(one).__name__ == _Visible.__name__ for one in logger.filters):
        logger.addFilter(_Visible())


def _stays(c: str) -> bool:
    return c.isprintable() or c in _LAID_OUT or c in _JOINERS or unicodedata.category(c) in _SHOWN


def _escaped(c: str) -> str:
    return ascii(c)[1:-1]


def _in_json(c: str) -> str:
    return json.dumps(c)[1:-1]
