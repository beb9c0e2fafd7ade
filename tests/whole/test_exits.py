"""Processes that are told to end while they write: what was acknowledged is there, what was not is said, none hangs."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import archive
from archive.testing import assert_whole
from tests.support import exits
from tests.support.exits import Case, Ended
from tests.support.places import ROOT
from tests.support.sampling import few_of

pytestmark = pytest.mark.skipif(not hasattr(signal, "pidfd_send_signal"), reason="waits for processes as Linux does")

LONGEST_S = 0.3  # after which a child is told to end
HANGS_S = 30.0  # a fraction of it, unless others use the machine
INTERRUPTS = (-signal.SIGINT, 1)  # Python says 1 where any thread calls exec() while it ends, as imports do
CODES = {"killed": (-signal.SIGTERM,), "exits": (143,), "interrupted": INTERRUPTS}
SAID = re.compile(r"<Writer .*> closed with (\d+) uncommitted steps")
KEEPS_JOURNAL = ("journals", "recovers")


def cases(root: Path, count: int, seed: int) -> Iterator[Case]:
    """Each work by each kind of end in turn, at any moment."""
    print(f"seed {seed}")
    dice, works, ends = random.Random(seed), list(exits.WORKS), list(CODES)
    for k in range(count):
        folder = root / str(k)
        folder.mkdir()
        end = ends[(k + k // len(works)) % len(ends)]
        yield Case(str(folder), works[k % len(works)], end, dice.random() * LONGEST_S, dice.random() < 0.5)


def run(tried: list[Case]) -> list[Ended]:
    code = "from tests.support import exits; exits.main()"
    command = [sys.executable, "-c", code, json.dumps([asdict(case) for case in tried])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    assert done.stderr == ""
    return [Ended(**json.loads(line)) for line in done.stdout.splitlines()]


def check(case: Case, ended: Ended) -> None:
    folder = Path(case.folder)
    told = (folder / "stderr").read_text()
    what = f"{case}, {ended}, on stderr:\n{told}"
    assert ended.code in CODES[case.end], what
    assert ended.seconds < HANGS_S, what
    check_told(case, told, what)
    log = [line.split() for line in (folder / "log").read_text().splitlines()]
    last = {
        word: max((int(n) for other, n in log if other == word), default=0) for word in ("adds", "added", "committed")
    }
    said = sum(map(int, SAID.findall(told)))
    found = there(case)
    assert last["committed"] <= found <= last["adds"], (last, found, what)
    if case.end != "killed" and case.work not in KEEPS_JOURNAL:
        assert found + said >= last["added"], (last, found, said, what)
        assert said <= last["adds"], (last, found, said, what)


def check_told(case: Case, told: str, what: str) -> None:
    """Nothing but what was lost and, where it was interrupted, the traceback of that."""
    lines = [line for line in told.splitlines() if not SAID.match(line)]
    if case.end != "interrupted":
        assert not lines, what
        return
    assert lines[0] == "Traceback (most recent call last):", what
    assert lines[-1] == "KeyboardInterrupt", what
    assert "Exception ignored" not in told, what


def there(case: Case) -> int:
    """How many steps the archive has, which are those that were added first; it is whole, and can be gone on with."""
    arc = archive.open(f"{case.folder}/archive")
    if case.work in KEEPS_JOURNAL:
        arc.recover("main")
    found = [one["serial"] for one in arc.episodes.read()]
    serials = np.concatenate([np.zeros(0, np.int64), *found])
    if case.work != "prunes":  # which lets go of the first ones
        np.testing.assert_array_equal(serials, np.arange(len(serials)))
    assert_whole(arc)
    with arc.writer(session="two") as w:
        w.append({"serial": np.arange(3)}, env_ids=7)
    assert arc.refresh().episodes[-1].length == 3
    return int(serials.max()) + 1 if len(serials) else 0


@pytest.mark.parametrize("count", [14, pytest.param(280, marks=pytest.mark.soak)])
def test_acknowledged_is_there_and_the_rest_is_said(tmp_path: Path, count: int) -> None:
    seed = 0 if count < 20 else random.randrange(10**6)
    tried = list(cases(tmp_path, count, seed))
    for case, ended in zip(tried, run(tried), strict=True):
        check(case, ended)


INTERRUPTED = """
import sys, threading
import numpy as np
import archive

begin, name = threading.Thread.start, sys.argv[2]

def start(thread):
    begin(thread)
    if thread.name.startswith(name) and name not in interrupted:
        interrupted.append(name)
        raise KeyboardInterrupt

interrupted = []
threading.Thread.start = start
w = archive.create(sys.argv[1]).writer()
w.append({"x": np.arange(3)}, env_ids=0)
w.checkpoint(1).result()
"""
POOLS = ["archive-layout", "archive-checkpoint"]  # whose threads the main thread begins


@pytest.mark.parametrize("name", few_of(POOLS, 1))
def test_a_process_ends_that_was_interrupted_while_it_began_a_thread(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "a"), name]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=HANGS_S, check=False
    )
    lines = [line for line in done.stderr.splitlines() if not SAID.match(line)]
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "KeyboardInterrupt")
    assert done.returncode in INTERRUPTS
