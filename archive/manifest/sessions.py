"""Who writes: rank, world size, run and session of a writer, and opening a session, which fences off earlier ones."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from archive.base import (
    AlreadyExistsError,
    AmbiguousWriteError,
    LetGoError,
    MissingObjectError,
    NotExclusiveError,
    SessionInUseError,
    UsageError,
    check_text,
    escape,
    layout,
)
from archive.manifest import commits, tablefiles, tables
from archive.manifest.branches import Branches, Origin
from archive.manifest.claims import read_claim
from archive.manifest.commit import Commit
from archive.manifest.commits import CommitLog
from archive.manifest.records import Claim, ForkedFrom, KeepRule, ResumedFrom, RunEntry
from archive.manifest.resumed import Resume, check_same_origin
from archive.manifest.tablefiles import Snapshot
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

REMEMBERED_SESSIONS = 100  # of a run, before its newest
MAX_SESSION_BYTES = 180  # of its escaped form; it is part of file names, which end at 255 bytes
DEFAULT_RUN = "main"
MAX_CONCURRENT = 16


@dataclass(frozen=True)
class Place:
    """One writer's place: which rank of which world, in which session of which run."""

    rank: int
    world_size: int
    run: str
    session: str


def place(rank: int | None, world_size: int | None, run: str, session: str | None) -> Place:
    """Fill in what is not given: from torch.distributed, else RANK and WORLD_SIZE, else a world of one."""
    rank = _rank() if rank is None else rank
    world_size = _world_size(rank) if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of a world of {world_size}; ranks count from 0")
    for value, what in ((run, "run"), (session or "-", "session")):
        if not check_text(value, what):
            raise UsageError(f"the {what} must not be empty")
    if len(escape(session or "-")) > MAX_SESSION_BYTES:
        raise UsageError(
            f"the session {session!r:.80} is too long: {MAX_SESSION_BYTES} bytes at most, three for each byte that is "
            "no letter, digit, '-' or '_'; give a shorter one"
        )
    return Place(rank, world_size, run, session or _session(world_size, run))


def _process_group() -> object | None:
    distributed = sys.modules.get("torch.distributed")
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if ready else None


def _rank() -> int:
    group = _process_group()
    return int(group.get_rank()) if group else int(os.environ.get("RANK", "0"))  # type: ignore[attr-defined]


def _world_size(rank: int) -> int:
    group = _process_group()
    if group:
        return int(group.get_world_size())  # type: ignore[attr-defined]
    return int(os.environ.get("WORLD_SIZE", str(rank + 1 if rank else 1)))


def new_session() -> str:
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def _session(world_size: int, run: str) -> str:
    """A name that all ranks of one start of the job share, and no other start has. In a process group each waits for
    all: no session begins before the last rank has planned what to go on from."""
    if world_size == 1:
        return new_session()
    group = _process_group()
    if group:
        names = [""] * int(group.get_world_size())  # type: ignore[attr-defined]
        group.all_gather_object(names, new_session())  # type: ignore[attr-defined]
        return names[0]
    named = named_session(run)
    if named is None:
        raise UsageError(
            f"a writer of one rank in a world of {world_size} needs session=: a name that all ranks of this start of "
            "the job share and no earlier start had (there is no process group, TORCHELASTIC_RUN_ID or SLURM_JOB_ID)"
        )
    return named


