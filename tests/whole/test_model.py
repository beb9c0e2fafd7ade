"""Random histories of whole archives against a perfect model in plain Python (`tests/support/model`): ranks that add,
evict, checkpoint, journal, die and come back on other numbers of ranks, forks, labels, late fields, forgetting,
pruning, compaction, merging, and operations that fail in between.

Each run draws seeds anew for a minute (CI by the commit, so that a run can be repeated). A failure names its seed, and
a short history that fails, too, which becomes one of those below:

    MODEL_SEED=123 python -m pytest tests/whole/test_model.py -k one_history
    MODEL_HISTORY='123 begin:7 append:12 ...' python -m pytest tests/whole/test_model.py -k one_history
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from archive.arrays import Steps
from archive.write.live import LiveSet
from tests.support.backends import make_backend
from tests.support.model import histories
from tests.support.model.histories import History, HistoryError, Step
from tests.support.model.perfect import Rank
from tests.support.model.world import World
from tests.support.sampling import fresh_seed

PARTS, CPU_S = 4, 12.0  # what is under way then ends: a minute in all
SOAKS, SOAK_STEPS = 20, 50_000  # 10^6 steps


def drawn() -> itertools.count[int]:
    """A fresh seed, and all that follow it."""
    first = fresh_seed()
    print(f"MODEL_SEED={first} and those after it")
    return itertools.count(first)


def for_seconds(cpu_s: float) -> Callable[[int], bool]:
    stop = time.process_time() + cpu_s
    return lambda done: time.process_time() > stop


@pytest.mark.parametrize("first", [1000, 9000, 20000, 30000])
def test_histories_drawn_before(first: int) -> None:
    """Those that were found to be well."""
    histories.explore(itertools.count(first), lambda done: done >= 5 * histories.LENGTH, tries=20)


FOUND = {
    "an episode that began without steps has lost its first": "7 begin:15 add_episode:426 append:6 evict_some:10 "
    "checkpoint:1",
    "an episode that was forgotten gets a new revision": "276 begin:276 add_episode:1557180363 remove:790082160 "
    "checkpoint:835825182 forget:70666570 revise:736781388 commit:2673507368",
    "a field goes with the only episode that had it": "63 begin:63 add_episode:3549849963 remove:1175782495 "
    "checkpoint:129629132 add_fields:3920523968 forget:978394465",
    "what a checkpoint left out is not let go of": "8 begin:8 append:4133025703 add_episode:829429670 "
    "add_episode:130110577 add_episode:1946188980 add_episode:2461552813 checkpoint:3118154571",
    "a revision that nobody has committed needs nothing of the one before": (
        "281623909246 add_episode:2951270336 begin:2820545068 append:2998525681 append:3657487940 "
        "begin:2144664296 add_episode:1311081357 resume:3982031391 checkpoint:1109627577 "
        "append:2431765783 revise:4284171353 reader:1966253101 append:260084881 clear:1065262331 "
        "checkpoint:1276146976 checkpoint:3651667975 append:886380807 append:813140173 "
        "compact:2377098450 revise:946079569 weights:1490505752 checkpoint:157732881 commit:1798629440"
    ),
}


@pytest.mark.parametrize("history", FOUND.values(), ids=FOUND)
def test_histories_that_went_wrong(history: str) -> None:
    histories.run(History.parse(history))


@pytest.mark.parametrize("part", range(PARTS))
def test_histories_of_fresh_seeds(part: int) -> None:
    """What a minute has room for, in all parts together."""
    histories.explore(drawn(), for_seconds(CPU_S), tries=40)


@pytest.mark.parametrize(("name", "length"), [("local", 30), ("moto", 10)])
def test_histories_on_other_stores(name: str, length: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    root = _roots(name, request, tmp_path)
    histories.explore(itertools.count(1000), lambda done: done > 0, root, length=length, tries=20)


def _roots(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> histories.Root:
    backend = make_backend(request, name, tmp_path)
    return lambda: (f"{backend.url}/{uuid.uuid4().hex}", backend.storage_options)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(SOAKS))
def test_a_million_steps(part: int) -> None:
    histories.explore(drawn(), lambda done: done >= SOAK_STEPS, tries=2_000)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["local", "moto"])
def test_more_histories_on_other_stores(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    histories.explore(drawn(), lambda done: done >= 5_000, _roots(name, request, tmp_path), tries=2_000)


def test_one_history_again() -> None:
    """That of MODEL_HISTORY or MODEL_SEED; without them, one that was drawn before."""
    text, seed = os.environ.get("MODEL_HISTORY"), os.environ.get("MODEL_SEED")
    history = History.parse(text) if text else History.drawn(int(seed or 0), histories.LENGTH if seed else 40)
    histories.run(history)


def test_a_history_is_told_and_read_again() -> None:
    history = History.drawn(5)
    assert History.parse(str(history)) == history == History.drawn(5)
    assert History.parse("3 begin:7 append:12") == History(3, (Step("begin", 7), Step("append", 12)))


def ticks_everywhere(self: World, noted: Any = World.maybe_tick) -> None:
    """Each journal ticks by itself, which nobody tells the model."""
    noted(self)
    for session in self.active.values():
        for rank in session.alive if session.journal else ():
            self.writer(session, rank).sync()


def test_journals_may_tick_by_themselves() -> None:
    history = "50000 begin:50000 append:1689142194 add_episode:795296725 append:4076562475 revise:426448140 recover:1"
    with mock.patch.object(World, "maybe_tick", ticks_everywhere):
        histories.run(History.parse(history))
        with mock.patch.object(Rank, "maybe_ticked"), pytest.raises(AssertionError):
            histories.run(History.parse(history))


def forgets_the_oldest(self: LiveSet, steps: Steps, evict: Any = LiveSet.evict) -> None:
    """An eviction by which one step too few leaves."""
    evict(self, Steps(steps.stream, steps.lo, np.where(steps.lo == 0, steps.hi - 1, steps.hi)))


def test_what_goes_wrong_is_found_and_made_short_and_seen_again() -> None:
    with mock.patch.object(LiveSet, "evict", forgets_the_oldest):
        with pytest.raises(HistoryError) as raised:
            histories.explore(itertools.count(), lambda done: done > 2_000, length=30, tries=60)
        seed, _, rest = str(raised.value).partition(" ")
        short = History.parse(rest.rpartition("MODEL_HISTORY='")[2].rstrip("'"))
        assert len(short.steps) < 6
        first, again = histories.failure_of(short), histories.failure_of(short)
        assert first is not None
        assert (type(first), str(first)) == (type(again), str(again))
        assert histories.failure_of(History.drawn(int(seed.partition("=")[2]), 30)) is not None
    assert histories.failure_of(short) is None
