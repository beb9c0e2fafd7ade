"""The example as its readers run it: torchrun on some ranks, one is killed, and it goes on with fewer and then more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
import resharding
from tests.support.places import ROOT

EXAMPLE = ROOT / "tests" / "examples" / "train_resume.py"
ENVS = 12
EVERY = 5  # steps between checkpoints, also of what resumes: it may do so from any of them
LAUNCH_S = 120


@contextmanager
def torchrun(url: Path, ranks: int, steps: int, every: int) -> Iterator[subprocess.Popen[str]]:
    """The example under torchrun, in a process that ends with the block."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    with (url.parent / f"log-{ranks}").open("w+") as log, subprocess.Popen(
        [sys.executable, *launch, str(EXAMPLE), str(url), "--steps", str(steps), "--every", str(every)],
        stdout=log, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
    ) as job:  # fmt: skip
        try:
            yield job
        finally:
            for pid in [*workers(job), job.pid] if job.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def finished(url: Path, ranks: int, steps: int, every: int) -> archive.Archive:
    """The archive after a launch that ends by itself."""
    with torchrun(url, ranks, steps, every) as job:
        code = job.wait(LAUNCH_S)
    assert code == 0, (url.parent / f"log-{ranks}").read_text()[-3000:]
    return archive.open(url)


def workers(job: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


def end(job: subprocess.Popen[str], survivors: list[int]) -> None:
    """Ranks that wait for the dead one inside of gloo do not see torchrun's SIGTERM; it would kill them after 30 s."""
    with suppress(subprocess.TimeoutExpired):
        job.wait(3)
    for pid in survivors:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def latest_step(url: Path) -> int:
    try:
        latest = archive.open(url).checkpoints.latest
    except archive.NotFoundError:
        return 0
    return latest.step if latest else 0


def accounted(episodes: list[dict[str, Any]]) -> list[int]:
    """Which steps are there, if each is what its checksum says."""
    found: list[int] = []
    for data in episodes:
        bits = np.ascontiguousarray(data["obs"]).view(np.int32).astype(np.int64).sum(-1)
        assert ((bits * 31 + data["action"]) * 31 + data["serial"] == data["checksum"]).all()
        found += data["serial"].tolist()
    return sorted(found)


def check_whole(ck: Any) -> None:
    """All steps that were ever made up to the checkpoint are in it once, each with its priority."""
    assert accounted(ck.episodes.read()) == list(range(ck.step * ENVS))
    priority = np.concatenate([ck.column("priority", rank) for rank in ck.ranks])
    rewards = np.concatenate([data["reward"] for data in ck.episodes.read("reward")])
    assert np.array_equal(priority, np.abs(rewards))


def check_shares(ck: Any, ranks: int) -> None:
    """Over so many ranks, all steps of the checkpoint are in the shares once."""
    plan = resharding.plan(ck, ranks, num_envs=ENVS // ranks, max_length=1024)
    assert plan.dropped == {}
    steps = [data for rank in range(ranks) for data in plan.share(rank).read()]
    assert accounted(steps) == list(range(ck.step * ENVS))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds torchrun's workers in /proc")
@pytest.mark.parametrize("worlds", [(2, 1, 3), pytest.param((4, 3, 6), marks=pytest.mark.soak)], ids=str)
def test_killed_and_resumed_on_fewer_and_on_more(tmp_path: Path, worlds: tuple[int, int, int]) -> None:
    url, (first, *later) = tmp_path / "run", worlds
    with torchrun(url, first, 1000, EVERY) as job:
        stop = time.monotonic() + LAUNCH_S
        while latest_step(url) < 10 and time.monotonic() < stop and job.poll() is None:
            time.sleep(0.05)
        assert job.poll() is None, (tmp_path / f"log-{first}").read_text()[-3000:]
        pids = workers(job)
        os.kill(pids[-1], signal.SIGKILL)
        end(job, pids[:-1])
        assert job.wait(LAUNCH_S) != 0
    latest = archive.open(url).checkpoints.latest
    assert (latest.world_size, latest.whole) == (first, True)
    check_whole(latest)

    for ranks in later:
        check_shares(latest, ranks)
        arc = finished(url, ranks, latest.step + 20, EVERY)
        after = arc.checkpoints.latest
        assert (after.world_size, after.step, after.progress) == (ranks, latest.step + 20, {"step": latest.step + 20})
        check_whole(after)
        rows = arc.snapshot.columns(["session", "length"]).to_pylist()
        assert sum(row["length"] for row in rows if row["session"] == after.session) == 20 * ENVS  # only what is new
        state = after.state(ranks - 1)
        assert int(state["optimizer"]["state"][0]["step"]) == after.step  # the optimizer went on, too
        latest = after


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds torchrun's workers in /proc")
def test_sigterm_to_one_rank_ends_all_after_the_same_checkpoint(tmp_path: Path) -> None:
    url, every = tmp_path / "run", 10**6
    with torchrun(url, 2, every, every) as job:
        stop = time.monotonic() + LAUNCH_S
        while len(list(url.glob("sessions/*/rank-*.json"))) < 2 and time.monotonic() < stop and job.poll() is None:
            time.sleep(0.05)
        time.sleep(1.0)  # in which both are in the loop
        os.kill(workers(job)[1], signal.SIGTERM)
        assert job.wait(LAUNCH_S) == 0, (tmp_path / "log-2").read_text()[-3000:]
    (ck,) = archive.open(url).checkpoints
    assert (ck.world_size, ck.whole, ck.progress) == (2, True, {"step": ck.step})
    check_whole(ck)
