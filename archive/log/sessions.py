"""The place of a writer (rank, world size, run and session), and opening a session, which fences off earlier ones."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from archive import tables
from archive.base import (
    AlreadyExistsError,
    CorruptStateError,
    SessionInUseError,
    SupersededError,
    UsageError,
    check_text,
    escape,
    layout,
    process_group,
)
from archive.log.commit import Commit
from archive.log.log import Addition, Attempt, Change, CommitLog, Requirement, new_session
from archive.log.records import Claim, ForkedFrom, KeepRule, ResumedFrom, RunEntry
from archive.store import Storage, smallfiles
from archive.tables import MOST_RANKS

if TYPE_CHECKING:
    import pyarrow as pa

REMEMBERED_SESSIONS = 100  # of a run, before its newest
MAX_SESSION_BYTES = 180  # of its escaped form; it is part of file names, which end at 255 bytes
DEFAULT_RUN = "main"
Sequences = Mapping[int, int]  # rank -> its segments below this number
_BRANCH = ("session", "run", "parent", "parent_run", "rank", "sequence", "resumed_from", "trained")
_CLAIM = re.compile(r"rank-[0-9]{5,}\.json")


class Origin(NamedTuple):
    """The checkpoint that a session goes on from: the session that made it, and the offsets of its ranks.

    trained: the offsets that its weights know of; None: the same. Of ledger rows "trained" only those below count.
    """

    session: str
    run: str
    commit: int
    sequences: Sequences
    trained: Sequences | None = None


def branch_rows(origins: Mapping[str, Origin], runs: Mapping[str, str]) -> pa.Table:
    """Rows of the branches table: the origins of sessions. runs: the run of each of these sessions."""
    rows: list[tuple[Any, ...]] = []
    for name, origin in origins.items():
        for rank, sequence in (origin.sequences or {0: 0}).items():
            trained = None if origin.trained is None else origin.trained.get(rank, 0)
            rows.append((name, runs[name], origin.session, origin.run, rank, sequence, origin.commit, trained))
    return tables.from_columns("branches", {column: [row[at] for row in rows] for at, column in enumerate(_BRANCH)})


@dataclass(frozen=True)
class Place:
    """The identity of one writer: its rank and world size, its session and run."""

    rank: int
    world_size: int
    run: str
    session: str

    def newest(self, parent: Commit) -> None:
        """Raise unless its session is the newest of its run. Every commit of the writer requires this."""
        if self.run not in parent.runs or parent.runs[self.run].session != self.session:
            raise self.superseded(parent.runs[self.run].session if self.run in parent.runs else None)

    def superseded(self, by: str | None) -> SupersededError:
        """The error of a session that is not the newest of its run."""
        return SupersededError(
            f"session {self.session!r} of run {self.run!r} was replaced by session {by!r}; nothing was committed. "
            "This process belongs to an earlier start of the job: stop it, or open a new writer to take over"
        )


def place(rank: int | None, world_size: int | None, run: str, session: str | None) -> Place:
    """A Place with the gaps filled in: from torch.distributed, else RANK and WORLD_SIZE, else a world of one."""
    group = process_group() if rank is None or world_size is None else None
    if rank is None:
        rank = int(group.get_rank() if group else os.environ.get("RANK", "0"))
    if world_size is None:
        world_size = int(group.get_world_size() if group else os.environ.get("WORLD_SIZE", rank + 1 if rank else 1))
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of a world of {world_size}; ranks count from 0")
    if world_size > MOST_RANKS:
        raise UsageError(f"a world of {world_size} ranks is larger than the format allows, {MOST_RANKS}")
    for value, what in ((run, "run"), (session or "-", "session")):
        if not check_text(value, what):
            raise UsageError(f"the {what} must not be empty")
    if len(escape(session or "-")) > MAX_SESSION_BYTES:
        raise UsageError(
            f"the session {session!r:.80} is too long: {MAX_SESSION_BYTES} bytes at most, three for each byte that is "
            "no letter, digit, '-' or '_'; give a shorter one"
        )
    return Place(rank, world_size, run, session or _session(world_size, run))


def _session(world_size: int, run: str) -> str:
    """A name that all ranks of one start of the job share, and no other start has. In a process group each rank waits
    for all: no session begins before the last rank has planned its origin."""
    if world_size == 1:
        return new_session()
    group = process_group()
    if group:
        names = [""] * int(group.get_world_size())
        group.all_gather_object(names, new_session())
        return names[0]
    named = named_session(run)
    if named is None:
        raise UsageError(
            f"a writer of one rank in a world of {world_size} needs session=: a name that all ranks of this start of "
            "the job share and no earlier start had (there is no process group, TORCHELASTIC_RUN_ID or SLURM_JOB_ID)"
        )
    return named


def named_session(run: str) -> str | None:
    """The session name that torchrun or Slurm give this start of the job; None without them."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if job is None and "SLURM_JOB_ID" in os.environ:
        job, restart = "slurm-" + os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    if job in (None, "", "none"):
        return None
    return f"{job}-{restart}" + ("" if run == DEFAULT_RUN else f"-{run}")  # one job may write several runs


