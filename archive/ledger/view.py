"""Queries of a ledger: of a writer's, and of one as of a commit or a checkpoint, which is read-only; and the rows of
the table that a session sees. Episodes that it names are read wherever they are stored, also those that no buffer
holds any more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np

from archive import tables
from archive.base import NotFoundError, UsageError, cached_property
from archive.index import ByWriter, EpisodeIndex, Snapshot
from archive.ledger.fold import LedgerRows, places_of
from archive.ledger.keys import Key, TextIndex, normalised, parsed, texts
from archive.ledger.prompts import ALL_RANKS, DROPPED, SEALED, STATES, TRAINED, Prompts, Round
from archive.log import Commit, Sequences, tablefiles
from archive.read import Episodes, Reader
from archive.store import Storage
from archive.tables import among, distinct

if TYPE_CHECKING:
    import pyarrow as pa

Granularity = Literal["sibling", "group"]
_FOLDED = ("key", "round", "sibling", "state", "siblings", "episode_id", "cursor", "rank", "session")
_PLACES = ("ledger", "session", "rank", "sequence", "commit", "state")
_BATCHED = ("session", "rank", "sequence", "created_at", "update_count", "key", "round")


class Rollout(NamedTuple):
    """One rollout of a prompt: its sibling of this number."""

    key: Key
    sibling: int


class Group(NamedTuple("_KeyedEpisodes", [("key", Key), ("episodes", Sequence[str])])):
    """A prompt whose rollouts are all finished: the ids of their episodes, by sibling."""

    _archived: Archived | None

    def __new__(cls, key: Key, episodes: Sequence[str], archived: Archived | None = None) -> Self:
        """archived: finds its episodes."""
        made = super().__new__(cls, key, episodes)
        made._archived = archived
        return made

    def read(self, fields: Any = None, **how: Any) -> list[dict[str, Any]]:
        """The steps of its episodes, by sibling, from a buffer or the archive. Episodes that this writer has added
        since its last commit are committed first. Arguments are those of `Episodes.read`."""
        if self._archived is None:
            raise UsageError(f"the group of key {self.key!r:.80} has no ledger: take it from to_train()")
        return self._archived(self.episodes).read(fields, **how)


class Archived:
    """Episodes by id, as a session sees them. It reads tables when it is first asked, and later only what is new."""

    def __init__(
        self,
        storage: Storage,
        head: Callable[[], Commit],
        branch: tuple[str, Sequences | None],
        settle: Callable[[Sequence[str], bool], bool] | None = None,
    ) -> None:
        """head: gives the newest commit that counts. settle(ids, whole): commits those that are in no commit yet; True
        if it did. whole: they are there, and have ended."""
        self._storage, self._head, self._branch, self._settle = storage, head, branch, settle
        self._known: tuple[Episodes, TextIndex] | None = None

    def __call__(self, names: Sequence[str]) -> Episodes:
        """The episodes of these ids, in this order; NotFoundError if one is in no commit."""
        found = self._of(names)
        whole = found is not None and all(found.columns(["complete"])["complete"].to_pylist())
        if self._settle is not None and self._settle(names, whole):
            found = self._of(names)
        if found is not None:
            return found
        raise NotFoundError(
            f"one of the episodes {', '.join(map(repr, names[:10]))} is not at {self._storage.url} any more: it was "
            "forgotten by its id, and pruned; drop() the prompt, or reopen() the rollout to make it again"
        )

    def _of(self, names: Sequence[str]) -> Episodes | None:
        """The episodes as of the newest commit; None if one is not there."""
        head = self._head()
        if self._known is None or self._known[0].episode_index.snapshot.commit.number != head.number:
            if self._known is None:
                index = EpisodeIndex(Snapshot(self._storage, head), branch=self._branch)
            else:
                index = self._known[0].episode_index.as_of(head)
            every = Episodes(Reader(index.snapshot), index)
            self._known = every, TextIndex(every.table["episode_id"])
        every, ids = self._known
        places = ids.of(names)
        return None if None in places else every[np.array(places, np.int64)]

    def __getstate__(self) -> dict[str, Any]:
        return {"storage": self._storage, "head": self._head(), "branch": self._branch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["storage"], lambda: state["head"], state["branch"])  # type: ignore[misc]


class LedgerQueries(ABC):
    """The queries that a ledger answers from the states of prompts."""

    _archived: Archived

    @property
    @abstractmethod
    def _prompts(self) -> Prompts: ...

    @property
    def cursors(self) -> Mapping[int, Any]:
        """The last cursor of each rank, by rank, as far as is known; those of the newest session last."""
        return self._prompts.cursors.by_rank

    @property
    def cursor(self) -> Any:
        """The place in the data set that all ranks have passed: the lowest of the last cursors of the newest session's
        ranks, part by part of lists and objects. A rank without one stands at the cursor of the session before.
        None: at the beginning. `undrawn()` gives the keys beyond it. UsageError if cursors cannot be compared."""
        return self._prompts.cursors.joint

    def undrawn(self, keys: Key | Iterable[Key], rounds: int = 1) -> list[Key]:
        """The keys among these (a range, a list) that were drawn fewer than `rounds` times, as far as is known, in
        their order: the rest of a data set for its `rounds`-th epoch."""
        names = normalised(keys)
        drawn = self._prompts.newest(names)
        return [key for key in names if key not in drawn or drawn[key][0] + 1 < rounds]

    def to_reissue(self, granularity: Granularity = "sibling", *, all_ranks: bool = False) -> list[Any]:
        """Rollouts that earlier sessions drew and did not seal, in the order of their drawing: this rank's part.

        granularity: "sibling": a `Rollout(key, sibling)` for each missing one: sealed siblings are used again.
        "group": the keys with a missing one, to repeat whole groups: `drop` and `draw` them.
        Rollouts that this session has drawn, started or sealed itself are not among them.
        """
        if granularity not in ("sibling", "group"):
            raise UsageError(f"granularity={granularity!r}: give 'sibling' or 'group'")
        left = ((key, siblings) for key, one in self._open(all_ranks) if (siblings := one.left))
        if granularity == "group":
            return list(dict.fromkeys(key for key, _ in left))
        return [Rollout(key, sibling) for key, siblings in left for sibling in siblings]

    def to_train(self, *, all_ranks: bool = False) -> list[Group]:
        """Keys whose rollouts are all sealed (or dropped) and not trained on, with their episodes, which `group.read()`
        reads; of those that earlier sessions left, this rank's part."""
        return [Group(key, one.episodes, self._archived) for key, one in self._open(all_ranks) if one.complete]

    def _open(self, all_ranks: bool) -> Iterator[tuple[Key, Round]]:
        found = self._prompts
        return found.open(ALL_RANKS if all_ranks else found.rank)

    def sealed(self, key: Key) -> dict[int, str]:
        """Sibling -> id of its episode, in a key's newest open round; empty if there is none."""
        rounds = self._prompts.rounds.get(normalised(key)[0], ())
        return dict(sorted(rounds[-1].sealed.items())) if rounds else {}

    def state(self, key: Key) -> str | None:
        """The state of the key's newest round: "drawn", "started" (some rollout is started or sealed), "sealed" (all
        are), "trained" or "dropped". None if it was never drawn."""
        (key,) = normalised(key)
        return self._prompts.newest([key]).get(key, (0, None))[1]

    @property
    def counts(self) -> dict[str, int]:
        """State -> the number of keys in it."""
        found = self._prompts
        rounds = dict(found.rounds)  # other threads may change it meanwhile
        out = Counter(one[-1].state for one in rounds.values())
        out.update(found.ended.counts())
        out.subtract(state for _, state in found.ended.last(list(rounds)).values())
        return {state: out[state] for state in STATES}

    @property
    def table(self) -> pa.Table:
        """A table of all states: key (JSON), round, sibling (null: all), state, episode_id. One row for each rollout;
        one for all of a round that has ended."""
        import pyarrow as pa

        found = self._prompts
        rounds = dict(found.rounds)  # other threads may change it meanwhile
        text, last, how = found.ended.columns(rounds)
        own = [(key, *row) for key, each in rounds.items() for one in each for row in one.rows()]
        keys, *columns = zip(*own, strict=True) if own else [()] * 5
        nulls = [None] * len(how)
        over: list[list[Any]] = [last, nulls, how, nulls]
        number, sibling, state, episode = ([*ended, *mine] for ended, mine in zip(over, columns, strict=True))
        return pa.table(
            {
                "key": pa.concat_arrays([text, pa.array(texts(keys), pa.string())]),
                "round": pa.array(number, pa.int64()),
                "sibling": pa.array(sibling, pa.int64()),
                "state": pa.array(state, pa.string()),
                "episode_id": pa.array(episode, pa.string()),
            }
        )


