"""Tool: printing. What comes from an archive is text to be shown, never markup or terminal commands."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

MAX_CELL = 160
WIDTH = 400  # where nobody watches, nothing needs to be cut


def as_json(value: Any) -> None:
    """One JSON document; what JSON has no word for (nan, infinities) is null."""
    click.echo(json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=1))


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime):
        return value.isoformat()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def table(rows: Iterable[Sequence[Any]], columns: Sequence[str], *, title: str | None = None) -> None:
    """A table for people. Columns of numbers are aligned to the right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        numbers = all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        drawn.add_column(name, justify="right" if numbers else "left", overflow="ellipsis")
    for row in rows:
        drawn.add_row(*(Text(cell(value)) for value in row))
    _print(drawn)


def facts(pairs: Mapping[str, Any]) -> None:
    """Names and values, one a line."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        click.echo(f"{name:<{width}}  {cell(value, limit=None)}")


def cell(value: Any, *, limit: int | None = MAX_CELL) -> str:
    """One line of printable text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    elif isinstance(value, Mapping):
        value = json.dumps(plain(value), ensure_ascii=False)
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def size(nbytes: int) -> str:
    """Bytes for people."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def _print(drawn: Any) -> None:
    import sys

    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False, emoji=False)
    console.print(drawn)
