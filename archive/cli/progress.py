"""Tool: a bar on the terminal for long work: objects, bytes, rate and time left. Nothing where stderr is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from archive.base import one_line
from archive.cli.output import size

if TYPE_CHECKING:
    from archive import Archive

REFRESH_S = 0.2

Advance = Callable[[int, int], None]


def watched() -> bool:
    """Whether somebody is there to look at a bar."""
    return sys.stderr.isatty()


@contextmanager
def bar(what: str, archives: Sequence[Archive]) -> Iterator[Advance]:
    """Draws while the block runs; call what it gives with (objects done, objects in all).

    Bytes are those that these archives' stores were asked for or given meanwhile.
    """
    if not watched():
        yield lambda done, total: None
        return
    drawn = _Bar(what, [arc.storage.stats for arc in archives])
    try:
        yield drawn.advance
    finally:
        drawn.close()


class _Bar:
    def __init__(self, what: str, stats: Sequence[Any]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[objects]}"),
            TextColumn("{task.fields[bytes]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._stats, self._began = stats, time.monotonic()
        self._before = self._bytes()
        self._drawn = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._drawn.add_task(one_line(what), total=None, objects="", bytes="")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="archive-progress", daemon=True)
        self._drawn.start()
        self._thread.start()

    def advance(self, done: int, total: int) -> None:
        self._drawn.update(self._task, completed=done, total=total, objects=f"{done} of {total} objects")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._tell()
        self._drawn.stop()

    def _follow(self) -> None:
        while not self._stop.wait(REFRESH_S):
            self._tell()

    def _tell(self) -> None:
        moved = self._bytes() - self._before
        rate = moved / max(time.monotonic() - self._began, 1e-3)
        self._drawn.update(self._task, bytes=f"{size(moved)}, {size(int(rate))}/s")

    def _bytes(self) -> int:
        each = [stats.as_dict() for stats in self._stats]
        return sum(s["bytes_in"] + s["bytes_out"] for s in each)
