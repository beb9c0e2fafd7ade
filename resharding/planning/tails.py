"""What a plan does with what a run added after its newest checkpoint, and a journal kept."""

from __future__ import annotations

from archive.base import UsageError
from archive.checkpoint import Checkpoint, Checkpoints
from archive.journal import recover
from archive.manifest import Commit, CommitLog, Origin, commits, named_session

LIVE, ARCHIVE, IGNORE = TAILS = ("live", "archive", "ignore")


def with_tails(checkpoint: Checkpoint, tails: str | None, session: str | None) -> tuple[Checkpoint, Origin | None]:
    """The checkpoint to plan, and what a session that resumes goes on from, if not what the checkpoint says.

    "live": the checkpoint with what the journals of its run hold beyond it, recovered now if nobody did yet.
    "archive": the checkpoint itself, but the session sees the steps beyond it, as archived ones.  "ignore": the
    checkpoint as it is; what came after is left behind.  None: "live" where the run keeps a journal and this is its
    newest whole checkpoint, in an archive that is not open as of some commit; else "ignore".
    session: that is to go on (default: as torchrun or Slurm name it). A faster rank may have begun it; then its journal
    is no tail, and all ranks go on from what that one did.
    """
    if tails not in (None, *TAILS):
        raise UsageError(f"tails={tails!r}: give {', '.join(map(repr, TAILS))}, or None to take in what is journaled")
    if tails == IGNORE or (tails is None and not _keeps_journal(checkpoint)):
        return checkpoint, None
    log = CommitLog(checkpoint.snapshot.storage, checkpoint.archive_id, checkpoint.served_by)
    if not _has_begun(log.catch_up(), checkpoint.run, session):
        recover(log, checkpoint.run)
    newest = _newest(checkpoint, log.catch_up())
    if newest is None:
        if tails is None:
            return checkpoint, None
        raise UsageError(
            f"tails={tails!r}: checkpoint {checkpoint.name!r} is not the newest whole one of run {checkpoint.run!r}, "
            "so what came after it is no tail; plan arc.checkpoints.latest, or with tails='ignore'"
        )
    return (checkpoint, newest.origin) if tails == ARCHIVE else (newest, None)


def _keeps_journal(checkpoint: Checkpoint) -> bool:
    entry = checkpoint.commit.runs.get(checkpoint.run)
    return entry is not None and entry.journal is not None and not checkpoint.later.read_only


def _has_begun(head: Commit, run: str, session: str | None) -> bool:
    """Whether another rank has begun the session that is to go on."""
    entry = head.runs.get(run)
    return entry is not None and entry.session == (named_session(run) if session is None else session)


def _newest(checkpoint: Checkpoint, head: Commit) -> Checkpoint | None:
    """The run's newest whole checkpoint, if it is this one or was recovered from it; else None."""
    storage = checkpoint.snapshot.storage
    found = Checkpoints(storage, head).newest(run=checkpoint.run, replay=True)
    if found is None or found.number == checkpoint.number:
        return None if found is None else checkpoint
    number: int | None = found.number
    while number is not None and number > checkpoint.number:
        made = commits.read_of(storage, number, head).checkpoint
        number = None if made is None or made.recovered is None else made.recovered.base
    return found if number == checkpoint.number else None
