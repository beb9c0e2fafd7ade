"""Ray on this machine for tests, and this process as it was before once it is over."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def cluster(num_cpus: int, **environment: str) -> Iterator[Any]:
    """Ray with so many workers, started with these environment variables; a skip where it is not installed."""
    ray = pytest.importorskip("ray", reason="Ray has no wheel for every Python and platform")
    folder = tempfile.mkdtemp(prefix="ray")  # short: its sockets' paths end at 108 bytes
    with _as_it_was(), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.shutdown()  # of a module that is over; a process is connected to one at a time
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
            ray.shutdown()  # as above
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            cluster.wait_for_nodes()
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
