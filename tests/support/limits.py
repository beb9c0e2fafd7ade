"""Limits of what a hostile input may take of this process: work, memory, addresses."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class StuckError(BaseException):
    """An input takes too long."""


def _give_up(*_: Any) -> None:
    raise StuckError


@contextmanager
def limited(work_s: float, room_bytes: int) -> Iterator[None]:
    """No more than so much processor time, or a StuckError; no more than so many addresses beyond those of now, or a
    MemoryError before the machine is full."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room_bytes, before[1]))
    handler = signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, work_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def peak_bytes(*, reset: bool = False) -> int:
    """The most memory that this process has had, since it was last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
