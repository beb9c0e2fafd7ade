"""Does I/O: the figures of a run from its archive: what its newest checkpoints, and the objects between them, say.

A few commits and tables are read, and a few objects are asked for their size; no data, and nothing is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import NotFoundError, UsageError, layout
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
    added = _added(storage, head, entry.session, first.number, last.number)
    totals, ranks = last.checkpoint.buffers.values(), last.checkpoint.world_size
    return {
        "ranks": ranks,
        "checkpoint_s": seconds / (len(made) - 1),
        "live_steps": float(sum(one.steps for one in totals)),
        "state_bytes": _mean(storage, [one.key for one in last.checkpoint.ranks]),
        "keep": _keep(entry),
        **_steps(storage, added, seconds),
        **_journal(_lengths(added), seconds, ranks),
    }


def _run_of(storage: Storage, head: Commit, run: str | None) -> tuple[str, RunEntry]:
    if run is None and len(head.runs) != 1:
        known = ", ".join(map(repr, list(head.runs)[:10])) or "none yet"
        raise UsageError(f"say which run of {storage.url} is meant, by run= or --run: {known}")
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


def _added(storage: Storage, head: Commit, session: str, first: int, last: int) -> pa.Table:
    """The rows of the segments that a session added between two commits."""
    import pyarrow.compute as pc

    files = [one for one in head.files("segments") if one.commit is None or one.commit[1] > first]
    table = tablefiles.load(storage, "segments", files, ["session", "commit", "length", "episode_id", "shard"])
    since = pc.and_(pc.greater(table["commit"], first), pc.less_equal(table["commit"], last))
    found: pa.Table = table.filter(pc.and_(since, pc.equal(table["session"].cast("string"), session)))
    if not sum(_lengths(found).values()):
        raise UsageError(f"session {session!r} added no steps between commits {first} and {last}: give the figures")
    return found


def _steps(storage: Storage, added: pa.Table, seconds: float) -> dict[str, Any]:
    """The rate, size and calls of what was added. No size where each shard is many objects."""
    import pyarrow.compute as pc

    held = _lengths(added)
    count, episodes = sum(held.values()), len(pc.unique(added["episode_id"]))
    some = {key: held[key] for key in list(held)[-_SIZED:] if not key.endswith(".zarr")}
    known = {"step_bytes": sum(storage.sizes(some).values()) / sum(some.values())} if sum(some.values()) else {}
    calls = count / episodes if added.num_rows <= episodes else 0.0  # an episode each; else, unknown
    return {"steps_s": count / seconds, "episode_steps": count / episodes, "call_steps": calls, **known}


def _lengths(segments: pa.Table) -> dict[str, int]:
    """Object -> the steps in it, of those that a segment names. An object may have the shards of several ranks."""
    names, lengths = segments["shard"].cast("string").to_pylist(), segments["length"].to_numpy()
    out: dict[str, int] = {}
    for name, length in zip(names, lengths.tolist(), strict=True):
        if name is not None:
            key = layout.object_of(name)
            out[key] = out.get(key, 0) + length
    return out


def _journal(objects: Iterable[str], seconds: float, ranks: int) -> dict[str, Any]:
    """The seconds between ticks, by the numbers of the journals' objects, and the ranks that share one."""
    journals: dict[str, list[int]] = {}
    for key in objects:
        folder, _, name = key.rpartition("/")
        if layout.journal_place(key) is not None:
            journals.setdefault(folder, []).append(int(name.removesuffix(".zip")))
    if not journals:
        return {"journal_s": None}
    ticks = sum(max(numbers) - min(numbers) + 1 for numbers in journals.values())
    every_s = min(seconds * len(journals) / ticks, 86_400.0)
    return {"journal_s": every_s, "journal_ranks": ceil(ranks / len(journals))}


def _mean(storage: Storage, keys: Sequence[str]) -> float:
    """The mean size of some of these objects."""
    some = keys[:: max(1, len(keys) // _SIZED)][:_SIZED]
    return float(np.mean(list(storage.sizes(some).values()))) if some else 0.0


def _keep(entry: RunEntry) -> Keep | None:
    """The policy of the run; None where it keeps ever more."""
    found = Keep.of(entry.keep)
    return None if found == Keep() or found.every is not None else found
