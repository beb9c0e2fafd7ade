"""Bars of long work: drawn on the terminal, or told in lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from archive.base import one_line, size

LINE_S = 10.0  # between lines at first; later ones are further apart
_SPARSE = 20  # a line is due after this part of the time that went by
Advance = Callable[[int, int], None]


@contextmanager
def bar(what: str, stored: Sequence[Any] = (), of: str = "objects", *, lines: bool = False) -> Iterator[Advance]:
    """Draw a bar while the block runs; the block calls what it gets with (done, in all).

    The bar counts the bytes that the stores of `stored`, such as archives, sent and received meanwhile. lines: where
    there is no terminal, as in a notebook or in the log of a batch system, tell how far it is now and then.
    """
    if not sys.stderr.isatty():
        yield _Lines(one_line(what), of) if lines else lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[counted]}"),
        TextColumn("{task.fields[traffic]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task(one_line(what), total=None, counted="", traffic=_Traffic(stored) if stored else "")
        yield lambda done, total: drawn.update(task, completed=done, total=total, counted=f"{done} of {total} {of}")


def telling(
    progress: Advance | bool | None, what: str, stored: Sequence[Any] = (), of: str = "objects"
) -> AbstractContextManager[Advance]:
    """A function that is called with (done, in all): the one that a caller of the library gave or, for True, one that
    draws a bar, or tells in lines."""
    if progress is True:
        return bar(what, stored, of, lines=True)
    return nullcontext(progress or (lambda done, total: None))


class _Lines:
    """Lines on stderr: the first one at once, the next ones ever further apart, and one for the end."""

    def __init__(self, what: str, of: str) -> None:
        self._what, self._of = what, of
        self._began = self._due = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._due or done == total:
            sys.stderr.write(f"{self._what}: {done} of {total} {self._of}, {now - self._began:.0f} s\n")
            self._due = now + max(LINE_S, (now - self._began) / _SPARSE)


class _Traffic:
    """The bytes moved since it was made, and how many a second: a text that the bar asks for whenever it is drawn."""

    def __init__(self, stored: Sequence[Any]) -> None:
        self._stats = [one.storage.stats for one in stored]
        self._began = time.monotonic()
        self._before = self._bytes()

    def __str__(self) -> str:
        moved = self._bytes() - self._before
        rate = moved / max(time.monotonic() - self._began, 1e-3)
        return f"{size(moved)}, {size(int(rate))}/s"

    def _bytes(self) -> int:
        each = [stats.as_dict() for stats in self._stats]
        return sum(s["bytes_in"] + s["bytes_out"] for s in each)
