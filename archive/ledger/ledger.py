"""The ledger of a writer: verbs that record the course of prompts, all or nothing, and the work to be repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from logging import INFO
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import row_codes
from archive.base import UsageError, check_text, jsontree, level_of, logger
from archive.ledger.fold import places_of
from archive.ledger.keys import Key, normalised, texts
from archive.ledger.prompts import (
    CURSOR,
    DONE,
    DRAWN,
    DROPPED,
    LOST,
    REOPENED,
    RUNNING,
    SEALED,
    STARTED,
    TRAINED,
    WHOLE_KEY,
    Changed,
    Prompts,
)
from archive.ledger.view import Archived, LedgerQueries, LedgerView, left_in_flight
from archive.log import CommitLog, Place
from archive.store import Storage
from archive.tables import MOST_SIBLINGS
from archive.write import Changes, EpisodeRecord, Ids, rows_alone

if TYPE_CHECKING:
    import pyarrow as pa

Call = Mapping[str, Any]  # of a verb: columns of the ledger table, but keys as they are, and episodes as records
RecordOf = Callable[[str], EpisodeRecord | None]
_ROLLOUT = ("ledger", "key", "round", "sibling")


class Ledger(LedgerQueries):
    """The ledger of a writer: `w.ledger("prompts")`. Its records are committed with the writer's episodes.

    Each verb takes a key or a list of keys (strings or integers), and is all or nothing. A key that was trained on or
    dropped may be drawn again: that is its next round.
    """

    def __init__(self, of: Ledgers, name: str) -> None:
        self.name = name
        self._of = of
        self._archived = of.archived
        self._known: Prompts | None = None
        self._calls: list[Call] = []
        self._before: dict[Key, Any] = {}  # the rounds, or None, of the keys that the call under way has changed
        of.changes.parts.append((self._mark, self._cut_back))

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def draw(self, keys: Key | Iterable[Key], siblings: int = 1, cursor: Any = None) -> None:
        """Record that these prompts were taken from the data set.

        siblings: the number of rollouts planned for each. cursor: JSON value, the place of this rank's reader of the
        data set now, of numbers that count up: a row, or lists or objects of them, as {"epoch": 0, "row": 7}. After a
        resume `.cursor` is the lowest that all ranks had passed, and `undrawn()` gives the keys beyond it that no rank
        drew:

            rows = prompts.undrawn(range(prompts.cursor or 0, len(prompts_of_the_data_set)))
            for row in rows[rank::world_size]:  # made before the first draw, so all ranks have the same
                prompts.draw(row, cursor=row + 1)

        UsageError for a key that is still in flight. Ranks know nothing of each other's until a resume: deal the data
        set out to them. Of a key that two ranks have drawn, a resume finds one round: of each sibling what was said
        last, and ended if one rank has trained on it or dropped it.
        """
        names, siblings = normalised(keys), index(siblings)
        if not 1 <= siblings <= MOST_SIBLINGS:
            bound = "one rollout of a key at least" if siblings < 1 else f"at most {MOST_SIBLINGS} of them"
            raise UsageError(f"siblings={siblings}: there is {bound}; nothing was changed")
        text = None if cursor is None else jsontree.dumps(cursor, where="cursor")
        self._tell(DRAWN, lambda prompts: prompts.draw(names, siblings), cursor=text, siblings=siblings)

    def start(self, keys: Key | Iterable[Key], sibling: int = 0) -> None:
        """Record that a rollout of these prompts is running, as this sibling."""
        names, sibling = normalised(keys), index(sibling)
        self._tell(STARTED, lambda prompts: prompts.move(names, sibling, STARTED, RUNNING), sibling)

    def seal(
        self,
        key: Key | Iterable[Key],
        sibling: int = 0,
        episode_id: str | Sequence[str] = (),
        model_weights_uuid: Any = None,
        update_count: int | None = None,
    ) -> None:
        """Record that a rollout of this prompt is finished, as this episode (one for each of several prompts).

        The episode must have been added to this writer before, or be one that it took over, so that both become
        visible together. A journal may flush between the two calls: a crash then leaves the episode without its
        seal, and this rollout must be repeated; `with w.together():` around both prevents that.
        model_weights_uuid, update_count: those of the episode, if not given.
        """
        names, sibling = normalised(key), index(sibling)
        given = [episode_id] if isinstance(episode_id, str) else list(episode_id)
        if len(given) != len(names):
            raise UsageError(f"{len(names)} keys and {len(given)} episodes: give episode_id= one for each of the keys")
        uuid = None if model_weights_uuid is None else check_text(str(model_weights_uuid), "model_weights_uuid")
        update = None if update_count is None else index(update_count)
        self._tell(
            SEALED,
            lambda prompts: prompts.move(names, sibling, SEALED, DONE, given),
            sibling,
            dict(zip(names, given, strict=True)),
            model_weights_uuid=uuid,
            update_count=update,
        )

    def reopen(self, keys: Key | Iterable[Key], sibling: int = 0) -> None:
        """Record that a sealed rollout of these prompts is made again: it expired, or another episode replaces it. It
        is running until it is sealed anew."""
        names, sibling = normalised(keys), index(sibling)
        self._tell(STARTED, lambda prompts: prompts.move(names, sibling, REOPENED, RUNNING), sibling)

    def train(self, keys: Key | Iterable[Key], update_count: int | None = None) -> None:
        """Record that these prompts were trained on: all rollouts are sealed, and none counts as new any more.

        update_count: of that update."""
        names = normalised(keys)
        update = None if update_count is None else index(update_count)
        self._tell(TRAINED, lambda prompts: prompts.end(names, TRAINED), update_count=update)

    def drop(self, keys: Key | Iterable[Key], reason: str, *, sibling: int | None = None) -> None:
        """Record that these prompts are given up; with `sibling`, one rollout of each, and the others go on."""
        names, reason = normalised(keys), check_text(reason, "reason")
        if sibling is None:
            self._tell(DROPPED, lambda prompts: prompts.end(names, DROPPED), reason=reason)
        else:
            which = index(sibling)
            self._tell(DROPPED, lambda prompts: prompts.move(names, which, DROPPED, LOST), which, reason=reason)

    @property
    def _prompts(self) -> Prompts:
        with self._of.changes.entered():
            if self._known is None:
                self._known = self._of.load(self.name)
            return self._known

    def __repr__(self) -> str:
        return f"<Ledger {self.name!r} of rank {self._of.place.rank}>"

    def _mark(self) -> Any:
        """A copy of the state that a call may change."""
        self._before = {}
        return self._calls, len(self._calls), self._known, self._known and self._known.cursors

    def _cut_back(self, mark: Any) -> None:
        """Restore the state of a mark."""
        self._calls, length, self._known, cursors = mark
        del self._calls[length:]
        if self._known is not None:
            self._known.cursors = cursors
            for key, rounds in self._before.items():
                if rounds is None:
                    self._known.rounds.pop(key, None)
                else:
                    self._known.rounds[key] = rounds

    # -- records -------------------------------------------------------------------------------------------------------

    def _tell(
        self,
        state: str,
        change: Callable[[Prompts], Changed],
        sibling: int = WHOLE_KEY,
        episodes: Mapping[Key, str] | None = None,
        cursor: str | None = None,
        **columns: Any,
    ) -> None:
        """Apply a change to keys, and note its records: all or nothing."""
        with self._of.changes.entered(), self._of.changes(wait=True):
            made = {key: self._of.record(episode) for key, episode in (episodes or {}).items()}
            prompts, place = self._prompts, self._of.place
            rounds, numbers = change(prompts)
            said = {"ledger": self.name, "sibling": sibling, "created_at": datetime.now(UTC)}
            if rounds:
                self._before = {key: prompts.rounds.get(key) for key in rounds} | self._before
                if state == DRAWN:  # at the end of the order, also known keys
                    for key in prompts.rounds.keys() & rounds.keys():
                        del prompts.rounds[key]
                prompts.rounds.update(rounds)
                if made:
                    columns["episode_id"] = [made[key] for key in rounds]
                self._calls.append({**said, "state": state, "key": list(rounds), "round": numbers, **columns})
            if cursor is not None:
                value = jsontree.loads(cursor, where="cursor")
                prompts.cursors = prompts.cursors.saying(place.session, place.rank, value, place.world_size)
                self._calls.append({**said, "state": CURSOR, "key": None, "round": [0], "cursor": cursor})

    def take_calls(self) -> list[Call]:
        """The calls since the last call of this."""
        calls, self._calls = self._calls, []
        return calls


class Ledgers:
    """The ledgers of a writer, by name."""

    def __init__(
        self,
        changes: Changes,
        storage: Storage,
        log: CommitLog,
        place: Place,
        ids: Ids,
        holders: Callable[[], Mapping[str, int]],
        record_of: RecordOf,
        settle: Callable[[Sequence[str], bool], bool],
    ) -> None:
        """holders: episode id -> the rank that has it live, as far as is known.  record_of: the writer's record of an
        episode.  settle: as of Archived."""
        self.changes = changes
        self.place = place
        self.archived = Archived(storage, log.catch_up, (place.session, None), settle)
        self._storage, self._log, self._ids, self._holders = storage, log, ids, holders
        self._record_of = record_of
        self._by_name: dict[str, Ledger] = {}

    def of(self, name: str) -> Ledger:
        """The ledger of this name, the same object for all callers."""
        if name not in self._by_name:
            self._warn_of_left(name)
            self._by_name[name] = Ledger(self, name)
        return self._by_name[name]

    def load(self, name: str) -> Prompts:
        """The states of prompts for the session, from its origin."""
        found = LedgerView(self._storage, self._log.catch_up(), name, self.place.session, {})._prompts
        if not found.rounds:
            return replace(found, rank=self.place.rank)
        waiting, running, done = found.far_along()
        logger.log(
            level_of(self.place.rank, INFO),
            "ledger %r: %d rollouts drawn and not started, %d started and not sealed; %d sealed kept%s",
            name,
            waiting,
            running,
            done,
            f"; {found.undone} trained after the checkpoint, to be trained again" if found.undone else "",
        )
        holders = self._holders() if done else {}
        return found.dealt(self.place.rank, self.place.world_size, holders.get)

    def record(self, episode_id: str) -> EpisodeRecord:
        """The record of an episode of the writer; UsageError if the writer does not know it."""
        found = self._record_of(episode_id)
        if found is None:
            raise UsageError(
                f"episode {episode_id!r:.80} was not added to this writer: add it first, then seal, so that both "
                "become visible together; nothing was changed"
            )
        return found

    def _warn_of_left(self, name: str) -> None:
        """Warn if an earlier session left keys in flight and resume= was not given."""
        run = self.place.run
        left = left_in_flight(self._storage, self._log.head, name, run) if self.place.rank == 0 else 0
        if left:
            logger.warning(
                "ledger %r: an earlier session of run %r left %d keys in flight, which this one does not know, as "
                "its writer was opened without resume=: to go on with them, open it with arc.writer(resume=arc.recover("
                ")), or on other ranks with resume=resharding.plan(checkpoint, world_size=...).share(rank)",
                name,
                run,
                left,
            )

    def send(self) -> None:
        """Hand in the records, after all that is ready for the store, so that a sealed episode's rows come first."""
        calls = [call for ledger in self._by_name.values() for call in ledger.take_calls()]
        if calls:
            self.changes.add(rows_alone("ledger", lambda: self._numbered(calls)))

    def _numbered(self, calls: Sequence[Call]) -> pa.Table:
        """The rows of these calls. On the thread that numbers segments, after rows that were handed in before."""
        about = {"session": self.place.session, "rank": self.place.rank, "sequence": self._ids.sequence}
        self._ids.sequence += 1
        return _that_count(tables.concat("ledger", [_rows({**call, **about}) for call in calls]))


