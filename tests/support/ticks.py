"""What lies in the journals of an archive, as whoever knows their names reads it."""

from __future__ import annotations

from typing import Any

import numpy as np

import archive
from archive.saved import TickObject

NEVER_S = 3600.0  # a journal that ticks when it is told to


def steps(n: int, base: int = 0) -> dict[str, Any]:
    """An episode of n steps."""
    return {"obs": np.arange(base, base + n, dtype=np.float32), "reward": np.ones(n, np.float32)}


def abandoned(*writers: Any) -> archive.Archive:
    """The archive as the next start finds it: nobody closes these writers."""
    for w in writers:
        assert w._journal is not None
        w._journal.ticker.stop()
    return archive.open(writers[0]._storage.url)


def recovered(*writers: Any) -> archive.Checkpoint:
    """The checkpoint that the next start makes of what these writers journaled."""
    found = abandoned(*writers).recover()
    assert found is not None
    return found


def journal(arc: archive.Archive, session: str, rank: int = 0) -> list[TickObject]:
    """A rank's objects by number, up to the first that is missing."""
    out: list[TickObject] = []
    while True:
        key = f"journal/{session}/rank-{rank:05d}/{len(out):09d}.zip"
        if not arc.storage.exists(key):
            return out
        out.append(TickObject(arc.storage.get_all([key])[0], key, key))


def gone(arc: archive.Archive, session: str) -> dict[str, list[tuple[Any, ...]]]:
    """All that left each buffer, as the journal says."""
    out: dict[str, list[tuple[Any, ...]]] = {}
    for one in journal(arc, session):
        for name, ranges in one.index.gone.items():
            out.setdefault(name, []).extend(tuple(r) for r in ranges)
    return out


def left_of(arc: archive.Archive, session: str, buffer: str = "replay") -> set[tuple[Any, ...]]:
    """The addresses (session, rank, env, position) of the steps that a journal says are live in one rank's buffer."""
    out: set[tuple[Any, ...]] = set()
    for one in journal(arc, session):
        for row in one.table("live").to_pylist():
            if row["buffer"] == buffer:
                stream = (row["session"], row["stream_rank"], row["stream_env"])
                out |= {(*stream, p) for p in range(row["lo"], row["hi"])}
        for row in one.table("segments").to_pylist():
            if row["buffer"] == buffer:
                stream = (row["session"], row["rank"], row["env_id"])
                out |= {(*stream, p) for p in range(row["position"], row["position"] + row["length"])}
    for found in gone(arc, session).get(buffer, []):
        *named, lo, hi = found
        out -= {(*named, p) for p in range(lo, hi)}
    return out


def live_of(w: Any, buffer: str = "replay") -> set[tuple[Any, ...]]:
    """The addresses of the steps that are live in a writer's buffer."""
    inner = w._buffers[buffer]
    steps, streams = inner.live_set.written(inner.live_set.runs())
    places = zip(steps.stream.tolist(), steps.lo.tolist(), steps.hi.tolist(), strict=True)
    return {(*streams[number], p) for number, lo, hi in places for p in range(lo, hi)}


def group(arc: archive.Archive, session: str, number: int) -> Any:
    """An object of rank 0 in memory, as zarr opens it."""
    import zarr

    key = f"journal/{session}/rank-00000/{number:09d}.zip"
    return zarr.open_group(f"zip::{arc.storage.full_url(key)}", mode="r", zarr_format=3)
