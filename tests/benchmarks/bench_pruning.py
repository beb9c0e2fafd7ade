"""What it takes to prune what crashes left behind: requests, seconds and memory, on SeaweedFS.

`BENCH_OBJECTS=10000` leaves fewer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest

import archive
from tests.benchmarks import common
from tests.support import servers
from tests.support.pruning import NOW, left_behind

MANY = int(os.environ.get("BENCH_OBJECTS", 100_000))
BUCKET = "bench"
TITLE = "pruning"


def measure(count: int = MANY) -> Sequence[common.Row]:
    with servers.seaweedfs() as endpoint:
        servers.make_bucket(endpoint, BUCKET)
        return measured(endpoint, count)


def measured(endpoint: str, count: int) -> Sequence[common.Row]:
    arc = archive.create(f"s3://{BUCKET}/archive", storage_options=servers.s3fs_options(endpoint))
    objects = len(left_behind(arc, count=count))
    with common.Peak() as peak:
        began, before = time.perf_counter(), arc.io_stats()
        plan = arc.prune(**NOW)
        plan_s, planned = time.perf_counter() - began, arc.io_stats() - before
        began, before = time.perf_counter(), arc.io_stats()
        done = plan.commit()
        done_s, deleted = time.perf_counter() - began, arc.io_stats() - before
    assert (done.deleted, done.errors) == (objects, {})
    said = {"planned": planned.as_dict(), "done": deleted.as_dict()}
    thousands = -(-objects // 1000)
    return [
        common.bounded(f"plan of {objects:,} objects, seconds", plan_s, most=60, unit="s", **said),
        common.bounded("plan, requests", planned.requests, most=thousands + 30, unit="requests"),
        common.bounded("commit and delete, seconds", done_s, unit="s"),
        common.bounded("deletes, requests", deleted.delete, most=thousands, unit="requests"),
        common.bounded("memory", peak.extra_bytes / 2**20, most=2048, unit="MiB"),
    ]


@pytest.mark.bench
def test_pruning() -> None:
    common.report(TITLE, measure())


def test_of_few(seaweedfs_endpoint: str) -> None:
    """What is measured is what it says."""
    servers.make_bucket(seaweedfs_endpoint, BUCKET)
    rows = measured(seaweedfs_endpoint, 1500)
    assert [row.met for row in rows if row.met is not None] == [True] * 4


if __name__ == "__main__":
    common.main(TITLE, measure, {})
