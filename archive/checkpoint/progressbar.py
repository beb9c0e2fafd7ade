"""A bar on the terminal for a checkpoint that is being saved; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from archive.base import one_line, ranks

PHASES = ("uploading", "staging", "joining", "committed")

Progress = Callable[[dict[str, Any]], None]


def on_terminal(world_rank: int) -> Progress | None:
    """What draws the bar, on rank 0 of a job that somebody watches; None elsewhere."""
    if world_rank != 0 or not sys.stderr.isatty():
        return None
    return Bar()


class Bar:
    """Draws the phases of one checkpoint as they are told."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
            TimeElapsedColumn(),
        )
        self._drawn = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._drawn.add_task("checkpoint", total=len(PHASES), phase="")

    def __call__(self, event: dict[str, Any]) -> None:
        phase = event["phase"]
        if phase == PHASES[0]:
            self._drawn.start()
        done = PHASES.index(phase) + (phase == PHASES[-1]) if phase in PHASES else 0
        if waiting := event.get("waiting_for"):
            phase = f"waiting for {ranks(waiting)}"
        self._drawn.update(self._task, completed=done, phase=phase, description=one_line(f"checkpoint {event['name']}"))
        if phase in (PHASES[-1], "failed"):
            self._drawn.stop()
