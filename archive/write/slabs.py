"""Pure, no I/O: how much of a buffer whose env rows advance together goes to one shard, a slab of time."""

from __future__ import annotations

SLABS = 32  # of a buffer, at least: eviction cuts one of them, and what is left of it is many short runs
LEAST_SLAB_BYTES = 4 * 1024 * 1024
LEAST_RUN, LEAST_RUN_BYTES = 8, 2048  # steps of an env row in a slab, or bytes: each run is a row of the segments table


def slab_bytes(buffer_bytes: int, env_rows: int, step_bytes: int, most: int) -> int:
    """Bytes of one slab, at most `most`; `buffer_bytes`: of all live steps."""
    run_bytes = step_bytes * min(LEAST_RUN, -(-LEAST_RUN_BYTES // step_bytes))
    return min(most, max(buffer_bytes // SLABS, LEAST_SLAB_BYTES, env_rows * run_bytes))