class TrainedBatch(NamedTuple):
    """A batch that all ranks trained on at one step: the time of its first record, the keys, and the ids of their
    episodes by sibling."""

    step: int
    at: datetime
    keys: list[Key]
    episodes: list[str]


class LedgerView(LedgerQueries):
    """The states of prompts at a commit or checkpoint, on all ranks. `to_reissue()` gives what a session that goes on
    from there repeats. Tables are read once, at the first use."""

    def __init__(
        self,
        storage: Storage,
        commit: Commit,
        name: str,
        session: str,
        own: Sequences | None = None,
        trained: Sequences | None = None,
    ) -> None:
        """session: the one whose view this is; own: its own rows below these numbers; None: all. trained: the same for
        rows "trained", where its weights know of fewer."""
        self.name = name
        self._storage = storage
        self._commit = commit
        self._session = session
        self._own = own
        self._trained = trained

    @property
    def rows(self) -> pa.Table:
        """The records that count, in order: rows of the ledger table. Read at each call."""
        return self._seen(None)[0]

    @property
    def batches(self) -> list[TrainedBatch]:
        """The batches that were trained on, oldest first. A step is the update count, over the ranks of a session;
        without update counts each call of `train` is one, and its place is the step."""
        rows = self._seen((*_BATCHED, "state", "sibling", "episode_id"))[0]
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
        """The ids of sealed episodes of prompts that were neither trained on nor dropped."""
        return LedgerRows(*self._seen()).awaited()

    @property
    def in_flight(self) -> int:
        """The number of keys that were drawn and neither trained on nor dropped."""
        return LedgerRows(*self._seen()).in_flight

    def _seen(
        self, columns: Sequence[str] | None = _FOLDED, fresh: pa.Table | None = None
    ) -> tuple[pa.Table, pa.Table, Mapping[str, Collection[int]]]:
        """The rows that the session sees, in order; those "trained" that do not count for it; and the ranks of the
        sessions that it sees, as far as they are known, oldest first. columns: all if None. fresh: rows of its own
        that the next commit will add."""
        import pyarrow as pa

        commit = self._commit
        wanted = None if columns is None else list(dict.fromkeys((*columns, *_PLACES)))
        table = tablefiles.load(self._storage, "ledger", commit.files("ledger"), wanted)
        if fresh is not None:  # as if the next commit had added them
            fresh = tables.set_column(fresh, "commit", commit.number + 1).select(table.column_names)
            table = pa.concat_tables([table, fresh])
        table = _those(table, places_of(table["ledger"], [self.name]) == 0)
        if not table.num_rows:
            return table, table, {}
        branches, rows = Snapshot(self._storage, commit).branches, ByWriter(table)
        sight = branches.sight(self._session, self._own)
        known = branches.sight_trained(self._session, self._own if self._trained is None else self._trained)
        inside = rows.seen(sight)
        counts = inside & ((places_of(table["state"], [TRAINED]) < 0) | rows.seen(known))
        found, undone = _in_order(_those(table, counts), [*sight][::-1]), _those(table, inside & ~counts)
        if columns is not None:
            found, undone = found.select(columns), undone.select(columns)
        return found, undone, self._worlds(sight)

    def _worlds(self, sight: Mapping[str, Sequences | None]) -> dict[str, Collection[int]]:
        """The ranks of the sessions that this one sees, itself the last; of itself the ranks that are known to have
        begun."""
        out: dict[str, Collection[int]] = {name: set(sight[name] or ()) for name in reversed([*sight])}
        known = (self._commit.own_runs, self._commit.runs)  # those in the commit itself first: the others are read
        mine = ([one for one in runs.values() if one.session == self._session] for runs in known)
        begun = {rank for one in next(filter(None, mine), []) for rank in (*one.sequences, *(one.journal or ()))}
        out[self._session] = {*out[self._session], *begun}
        return out

    @cached_property
    def _prompts(self) -> Prompts:
        rows = self._seen()
        _release()  # memory that reading took and these rows do not need
        found = LedgerRows(*rows).prompts()
        _release()
        return found

    @cached_property
    def _archived(self) -> Archived:
        return Archived(self._storage, lambda: self._commit, (self._session, self._own))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_prompts", "_archived")}

    def __repr__(self) -> str:
        return f"<Ledger {self.name!r} as of commit {self._commit.number}, session {self._session!r}>"


