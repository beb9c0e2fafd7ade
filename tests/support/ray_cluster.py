"""Ray on this machine for tests, one cluster for all that follow each other, and this process as it was before once it
is over."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

CPUS = 4  # of the cluster that tests share: as many as any of them asks for
FIRST = (  # whatever needs one runs one after the other, ahead of all else: see tests/conftest.py
    "tests/adapters/rllib/test_offline.py",
    "tests/adapters/transferqueue/test_checkpoints.py",
    "tests/adapters/xtuner/test_refs.py",
    "tests/jobs/test_verbs_on_ray.py",
    "tests/jobs/test_workers.py",
    "tests/ray/test_reading.py",
    "tests/ray/test_writing.py",
)
_running = contextlib.ExitStack()


@contextlib.contextmanager
def cluster(num_cpus: int) -> Iterator[Any]:
    """Ray with at least so many workers, to which this process is connected; a skip where it is not installed. It
    goes on afterwards, for the next test that asks, until `stop`."""
    ray = pytest.importorskip("ray", reason="Ray has no wheel for every Python and platform")
    assert num_cpus <= CPUS
    if not (ray.is_initialized() and ray.cluster_resources().get("CPU") == CPUS):  # a test may have ended it
        stop()
        _running.enter_context(started(CPUS))
    yield ray


def stop() -> None:
    """End the cluster that tests share, if there is one."""
    _running.close()


@contextlib.contextmanager
def started(num_cpus: int) -> Iterator[Any]:
    """A cluster of so many workers, to which this process is connected, from the beginning of the block to its end."""
    ray = pytest.importorskip("ray", reason="Ray has no wheel for every Python and platform")
    folder = tempfile.mkdtemp(prefix="ray")  # short: its sockets' paths end at 108 bytes
    with _as_it_was(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.shutdown()  # of a cluster of another kind; a process is connected to one at a time
        ray.init(
            address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            _temp_dir=folder, object_store_memory=80 * 1024 * 1024,
        )  # fmt: skip
        try:
            yield ray
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Ray leaves a handler of SIGTERM, and a level and formatters of the root logger's, behind."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    formatters = [handler.formatter for handler in handlers]
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, terminate)
        root.setLevel(level)
        root.handlers[:] = handlers
        for handler, formatter in zip(handlers, formatters, strict=True):
            handler.setFormatter(formatter)


@contextlib.contextmanager
def nodes(*cpus: int) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with nodes of so many workers each, to which this process is connected."""
    ray = pytest.importorskip("ray", reason="Ray has no wheel for every Python and platform")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray")
    given = {"object_store_memory": 80 * 1024 * 1024, "include_dashboard": False, "temp_dir": folder}
    with _as_it_was(), pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_UV_RUN_RUNTIME_ENV"):
            patch.setenv(name, "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **given})
        try:
            for count in cpus[1:]:
                cluster.add_node(num_cpus=count, **given)
            stop()
            ray.shutdown()  # as above
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            cluster.wait_for_nodes()
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