def named_session(run: str) -> str | None:
    """The session of a run in this start of the job, as torchrun or Slurm name it; None if neither does."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if job is None and "SLURM_JOB_ID" in os.environ:
        job, restart = "slurm-" + os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    if job in (None, "", "none"):
        return None
    return f"{job}-{restart}" + ("" if run == DEFAULT_RUN else f"-{run}")  # one job may write several runs


def open_session(
    log: CommitLog, who: Place, keep: KeepRule | None = None, resume: Resume | None = None, *, journal: bool = False,
    check: Callable[[Commit], None] = lambda head: None,
) -> None:  # fmt: skip
    """Take the place: one writer per session and rank, and the newest session of its run.

    keep: which checkpoints to retain, for the run from now on; None leaves it as it is.  resume: what the session goes
    on from; whichever rank says so first has it recorded.  journal: the same with whether it keeps a journal.
    check: called before the session is opened, unless it is already; nothing is written where that raises.
    """
    head = log.catch_up()
    _check_run(head, who, None if resume is None else resume.forked_from)
    if journal:
        _check_can_journal(head)
    origin = None if resume is None else resume.origin
    check_same_origin(head.runs.get(who.run), who.rank, who.session, origin)
    opened = _is_open(head, who)
    if not opened:
        check(head)
    _claim_rank(log.storage, who, head)
    if not opened:  # unless another rank has done so meanwhile: this finds its commit
        log.append(f"{who.session}/open/{who.run}", partial(_opened, log.storage, who, keep, resume, journal))
        commits.fence(log.head, who.run, who.session)
    if origin is not None and log.head.runs[who.run].resumed_from is None:
        log.append(f"{who.session}/resume/{who.run}", partial(_resumed, log.storage, who, origin))
    check_same_origin(log.head.runs.get(who.run), who.rank, who.session, origin)
    if journal and log.head.runs[who.run].journal is None:
        log.append(f"{who.session}/journal/{who.run}", partial(_journaled, who))


def _is_open(head: Commit, who: Place) -> bool:
    return who.run in head.runs and head.runs[who.run].session == who.session


def _opened(
    storage: Storage, who: Place, keep: KeepRule | None, resume: Resume | None, journal: bool, parent: Commit,
    attempt: int,
) -> Commit:  # fmt: skip
    """The commit that opens a session."""
    forked_from = None if resume is None else resume.forked_from
    _check_run(parent, who, forked_from)
    if resume is not None and resume.checkpoint is not None:
        _check_kept(storage, parent, resume.checkpoint, resume.name)
    before = parent.runs.get(who.run)
    if before is None:
        entry = RunEntry(who.session)
    elif who.session in before.superseded:
        raise commits.superseded(parent, who.run, who.session)
    else:
        known = before.sessions[-REMEMBERED_SESSIONS:]
        entry = replace(
            before, session=who.session, superseded=known, sequences={}, resumed_from=None, journal=None,
            stands_for=None,
        )  # fmt: skip
    entry = replace(entry, keep=keep or entry.keep, forked_from=forked_from or entry.forked_from)
    made = parent.after("session", run=who.run, session=who.session, runs={**parent.runs, who.run: entry})
    made = _with_journal(who, made) if journal else made
    origin = None if resume is None else resume.origin
    return made if origin is None else _branching(storage, who, origin, parent, made)


def _journaled(who: Place, parent: Commit, attempt: int) -> Commit:
    """For a session that a rank opened which keeps no journal."""
    commits.fence(parent, who.run, who.session)
    return _with_journal(who, parent.after("session", run=who.run, session=who.session))


def _with_journal(who: Place, made: Commit) -> Commit:
    """The commit of a session that keeps a journal, of which nothing is in a checkpoint."""
    entry = replace(made.runs[who.run], journal=dict.fromkeys(range(who.world_size), 0))
    known = layout.with_feature(made.format, layout.JOURNAL)
    return replace(made, runs={**made.runs, who.run: entry}, format=known)


def _check_can_journal(head: Commit) -> None:
    """Refuse what readers and writers of the first format would not understand."""
    if head.version < layout.WRITE_VERSION:
        raise UsageError(
            f"journal_s=: this archive is of format {head.version}, which knows no journal: upgrade it by "
            "arc.upgrade() or `archive upgrade URL`, which rewrites nothing. Libraries that know format "
            f"{head.version} alone can no longer open it then"
        )


def _resumed(storage: Storage, who: Place, origin: Origin, parent: Commit, attempt: int) -> Commit:
    """For a session that a rank opened which goes on from nothing."""
    commits.fence(parent, who.run, who.session)
    return _branching(storage, who, origin, parent, parent.after("session", run=who.run, session=who.session))


def _branching(storage: Storage, who: Place, origin: Origin, parent: Commit, made: Commit) -> Commit:
    """The commit of a session, with what the session goes on from."""
    rows = Branches({who.session: origin}, {who.session: who.run}).columns()
    table = tables.from_columns("branches", rows)
    files = tablefiles.add_rows(storage, who.session, "branches", parent, table, fold=True)
    entry = replace(made.runs[who.run], resumed_from=ResumedFrom(origin.session, origin.commit))
    return replace(made, branches=files, runs={**made.runs, who.run: entry})


def _check_run(head: Commit, who: Place, forked_from: ForkedFrom | None) -> None:
    """A session is of one run; and a run begins once, but for a fork without a whole checkpoint,
    which loses nothing."""
    for run, entry in head.runs.items():
        if run != who.run and who.session in entry.sessions:
            raise SessionInUseError(
                f"session {who.session!r} is one of run {run!r}, not of {who.run!r}; give a session name of its own"
            )
    present = head.runs.get(who.run)
    if forked_from is None or present is None or present.session == who.session:
        return
    if present.forked_from != forked_from or present.latest is not None:
        raise UsageError(
            f"run {who.run!r} is there already, so it cannot begin at checkpoint {forked_from.name!r} of run "
            f"{forked_from.run!r}: go on with it by resume=arc.checkpoints.of({who.run!r}).latest, or give another run="
        )


def _check_kept(storage: Storage, parent: Commit, number: int, name: str | None) -> None:
    """Refuse to go on from a checkpoint that was forgotten."""
    if parent.let_go is None or number > parent.let_go:
        return
    marked = {mark.commit for entry in parent.runs.values() for mark in entry.marks.values()}
    kept = tablefiles.load(storage, "checkpoints", parent.files("checkpoints"), ["commit"])["commit"].to_pylist()
    if number not in marked and number not in kept:
        raise LetGoError(
            f"checkpoint {name!r} (commit {number}) at {storage.url} was forgotten by commit {parent.let_go} at the "
            "latest: go on from one of arc.checkpoints, or bring it back by arc.undo() or arc.restore(commit=...)"
        )


def _claim_rank(storage: Storage, who: Place, head: Commit) -> None:
    claim = Claim(who.run, who.session, who.rank, secrets.token_hex(8), head.sighting)
    data = json.dumps(claim.to_json()).encode()
    key = layout.rank_key(who.session, who.rank)
    try:
        storage.create(key, data)
        return
    except AmbiguousWriteError:
        if storage.exists(key) and storage.get_head(key, len(data) + 1) == data:
            return
        storage.create(key, data)
        return
    except AlreadyExistsError as e:
        raise SessionInUseError(
            f"rank {who.rank} of session {who.session!r} at {storage.url} already has, or had, a writer; a restarted "
            "job needs a session name of its own (session=...)"
        ) from e


def check_exclusive(storage: Storage, archive_json: bytes, *, single_writer: bool) -> None:
    """Make sure that the store has a create-only put, by creating what is there already."""
    if single_writer:
        return
    try:
        storage.create(layout.ARCHIVE_KEY, archive_json)
    except AlreadyExistsError:
        return
    except AmbiguousWriteError:
        return
    raise NotExclusiveError(
        f"the store at {storage.url} let an existing object be created again, so two writers would overwrite each "
        "other's commits; use another store, or open with single_writer=True if there is but one writer"
    )


# -- runs of sessions -------------------------------------------------------------------------------------------------


def run_of_session(snapshot: Snapshot) -> dict[str, str | None]:
    """Session -> run, for all sessions that have rows; None where nothing says it.

    A commit names each run's newest session and the hundred before it. Of others, and of sessions that came along with
    the episodes of another archive, the claim of one of their ranks says it.
    """
    known: dict[str, str | None] = {**_named(snapshot.commit)}
    table = snapshot.columns(["session", "rank"])
    sessions = [s for s in _distinct(table["session"]) if s not in known]
    if sessions:
        claims = [(s, _a_rank(table, s)) for s in sessions]
        with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
            found = pool.map(lambda claim: _claimed(snapshot.storage, *claim), claims)
            known |= dict(zip(sessions, found, strict=True))
    return known


def _named(commit: Commit) -> dict[str, str]:
    """What the commit itself says."""
    out: dict[str, str] = {}
    for run, entry in commit.runs.items():
        out |= dict.fromkeys(entry.sessions, run)
    return out


def _distinct(column: pa.ChunkedArray) -> list[str]:
    return [s for s in column.unique().to_pylist() if s is not None]


def _a_rank(table: pa.Table, session: str) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    return int(table["rank"][pc.index(table["session"].cast(pa.string()), session).as_py()].as_py())


def _claimed(storage: Storage, session: str, rank: int) -> str | None:
    """What a rank of the session said when it began; None if that is gone, or says nothing of a run."""
    try:
        return read_claim(storage, layout.rank_key(session, rank)).run or None
    except MissingObjectError:
        return None
