"""Drivers and workers in processes of their own that are killed, fail, or meet: processes of this machine, and actors
of a Ray cluster."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archive.errors import JobError
from archive.jobs import runner
from archive.jobs.job import Batches, Job
from archive.jobs.receipts import Done, Result
from archive.jobs.runner import JobCall
from tests.support import ray_cluster
from tests.support.job_driver import EPISODES, WORKERS, calls, check, driver, ended, filled, kill_after, work

ENGINES = ["local", "ray"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster.cluster(WORKERS) as ray:
        yield ray


@pytest.fixture
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of a call with an engine, in this process; of another driver with the cluster's address."""
    engine = request.param
    if engine == "ray":
        request.getfixturevalue("cluster")
    return {"engine": engine, "workers": WORKERS}


@pytest.fixture
def apart(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of a driver in another process, with an engine."""
    if request.param == "local":
        return {"engine": "local", "workers": WORKERS}
    ray = request.getfixturevalue("cluster")
    return {"engine": "ray", "workers": 2, "ray": {"address": ray.get_runtime_context().gcs_address}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "calls").mkdir()
    return tmp_path / "calls"


@pytest.mark.parametrize(
    ("apart", "after"),
    [
        ("local", [9, 27, 60]),
        ("ray", [7, 40]),
        *(pytest.param(one, list(range(1, 90, 3)), marks=pytest.mark.soak) for one in ENGINES),
    ],
    indirect=["apart"],
)
def test_a_driver_is_killed_again_and_again(
    apart: dict[str, Any], after: list[int], tmp_path: Path, folder: Path
) -> None:
    arc = filled(str(tmp_path / "arc"))
    killed = 0
    for objects in after:
        with driver(arc.url, folder, slow_s=0.005, **apart) as process:
            killed += kill_after(process, tmp_path / "arc" / "jobs", objects)
    assert killed
    with driver(arc.url, folder, slow_s=0.005, **apart) as process:
        assert ended(process) == "done"
    check(arc, folder, killed)


@pytest.mark.parametrize("how", ENGINES, indirect=True)
def test_workers_are_killed(how: dict[str, Any], tmp_path: Path, folder: Path) -> None:
    arc = filled(str(tmp_path / "arc"))
    for episode in (3, 20, 21, 29, 40):  # two of one batch: with a third death it would be blamed for its neighbour's
        (folder / f"die-{episode}").touch()
    work(arc, folder, **how)
    check(arc, folder, killed=5)


@pytest.mark.parametrize("how", ENGINES, indirect=True)
def test_a_function_that_always_ends_its_process(how: dict[str, Any], tmp_path: Path, folder: Path) -> None:
    arc = filled(str(tmp_path / "arc"))
    (folder / "always-21").touch()
    with pytest.raises(JobError, match="ended the worker that it ran on 3 times"):
        work(arc, folder, **how)
    (folder / "always-21").unlink()
    work(arc, folder, **how)
    check(arc, folder, killed=4)


@pytest.mark.parametrize("how", ENGINES, indirect=True)
def test_a_function_that_raises_at_one_episode(how: dict[str, Any], tmp_path: Path, folder: Path) -> None:
    arc = filled(str(tmp_path / "arc"))
    (folder / "fail-20").touch()
    with pytest.raises(ValueError, match="no 20") as caught:
        work(arc, folder, **how)
    assert "'e20'" in caught.value.__notes__[0]
    (folder / "fail-20").unlink()
    work(arc, folder, **how)
    check(arc, folder, killed=1)


@pytest.mark.parametrize("apart", ENGINES, indirect=True)
def test_the_same_job_started_twice_at_once(apart: dict[str, Any], tmp_path: Path, folder: Path) -> None:
    arc = filled(str(tmp_path / "arc"))
    with driver(arc.url, folder, slow_s=0.005, **apart) as one, driver(arc.url, folder, slow_s=0.005, **apart) as other:
        assert [ended(one), ended(other)] == ["done", "done"]
    check(arc, folder, killed=1)
    assert len(calls(folder)) < 2 * EPISODES


def test_drivers_in_step_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are at the same batch at the same time, one by one: who is second there goes on elsewhere."""
    arc, rng, batches = filled("memory://in-step"), random.Random(7), 400
    job = Job(arc.storage, "steps")
    frozen = {"commit": arc.head.number, "annotations": arc.head.number, "session": "s", "terms": {}, "function": None}
    made = job.begin(Batches.of([[str(n)] for n in range(batches)]), None, kind="verify", archive=arc.id, **frozen)
    drivers = [JobCall.going_on(arc.storage, job, made.record) for _ in range(2)]
    drawn = iter([17, 17])  # both begin there
    monkeypatch.setattr(runner, "randrange", lambda *least_stop: next(drawn, None) or rng.randrange(*least_stop))
    left, computed = [one._left() for one in drivers], 0
    while under_way := [
        (one, batch[0]) for one, source in zip(drivers, left, strict=True) if (batch := next(source, None))
    ]:
        there = {number for _, number in under_way if drivers[0].store.has(number)}
        for one, number in under_way:
            computed += number not in there
            ours = number not in there and one.store.put(number, 1, Result({}, {}, None, 0))[0]
            one._take(Done(number, ours))
    assert [one.results for one in drivers] == [{*range(batches)}] * 2
    assert computed <= batches + 20


# -- clusters that change ----------------------------------------------------------------------------------------------


def when_computed(folder: Path, count: int, change: Callable[[], Any]) -> threading.Thread:
    """A thread that changes something once so many episodes were computed."""

    def wait() -> None:
        while len(calls(folder)) < count:
            time.sleep(0.01)
        change()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.soak
def test_a_node_is_removed(tmp_path: Path, folder: Path) -> None:
    arc = filled(str(tmp_path / "arc"))
    with ray_cluster.nodes(2, 2) as nodes:
        (node,) = nodes.worker_nodes
        thread = when_computed(folder, 8, lambda: nodes.remove_node(node, allow_graceful=False))
        work(arc, folder, slow_s=0.5, engine="ray", workers=4)  # longer than a worker is waited for
        thread.join()
    check(arc, folder, killed=1)


@pytest.mark.soak
def test_a_cluster_that_is_gone(tmp_path: Path, folder: Path) -> None:
    arc = filled(str(tmp_path / "arc"))
    with ray_cluster.cluster(2) as ray:
        thread = when_computed(folder, 8, ray.shutdown)
        with pytest.raises(JobError, match="no longer connected to a cluster of Ray; what is finished stays"):
            work(arc, folder, slow_s=0.02, engine="ray", workers=2)
        thread.join()
    assert 0 < arc.jobs["score"].done < arc.jobs["score"].total
    with ray_cluster.cluster(2):
        work(arc, folder, slow_s=0.02, engine="ray", workers=2)
    check(arc, folder, killed=1)
