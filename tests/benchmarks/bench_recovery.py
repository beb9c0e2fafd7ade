"""Recovering what 64 ranks journaled in 100 ticks each, from SeaweedFS 20 ms away: requests, bytes, seconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "recovery: the journals of 64 ranks, 100 ticks each"
RANKS, TICKS, TOKENS, DELAY_S = 64, int(os.environ.get("BENCH_LENGTH", 100)), 500, 0.02
NEVER_S = 3600.0


def child_journal(where: str) -> dict[str, float]:
    """Ranks save a checkpoint and journal a trajectory a tick; then they are gone."""
    import numpy as np

    rng = np.random.default_rng(0)
    steps = {"token": rng.integers(0, 150_000, TOKENS, dtype=np.int32), "logprob": rng.standard_normal(TOKENS)}
    writers = [common.opened(where).writer(rank, RANKS, session="s", journal_s=NEVER_S) for rank in range(RANKS)]
    for w in writers:
        w.add_episode(steps)
    saved = [w.checkpoint(1) for w in writers]
    for one in saved:
        one.result()
    for _ in range(TICKS):
        for w in writers:
            w.add_episode(steps)
            w.sync()
    for w in writers:
        w._journal = None
        w._end()
    return {}


def child_recover(where: str) -> dict[str, float]:
    """Recover; what that took."""
    arc = common.opened(where)
    size = sum(one.bytes for one in arc.storage.scan("journal"))
    before, began = arc.io_stats(), time.perf_counter()
    made = arc.recover()
    spent, seconds = arc.io_stats() - before, time.perf_counter() - began
    requests = spent.get + spent.put + spent.create + spent.list + spent.head - RANKS * TICKS
    again, began = common.opened(where), time.perf_counter()
    assert again.recover().number == made.number
    return {
        "requests": requests, "bytes": spent.bytes_in / size, "seconds": seconds, "mb": size / 1e6,
        "again_s": time.perf_counter() - began,
        "episodes": made.record.buffers["replay"].episodes,
    }  # fmt: skip


def measure() -> Sequence[common.Row]:
    from tests.support import servers
    from tests.support.backends import BUCKET
    from tests.support.proxy import FaultProxy

    servers.set_environment()
    with servers.seaweedfs() as endpoint, FaultProxy(endpoint) as proxy:
        servers.make_bucket(endpoint, BUCKET)
        proxy.add("delay", times=-1, seconds=DELAY_S)
        near, far = (
            {"url": f"s3://{BUCKET}/r", "options": servers.s3fs_options(at)} for at in (endpoint, proxy.endpoint)
        )
        common.child(__file__, "journal", json.dumps(near))
        found = common.child(__file__, "recover", json.dumps(far))
    assert found["episodes"] == RANKS * (TICKS + 1)
    objects = RANKS * TICKS
    return [
        common.bounded(
            f"requests beside one for each of {objects:,} objects", found["requests"], most=4 * RANKS, unit=""
        ),
        common.bounded(f"bytes read, of {found['mb']:.0f} MB of journals", found["bytes"], most=1.05, unit="x"),
        common.bounded("recovery, one process", found["seconds"], unit="s"),
        common.bounded("the next rank that asks", found["again_s"], unit="s"),
    ]


@pytest.mark.bench
def test_recovery() -> None:
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {"journal": child_journal, "recover": child_recover})
