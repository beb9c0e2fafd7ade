"""Episodes from S3 one after the other: alone, read ahead while iterating, streamed, all at once; 20 ms a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import archive
from tests.support import servers
from tests.support.proxy import FaultProxy

EPISODES, STEPS = 1000, 20


@pytest.mark.bench
def test_episodes_a_second(moto_endpoint: str) -> None:
    with FaultProxy(moto_endpoint) as proxy:
        url = f"s3://bucket/streaming-{time.time_ns()}"
        direct = archive.create(url, storage_options=servers.s3fs_options(moto_endpoint))
        with direct.writer() as w:
            for i in range(EPISODES):
                w.add_episode({"obs": np.random.default_rng(i).random((STEPS, 50)), "reward": np.ones(STEPS)})
        proxy.add("delay", method="GET", times=-1, seconds=0.02)
        ways: dict[str, tuple[int, Callable[[Any], Any]]] = {
            "alone": (50, lambda eps: [eps[i].read() for i in range(50)]),
            "iterated": (EPISODES, lambda eps: [ep.read() for ep in eps]),
            "streamed": (EPISODES, lambda eps: [data for _, data in eps.stream(max_bytes=2**24)]),
            "at once": (EPISODES, lambda eps: eps.read()),
        }
        for name, (count, work) in ways.items():
            arc = archive.open(url, storage_options=servers.s3fs_options(proxy.endpoint))
            len(arc.episodes.table)
            before, started = arc.io_stats().get, time.perf_counter()
            work(arc.episodes)
            took_s = time.perf_counter() - started
            requests = arc.io_stats().get - before
            print(f"{name:9} {count / took_s:8.0f} episodes/s {requests:5d} requests {took_s:6.2f} s")
