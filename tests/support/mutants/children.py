"""Forked children of this process: a bound on each, an end of all that it started, and how far it came."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MEMORY = Path("/dev/shm")  # the library syncs tens of thousands of files
IDLE_S, LEAST_BUSY_S = 60.0, 1.0  # in so long a process runs so long, or waits to run, or else it hangs
_BROKEN = 99
_LOOK_S = 2.0
_PR_SET_PDEATHSIG = 1  # a child ends with its parent


class Child:
    """A forked process. It works in a folder of its own, and notes there how far it is."""

    def __init__(self, work: Callable[[Child], int], most_cpu_s: float) -> None:
        """most_cpu_s: it hangs if it needs more, or nearly nothing for a minute."""
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-", dir=MEMORY if MEMORY.is_dir() else None))
        self._most_cpu_s = most_cpu_s
        self._looked, self._before, self._next_look = time.monotonic(), 0.0, 0.0
        self.result: int | None = None  # of the work; None while it goes on, or once it hung
        self.hung = False
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            code = _BROKEN
            try:
                os.setpgid(0, 0)
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                said = os.open(self.folder / "said", os.O_CREAT | os.O_WRONLY)
                for stream in (1, 2):
                    os.dup2(said, stream)
                code = work(self)
            finally:
                os._exit(code)

    def note(self, text: str) -> None:
        """Say how far it is."""
        (self.folder / "at").write_text(text)

    @property
    def at(self) -> str:
        """How far it was at last."""
        file = self.folder / "at"
        return file.read_text() if file.exists() else ""

    @property
    def ended(self) -> bool:
        """True once it has ended, or hung and was ended. RuntimeError if its work failed by itself."""
        if self.hung or self.result is not None:
            return True
        found, status = os.waitpid(self._pid, os.WNOHANG)
        if found:
            self.result = os.waitstatus_to_exitcode(status)
        elif self._hangs():
            self.hung = True
        else:
            return False
        self._end_group()
        if not found:
            os.waitpid(self._pid, 0)
        if self.result == _BROKEN:
            raise RuntimeError(f"the work of a forked process failed: {(self.folder / 'said').read_text()}")
        return True

    def _hangs(self) -> bool:
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_S
        ran, waited = self._times()
        if ran > self._most_cpu_s:
            return True
        if time.monotonic() - self._looked > IDLE_S:
            is_idle = abs(ran + waited - self._before) < LEAST_BUSY_S  # threads that ended count no more
            self._looked, self._before = time.monotonic(), ran + waited
            return is_idle
        return False

    def _times(self) -> tuple[float, float]:
        """How long its threads ran, and how long they waited for a processor."""
        ran = waited = 0.0
        for task in Path(f"/proc/{self._pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                a, b, _ = task.read_text().split()
                ran, waited = ran + int(a) / 1e9, waited + int(b) / 1e9
        return ran, waited

    def _end_group(self) -> None:
        """End all that it has started, too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def forget(self) -> None:
        """Remove its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
