"""Tool: printing. What comes from an archive is text to be shown, never markup or terminal commands."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from archive.base import plaintext

MAX_CELL = 160
UNWATCHED = 10_000  # columns where nobody watches: nothing needs to be cut
NAMES = frozenset({"episode_id", "name", "url", "archive", "object", "field", "shard", "step"})  # columns that stay
PROSE = frozenset({"what happened", "problem"})  # columns that go on in the next line
PROSE_WIDTH = 30


def say(text: str) -> None:
    """Print text, whatever names it holds: the one way in which commands do."""
    click.echo(plaintext.visible(text))


def as_json(value: Any) -> None:
    """One JSON document; what JSON has no word for (nan, infinities) is null."""
    say(plaintext.as_json(plain(value), indent=1))


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


def table(rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> None:
    """A table for people. Columns of numbers are aligned to the right.

    On a terminal that is too narrow for it nothing is cut: columns are left out that are empty, then those that tell
    least, from the right; what things are called and where they lie stays.
    """
    rows = [list(row) for row in rows]
    widths = [_width([row[i] for row in rows], name) for i, name in enumerate(columns)]
    shown, room = list(range(len(columns))), _room()
    if room is not None and _total(widths, shown) > room:
        shown = [i for i in shown if columns[i] in NAMES or any(row[i] is not None for row in rows)]
        for i in reversed([i for i in shown if columns[i] not in NAMES]):
            if _total(widths, shown) > room and len(shown) > 1:
                shown.remove(i)
    _draw([[row[i] for i in shown] for row in rows], [columns[i] for i in shown], room)
    left = [name for i, name in enumerate(columns) if i not in shown]
    if left:
        say(f"left out for want of room: {', '.join(left)} (--json has all)")


def _room() -> int | None:
    """Columns of the terminal; None where nobody watches."""
    import shutil
    import sys

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _width(values: Iterable[Any], name: str) -> int:
    """What a column needs at least: prose goes on in the next line."""
    from rich.cells import cell_len

    widest = max([cell_len(name), *(cell_len(cell(value)) for value in values)])
    return min(widest, PROSE_WIDTH) if name in PROSE else widest


def _total(widths: Sequence[int], shown: Iterable[int]) -> int:
    return 1 + sum(3 + widths[i] for i in shown)


def _draw(rows: Sequence[Sequence[Any]], columns: Sequence[str], room: int | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        numbers = all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        drawn.add_column(Text(cell(name)), justify="right" if numbers else "left", no_wrap=name not in PROSE)
    for row in rows:
        drawn.add_row(*(Text(cell(value)) for value in row))
    needed = _total([_width([row[i] for row in rows], name) for i, name in enumerate(columns)], range(len(columns)))
    width = UNWATCHED if room is None else max(room, needed)
    console = Console(width=width, highlight=False, markup=False, emoji=False, force_terminal=room is not None)
    with console.capture() as captured:
        console.print(drawn)
    # not by `say`: the colours are rich's own, and the cells have been made visible
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()))


def facts(pairs: Mapping[str, Any]) -> None:
    """Names and values, one a line."""
    shown = {cell(name, limit=None): cell(value, limit=None) for name, value in pairs.items()}
    width = max(map(len, shown), default=0)
    for name, text in shown.items():
        say(f"{name:<{width}}  {text}")


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
        value = ", ".join(map(str, value)) or "-"
    elif isinstance(value, Mapping):
        value = json.dumps(plain(value), ensure_ascii=False)
    text = plaintext.one_line(str(value))
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def size(nbytes: int) -> str:
    """Bytes for people."""
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
