"""Drivers and workers in processes of their own that are killed, fail, or meet: processes of this machine, and actors
of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archive.errors import JobError
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
    for episode in (3, 20, 21, 40):
        (folder / f"die-{episode}").touch()
    work(arc, folder, **how)
    check(arc, folder, killed=4)


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
