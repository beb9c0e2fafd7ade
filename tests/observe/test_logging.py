"""What is logged: a line for what was done, in which nothing acts; and nothing on stderr that nobody asked for."""

from __future__ import annotations

import itertools
import logging
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import archive
import resharding
from archive.base import logger, waits
from tests.support.places import ROOT
from tests.support.processes import until
from tests.support.ranks import close, job, resumed

DONE = [
    r"commit 2 of run 'main': rank 0 wrote \d+ B of new steps, \d+\.\d s",
    r"checkpoint 'step-5' of run 'main', step 5, is commit 3: rank 0 of 1 wrote \d+ B of new steps, \d+\.\d s",
    r"rank 0 of 2 read 1 episodes, 30 steps of buffer 'replay' of 'step-5', which 1 ranks saved: .* requests, .* s",
    r"rank 0 of run 'main' goes on from 'step-6', 1 -> 2 ranks, with \d+ live steps: .* requests, \d+\.\d s",
    r"commit 5: retention expired 1 checkpoints and 0 episodes \(.*\), \d+\.\d s",
    r"deleted \d+ of \d+ objects \(.*\) of memory://logging/lines, \d+\.\d s",
]


def test_a_line_for_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "archive")
    arc = archive.create("memory://logging/lines")
    with arc.writer(compression=None) as w:
        w.add_episode({"x": np.arange(30.0)}, episode_id="a")
        w.commit()
        w.add_episode({"x": np.arange(30.0)}, episode_id="b")
        made = w.checkpoint(step=5).result()
        w.remove(["a"])
        w.checkpoint(step=6, wait=True)
    for rank in range(2):
        resharding.plan(made, world_size=2).share(rank).read()
    arc.forget(keep=archive.Keep(last=1), dry_run=False)
    arc.prune(older_than="0s", dry_run=False, force=True)
    latest = arc.refresh().checkpoints.latest
    assert latest is not None
    arc.writer(session="next", resume=resharding.plan(latest, world_size=2).share(0)).close()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    for wanted in DONE:
        assert sum(bool(re.fullmatch(wanted, line)) for line in told) == 1, (wanted, told)
    assert not any(line.startswith("rank 1") for line in told), "rank 0 says it for all"
    assert all(record.name == "archive" for record in caplog.records if record.name.startswith("archive"))


def test_a_message_is_one_line_in_which_nothing_acts(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("an episode %s", "x\x1b[2J\nERROR forged")
    assert caplog.messages == [r"an episode x\x1b[2J\nERROR forged"]


def test_healthy_work_prints_nothing() -> None:
    code = """
import archive, numpy as np, resharding
arc = archive.create("memory://x")
with arc.writer() as w:
    w.add_episode({"x": np.arange(3)})
    made = w.checkpoint(step=1).result()
resharding.plan(made, world_size=1).share(0).read()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_job_says_once_what_each_of_its_ranks_could(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks save, one of them late, and five go on: there are as many lines as for one rank."""
    caplog.set_level(logging.INFO, "archive")
    monkeypatch.setattr(waits, "FIRST_S", 0.2)
    url = "memory://logging/job"
    archive.create(url)
    ranks = job(url, 8, "first")
    for rank in ranks:
        rank.run(3)
    late = ranks.pop(5)
    pending = [rank.writer.checkpoint(1) for rank in ranks]
    until(lambda: any("has waited" in line for line in caplog.messages), 60.0)
    made = [one.result(60) for one in [*pending, late.writer.checkpoint(1)]]
    close([*ranks, late])
    plan = resharding.plan(made[0], world_size=5, num_envs=1, capacity=10)
    close(resumed(url, plan, "second", itertools.count(1000)))
    waited = [line for line in caplog.messages if "has waited" in line]
    told = Counter(record.msg for record in caplog.records if "has waited" not in record.msg)
    assert {msg: count for msg, count in told.items() if count > 1} == {}
    assert len(told) >= 4
    assert len(waited) <= 6, "again after twice as long"
