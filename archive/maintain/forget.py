"""Forgetting applies retention: the decision as of a commit, and the commit that carries it out; undo, and restore.

Nothing is deleted: `undo` brings back what was forgotten, until it is pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from archive.base import ConflictError, MissingObjectError, NotFoundError, UsageError, logger
from archive.checkpoint import Keep
from archive.index import Walk
from archive.jobs import Crew
from archive.log import (
    Addition,
    Attempt,
    Change,
    Commit,
    CommitLog,
    Mark,
    Place,
    Requirement,
    RunEntry,
    commits,
    new_session,
    read_of,
    sessions,
    tablefiles,
)
from archive.maintain.draft import Draft, as_commit, draft, redraft, with_since, with_tables
from archive.maintain.objects import no_longer, note_forgotten
from archive.maintain.plans import ForgetPlan, Progress
from archive.maintain.redaction import Redaction, transaction
from archive.maintain.retention import UNREFERENCED, ForgetRequest
from archive.maintain.survivors import Decision, decide
from archive.observe import operation
from archive.store import Storage
from archive.tables import FOLLOWING

CHECKPOINTS = "checkpoints"
MOST_TRIES = 16
_BETWEEN = frozenset({"compact", "merge", "restore"})  # kinds that an undo cannot go back behind
_ROWS = ("segments", "checkpoints", *FOLLOWING)  # tables that a forgetting takes rows from

Shown = Callable[[Commit], None]


def plan(log: CommitLog, asked: ForgetRequest, shown: Shown, redaction: Redaction | None = None) -> ForgetPlan:
    """A plan of what a forgetting would do to the newest commit; nothing is written. shown: called with the commit,
    once it is made."""
    decision = decide(log.storage, log.catch_up(), asked)
    dry = Attempt(log.storage, is_dry=True)
    made = None if decision.empty else _Forgetting(asked, redaction).drafted(decision, dry)
    gone = {} if made is None else made.gone

    def carry(plan: ForgetPlan, crew: Crew, job: str | None, progress: Progress | None) -> ForgetPlan:
        forgetting, call = _Forgetting(asked, redaction, decision), None
        key, own, requires = transaction(new_session()), log, list[Requirement]()
        if redaction is not None:
            call = redaction.rewrite(log, forgetting.decided(log.storage, log.catch_up()), crew, job, progress)
            key, own, requires = transaction(call.session), call.log_of(log), [call.not_ended]
        gone = {"checkpoints": plan.checkpoints_gone, "episodes": plan.episodes_gone}
        commit = _commit(own, forgetting, key, requires, **gone)
        if call is not None:
            call.finish()
        shown(commit)
        return replace(plan, made=commit)

    return ForgetPlan(
        url=log.storage.url,
        as_of=decision.parent.number,
        asked=str(asked),
        checkpoints=tuple(decision.fates),
        episodes=decision.episodes,
        episodes_gone=decision.episodes_gone,
        objects=len(gone),
        bytes=sum(gone.values()),
        redacted=None if redaction is None else redaction.told(decision, made),
        _carry=carry,
    )


# -- after checkpoints -------------------------------------------------------------------------------------------------


def check_writer(head: Commit, run: str, keep: Keep | None, forget: str) -> None:
    """Refuse a writer whose forget= has no effect, or is unknown."""
    if forget not in (CHECKPOINTS, UNREFERENCED):
        raise UsageError(f"forget={forget!r}: give {CHECKPOINTS!r}, {UNREFERENCED!r} or None")
    known = head.runs.get(run)
    if keep == Keep() or (keep is None and (known is None or known.keep is None)):
        raise UsageError(f"forget={forget!r} forgets what keep= does not retain: give keep=, as archive.Keep(last=5)")


def after_checkpoint(storage: Storage, archive_id: str, place: Place, forget: str) -> Callable[[Commit], None]:
    """A function that applies the retention of a run after a checkpoint of its writer."""
    episodes = UNREFERENCED if forget == UNREFERENCED else None

    def let_go(made: Commit) -> None:
        log = CommitLog(storage, archive_id, made)  # of its own: the writer's is not to wait for it
        entry = log.catch_up().runs[place.run]
        if entry.keep is None:
            return
        asked = ForgetRequest(Keep.of(entry.keep), episodes, run=place.run, anyhow=True)
        try:
            _commit(log, _Forgetting(asked), f"{place.session}/forget/{made.number}", [place.newest])
        except NothingToForgetError:
            return

    return let_go


# -- the commit --------------------------------------------------------------------------------------------------------


class NothingToForgetError(ConflictError):
    """Nothing is left to forget."""


class _Forgetting:
    """The change of a forgetting, drafted anew for each commit that it is to follow.

    planned: what it may forget, if a plan was shown before; None: whatever the request selects by then.
    """

    def __init__(
        self, asked: ForgetRequest, redaction: Redaction | None = None, planned: Decision | None = None
    ) -> None:
        self.asked = asked
        self._redaction = redaction
        self._planned = planned
        self._done: Draft | None = None  # by an earlier try

    def adds(self, parent: Commit, attempt: Attempt) -> Addition:
        """The keys of the commit that is to follow this one."""
        if attempt.number == MOST_TRIES:
            raise ConflictError(
                f"others committed {MOST_TRIES} times at {attempt.storage.url} while {self.asked} was to be committed; "
                "nothing was forgotten: ask again. A writer that forgets does so after its next checkpoint"
            )
        made = self._again(parent, attempt) or self._anew(parent, attempt)
        decision, storage = made.decision, attempt.storage
        removed = {
            "checkpoints": len(decision.fates) - len(decision.kept),
            "episodes": decision.episodes_gone,
            "objects": len(made.gone),
            "bytes": sum(made.gone.values()),
        }
        if self._redaction is not None:
            told = self._redaction.told(decision, made)
            if told.obstacles:
                why = "; ".join(told.obstacles)
                raise ConflictError(f"the redaction at {storage.url} was not done: {why}. Plan again")
            removed["redacted"] = told.episodes
        return {}, {**made.says, "removed": removed, "forgotten": note_forgotten(storage, parent, made.gone)}

    def drafted(self, decision: Decision, attempt: Attempt) -> Draft:
        """The draft of a decision, but for its table of forgotten objects."""
        if self._redaction is not None:
            decision = self._redaction.applied(decision, is_dry=attempt.is_dry)
        return draft(decision, partial(attempt.write, new_session()))

    def _again(self, parent: Commit, attempt: Attempt) -> Draft | None:
        """The draft of an earlier try, made to follow this commit; None if it must be decided anew."""
        if self._done is None or self._redaction is not None:
            return None
        return redraft(self._done, parent, self.asked.run, partial(attempt.write, new_session()))

    def _anew(self, parent: Commit, attempt: Attempt) -> Draft:
        """The draft of a decision as of this commit; ConflictError if that differs from what was planned."""
        self._done = self.drafted(self.decided(attempt.storage, parent), attempt)
        return self._done

    def decided(self, storage: Storage, parent: Commit) -> Decision:
        """The decision as of a commit; ConflictError if it differs from what was planned."""
        planned, url = self._planned, storage.url
        if planned is not None and parent.digest == planned.parent.digest:
            return planned
        decision = decide(storage, parent, self.asked)
        if planned is not None and planned.goes != decision.goes:
            raise ConflictError(
                f"the archive at {url} changed since commit {planned.parent.number}, so that other things would "
                "be forgotten than were planned; nothing was committed: plan again"
            )
        if decision.empty:
            raise NothingToForgetError(f"nothing at {url} is left to be forgotten: plan again")
        if planned is not None:
            self._planned = decision
        return decision


def _commit(
    log: CommitLog, forgetting: _Forgetting, transaction: str, requires: Sequence[Requirement] = (), **about: Any
) -> Commit:
    """Commit a forgetting. about: attributes for traces that are known before."""
    with operation("forget", **about) as done:
        made = log.commit(transaction, Change("forget", forgetting.adds, requires))
    gone = (made.removed.get("checkpoints", 0), made.removed.get("episodes", 0))
    logger.info(
        "commit %d: retention expired %d checkpoints and %d episodes (%s), %.1f s",
        made.number,
        *gone,
        forgetting.asked,
        done.seconds,
    )
    return made


# -- undo --------------------------------------------------------------------------------------------------------------


def undo(log: CommitLog) -> Commit:
    """Bring back what the newest forgetting that is not undone forgot; what came since stays."""
    return log.commit(f"undo/{new_session()}", Change("undo", _undone))


def to_undo(log: CommitLog) -> Commit:
    """The forgetting that `undo` would bring back now; UsageError if there is none."""
    return _newest_forgetting(log.storage, log.catch_up())


def _undone(parent: Commit, attempt: Attempt) -> Addition:
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
    write = partial(attempt.write, new_session())
    files = {kind: with_since(storage, kind, getattr(before, kind), parent, forgot.number, write) for kind in _ROWS}
    runs = {run: _with_tables_before(entry, before.runs.get(run), forgot.number) for run, entry in parent.runs.items()}
    says = {"runs": parent.runs_with(runs), "undoes": forgot.number, "let_go": before.let_go or 0, **files}
    return _brought_back(storage, parent, says, since, f"commit {forgot.number} cannot be undone")


def _newest_forgetting(storage: Storage, parent: Commit) -> Commit:
    """The newest commit that forgot and is not undone; an error if it cannot be undone."""
    if not parent.let_go:
        raise UsageError(f"nothing was forgotten at {storage.url} that is not undone yet: there is nothing to undo")
    found = read_of(storage, parent.let_go, parent)
    if found.kind != "forget":
        raise ConflictError(
            f"commit {found.number} at {storage.url}, of kind {found.kind!r}, is the newest that dropped something, "
            f"and only a 'forget' can be undone: use arc.restore(commit={found.number - 1})"
        )
    return found


def _with_tables_before(entry: RunEntry, before: RunEntry | None, forgot: int) -> RunEntry:
    """A run's entry whose newest checkpoints are served by the tables that served them before."""
    known: Mapping[str, Mark] = {} if before is None else before.marks

    def manifest(name: str, mark: Mark) -> int | None:
        if mark.manifest != forgot:
            return mark.manifest
        return known[name].manifest if name in known else None

    return with_tables(entry, manifest)


