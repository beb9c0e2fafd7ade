"""Jobs of many episodes, or batches: what is done again after a kill, the memory of a driver, requests and sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from tests.support.places import ROOT

MOST_COMMIT_BYTES = 1_000_000
MOST_DRIVER_BYTES = 500 * 2**20


def filled(url: str, episodes: int) -> archive.Archive:
    arc = archive.create(url)
    with arc.writer() as w:
        for i in range(episodes):
            w.add_episode({"reward": np.full(1, float(i))}, episode_id=f"e{i}")
    return archive.open(url)


class Stopped(BaseException):
    """What stops a driver in the middle of a function."""


def stopped_at(count: int, made: list[int]) -> Any:
    """A function that stops its driver at the episode after so many."""

    def fn(steps: Mapping[str, Any]) -> dict[str, Any]:
        if len(made) == count:
            made.append(-1)
            raise Stopped
        made.append(int(steps["reward"][0]))
        return {"twice": 2 * steps["reward"]}

    return fn


@pytest.mark.parametrize("episodes", [1_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_job_that_is_stopped_at_99_percent_does_one_percent_again(tmp_path: Path, episodes: int) -> None:
    arc, made = filled(str(tmp_path / "arc"), episodes), list[int]()
    fn, size = stopped_at(episodes * 99 // 100, made), episodes // 500
    with pytest.raises(Stopped):
        arc.episodes.map(fn, ["reward"], ["twice"], job="score", batch_size=size)
    before = len(made) - 1
    archive.open(arc.url).episodes.map(fn, ["reward"], ["twice"], job="score", batch_size=size)
    made.remove(-1)
    assert len(made) - episodes <= episodes // 100
    assert len(made) - before <= 2 * episodes // 100
    arc = arc.refresh()
    assert sum(arc.late_fields["length"].to_pylist()) == episodes
    assert len({*made}) == episodes
    commits = (tmp_path / "arc" / "commits").rglob("*.json")
    assert max(path.stat().st_size for path in commits) <= MOST_COMMIT_BYTES


DRIVER = """
import json, sys
import numpy as np
import archive
from archive.jobs import runner

most, real = [0], runner.wait
def counted(futures, *rest):
    most[0] = max(most[0], len(futures))
    return real(futures, *rest)
runner.wait = counted
arc = archive.open(sys.argv[1])
before = arc.io_stats()
arc.episodes.map(lambda s: {"twice": 2 * s["reward"]}, ["reward"], ["twice"], job="score", batch_size=1, workers=2)
sent = (arc.io_stats() - before).as_dict()
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
print(json.dumps({"peak": peak, "under way": most[0], "sent": sent}))
"""


@pytest.mark.parametrize("batches", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_driver_of_many_batches_holds_a_window_of_them(tmp_path: Path, batches: int) -> None:
    arc = filled(str(tmp_path / "arc"), batches)
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, arc.url], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(said.stdout)
    print(found)
    assert found["peak"] <= MOST_DRIVER_BYTES
    assert found["under way"] <= 2 * 2 * 2  # of two workers, and what they are through with
    driver = {
        verb: count / batches for verb, count in found["sent"].items() if verb in ("get", "put", "create", "list")
    }
    assert sum(driver.values()) <= 1.3, driver  # a result is read once, by the commit; workers send the rest
    assert arc.jobs["score"].about["of"] == batches
    commits = (tmp_path / "arc" / "commits").rglob("*.json")
    assert max(path.stat().st_size for path in commits) <= MOST_COMMIT_BYTES
