"""Opening an archive of many episodes and commits, and filtering by weights and update count; no steps are read."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

try:
    from . import common
except ImportError:  # run as a script
    import common  # type: ignore[import-not-found,no-redef]

TITLE = "index: open and filter without reading steps"
RANKS = 64
UPDATES = 1000
SESSION = "20260101-000000-abcdef"
MILLION = int(os.environ.get("BENCH_EPISODES", 1_000_000))


def weights_of(update: int) -> str:
    return str(uuid.UUID(int=(update + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128))


def segment_rows(first: int, count: int, total: int) -> Any:
    """One segment an episode, as 64 ranks write them; the update count grows with time."""
    import numpy as np
    import pyarrow as pa

    from archive import tables

    number = np.arange(first, first + count)
    rank, update = number % RANKS, number * UPDATES // total
    shards = pa.array(
        [f"shards/{i:08x}-{SESSION}-00000.zip" for i in range(first // 1000, (first + count) // 1000 + 1)]
    )
    uuids = pa.array([weights_of(u) for u in range(UPDATES)]).take(pa.array(update))
    return tables.from_columns(
        "segments",
        {
            "episode_id": [
                f"{SESSION}-{r:05d}-{n:09d}" for r, n in zip(rank.tolist(), (number // RANKS).tolist(), strict=True)
            ],
            "session": SESSION, "buffer": "default", "rank": rank, "env_id": number // RANKS % 16,
            "position": number // 1024 * 200, "sequence": number // RANKS, "replaces": False,
            "start": number % 1000 * 200, "shard": shards.take(pa.array(number // 1000 - first // 1000)),
            "length": np.full(count, 200), "schema": "{}",
            "model_weights_uuids": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), uuids),
            "update_count_min": update, "update_count_max": update, "first": True, "last": True, "terminated": True,
            "truncated": False, "episode_start": 0, "return": np.random.default_rng(first).normal(size=count),
            "created_at": pa.array(number + 1_700_000_000_000_000, pa.timestamp("us", tz="UTC")),
            "chunks": f"manifest/{first:08x}.chunks.parquet", "chunks_bytes": 1, "chunks_crc32c": 1,
        },
    )  # fmt: skip


def fill(url: str, episodes: int, commits: int) -> None:
    """An archive whose manifest was written and folded commit by commit, by the code that does it."""
    import archive
    from archive.log import Change, CommitLog
    from archive.log.commits import newest

    arc = archive.create(url)
    log = CommitLog(arc.storage, arc.id, newest(arc.storage))
    per = episodes // commits
    for i in range(commits):
        rows = segment_rows(i * per, per, episodes)
        log.commit(f"{SESSION}/{i}", Change("write", partial(_added, rows), run="main", session=SESSION))


def _added(rows: Any, parent: Any, attempt: Any) -> Any:
    return {"segments": rows}, {}


def child_query(url: str, repeats: int = 5) -> dict[str, float]:
    """Open and filter once, cold but for imports, and filter again, warm."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401

    import archive
    import archive.facade
    import archive.read

    wanted = {"model_weights_uuid": weights_of(500), "update_count": (400, 600)}
    found: list[int] = []

    def cold() -> None:
        arc = archive.open(url)
        found.append(len(arc.episodes.filter(**wanted)))

    seconds = common.timed(cold)
    arc = archive.open(url)
    episodes = arc.episodes
    episodes.filter(**wanted)
    warm = [common.timed(lambda: len(episodes.filter(**wanted))) for _ in range(repeats)]
    return {"cold_s": seconds, "warm_s": statistics.median(warm), "found": found[0], "episodes": len(episodes)}


def query(url: str) -> dict[str, float]:
    """The median of three fresh processes."""
    runs = [common.child(__file__, "query", url) for _ in range(3)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def requests_after(commits: int) -> dict[str, int]:
    """Requests that open and filter take on S3, after that many commits."""
    import fsspec

    sys.path.insert(0, str(common.ROOT))
    import archive
    from tests.support import servers

    servers.set_environment()
    fill("memory://bench-index", 20 * commits, commits)
    memory = fsspec.filesystem("memory")
    with servers.moto() as endpoint:
        client = servers.s3_client(endpoint)
        client.create_bucket(Bucket="bench")
        head = archive.open("memory://bench-index").commits[-1]
        for path in memory.find("/bench-index"):
            number = path.rpartition("/")[2].removesuffix(".json")
            old = "/commits/" in path and int(number) < head.number - 1000 and int(number) % 100
            if not old:  # LISTs show folders, so one commit of an old folder is as good as all
                key = path.removeprefix("/bench-index/")
                client.put_object(Bucket="bench", Key=f"a/{key}", Body=memory.cat_file(path))
        arc = archive.open("s3://bench/a", storage_options=servers.s3fs_options(endpoint))
        found = len(arc.episodes.filter(model_weights_uuid=weights_of(500), update_count=(400, 600)))
        stats = arc.io_stats()
    memory.rm("/bench-index", recursive=True)
    return {"requests": stats.requests, "found": found, "files": len(head.files("segments")), "commits": head.number}


def import_seconds() -> float:
    """Median seconds that `import archive` adds to a new interpreter."""
    code = "import time; start = time.perf_counter(); import archive; print(time.perf_counter() - start)"

    def once() -> float:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=common.environment()
        )
        return float(done.stdout)

    return statistics.median(once() for _ in range(5))


def measure() -> Sequence[common.Row]:
    rows = [common.bounded("import archive", import_seconds(), most=0.25, unit="s")]
    for episodes, commits, cold_s, warm_ms in ((MILLION, 100, 0.4, 20), (10 * MILLION, 40, 3, 200)):
        folder = tempfile.mkdtemp(prefix="bench-")
        try:
            fill(f"{folder}/archive", episodes, commits)
            found = query(f"{folder}/archive")
        finally:
            shutil.rmtree(folder)
        rows.append(
            common.bounded(f"open + filter, {episodes:,} episodes", found["cold_s"], most=cold_s, unit="s", **found)
        )
        rows.append(
            common.bounded(f"filter, warm, {episodes:,} episodes", 1e3 * found["warm_s"], most=warm_ms, unit="ms")
        )
    for count in (10, 1000, 10_000):
        asked = requests_after(count)
        rows.append(
            common.bounded(
                f"requests of open + filter, {count:,} commits", asked["requests"], most=20, unit="", **asked
            )
        )
    return rows


@pytest.mark.bench
def test_index() -> None:
    common.report(TITLE, measure())


if __name__ == "__main__":
    common.main(TITLE, measure, {"query": child_query})
