"""Random histories under a seeded scheduler: the log alone (sessions, commits, forgettings, looks), and whole archives
(jobs that die, stall and start again, archivists, readers). Clocks jump, requests fail, lose their answer or land late.

Each run draws seeds anew for a minute (CI by the commit, so that a run can be repeated). A failure names a small
history that fails, too: CONTRIBUTING.md, "Replaying a history of the simulator", says how to see it again.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import pytest

from tests.support.sampling import fresh_seed
from tests.support.simulation.commits import LOG
from tests.support.simulation.histories import History, Kind, explore, run
from tests.support.simulation.promises import JOBS

pytestmark = pytest.mark.usefixtures("simulated")

CPU_S = {"log": 15.0, "jobs": 15.0}  # of each part
PARTS = [(LOG, 0), (JOBS, 0), (JOBS, 1), (JOBS, 2)]  # a minute in all
SOAKS, SOAK_REQUESTS = 10, 100_000  # 10^6 requests


def drawn(kind: Kind) -> itertools.count[int]:
    """A fresh seed, and all that follow it."""
    first = fresh_seed()
    print(f"seeds of {kind.name} from {first} on")
    return itertools.count(first)


def for_seconds(cpu_s: float) -> Callable[[int, int], bool]:
    stop = time.process_time() + cpu_s
    return lambda histories, requests: time.process_time() > stop


def test_histories_of_the_log_drawn_before() -> None:
    explore(itertools.count(1000), LOG, lambda histories, requests: histories >= 300)


def test_histories_of_jobs_drawn_before() -> None:
    explore(itertools.count(100), JOBS, lambda histories, requests: histories >= 10)


FOUND = {
    "the listing has no commit yet": "seed=915 kind=log by=given B.forget:38868 C.look:4097",
    "a recovery of prompts alone has no buffer": (
        "seed=3000 kind=jobs by=random:0.02 B.start:52880 B.draw:38725 B.sync:4303 B.start:52880 B.add:60677"
    ),
}


@pytest.mark.parametrize("history", FOUND.values(), ids=FOUND)
def test_histories_that_went_wrong(history: str) -> None:
    assert_well(history)


@pytest.mark.parametrize(("kind", "part"), PARTS, ids=[f"{kind.name}-{part}" for kind, part in PARTS])
def test_histories_of_fresh_seeds(kind: Kind, part: int) -> None:
    explore(drawn(kind), kind, for_seconds(CPU_S[kind.name]), tries=60)


def test_one_history_again() -> None:
    """That of SIM_HISTORY; without it, one that was drawn before."""
    assert_well(os.environ.get("SIM_HISTORY") or str(History.drawn(7, JOBS)))


def assert_well(history: str) -> None:
    found = run(History.parse(history))
    if found.error is not None:
        raise found.error


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", [LOG, JOBS], ids=["log", "jobs"])
@pytest.mark.parametrize("part", range(SOAKS // 2))
def test_a_million_requests(kind: Kind, part: int) -> None:
    done, sent = explore(drawn(kind), kind, lambda histories, requests: requests >= SOAK_REQUESTS, tries=2_000)
    print(f"{done} histories, {sent} requests")
