"""A ledger as of a commit or a checkpoint, to be looked at only; and which rows of the table a session sees of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from archive import tables
from archive.base import NotFoundError, cached_property
from archive.index import ByWriter, Snapshot
from archive.ledger.fold import LedgerRows, places_of, release
from archive.ledger.keys import Key, parsed
from archive.ledger.prompts import Prompts
from archive.ledger.queries import Archived, LedgerQueries
from archive.ledger.rounds import DROPPED, SEALED, TRAINED
from archive.log import Commit, Sequences, tablefiles
from archive.store import Storage
from archive.tables import among, distinct

if TYPE_CHECKING:
    import pyarrow as pa

_FOLDED = ("key", "round", "sibling", "state", "siblings", "episode_id", "cursor", "rank", "session")
_PLACES = ("ledger", "session", "rank", "sequence", "commit", "state")
_BATCHED = ("session", "rank", "sequence", "created_at", "update_count", "key", "round")


class TrainedBatch(NamedTuple):
    """What was trained on at one step, by all ranks: when the first of them said so, the keys, and the ids of their
    episodes by sibling."""

    step: int
    at: datetime
    keys: list[Key]
    episodes: list[str]


class LedgerView(LedgerQueries):
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

    @property
    def rows(self) -> pa.Table:
        """Everything that was said and counts, in order: rows of the ledger table. Reads it at each look."""
        return self.seen(None).rows

    @property
    def batches(self) -> list[TrainedBatch]:
        """The batches that were trained on, oldest first. A step is the update count, over the ranks of a session;
        where none was told, each call of `train` is one, and its place is the step."""
        rows = self.seen((*_BATCHED, "state", "sibling", "episode_id")).rows
        sealed = _sealed(rows.filter(among(rows["state"], (SEALED, DROPPED))))
        trained = rows.filter(among(rows["state"], (TRAINED,)))
        session, rank, sequence, at, update, text, number = (trained[name].to_pylist() for name in _BATCHED)
        calls = [
            (s, u) if u is not None else (s, *call)
            for s, u, *call in zip(session, update, rank, sequence, at, strict=True)
        ]
        out: dict[tuple[Any, ...], TrainedBatch] = {}
        for i, (call, key) in enumerate(zip(calls, parsed(text), strict=True)):
            step = len(out) if update[i] is None else update[i]
            batch = out.setdefault(call, TrainedBatch(step, at[i], [], []))
            of = sealed.get((text[i], number[i]), {})
            batch.keys.append(key)
            batch.episodes.extend(of[sibling] for sibling in sorted(of))
        return list(out.values())

    @property
    def awaited(self) -> pa.ChunkedArray:
        """The ids of episodes that are sealed, of prompts that were neither trained on nor dropped."""
        return self.seen().awaited()

    @property
    def in_flight(self) -> int:
        """The number of keys that were drawn and neither trained on nor dropped."""
        return self.seen().in_flight

    def seen(self, columns: Sequence[str] | None = _FOLDED, fresh: pa.Table | None = None) -> LedgerRows:
        """The rows that the session sees. columns: all if None. fresh: rows of its own that are to be committed
        next."""
        import pyarrow as pa

        commit = self._commit
        wanted = None if columns is None else list(dict.fromkeys((*columns, *_PLACES)))
        table = tablefiles.load(self._storage, "ledger", commit.files("ledger"), wanted)
        if fresh is not None:  # as if the next commit had brought them
            fresh = tables.set_column(fresh, "commit", commit.number + 1).select(table.column_names)
            table = pa.concat_tables([table, fresh])
        table = _those(table, places_of(table["ledger"], [self.name]) == 0)
        if not table.num_rows:
            return LedgerRows(table, table)
        branches, rows = Snapshot(self._storage, commit).branches, ByWriter(table)
        sight = branches.sight(self._session, self._own)
        known = branches.sight_trained(self._session, self._own if self._trained is None else self._trained)
        inside = rows.seen(sight)
        counts = inside & ((places_of(table["state"], [TRAINED]) < 0) | rows.seen(known))
        found, undone = _in_order(_those(table, counts), [*sight][::-1]), _those(table, inside & ~counts)
        if columns is not None:
            found, undone = found.select(columns), undone.select(columns)
        return LedgerRows(found, undone, self._worlds(sight))

    def _worlds(self, sight: Mapping[str, Sequences | None]) -> dict[str, Collection[int]]:
        """The ranks of the sessions that this one sees, itself the last: of itself those that are known to have
        begun."""
        out: dict[str, Collection[int]] = {name: set(sight[name] or ()) for name in reversed([*sight])}
        known = (self._commit.own_runs, self._commit.runs)  # those that it says itself first: the others are read
        mine = ([one for one in runs.values() if one.session == self._session] for runs in known)
        begun = {rank for one in next(filter(None, mine), []) for rank in (*one.sequences, *(one.journal or ()))}
        out[self._session] = {*out[self._session], *begun}
        return out

    @cached_property
    def _prompts(self) -> Prompts:
        found = self.seen().prompts()
        release()
        return found

    @cached_property
    def _archived(self) -> Archived:
        return Archived(self._storage, lambda: self._commit, (self._session, self._own))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_prompts", "_archived")}

    def __repr__(self) -> str:
        return f"<Ledger {self.name!r} as of commit {self._commit.number}, session {self._session!r}>"


def _sealed(rollouts: pa.Table) -> dict[tuple[str, int], dict[int, str]]:
    """(key, round) -> sibling -> its episode, the one that was sealed last; without those that were dropped after."""
    out: dict[tuple[str, int], dict[int, str]] = {}
    columns = (rollouts[name].to_pylist() for name in ("key", "round", "sibling", "episode_id"))
    for key, number, sibling, episode in zip(*columns, strict=True):
        if episode is not None:
            out.setdefault((key, number), {})[sibling] = episode
        else:
            out.get((key, number), {}).pop(sibling, None)
    return out


def _those(table: pa.Table, mask: Any) -> pa.Table:
    """Some rows; the table itself if it is all, as a copy of millions takes long."""
    import pyarrow as pa

    return table if mask.all() else table.filter(pa.array(mask))


def _in_order(table: pa.Table, sessions: Sequence[str]) -> pa.Table:
    """The rows of later sessions after those of earlier ones, within a session by commit, and of a rank as it said
    them. No clock has a say in it: that of a machine may be set back."""
    keys = (table[name].to_numpy() for name in ("sequence", "rank", "commit"))
    ordered = np.lexsort((*keys, places_of(table["session"], sessions)))
    return table if (ordered[1:] > ordered[:-1]).all() else table.take(ordered)


def of_run(storage: Storage, head: Commit, name: str, run: str) -> LedgerView:
    """A ledger as the newest session of a run sees it; NotFoundError if there is no such run."""
    if run not in head.runs:
        raise NotFoundError(f"there is no run {run!r} at {storage.url}; there is: {', '.join(head.runs) or 'none'}")
    entry = head.runs[run]
    return LedgerView(storage, head, name, entry.stands_for or entry.session)


def names(storage: Storage, commit: Commit) -> list[str]:
    """The ledgers of which there are rows, by name."""
    return sorted(_distinct(storage, commit, "ledger"))


def left_in_flight(storage: Storage, head: Commit, name: str, run: str) -> int:
    """The number of keys of a ledger that sessions before a run's newest left, if that went on from none of them."""
    entry = head.runs[run]
    if not head.ledger or entry.resumed_from is not None:
        return 0
    known = {*_distinct(storage, head, "session"), *Snapshot(storage, head).branches.origins}
    before = next((one for one in reversed(entry.superseded) if one in known), None)
    return 0 if before is None else LedgerView(storage, head, name, before).in_flight


def taken_back(storage: Storage, commit: Commit, session: str, trained: Sequences, fresh: pa.Table) -> set[str]:
    """Ids of the episodes, of all ledgers, that a session has trained on, and that count as sealed, as its weights know
    of its rows "trained" below these numbers alone. fresh: rows of its own that are to be committed next."""
    out: set[str] = set()
    for name in {*names(storage, commit), *fresh["ledger"].unique().to_pylist()}:
        found = LedgerView(storage, commit, name, session, None, trained).seen(fresh=fresh)
        own = _those(found.undone, places_of(found.undone["session"], [session]) == 0)
        if own.num_rows:
            out |= set(found.awaited(own).to_pylist())
    return out


def _distinct(storage: Storage, commit: Commit, column: str) -> list[str]:
    return distinct(tablefiles.load(storage, "ledger", commit.files("ledger"), [column])[column])
