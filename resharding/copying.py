"""Copying shards from one store to another, checked on the way; on this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from archive.bases import Roots
from archive.errors import CorruptChunkError, UsageError
from archive.packing import checksum
from archive.ranges import ByteRange
from archive.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

ENGINES = ("local", "ray")
AT_ONCE = 4
SHARDS_PER_TASK = 8

Job = tuple[str, list[dict[str, Any]]]  # shard, its members as rows of the chunk table


def copy_shards(source: Roots, target: Storage, chunks: pa.Table, *, engine: str = "local") -> int:
    """Copy the shards that the chunk rows name, but for those that are there; how many were copied."""
    if engine not in ENGINES:
        raise UsageError(f"engine={engine!r}: give one of {', '.join(ENGINES)}")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in chunks.to_pylist():
        rows.setdefault(row["shard"], []).append(row)
    present = set(target.list("shards"))
    jobs = [(s, members) for s, members in rows.items() if s.endswith(".zip") and s.removeprefix("shards/") not in present]
    jobs += [(s, members) for s, members in rows.items() if not s.endswith(".zip")]
    if engine == "ray":
        _on_ray(source, target, jobs)
    else:
        _here(source, target, jobs)
    return len(jobs)


def _here(source: Roots, target: Storage, jobs: Sequence[Job]) -> None:
    with ThreadPoolExecutor(AT_ONCE, "archive-copy") as pool:
        for _ in pool.map(lambda job: _copy(source, target, *job), jobs):
            pass


def _on_ray(source: Roots, target: Storage, jobs: Sequence[Job]) -> None:
    import importlib

    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as e:
        raise UsageError("engine='ray' needs Ray: pip install 'trajectory-archive[ray]'") from e
    task = ray.remote(_here)
    batches = [jobs[i : i + SHARDS_PER_TASK] for i in range(0, len(jobs), SHARDS_PER_TASK)]
    ray.get([task.remote(source, target, batch) for batch in batches])


def _copy(source: Roots, target: Storage, shard: str, members: list[dict[str, Any]]) -> None:
    """Copy one shard. A packed one is put whole, so it is there or not; of a directory every member is put again."""
    if shard.endswith(".zip"):
        data = memoryview(source.get(shard))
        for member in members:
            _check(shard, member, data[member["offset"] : member["offset"] + member["size"]])
        target.put(shard, data)
        return
    ranges = [ByteRange(f"{shard}/{m['member']}", 0, m["size"]) for m in members]
    for member, data_of in zip(members, source.get_ranges(ranges), strict=True):
        _check(shard, member, memoryview(data_of))
        target.put(f"{shard}/{member['member']}", data_of)


def _check(shard: str, member: dict[str, Any], data: memoryview) -> None:
    """A chunk ends in its own checksum, which must be the one in the table and that of what is before it."""
    if member["chunk"] < 0:
        sound = checksum(data) == member["crc32c"]
    else:
        sound = int.from_bytes(data[-4:], "little") == member["crc32c"] == checksum(data[:-4])
    if not sound:
        raise CorruptChunkError(f"{member['member']!r} of {shard} does not match its checksum and was not copied; run `archive verify`")
