"""Run as a program: children that write are told to end at some moment, and end as interpreters do.

Usage: python -c "from tests.support import exits; exits.main()" CASES, where CASES is a JSON list of cases (`Case`, by
name). Prints a JSON line for each: how the child ended, and how long that took. Children are forked off this program,
which has only imported things, so that many take little time; each of them ends by the end of the main module, with all
that an interpreter does then.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import archive

STEPS = 5  # a call
BOUND_S = 60.0  # so long only where something hangs


@dataclass(frozen=True)
class Case:
    """What a child does, how it is ended, how long after it began, and whether it writes within `with`."""

    folder: str
    work: str
    end: str
    after_s: float
    within: bool


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (below 0: the signal), after so long; None if it hung."""

    code: int | None
    seconds: float


class Log:
    """What was done, a line each, written at once: "began", "added SERIAL", "committed SERIAL" (all below it)."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, what: str, serial: int = 0) -> None:
        os.write(self._file, f"{what} {serial}\n".encode())


@contextlib.contextmanager
def writer(arc: archive.Archive, case: Case, **how: Any) -> Iterator[archive.Writer]:
    """As a context, or left open."""
    w = arc.writer(session="one", **how)
    if not case.within:
        yield w
        return
    with w:
        yield w


def add(w: archive.Writer, log: Log, serial: int) -> int:
    log("adds", serial + STEPS)
    w.append({"serial": np.arange(serial, serial + STEPS)}, env_ids=0, first=serial == 0)
    log("added", serial + STEPS)
    return serial + STEPS


def appends(arc: archive.Archive, case: Case, log: Log) -> None:
    with writer(arc, case) as w:
        log("began")
        for serial in range(0, 10**9, STEPS):
            add(w, log, serial)


def commits(arc: archive.Archive, case: Case, log: Log) -> None:
    with writer(arc, case) as w:
        log("began")
        serial = 0
        while True:
            for _ in range(3):
                serial = add(w, log, serial)
            w.commit()
            log("committed", serial)


def checkpoints(arc: archive.Archive, case: Case, log: Log) -> None:
    with writer(arc, case) as w:
        log("began")
        serial = step = 0
        while True:
            serial, step = add(w, log, serial), step + 1
            w.checkpoint(step, state={"serial": serial}).result()
            log("committed", serial)
            serial = add(w, log, serial)


def in_background(arc: archive.Archive, case: Case, log: Log) -> None:
    with writer(arc, case) as w:
        log("began")
        serial = step = 0
        while True:
            serial, step = add(w, log, serial), step + 1
            pending, asked = w.checkpoint(step, state={"serial": serial}), serial
            log("asked", asked)
            serial = add(w, log, serial)
            pending.result()
            log("committed", asked)


def journals(arc: archive.Archive, case: Case, log: Log) -> None:
    with writer(arc, case, journal_s=0.01) as w:
        log("began")
        serial = 0
        while True:
            serial = add(w, log, serial)
            w.sync()
            log("committed", serial)


def recovers(arc: archive.Archive, case: Case, log: Log) -> None:
    with writer(arc, case, journal_s=0.01) as w:
        serial = 0
        for times in itertools.count():
            serial = add(w, log, serial)
            w.sync()
            log("committed", serial)
            if times == 5:
                log("began")
            if times >= 5:
                archive.open(f"{case.folder}/archive").recover("main")


def prunes(arc: archive.Archive, case: Case, log: Log) -> None:
    with writer(arc, case, keep=archive.Keep(last=1), forget="unreferenced") as w:
        log("began")
        serial = step = 0
        while True:
            serial, step = add(w, log, serial), step + 1
            w.checkpoint(step, state={"serial": serial}).result()
            log("committed", serial)
            archive.open(f"{case.folder}/archive").prune("0s", dry_run=False, force=True)


WORKS: dict[str, Callable[[archive.Archive, Case, Log], None]] = {
    work.__name__: work for work in (appends, commits, checkpoints, in_background, journals, recovers, prunes)
}
SIGNALS = {"killed": signal.SIGTERM, "exits": signal.SIGTERM, "interrupted": signal.SIGINT}


def pressed_again(ignored: Any) -> None:
    """Python drops an interrupt that comes while a weak reference of its own is cleared: a user presses again."""
    if ignored.exc_type is KeyboardInterrupt and getattr(ignored.object, "__module__", "") == "weakref":
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)


def child(case: Case) -> None:
    """The work of a case, in a process of its own."""
    sys.unraisablehook = pressed_again
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if case.end != "exits" else lambda number, frame: sys.exit(143))
    error = os.open(f"{case.folder}/stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    WORKS[case.work](archive.create(f"{case.folder}/archive"), case, Log(f"{case.folder}/log"))


def told_to_end(case: Case, pid: int) -> Ended:
    """Wait until it has begun, and for its moment, then for its end."""
    log, ended = Path(case.folder) / "log", os.pidfd_open(pid)
    until = time.monotonic() + BOUND_S
    while not (log.exists() and "began" in log.read_text()) and time.monotonic() < until:
        select.select([ended], [], [], 0.005)
    select.select([ended], [], [], case.after_s)
    began = time.monotonic()
    os.kill(pid, SIGNALS[case.end])
    hung = not select.select([ended], [], [], BOUND_S)[0]
    if hung:
        os.kill(pid, signal.SIGKILL)
    os.close(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(None if hung else code, time.monotonic() - began)


AHEAD = (
    "numpy.ma", "pandas", "zarrs", "pyarrow.parquet", "pyarrow.compute", "zarr", "archive.writer", "archive.maintain",
    "archive.shard",
)  # fmt: skip


def main() -> None:
    for name in AHEAD:  # once, ahead of all forks
        importlib.import_module(name)
    for given in json.loads(sys.argv[1]):
        case = Case(**given)
        pid = os.fork()
        if pid == 0:
            child(case)
            return
        print(json.dumps(asdict(told_to_end(case, pid))), flush=True)


if __name__ == "__main__":
    main()