def _rows(call: Call) -> pa.Table:
    """The rows of one call. Rows of sealed rollouts have the weights of their episodes, as their writer knows them by
    now, unless weights were given."""
    columns = {**call, "key": ["null"] if call["state"] == CURSOR else texts(call["key"])}
    if call["state"] == SEALED:
        records: Sequence[EpisodeRecord] = call["episode_id"]
        columns["episode_id"] = [record.id for record in records]
        for place, name in enumerate(("model_weights_uuid", "update_count")):
            if columns[name] is None:
                columns[name] = [record.weights[place] for record in records]
    return tables.from_columns("ledger", columns)


def _that_count(rows: pa.Table) -> pa.Table:
    """The rows that a commit needs: no start of a rollout that is sealed later on, and only the last cursor of a
    ledger. Rows of cursors have a rollout of their own."""
    word = places_of(rows["state"], (STARTED, CURSOR, SEALED))
    some = np.flatnonzero(word >= 0)
    (rollout,) = row_codes(rows.select(_ROLLOUT).take(some))
    closes, last = word[some] > 0, np.full(len(some), -1)
    last[rollout[closes]] = some[closes]
    gone = some[(word[some] < 2) & (last[rollout] > some)]
    return rows.take(np.delete(np.arange(rows.num_rows), gone)) if len(gone) else rows
