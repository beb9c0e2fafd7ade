"""A bar on the terminal for long work: objects, bytes, rate and time left.
Nothing where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from archive.base import one_line, size

if TYPE_CHECKING:
    from archive import Archive

Advance = Callable[[int, int], None]


@contextmanager
def bar(what: str, archives: Sequence[Archive]) -> Iterator[Advance]:
    """Draws while the block runs; call what it gives with (objects done, objects in all).

    Bytes are those that these archives' stores were asked for or given meanwhile.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[objects]}"),
        TextColumn("{task.fields[traffic]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(one_line(what), total=None, objects="", traffic=_Traffic(archives))
        yield lambda done, total: drawn.update(task, completed=done, total=total, objects=f"{done} of {total} objects")


class _Traffic:
    """Bytes moved since it was made, and how many a second; as text, which the bar asks for whenever it is drawn."""

    def __init__(self, archives: Sequence[Archive]) -> None:
        self._stats = [arc.storage.stats for arc in archives]
        self._began = time.monotonic()
        self._before = self._bytes()

    def __str__(self) -> str:
        moved = self._bytes() - self._before
        rate = moved / max(time.monotonic() - self._began, 1e-3)
        return f"{size(moved)}, {size(int(rate))}/s"

    def _bytes(self) -> int:
        each = [stats.as_dict() for stats in self._stats]
        return sum(s["bytes_in"] + s["bytes_out"] for s in each)
