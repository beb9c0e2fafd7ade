"""What it takes to find all that a commit leads to, after many checkpoints: seconds, memory, requests and bytes.

The manifest is written and folded commit by commit, by the code that does it; there are no shards behind it.
`BENCH_COMMITS=1000`, `BENCH_EPISODES=100000` make it smaller.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import common
from tests.benchmarks.bench_index import SESSION, segment_rows

COMMITS = int(os.environ.get("BENCH_COMMITS", 10_000))
EPISODES = int(os.environ.get("BENCH_EPISODES", 1_000_000))
TITLE = "mark"


def fill(url: str, episodes: int, commits: int) -> None:
    """An archive of so many checkpoints, each of which brought the same number of episodes."""
    import archive
    from archive import tables
    from archive.log import Change, CommitLog

    arc = archive.create(url)
    log = CommitLog(arc.storage, arc.id, arc.head)
    per = episodes // commits
    live = tables.from_columns(
        "live",
        {"rank": [0], "buffer": "replay", "env_id": [0], "position": [0], "session": SESSION, "stream_rank": [0],
         "stream_env": [0], "lo": [0], "hi": [per]},
    )  # fmt: skip
    for i in range(commits):
        adds = partial(_checkpoint, segment_rows(i * per, per, episodes), live, i)
        log.commit(f"{SESSION}/{i}", Change("checkpoint", adds, run="main", session=SESSION))


def _checkpoint(rows: Any, live: Any, step: int, parent: Any, attempt: Any) -> Any:
    from archive import tables
    from archive.log import BufferTotals, CheckpointRecord, Lineage, RunEntry, StagedObject

    name = f"step-{step}"
    record = CheckpointRecord(
        name, step, step, 1, True, (), (StagedObject(0, f"states/{SESSION}/{name}/rank-00000.zip", "0"),),
        {"replay": BufferTotals(1, 1, ())}, {}, {}, Lineage(), borrowed=(),
    )  # fmt: skip
    row = tables.from_columns(
        "checkpoints",
        {"commit": [0], "run": "main", "session": SESSION, "name": [name], "step": [step], "world_size": 1,
         "whole": [True], "replay_saved": [True], "metrics": ["{}"], "created_at": [parent.created_at]},
    )  # fmt: skip
    mark = record.mark(SESSION, parent.number + 1)
    says = {"checkpoint": record, "runs": {"main": RunEntry(SESSION, latest=mark, latest_replay=mark)}}
    return {"segments": rows, "checkpoints": row, "live": live}, says


def child_mark(url: str) -> dict[str, float]:
    """Open, and find what the newest commit leads to."""
    import archive
    from archive.index import Walk

    arc = archive.open(url)
    with common.Peak() as peak:
        before = arc.io_stats()
        found: list[Any] = []
        seconds = common.timed(lambda: found.append(Walk(arc.storage).reach(arc.head)))
        taken = arc.io_stats() - before
    return {
        "seconds": seconds, "requests": taken.requests, "bytes": taken.bytes_in, "keys": len(found[0].keys),
        "memory": peak.extra_bytes / 2**20,
    }  # fmt: skip


def measure(episodes: int = EPISODES, commits: int = COMMITS) -> Sequence[common.Row]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=os.environ.get("BENCH_FOLDER")) as folder:
        fill(folder, episodes, commits)
        told = common.child(__file__, "mark", folder)
        of = ("manifest/*.segments.parquet", "manifest/*.checkpoints.parquet", "commits/*/*.json")
        tables = sum(path.stat().st_size for pattern in of for path in Path(folder).glob(pattern))
        files = sum(1 for pattern in of for _ in Path(folder).glob(pattern))
    what = f"of {episodes:,} episodes and {commits:,} checkpoints"
    return [
        common.bounded(f"mark {what}", told["seconds"], most=60, unit="s", keys=told["keys"]),
        common.bounded("memory", told["memory"], most=2048, unit="MiB"),
        common.bounded("bytes read, of commits and tables", told["bytes"] / tables, most=1.2, bytes=told["bytes"]),
        common.bounded("requests, of these files", told["requests"] / files, most=1.2, requests=told["requests"]),
    ]


@pytest.mark.bench
def test_mark() -> None:
    common.report(TITLE, measure())


def test_of_few() -> None:
    """What is measured is what it says."""
    rows = measure(1000, 20)
    assert [row.met for row in rows] == [True] * len(rows)


if __name__ == "__main__":
    common.main(TITLE, measure, {"mark": child_mark})