# -- restore -----------------------------------------------------------------------------------------------------------


def restore(log: CommitLog, number: int) -> Commit:
    """Restore an earlier commit as a new one. Each run gets a new session, so that no present writer goes on."""
    return log.commit(f"restore/{new_session()}", Change("restore", partial(_restored, number)))


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
        "runs": runs,
        "run_files": None,
        "undoes": number,
        "let_go": parent.number + 1,
        "branches": then.branches,
        "bases": {**parent.bases, **then.bases},
        **{kind: getattr(then, kind) for kind in _ROWS},
    }
    return _brought_back(storage, parent, says, _since(storage, parent, number), f"commit {number} cannot be restored")


def _fenced(entry: RunEntry, now: RunEntry | None, number: int) -> RunEntry:
    """A run as it was, with a session of its own that no process has; `number`: of the commit that opens it."""
    known = dict.fromkeys([*entry.sessions, *(now.sessions if now else ())])
    superseded = tuple(known)[-sessions.REMEMBERED_SESSIONS :]
    return replace(
        entry,
        session=new_session(),
        opened=number,
        superseded=superseded,
        sequences={},
        resumed_from=None,
        journal=None,
        nodes=None,
        stands_for=entry.stands_for or entry.session,
    )


# -- both --------------------------------------------------------------------------------------------------------------


