"""What reading a share takes, from the chunk tables: requests and bytes. Reads no data."""

from __future__ import annotations

from archive.read import Episodes


def read_cost(episodes: Episodes) -> dict[str, int]:
    """Requests, bytes, and bytes of the shards touched, of reading these episodes in all fields; bytes of their own
    steps."""
    plan = episodes.reader.plan(episodes.spans())
    touched = episodes.reader.shard_bytes(episodes.step_spans())
    return {
        "requests": plan.requests,
        "bytes": plan.fetched_bytes,
        "shard_bytes": touched,
        "needed_bytes": episodes.nbytes,
    }
