"""Run as a program by every rank of three: steps and checkpoints until it is told to end; rank 1 is killed meanwhile.

Usage: python -m tests.support.dead_rank '{"url": ..., "folder": ..., "rank": 0}'. `folder` gets rank-N.log,
one JSON line each.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import archive
from archive.base import layout, shutdown, waits
from archive.checkpoint import assembly, requests

SHUTDOWN_S = 6.0
LIVING = (0, 2)
WAITS_FOR = {shutdown.AGREE_PART: (), shutdown.EARLIER_PART: ("step-2",), shutdown.LAST_PART: ("last",)}


def hold(url: Path) -> None:
    """Hold this process's time to log, and to do without others, until both living ranks are as far: a busy machine
    may give one of them more of its time than the other has."""
    due, passed = waits.Wait.due, shutdown.Shutdown.passed

    def as_far(*names: str) -> bool:
        """True if all of these parts are staged by both, or by none."""
        staged = [[(url / layout.state_key("s", name, rank)).exists() for rank in LIVING] for name in names]
        return all(one == other for one, other in staged)

    def both_passed(self: shutdown.Shutdown, part: float, since: float = math.inf) -> bool:
        answered = all((url / layout.agreement_key("s", 0, rank)).exists() for rank in LIVING)
        return passed(self, part, since) and answered and as_far(*WAITS_FOR[part])

    waits.Wait.due = lambda self: as_far("step-1", "step-2", "last") and due(self)  # type: ignore[method-assign]
    shutdown.Shutdown.passed = both_passed  # type: ignore[method-assign]


def main() -> None:
    given = json.loads(sys.argv[1])
    assembly.STEP_IN_S = assembly.PARTIAL_STEP_IN_S = 0.2
    waits.FIRST_S = 0.3
    hold(Path(given["url"]))
    logging.basicConfig(level=logging.WARNING)
    w = archive.open(given["url"], create=True).writer(given["rank"], 3, session="s")
    log = Path(given["folder"]) / f"rank-{w.rank}.log"
    told: list[Any] = []

    def say(**what: object) -> None:
        with log.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def step(serial: int) -> None:
        w.append({"serial": [w.rank * 1000 + serial]}, env_ids=0)

    requests.listen(shutdown_s=SHUTDOWN_S)
    step(0)
    w.checkpoint(1).result(60)
    say(pid=os.getpid(), ready=True)
    while not (Path(given["folder"]) / "go").exists():
        requests.requested()
        time.sleep(0.02)
    step(1)
    pending = w.checkpoint(2, on_progress=lambda event: told.append(event.get("waiting_for")))
    while not pending.waiting_for:
        time.sleep(0.02)
    say(waiting_for=list(pending.waiting_for), told=[one for one in told if one], shown=repr(pending))
    serial = 2
    while not requests.requested():
        step(serial)
        serial += 1
        time.sleep(0.02)
    assert requests.terminating()
    last = w.checkpoint(3, name="last").result()
    say(last=last.name, missing=last.missing_ranks, earlier=pending.result().missing_ranks, serial=serial)
    w.close()


main()
