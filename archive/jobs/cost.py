"""Pure, no I/O: the cost of a job before it is begun: requests, dollars, hours, and sizes of what it writes.

A real job on a store that counts requests holds the counts (tests/jobs/test_cost.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from typing import Any

from archive.arrays import MAX_BLOCK_BYTES
from archive.jobs.columns import BATCH_BYTES, OWN_SHARD_BYTES
from archive.jobs.folds import FOLDED
from archive.store import PRICES
from archive.store.drivers import PAGE

_TABLES = 4  # requests of a worker for the tables of the archive, beside one for each file of chunks
_RESULT_BYTES, _FOLD_BYTES, _FILE_BYTES = 1_500, 21, 250  # of a result, a batch in a fold, a file in a commit
_COMMIT_BYTES, _ROW_BYTES = 3_000, 40  # of a commit without its files of results; of an episode in these
_TABLE_BYTES, _SHARD_BYTES = (
    32 * 1024 * 1024,
    64_000_000,
)  # of a file of a table that is not merged any more; of a shard
_OF_A_FOLD = 4  # requests: is there another commit, before it and before its try; has the round ended
_LATENCY_S = 0.05


def estimate(
    *, objects: int, nbytes: int, episodes: int, workers: int, commits: int = 1, part: float = 1.0, seconds: float = 0,
    result_bytes: int = 10_000, commit_every_s: float | None = 600, calls: int = 1, bytes_s: float = 100e6,
    prices: Mapping[str, float] = PRICES["s3"].verbs,
) -> dict[str, Any]:  # fmt: skip
    """The cost of `episodes.map(fn, job=...)` over so many objects (shards), of `nbytes` in all.

    commits: those that wrote the objects, whose files of chunks each worker reads.  part: of the bytes, the fields that
    are read.  seconds: of the function, for a batch.  result_bytes: of its columns, for a batch.  calls: the first one,
    and those that went on.  bytes_s: that each worker, or the driver, reads in a second.
    prices: of a request, by verb; those of S3 Standard by default.
    """
    each = max(1, ceil(nbytes * part / objects / BATCH_BYTES))
    batches, read = objects * each, nbytes * part / objects / each
    work_s = batches / workers * max(2 * _LATENCY_S + read / bytes_s, seconds + _LATENCY_S)
    commit_s = batches * (result_bytes if result_bytes < OWN_SHARD_BYTES else 0) / bytes_s
    hours = max(work_s, commit_s) / 3600
    folds = ceil(batches / FOLDED) + (0 if commit_every_s is None else int(hours * 3600 / commit_every_s))
    requests = _requests(batches, folds, max(1, ceil(read / MAX_BLOCK_BYTES)), workers, commits, result_bytes, calls)
    files = ceil(log2(folds + 1)) + episodes * _ROW_BYTES // _TABLE_BYTES
    return {
        "batches": batches,
        "commits": folds,
        "requests": requests,
        "dollars": round(sum(count * prices[verb] for verb, count in requests.items()), 2),
        "hours": round(hours, 2),
        "bytes of a result": _RESULT_BYTES + (result_bytes if result_bytes < OWN_SHARD_BYTES else 0),
        "bytes of a fold": _FOLD_BYTES * min(FOLDED, batches) + 50,
        "bytes of a commit": _COMMIT_BYTES + _FILE_BYTES * files,
    }


def _requests(
    batches: int, folds: int, reads: int, workers: int, commits: int, result_bytes: int, calls: int
) -> dict[str, int]:
    """The requests of a job, by kind: those of the batches, the commits, the workers, and of beginning and ending."""
    large = result_bytes >= OWN_SHARD_BYTES
    shards = 0 if large else ceil(min(batches, FOLDED) * result_bytes / _SHARD_BYTES)
    pages = ceil((batches + 3 * folds) / PAGE)
    return {
        "get": batches * (reads + 1) + folds * _OF_A_FOLD + workers * (commits + _TABLES),
        "head": batches,
        "create": batches + 3 * folds + 3,  # a fold, its commit, the record of it; round, kind, end
        "put": batches * large + folds * (shards + 2) + 1,  # shards, rows and chunks of a commit; the plan
        "list": 3 + pages + (calls - 1) * 5 * pages,  # at the beginning of a call, and at the end of the job
    }