def open_session(
    log: CommitLog,
    who: Place,
    seen: int,
    keep: KeepRule | None = None,
    origin: Origin | None = None,
    forked_from: ForkedFrom | None = None,
    *,
    journal: bool = False,
    nodes: int = 0,
    check: Callable[[Commit], None] = lambda head: None,
    take_over: Callable[[], None] = lambda: None,
    again: bool = False,
) -> None:
    """Open a session and claim its rank: one writer per session and rank, and the newest session of its run.

    seen: the newest commit that was known at the decision.  keep: retention of checkpoints, for the run from
    now on; None leaves it as it is.  origin: the checkpoint that it goes on from; the first rank to open has it
    recorded.  journal: likewise, True if it has a journal.  nodes: likewise, how many nodes keep one for their ranks.
    check: called before the session is opened, unless it is open already; if it raises, nothing is written.
    take_over: likewise, called when its rank is claimed.  again: an earlier try of the same may have claimed it.
    """

    def may_open(head: Commit) -> None:
        _check_run(head, who, forked_from)
        _check_seen(head, who, seen)

    head = log.catch_up()
    may_open(head)
    _check_same_origin(head, who, origin)
    is_open = who.run in head.runs and head.runs[who.run].session == who.session
    if not is_open:
        _check_claimed(log.storage, head, who)
        check(head)
    with suppress(*([SessionInUseError] if again else [])):
        _claim_rank(log.storage, who, head)
    while not is_open:  # unless another rank has done so meanwhile: this finds its commit
        had_journal = _keeps_journal(log.head, who)
        take_over()
        newest = _newest_of_other(log.head, who)

        def may_open_now(head: Commit, had_journal: bool = had_journal, newest: set[str] = newest) -> None:
            may_open(head)
            if (_keeps_journal(head, who) and not had_journal) or _newest_of_other(head, who) != newest:
                raise _WentOnError

        try:
            _say(log, "open", who, partial(_opened, who, keep, forked_from), origin, journal, may_open_now, nodes)
        except _WentOnError:
            log.catch_up()
            continue
        is_open = True
        who.newest(log.head)
    if origin is not None and log.head.runs[who.run].resumed_from is None:  # its opener gave no origin
        _say(log, "resume", who, lambda parent: parent.runs[who.run], origin, False, who.newest)
    _check_same_origin(log.head, who, origin)
    if journal and log.head.runs[who.run].journal is None:  # its opener keeps none
        _say(log, "journal", who, lambda parent: parent.runs[who.run], None, True, who.newest, nodes)


class _WentOnError(Exception):
    """The session before has made another checkpoint, or begun a journal, since it was taken over: do that again."""


def _keeps_journal(head: Commit, who: Place) -> bool:
    """True if the session whose place is taken keeps a journal."""
    entry = head.runs.get(who.run)
    return entry is not None and entry.session != who.session and bool(entry.journal)


def _newest_of_other(head: Commit, who: Place) -> set[str]:
    """The names of the newest checkpoints of the session whose place is taken."""
    entry = head.runs.get(who.run)
    others = [] if entry is None or entry.session == who.session else entry.marks.values()
    return {mark.name for mark in others}


def _say(
    log: CommitLog,
    what: str,
    who: Place,
    entry_of: Callable[[Commit], RunEntry],
    origin: Origin | None,
    journal: bool,
    requirement: Requirement,
    nodes: int = 0,
) -> None:
    """Commit the run's entry, with the session's origin, and empty journals, of so many nodes, if it keeps some."""

    def adds(parent: Commit, attempt: Attempt) -> Addition:
        entry, known, rows = entry_of(parent), parent.format, {}
        if origin is not None:
            entry = replace(entry, resumed_from=ResumedFrom(origin.session, origin.commit))
            rows["branches"] = branch_rows({who.session: origin}, {who.session: who.run})
        if journal:
            entry = replace(entry, journal=dict.fromkeys(range(who.world_size), 0))
            known = layout.with_feature(known, layout.JOURNAL)
        if journal and nodes:
            entry = replace(entry, nodes=dict.fromkeys(range(nodes), 0))
            known = layout.with_feature(known, layout.NODES)
        return rows, {"runs": parent.runs_with({who.run: entry}), "format": known}

    change = Change("session", adds, [requirement], who.run, who.session)
    log.commit(f"{who.session}/{what}/{who.run}", change)