def _since(storage: Storage, head: Commit, number: int) -> list[Commit]:
    """The commits after this one, oldest first."""
    return list(commits.read_all(storage, range(number + 1, head.number + 1), head))


def _brought_back(
    storage: Storage, parent: Commit, says: Mapping[str, Any], since: Sequence[Commit], cannot: str
) -> Addition:
    """The keys with the table of forgotten objects; ConflictError if they lead to something that was pruned since."""
    walk = Walk(storage)
    try:
        reach = walk.reach(as_commit(parent, says)).keys
    except MissingObjectError as e:
        raise ConflictError(f"{cannot}: some of it was pruned ({e}); nothing was committed") from e
    for commit in since:
        lists = [] if commit.pruned is None else [commit.pruned]
        if lost := reach.intersection(tablefiles.load(storage, "pruned", lists, ["key"])["key"].to_pylist()):
            raise ConflictError(
                f"{cannot}: {storage.full_url(min(lost))}, and maybe more, was pruned by commit {commit.number} at "
                f"{storage.url}; nothing was committed"
            )
    kept = reach | {ref.path for ref in parent.files("forgotten")}
    gone = no_longer(storage, parent, walk.reach(parent).keys, kept)
    return {}, {**says, "forgotten": note_forgotten(storage, parent, gone, back=reach)}
