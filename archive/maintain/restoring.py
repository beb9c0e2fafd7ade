"""Making an earlier state the newest again, by one more commit: undoing a forgetting, restoring a commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from archive.base import ConflictError, MissingObjectError, NotFoundError, UsageError
from archive.maintain.drafting import read_commits, with_since
from archive.maintain.objects import no_longer, note_forgotten
from archive.manifest import (
    Addition,
    Attempt,
    Change,
    Commit,
    CommitLog,
    Mark,
    RunEntry,
    Walk,
    new_session,
    read_of,
    sessions,
    tablefiles,
)
from archive.store import Storage
from archive.tables import FOLLOWING

_BETWEEN = frozenset({"compact", "merge", "restore"})  # what an undo cannot go back behind
_ROWS = ("segments", "checkpoints", *FOLLOWING)  # tables that a forgetting takes rows from


def undo(log: CommitLog) -> Commit:
    """Bring back what the newest forgetting let go of that is not undone yet; what came since stays."""
    log.catch_up()
    session = new_session()
    return log.commit(f"undo/{session}", Change("undo", partial(_undone, session), session=session))


def to_undo(log: CommitLog) -> Commit:
    """The forgetting that `undo` would bring back now; UsageError if there is none."""
    return _newest_forgetting(log.storage, log.catch_up())


def restore(log: CommitLog, number: int) -> Commit:
    """Make the archive as it was as of a commit. Each run gets a new session, so that nobody who writes now goes on."""
    log.catch_up()
    return log.commit(f"restore/{new_session()}", Change("restore", partial(_restored, number)))


# -- undo --------------------------------------------------------------------------------------------------------------


def _undone(session: str, parent: Commit, attempt: Attempt) -> Addition:
    storage = attempt.storage
    forgot = _newest_forgetting(storage, parent)
    since = _since(storage, parent, forgot.number)
    between = [one for one in since if one.kind in _BETWEEN]
    if between:
        raise ConflictError(
            f"commit {between[0].number} at {storage.url}, of kind {between[0].kind!r}, came after what commit "
            f"{forgot.number} forgot, so it cannot be undone; nothing was committed. arc.restore(commit="
            f"{forgot.number - 1}) goes back before both, and leaves what came since"
        )
    before = read_of(storage, forgot.number - 1, parent)
    write = partial(tablefiles.write, storage, session)
    files = {kind: with_since(storage, kind, getattr(before, kind), parent, forgot.number, write) for kind in _ROWS}
    runs = {run: _marked_before(entry, before.runs.get(run), forgot.number) for run, entry in parent.runs.items()}
    says = {"runs": parent.runs_with(runs), "undoes": forgot.number, "let_go": before.let_go or 0, **files}
    return _finished(storage, parent, says, since, f"commit {forgot.number} cannot be undone")


def _newest_forgetting(storage: Storage, parent: Commit) -> Commit:
    """The newest commit that let go and is not undone; an error if it is not one that can be."""
    if not parent.let_go:
        raise UsageError(f"nothing was forgotten at {storage.url} that is not undone yet: there is nothing to undo")
    found = read_of(storage, parent.let_go, parent)
    if found.kind != "forget":
        raise ConflictError(
            f"commit {found.number} at {storage.url}, of kind {found.kind!r}, is the newest that let go of something, "
            f"and only a 'forget' can be undone: use arc.restore(commit={found.number - 1})"
        )
    return found


def _marked_before(entry: RunEntry, before: RunEntry | None, forgot: int) -> RunEntry:
    """A run's entry whose newest checkpoints are read with the tables that they were read with before."""
    known = {} if before is None else before.marks
    marks: dict[str, Mark] = {
        name: replace(mark, manifest=known[name].manifest if name in known else None)
        for name, mark in entry.marks.items()
        if mark.manifest == forgot
    }
    return replace(entry, **marks)  # type: ignore[arg-type]


# -- restore -----------------------------------------------------------------------------------------------------------


def _restored(number: int, parent: Commit, attempt: Attempt) -> Addition:
    storage = attempt.storage
    if not 0 < number < parent.number:
        raise UsageError(f"commit={number}: give the number of a commit before the newest, {parent.number}")
    try:
        then = read_of(storage, number, parent)
    except MissingObjectError as e:
        raise NotFoundError(f"commit {number} is not in the archive at {storage.url}") from e
    runs = {run: _fenced(entry, parent.runs.get(run), parent.number + 1) for run, entry in then.runs.items()}
    says = {
        "runs": runs, "run_files": None, "undoes": number, "let_go": parent.number + 1, "branches": then.branches,
        "bases": {**parent.bases, **then.bases}, **{kind: getattr(then, kind) for kind in _ROWS},
    }  # fmt: skip
    return _finished(storage, parent, says, _since(storage, parent, number), f"commit {number} cannot be restored")


def _fenced(entry: RunEntry, now: RunEntry | None, number: int) -> RunEntry:
    """A run as it was, with a session of its own, which nobody has; `number`: of the commit that opens it."""
    known = dict.fromkeys([*entry.sessions, *(now.sessions if now else ())])
    superseded = tuple(known)[-sessions.REMEMBERED_SESSIONS :]
    return replace(
        entry, session=new_session(), opened=number, superseded=superseded, sequences={}, resumed_from=None,
        journal=None, stands_for=entry.stands_for or entry.session,
    )  # fmt: skip


# -- both --------------------------------------------------------------------------------------------------------------


def _since(storage: Storage, head: Commit, number: int) -> list[Commit]:
    """The commits after this one, oldest first."""
    return [one for _, one in read_commits(storage, head, range(number + 1, head.number + 1))]


def _finished(storage: Storage, parent: Commit, says: dict[str, Any], since: list[Commit], cannot: str) -> Addition:
    """The same with the table of what was forgotten; ConflictError if it leads to what was pruned since."""
    finds = Walk(storage)
    try:
        reach = finds.reach(parent.after("undo", **says, number=parent.number + 1, archive=parent.archive)).keys
    except MissingObjectError as e:
        raise ConflictError(f"{cannot}: something of it was pruned ({e}); nothing was committed") from e
    for commit, key in _pruned(storage, since):
        if key in reach:
            raise ConflictError(
                f"{cannot}: {storage.full_url(key)}, and maybe more, was pruned by commit {commit.number} at "
                f"{storage.url}; nothing was committed"
            )
    gone = no_longer(storage, finds.reach(parent).keys, reach | {ref.path for ref in parent.files("forgotten")})
    return {}, {**says, "forgotten": note_forgotten(storage, parent, gone, back=reach)}


def _pruned(storage: Storage, since: list[Commit]) -> Iterator[tuple[Commit, str]]:
    for commit in since:
        if commit.pruned is not None:
            table = tablefiles.load(storage, "pruned", [commit.pruned], ["key"])
            yield from ((commit, key) for key in table["key"].to_pylist())
