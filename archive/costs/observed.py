"""Does I/O: the figures of a run from its archive: what its newest checkpoints, and the objects between them, say.

A few commits and tables are read, and a few objects are asked for their size; no data, and nothing is listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import NotFoundError, UsageError
from archive.checkpoint import Keep
from archive.log import Commit, RunEntry, commits, tablefiles
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

NEWEST = 10  # checkpoints that are looked at
_SIZED = 32  # objects of which the size is asked for


def figures(storage: Storage, head: Commit, run: str | None) -> dict[str, Any]:
    """Arguments of a Workload, as far as the newest checkpoints of a run tell. UsageError if there are not two of one
    session, or several runs and none is named."""
    name, entry = _run_of(storage, head, run)
    made = _checkpoints(storage, head, name)
    first, last = made[0], made[-1]
    seconds = (last.created_at - first.created_at).total_seconds()
    assert last.checkpoint is not None
    if seconds <= 0:
        raise UsageError(f"the newest checkpoints of run {name!r} were made within a second: give the figures yourself")
    steps = _steps(storage, head, entry.session, first.number, last.number)
    totals = last.checkpoint.buffers.values()
    out: dict[str, Any] = {
        "ranks": last.checkpoint.world_size,
        "checkpoint_s": seconds / (len(made) - 1),
        "live_steps": float(sum(one.steps for one in totals)),
        "state_bytes": _mean(storage, [one.key for one in last.checkpoint.ranks]),
        "keep": _keep(entry),
        **steps(seconds),
    }
    return out | _journal(first, last, name, seconds)


def _run_of(storage: Storage, head: Commit, run: str | None) -> tuple[str, RunEntry]:
    if run is None and len(head.runs) != 1:
        known = ", ".join(map(repr, list(head.runs)[:10])) or "none yet"
        raise UsageError(f"say which run of {storage.url} is meant, with run=: {known}")
    name = next(iter(head.runs)) if run is None else run
    if name not in head.runs:
        known = ", ".join(map(repr, list(head.runs)[:10])) or "none"
        raise NotFoundError(f"there is no run {name!r} at {storage.url}; its runs: {known}")
    return name, head.runs[name]


def _checkpoints(storage: Storage, head: Commit, run: str) -> Sequence[Commit]:
    """The commits of the newest whole checkpoints of the run's newest session, oldest first."""
    table = tablefiles.load(storage, "checkpoints", head.files("checkpoints"))
    session = head.runs[run].session
    rows = table.select(["commit", "session", "run", "whole", "replay_saved"]).to_pylist()
    mine = [
        r["commit"] for r in rows if (r["run"], r["session"]) == (run, session) and r["whole"] and r["replay_saved"]
    ]
    if len(mine) < 2:
        raise UsageError(
            f"the newest session of run {run!r} at {storage.url} has {len(mine)} whole checkpoints with buffers, and "
            "rates need two: let it run on, or give the figures yourself"
        )
    return list(commits.read_all(storage, sorted(mine)[-NEWEST:], head))


def _steps(storage: Storage, head: Commit, session: str, first: int, last: int) -> Any:
    """The figures of what a session added between two commits, as a function of the seconds between them."""
    import pyarrow.compute as pc

    files = [one for one in head.files("segments") if one.commit is None or one.commit[1] > first]
    names = ["session", "commit", "length", "episode_id", "shard"]
    table = tablefiles.load(storage, "segments", files, names)
    since = pc.and_(pc.greater(table["commit"], first), pc.less_equal(table["commit"], last))
    mine: pa.Table = table.filter(pc.and_(since, pc.equal(table["session"].cast("string"), session)))
    count = int(mine["length"].to_numpy().sum())
    if not count:
        raise UsageError(f"session {session!r} added no steps between commits {first} and {last}: give the figures")
    episodes, segments = len(pc.unique(mine["episode_id"])), mine.num_rows
    held = _lengths(mine)
    sized = dict(list(held.items())[-_SIZED:])
    nbytes = sum(storage.sizes(sized).values())

    def told(seconds: float) -> Mapping[str, Any]:
        length = count / episodes
        return {
            "steps_s": count / seconds,
            "step_bytes": max(nbytes / max(1, sum(sized.values())), 1e-9),
            "episode_steps": length,
            "call_steps": length if segments <= episodes else 0.0,
        }

    return told


def _lengths(segments: pa.Table) -> dict[str, int]:
    """Shard -> the steps in it, of those that a segment names."""
    names, lengths = segments["shard"].cast("string").to_pylist(), segments["length"].to_numpy()
    out: dict[str, int] = {}
    for name, length in zip(names, lengths.tolist(), strict=True):
        if name is not None and not name.endswith(".zarr"):
            out[name] = out.get(name, 0) + length
    return out


def _mean(storage: Storage, keys: Sequence[str]) -> float:
    """The mean size of some of these objects."""
    some = keys[:: max(1, len(keys) // _SIZED)][:_SIZED]
    return float(np.mean(list(storage.sizes(some).values()))) if some else 0.0


def _keep(entry: RunEntry) -> Keep | None:
    """The policy of the run; None where it keeps ever more."""
    found = Keep.of(entry.keep)
    return None if found == Keep() or found.every is not None else found


def _journal(first: Commit, last: Commit, run: str, seconds: float) -> dict[str, Any]:
    """The seconds between ticks, by the numbers of the journals' next objects at both commits."""
    before, after = first.runs[run].journal or {}, last.runs[run].journal or {}
    objects = sum(number - before.get(rank, 0) for rank, number in after.items())
    if not after or objects <= 0:
        return {"journal_s": None}
    return {"journal_s": min(seconds * len(after) / objects, 86_400.0)}