def _sealed(rollouts: pa.Table) -> dict[tuple[str, int], dict[int, str]]:
    """(key, round) -> sibling -> its episode, the one sealed last; without those that were dropped later."""
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
    """The rows, later sessions after earlier ones, within a session by commit, and within a rank in its order. No clock
    decides, as a clock may be set back."""
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
    """The ledgers that have rows, by name."""
    return sorted(_distinct(storage, commit, "ledger"))


def left_in_flight(storage: Storage, head: Commit, name: str, run: str) -> int:
    """The number of open keys that sessions before a run's newest left, if that went on from none of them."""
    entry = head.runs[run]
    if not head.ledger or entry.resumed_from is not None:
        return 0
    known = {*_distinct(storage, head, "session"), *Snapshot(storage, head).branches.origins}
    before = next((one for one in reversed(entry.superseded) if one in known), None)
    return 0 if before is None else LedgerView(storage, head, name, before).in_flight


def taken_back(storage: Storage, commit: Commit, session: str, trained: Sequences, fresh: pa.Table) -> set[str]:
    """Ids of the episodes, of all ledgers, that a session has trained on and that count as sealed, because its weights
    only know of its rows "trained" below these numbers. fresh: rows of its own that the next commit will add."""
    out: set[str] = set()
    for name in {*names(storage, commit), *distinct(fresh["ledger"])}:
        rows, undone, worlds = LedgerView(storage, commit, name, session, None, trained)._seen(fresh=fresh)
        own = _those(undone, places_of(undone["session"], [session]) == 0)
        if own.num_rows:
            out |= set(LedgerRows(rows, undone, worlds).awaited(own).to_pylist())
    return out


def _distinct(storage: Storage, commit: Commit, column: str) -> list[str]:
    return distinct(tablefiles.load(storage, "ledger", commit.files("ledger"), [column])[column])


def _release() -> None:
    """Return memory to the system that Arrow keeps for later: after millions of rows that is most of it."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
