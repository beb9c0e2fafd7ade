"""A history is its text: it runs again bit for bit, in any process; of one that fails a small one is made that does,
too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from archive.journal import ticker
from tests.support.simulation.choosers import Chooser
from tests.support.simulation.commits import LOG
from tests.support.simulation.histories import History, HistoryError, Kind, run
from tests.support.simulation.known_faults import KNOWN_FAULTS
from tests.support.simulation.library import forget_the_last
from tests.support.simulation.promises import JOBS
from tests.support.simulation.scheduler import HungError, Party, Scheduler
from tests.support.simulation.threads import Lock

pytestmark = pytest.mark.usefixtures("simulated")


def digests(listed: list[History]) -> list[str]:
    out = []
    for one in listed:
        out.append(run(one).digest)
        forget_the_last()
    return out


@pytest.mark.parametrize(("kind", "count"), [(LOG, 60), (JOBS, 6)], ids=["log", "jobs"])
def test_each_history_runs_again_bit_for_bit(kind: Kind, count: int) -> None:
    listed = [History.drawn(seed, kind) for seed in range(count)]
    assert [History.parse(str(one)) for one in listed] == listed
    first = digests(listed)
    assert len({*first}) == count
    assert digests(listed[::-1])[::-1] == first
    code = [sys.executable, "-m", "tests.support.simulation", *map(str, listed)]
    told = subprocess.run(code, env=os.environ | {"PYTHONHASHSEED": "7"}, stdout=subprocess.PIPE, check=True).stdout
    assert told.decode().split() == first


def test_a_thread_that_another_test_has_left_behind_keeps_its_own_time() -> None:
    seen, over, began = list[float](), threading.Event(), time.monotonic()

    def look() -> None:
        while not over.wait(0.001):
            seen.append(ticker.uptime())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        history = History.drawn(3, LOG)
        assert len({*digests([history] * 9)}) == 1
    finally:
        over.set()
        thread.join()
    assert seen
    assert began <= min(seen) <= max(seen) <= time.monotonic()


def test_the_turns_of_a_history_give_it_again() -> None:
    history = History.drawn(3, LOG)
    found = run(history)
    turns = " ".join(f"@{point}>{strand}" for point, strand in found.deviations)
    words = " ".join(map(str, history.words))
    again = History.parse(f"seed=3 kind=log by=given {words} {turns}")
    assert run(again).digest == found.digest


@pytest.mark.timeout(900)
def test_what_goes_wrong_is_made_small_and_seen_again() -> None:
    fault = KNOWN_FAULTS[0]
    *_, error = fault.found(0, 60.0, tries=60)
    assert isinstance(error, HistoryError)
    small = History.parse(str(error).rpartition("SIM_HISTORY='")[2].rstrip("'"))
    assert len(small.words) <= 8
    with fault.back():
        assert [type(run(small).error) for _ in range(2)] == [AssertionError, AssertionError]
    assert run(small).error is None


def test_a_hung_history_says_who_waits_for_what() -> None:
    s, locks = Scheduler(Chooser()), [Lock(), Lock()]

    def take(first: int) -> None:
        with locks[first]:
            s.block("a moment", 1.0)
            with locks[1 - first]:
                pass

    for number, name in enumerate("AB"):
        s.spawn("main", Party(name), lambda number=number: take(number), main=True)
    with pytest.raises(HungError, match=r"A/main waits for a lock of B/main; B/main waits for a lock of A/main"):
        s.run()
