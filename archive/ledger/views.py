"""A ledger as of a commit or a checkpoint: to be looked at only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archive.base import NotFoundError, cached_property
from archive.ledger import loading
from archive.ledger.archived import Archived
from archive.ledger.batches import SAID
from archive.ledger.cursors import Cursors
from archive.ledger.folding import Found, Seen, awaited, fold, in_flight, release
from archive.ledger.keys import Ended
from archive.ledger.looking import Standing
from archive.ledger.rounds import Rounds
from archive.ledger.terms import Key
from archive.manifest import Commit, Sequences
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa


class LedgerView(Standing):
    """What had become of prompts by then, on all ranks. `to_reissue()` is what a session that goes on from there would
    do again. Reads tables once, when first looked at."""

    def __init__(
        self, storage: Storage, commit: Commit, name: str, session: str, own: Sequences | None = None,
        trained: Sequences | None = None,
    ) -> None:  # fmt: skip
        """session: who looks; own: of its own rows those below these numbers; None: all. trained: the same of those
        "trained", where its weights know of fewer."""
        self.name = name
        self._storage = storage
        self._commit = commit
        self._session = session
        self._own = own
        self._trained = trained

    def _seen(self, columns: Sequence[str] | None) -> Seen:
        about = self.name, self._session, self._own, self._trained, columns
        return loading.seen(self._storage, self._commit, *about)

    @property
    def rows(self) -> pa.Table:
        """All that was said and counts, in order: rows of the ledger table. Reads it at each look."""
        return self._seen(None).rows

    @property
    def trained(self) -> pa.Table:
        """The rows that tell what was trained on; no other columns than that takes."""
        return self._seen(SAID).rows

    @property
    def awaited(self) -> pa.ChunkedArray:
        """The ids of episodes that are sealed, of prompts that were neither trained on nor dropped."""
        return awaited(self._seen(loading.FOLDED))

    @property
    def in_flight(self) -> int:
        """How many keys were drawn and neither trained on nor dropped."""
        return in_flight(self._seen(loading.FOLDED))

    @cached_property
    def _found(self) -> Found:
        found = fold(self._seen(loading.FOLDED))
        release()
        return found

    @cached_property
    def _archived(self) -> Archived:
        return Archived(self._storage, lambda: self._commit, (self._session, self._own))

    @property
    def _cursors(self) -> Cursors:
        return self._found.cursors

    @property
    def _rounds(self) -> Mapping[Key, Rounds]:
        return self._found.open

    @property
    def _ended(self) -> Ended:
        return self._found.ended

    @property
    def _rank(self) -> None:
        return None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("name", "_storage", "_commit", "_session", "_own", "_trained")
        return {name: getattr(self, name) for name in kept}

    def __repr__(self) -> str:
        return f"<Ledger {self.name!r} as of commit {self._commit.number}, session {self._session!r}>"


def of_run(storage: Storage, head: Commit, name: str, run: str) -> LedgerView:
    """A ledger as the newest session of a run sees it; NotFoundError if there is no such run."""
    if run not in head.runs:
        raise NotFoundError(f"there is no run {run!r} at {storage.url}; there is: {', '.join(head.runs) or 'none'}")
    entry = head.runs[run]
    return LedgerView(storage, head, name, entry.stands_for or entry.session)


def left_in_flight(storage: Storage, head: Commit, name: str, run: str) -> int:
    """How many keys of a ledger the sessions before a run's newest one left, if that went on from none of them."""
    entry = head.runs[run]
    if not head.ledger or entry.resumed_from is not None:
        return 0
    known = loading.sessions(storage, head)
    before = next((one for one in reversed(entry.superseded) if one in known), None)
    return 0 if before is None else LedgerView(storage, head, name, before).in_flight
