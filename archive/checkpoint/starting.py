"""Where a writer begins: anew, where a checkpoint's run goes on, or where a new run forks off from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from archive.base import UsageError, logger, size
from archive.manifest import ForkedFrom, Resume
from archive.store import IOStats


def start(rank: int | None, world_size: int | None, run: str | None, resume: Any, fork_from: Any) -> Resume | None:
    """What a writer takes over from a checkpoint or share; None if it begins anew. Refuses what contradicts it."""
    if resume is not None and fork_from is not None:
        raise UsageError(
            "resume= goes on with the checkpoint's run, fork_from= begins another run there: give one of them, not both"
        )
    source = resume if fork_from is None else fork_from
    if source is None:
        return None
    if not hasattr(source, "to_resume"):
        raise UsageError(
            f"a writer goes on from a Checkpoint or the Share of a plan, not from {type(source).__name__}: of what "
            "checkpoint() gives take .result(), of a plan take .share(rank)"
        )
    found: Resume = source.to_resume(rank)
    _check_rank(found, rank, world_size)
    return _resumed(found, run) if fork_from is None else _forked(found, run)


def tell(start: Resume, taken: IOStats, seconds: float) -> None:
    """Log what a writer has gone on from, and what that took."""
    steps = sum(int(buffer.runs.length.sum()) for buffer in start.buffers.values())
    name = "its episodes" if start.name is None else repr(start.name)
    worlds = f"{start.saved_by or start.world_size} -> {start.world_size} ranks"
    logger.info(
        "rank %d of run %r goes on from %s, %s, with %d live steps: %s in %d requests, %.1f s",
        start.rank, start.run, name, worlds, steps, size(taken.bytes_in), taken.requests, seconds,
    )  # fmt: skip


def _check_rank(found: Resume, rank: int | None, world_size: int | None) -> None:
    if rank not in (None, found.rank) or world_size not in (None, found.world_size):
        asked = ", ".join(f"{n}={v}" for n, v in (("rank", rank), ("world_size", world_size)) if v is not None)
        raise UsageError(
            f"{asked}: what is gone on from is that of rank {found.rank} of {found.world_size}; leave rank= and "
            "world_size= out, or take this rank's share of resharding.plan(checkpoint, world_size=...)"
        )


def _resumed(found: Resume, run: str | None) -> Resume:
    if run not in (None, found.run):
        raise UsageError(
            f"run={run!r}, and the checkpoint to resume from is of run {found.run!r}: leave run= out to go on with "
            f"{found.run!r} (which ends the session that has it), or begin {run!r} there with "
            f"arc.writer(run={run!r}, fork_from=...); a run's own newest is arc.checkpoints.of({run!r}).latest"
        )
    return found


def _forked(found: Resume, run: str | None) -> Resume:
    if run is None:
        raise UsageError(f"fork_from= begins a new run: name it with run=..., other than {found.run!r}")
    if run == found.run:
        raise UsageError(f"run={run!r} is that of the checkpoint: go on with it by resume=, or name another to fork")
    return replace(found, run=run, forked_from=ForkedFrom(found.run, found.name, found.checkpoint))
