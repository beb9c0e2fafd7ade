"""A question that must end soon, and in little memory, whatever lies in the archive."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from archive.base import ArchiveError

MOST_S, MOST_BYTES = 5.0, 500 << 20
_ROOM_BYTES = 3 << 30  # of addresses: a question that goes wrong ends in a MemoryError, not the machine


class _StuckError(BaseException):
    pass


def _stuck(*_: Any) -> None:
    raise _StuckError


@contextmanager
def _limited() -> Iterator[None]:
    """With no more than some seconds of work, and some addresses."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM_BYTES, before[1]))
    handler = signal.signal(signal.SIGPROF, _stuck)
    signal.setitimer(signal.ITIMER_PROF, 2 * MOST_S)
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


def asked(question: Callable[[], Any]) -> tuple[str, Any]:
    """What is wrong with how a question ended ("" if nothing is), and what it said: an ArchiveError, or its answer."""
    before, begun = peak_bytes(reset=True), time.process_time()
    try:
        with _limited():
            said: Any = question()
    except ArchiveError as e:
        said = e
    except (_StuckError, Exception) as e:
        return f"{type(e).__name__}: {e!s:.300}", e
    spent_s, grown = time.process_time() - begun, peak_bytes() - before
    wrong = f"took {spent_s:.1f} s" if spent_s > MOST_S else ""
    return (f"took {grown >> 20} MB" if grown > MOST_BYTES else wrong), said