def _check_seen(head: Commit, who: Place, seen: int) -> None:
    """Refuse to end a session that was opened after the decision to open this one."""
    entry = head.runs.get(who.run)
    if entry is None or entry.session == who.session:
        return
    if who.session in entry.superseded:
        raise who.superseded(entry.session)
    if (entry.opened or 0) > seen:
        raise SupersededError(
            f"session {entry.session!r} of run {who.run!r} was opened by commit {entry.opened}, and what session "
            f"{who.session!r} begins from was chosen as of commit {seen}: it would end a newer start of the job, "
            "and leave behind what that one has written; nothing was written. If this process belongs to an earlier "
            "start, stop it. To take over, look again: arc.refresh(), take the checkpoint from arc.checkpoints and "
            "plan it anew if you plan, then open the writer"
        )


def _opened(who: Place, keep: KeepRule | None, forked_from: ForkedFrom | None, parent: Commit) -> RunEntry:
    """The run's entry with this session as its newest."""
    before = parent.runs.get(who.run)
    if before is None:
        entry = RunEntry(who.session)
    else:
        known = before.sessions[-REMEMBERED_SESSIONS:]
        entry = replace(
            before,
            session=who.session,
            superseded=known,
            sequences={},
            resumed_from=None,
            journal=None,
            nodes=None,
            stands_for=None,
        )
    return replace(
        entry, opened=parent.number + 1, keep=keep or entry.keep, forked_from=forked_from or entry.forked_from
    )


def _check_run(head: Commit, who: Place, forked_from: ForkedFrom | None) -> None:
    """A session is of one run. A run begins once; a fork without a whole checkpoint may begin again, losing nothing."""
    for run, entry in head.own_runs.items():
        if run != who.run and who.session in entry.sessions:
            raise _of_another_run(who, run)
    present = head.runs.get(who.run)
    if forked_from is None or present is None or present.session == who.session:
        return
    if present.forked_from != forked_from or present.latest is not None:
        raise UsageError(
            f"run {who.run!r} is there already, so it cannot begin at checkpoint {forked_from.name!r} of run "
            f"{forked_from.run!r}: go on with it by resume=arc.checkpoints.of({who.run!r}).latest, or give another run="
        )


def _check_same_origin(head: Commit, who: Place, origin: Origin | None) -> None:
    """Require that all ranks go on from one checkpoint, or some steps would be held twice and others not at all."""
    entry = head.runs.get(who.run)
    if origin is None or entry is None or entry.session != who.session or entry.resumed_from is None:
        return
    if entry.resumed_from.commit != origin.commit:
        raise UsageError(
            f"rank {who.rank} resumes from commit {origin.commit}, but another rank of session {who.session!r} did "
            f"from commit {entry.resumed_from.commit}: have all ranks plan before any of them opens its writer (a "
            "barrier), or one of them plan for all, or name the session to resharding.plan(checkpoint, session="
            f"{who.session!r}); then start the session anew, under another name"
        )


def _check_claimed(storage: Storage, head: Commit, who: Place) -> None:
    """The check of `_check_run` for runs outside the newest commit itself: claims of their sessions name them."""
    if head.run_files is None:
        return
    folder = f"sessions/{escape(who.session)}"
    claimed = next((name for name in storage.list(folder) if name.endswith(".json")), None)
    if claimed is not None and (run := read_claim(storage, f"{folder}/{claimed}").run) != who.run:
        raise _of_another_run(who, run)


def _of_another_run(who: Place, run: str) -> SessionInUseError:
    return SessionInUseError(
        f"session {who.session!r} is one of run {run!r}, not of {who.run!r}; give a session name of its own"
    )


def _claim_rank(storage: Storage, who: Place, head: Commit) -> None:
    claim = Claim(who.run, who.session, who.rank, secrets.token_hex(8), head.sighting)
    try:
        storage.create_once(layout.rank_key(who.session, who.rank), json.dumps(claim.to_json()).encode())
    except AlreadyExistsError as e:
        raise SessionInUseError(
            f"rank {who.rank} of session {who.session!r} at {storage.url} already has, or had, a writer; a restarted "
            "job needs a session name of its own (session=...)"
        ) from e


def read_claim(storage: Storage, key: str) -> Claim:
    """The claim of a writer; CorruptStateError if its content does not match its name."""
    claim = smallfiles.read_small(storage, key, Claim, CorruptStateError)
    if layout.rank_key(claim.session, claim.rank) != key:
        raise CorruptStateError(
            f"{storage.full_url(key)} is the claim of rank {claim.rank} of session {claim.session!r}: it does not "
            "belong there; put the right one back from a copy"
        )
    return claim


def claim_keys(storage: Storage) -> list[str]:
    """The keys of the claims of all writers there ever were."""
    folders = [f"sessions/{name.rstrip('/')}" for name in storage.list("sessions") if name.endswith("/")]
    return [f"{folder}/{name}" for folder in folders for name in storage.list(folder) if _CLAIM.fullmatch(name)]
