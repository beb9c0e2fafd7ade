"""Printing, in one way: a command gives an `Output`. Text from an archive is shown, never taken for markup or terminal
commands."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from archive.base import plaintext

MAX_CELL = 160
UNWATCHED = 10_000  # columns where nobody watches: nothing needs to be cut
NAMES = frozenset({"episode_id", "name", "url", "archive", "object", "field", "shard", "step"})  # columns that stay
PROSE = frozenset({"what happened", "problem", "what"})  # columns that go on in the next line, and stay, too
PROSE_WIDTH = 30

Row = Mapping[str, Any]
Part = str | Row | tuple[Iterable[Row], Sequence[str]]  # text; names and values, one a line; a table of some columns


class Output:
    """The result of a command: one JSON document for programs, parts for people, and the exit code."""

    def __init__(self, document: Any, parts: str | Iterable[Part], *, code: int = 0) -> None:
        self._document, self._parts, self.code = document, parts, code

    def show(self, *, as_json: bool) -> None:
        """Print the document, or the parts: a generator of these runs only then."""
        if as_json:
            say(plaintext.as_json(plain(self._document), indent=1))
            return
        for part in [self._parts] if isinstance(self._parts, str) else self._parts:
            if isinstance(part, str):
                say(part)
            elif isinstance(part, Mapping):
                facts(part)
            else:
                table(*part)


def listed(rows: list[dict[str, Any]], columns: Sequence[str]) -> Output:
    """The output of a command that lists: all of the rows as JSON, a table of these columns for people."""
    return Output(rows, [(rows, columns)])


def say(text: str, *, err: bool = False) -> None:
    """Print text, whatever names it holds; err: to stderr."""
    click.echo(plaintext.visible(text), err=err)


def plain(value: Any) -> Any:
    """The value as JSON has it; nan and infinities are null."""
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


def table(rows: Iterable[Row], columns: Sequence[str]) -> None:
    """Print a table of these columns of the rows. Columns of numbers are aligned to the right.

    A terminal that is too narrow cuts nothing: empty columns are left out first, then others, from the right. Names,
    places and problems stay, on lines of their own if need be.
    """
    from rich.cells import cell_len

    rows = list(rows)
    cells = {name: [cell(row[name], limit=None if name in PROSE else MAX_CELL) for row in rows] for name in columns}
    widest = {name: max(map(cell_len, [name, *cells[name]])) for name in columns}
    least = {name: 3 + (min(width, PROSE_WIDTH) if name in PROSE else width) for name, width in widest.items()}
    room, shown = _terminal_width() or math.inf, list(columns)

    def is_narrow() -> bool:
        return 1 + sum(least[name] for name in shown) > room

    if is_narrow():
        shown = [name for name in shown if name in NAMES or any(row[name] is not None for row in rows)]
        for name in [name for name in reversed(shown) if name not in NAMES | PROSE]:
            if is_narrow() and len(shown) > 1:
                shown.remove(name)
    if is_narrow() and PROSE.intersection(shown):
        for i in range(len(rows)):
            say("  ".join(cells[name][i] for name in shown if name not in PROSE))
            for name in (name for name in shown if name in PROSE):
                say(f"  {cells[name][i]}")
    else:
        numbers = {name for name in shown if all(isinstance(row[name], (int, float, type(None))) for row in rows)}
        _draw({name: cells[name] for name in shown}, numbers, 1 + sum(least[name] for name in shown))
    if left := [name for name in columns if name not in shown]:
        say(f"left out for want of room: {', '.join(left)} (--json has all)")


def _terminal_width() -> int | None:
    """Columns of the terminal; None where nobody watches."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _draw(cells: Mapping[str, Sequence[str]], numbers: Container[str], least: int) -> None:
    """Print a table of cells in columns, which needs so much room at least."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in cells:
        drawn.add_column(Text(cell(name)), justify="right" if name in numbers else "left", no_wrap=name not in PROSE)
    for row in zip(*cells.values(), strict=True):
        drawn.add_row(*map(Text, row))
    terminal = _terminal_width()
    width = UNWATCHED if terminal is None else max(terminal, least)
    console = Console(width=width, highlight=False, markup=False, emoji=False, force_terminal=terminal is not None)
    with console.capture() as captured:
        console.print(drawn)
    # not by `say`: the colours are rich's own, and the cells have been made visible
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()))


def facts(pairs: Row) -> None:
    """Print names and values, one a line."""
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
