"""Processes that kill themselves at their k-th storage operation. Programs that have many of them one after the other
fork them off themselves, who have only imported things, so that many kills take little time; a test runs such a program
by `said_by`."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from archive.store.storage import Storage
from tests.support.processes import answers_in_processes
from tests.support.sampling import SEED

MAX_KILLS = 200


def die_at(k: int) -> None:
    """From now on, this process ends with SIGKILL after its k-th storage operation, or in the middle of a local one."""
    left, lock = [k], threading.Lock()

    def step() -> None:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            out = real(*args, **more)
            step()
            return out

        return call

    step()
    for name in ("link", "fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    Storage.request = counted(Storage.request)  # type: ignore[method-assign]


def forked(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 9
    try:
        code = int(work() or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def code_of(pid: int) -> int:
    """How a process ended, once it has."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(work: Callable[[], Any]) -> bool:
    """Whether a process was killed in the middle of its work; it must not end otherwise but well."""
    code = code_of(forked(work))
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def at_each(kills: Sequence[int] | None, once: Callable[[int], tuple[bool, Any]]) -> None:
    """Kill at these operations (by default at all, until it lives), and print what each kill led to."""
    outcomes = []
    for k in kills or range(MAX_KILLS):
        outcomes.append((k, *once(k)))
        if kills is None and not outcomes[-1][1]:
            break
    print(json.dumps(outcomes))


def of_blocks(one_in: int) -> Iterator[int]:
    """One operation of each `one_in` that follow each other, without end; the same in each run."""
    chosen, block = random.Random(SEED), 0
    while True:
        yield block * one_in + chosen.randrange(one_in)
        block += 1


def said_by(module: str, *arguments: object, timeout_s: float = 1500) -> list[Any]:
    """What a program of these prints, a line of JSON each."""
    ((printed, failure),) = answers_in_processes(_said, [(module, [*map(str, arguments)])], timeout_s)
    assert not failure, failure
    return [json.loads(line) for line in printed.splitlines()]


def _said(module: str, arguments: list[str]) -> tuple[str, str]:
    """What the program has printed, and the traceback that it ended by."""
    program = importlib.import_module(f"tests.support.{module}")
    sys.argv[1:] = arguments
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            program.main()
        except BaseException:
            return out.getvalue(), traceback.format_exc()
    return out.getvalue(), ""
