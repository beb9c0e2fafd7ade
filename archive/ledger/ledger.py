"""The ledger of a writer: verbs that say what becomes of prompts, all or nothing, and what is to be done again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from archive import tables
from archive.base import UsageError, check_text, jsontree, logger
from archive.ledger.fold import dealt, far_along
from archive.ledger.keys import Key, normalised, texts
from archive.ledger.prompts import Changed, Prompts
from archive.ledger.queries import Archived, LedgerQueries
from archive.ledger.rounds import CURSOR, DRAWN, DROPPED, SEALED, STARTED, TRAINED, WHOLE_KEY
from archive.ledger.view import LedgerView, left_in_flight
from archive.log import CommitLog, Place
from archive.store import Storage
from archive.tables import MOST_SIBLINGS
from archive.write import Changes, EpisodeRecord, Ids, rows_alone

if TYPE_CHECKING:
    import threading

    import pyarrow as pa


_NONE: Mapping[Key, str] = {}


class LedgerWriter(Protocol):
    """A writer: its lock, what its calls change, and the episodes that it knows."""

    def _entered(self) -> threading.RLock: ...
    @property
    def _changes(self) -> Changes: ...
    def _record_of(self, episode_id: str) -> EpisodeRecord | None: ...
    def _settle_episodes(self, ids: Sequence[str], whole: bool) -> bool: ...


class LedgerCall(NamedTuple):
    """One call of a verb: the same of so many keys. `made`: of sealed ones, what the writer knows of the episodes; its
    weights count where none were given. `columns`: what else its rows have."""

    ledger: str
    state: str
    keys: Sequence[Key]
    rounds: Sequence[int]
    sibling: int
    made: Sequence[EpisodeRecord]
    columns: Mapping[str, Any]

    @property
    def rollouts(self) -> list[tuple[str, int, Key, int]]:
        return [(self.ledger, self.sibling, *each) for each in zip(self.keys, self.rounds, strict=True)]

    def without(self, rollouts: set[tuple[str, int, Key, int]]) -> LedgerCall:
        left = [one for one in self.rollouts if one not in rollouts]
        return self._replace(keys=[key for _, _, key, _ in left], rounds=[number for *_, number in left])

    def rows(self, about: Mapping[str, Any]) -> pa.Table:
        columns = {
            "ledger": self.ledger, "state": self.state, "round": self.rounds, "sibling": self.sibling, **self.columns,
            "key": ["null"] if self.state == CURSOR else texts(self.keys), **about,
        }  # fmt: skip
        if self.state == SEALED:
            columns["episode_id"] = [record.id for record in self.made]
            for place, name in enumerate(("model_weights_uuid", "update_count")):
                if columns[name] is None:
                    columns[name] = [record.weights[place] for record in self.made]
        return tables.from_columns("ledger", columns)


class Ledger(LedgerQueries):
    """What becomes of prompts: `w.ledger("prompts")`. What is said is committed with the writer's episodes.

    Each verb takes a key or a list of keys (strings or integers), and is all or nothing. A key that was trained on or
    dropped may be drawn again: that is its next round.
    """

    def __init__(self, of: Ledgers, name: str) -> None:
        self.name = name
        self._writer = of.writer
        self._place = of.place
        self._archived = of.archived
        self._load = of.load
        self._known: Prompts | None = None
        self._calls: list[LedgerCall] = []
        self._before: dict[Key, Any] = {}  # the rounds, or None, of the keys that the call under way has changed
        of.writer._changes.parts.append((self._mark, self._cut_back))

    # -- saying -------------------------------------------------------------------------------------------------

    def draw(self, keys: Key | Iterable[Key], siblings: int = 1, cursor: Any = None) -> None:
        """These prompts were taken from the data set.

        siblings: how many rollouts are planned of each. cursor: JSON value, where this rank's reader of the data set
        stands now, of numbers that count up: a row, or lists or objects of them, as {"epoch": 0, "row": 7}. After a
        resume `.cursor` gives back the lowest that all ranks had passed, and `undrawn()` what nobody drew beyond it:

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
        """A rollout of these prompts is under way: that one of its siblings."""
        names, sibling = normalised(keys), index(sibling)
        self._tell(STARTED, lambda prompts: prompts.start(names, sibling), sibling)

    def seal(
        self, key: Key | Iterable[Key], sibling: int = 0, episode_id: str | Sequence[str] = (),
        model_weights_uuid: Any = None, update_count: int | None = None,
    ) -> None:  # fmt: skip
        """A rollout of this prompt is there, as this episode (of several prompts: as many episodes).

        The episode must have been added to this writer before, or be one that it took over: so that both become
        visible together. Between the two calls a journal may tick: what crashes then leaves the episode without its
        seal, and this rollout is to be done again; `with w.together():` around both lets nothing come between.
        model_weights_uuid, update_count: those of the episode, if not given.
        """
        names, sibling = normalised(key), index(sibling)
        given = [episode_id] if isinstance(episode_id, str) else list(episode_id)
        if len(given) != len(names):
            raise UsageError(f"{len(names)} keys and {len(given)} episodes: give episode_id= one for each of the keys")
        uuid = None if model_weights_uuid is None else check_text(str(model_weights_uuid), "model_weights_uuid")
        update = None if update_count is None else index(update_count)
        self._tell(
            SEALED, lambda prompts: prompts.seal(names, sibling, given), sibling, dict(zip(names, given, strict=True)),
            model_weights_uuid=uuid, update_count=update,
        )  # fmt: skip

    def reopen(self, keys: Key | Iterable[Key], sibling: int = 0) -> None:
        """A sealed rollout of these prompts is made again: it expired, or another episode takes its place. It is under
        way until it is sealed anew."""
        names, sibling = normalised(keys), index(sibling)
        self._tell(STARTED, lambda prompts: prompts.reopen(names, sibling), sibling)

    def train(self, keys: Key | Iterable[Key], update_count: int | None = None) -> None:
        """These prompts were trained on: all of their rollouts are sealed, and none counts as new any more.

        update_count: of the update that did it."""
        names = normalised(keys)
        update = None if update_count is None else index(update_count)
        self._tell(TRAINED, lambda prompts: prompts.train(names), update_count=update)

    def drop(self, keys: Key | Iterable[Key], reason: str, *, sibling: int | None = None) -> None:
        """These prompts are given up; or, with `sibling`, one rollout of each, which the others don't wait for."""
        names, reason = normalised(keys), check_text(reason, "reason")
        sibling = None if sibling is None else index(sibling)
        which = WHOLE_KEY if sibling is None else sibling
        self._tell(DROPPED, lambda prompts: prompts.drop(names, sibling), which, reason=reason)

    @property
    def _prompts(self) -> Prompts:
        with self._writer._entered():
            if self._known is None:
                self._known = self._load(self.name)
            return self._known

    def __repr__(self) -> str:
        return f"<Ledger {self.name!r} of rank {self._place.rank}>"

    def _mark(self) -> Any:
        """A copy of what a call may change."""
        self._before = {}
        return self._calls, len(self._calls), self._known, self._known and self._known.cursors

    def _cut_back(self, mark: Any) -> None:
        """Be as it was."""
        self._calls, length, self._known, cursors = mark
        del self._calls[length:]
        if self._known is not None:
            self._known.cursors = cursors
            for key, rounds in self._before.items():
                if rounds is None:
                    self._known.rounds.pop(key, None)
                else:
                    self._known.rounds[key] = rounds

    # -- keeping ------------------------------------------------------------------------------------------------

    def _tell(
        self, state: str, change: Callable[[Prompts], Changed], sibling: int = WHOLE_KEY,
        episodes: Mapping[Key, str] = _NONE, cursor: str | None = None, **columns: Any,
    ) -> None:  # fmt: skip
        """Take over what becomes of keys, and note what is to be said of it: all or nothing."""
        with self._writer._entered(), self._writer._changes(wait=True):
            made = {key: self._record(episode) for key, episode in episodes.items()}
            prompts, place = self._prompts, self._place
            rounds, numbers = change(prompts)
            now = {"created_at": datetime.now(UTC)}
            if rounds:
                self._before = {key: prompts.rounds.get(key) for key in rounds}
                if state == DRAWN:  # at the end of the order, also those that were there
                    for key in prompts.rounds.keys() & rounds.keys():
                        del prompts.rounds[key]
                prompts.rounds.update(rounds)
                records = [made[key] for key in rounds] if made else []
                call = LedgerCall(self.name, state, list(rounds), numbers, sibling, records, now | columns)
                self._calls.append(call)
            if cursor is not None:
                value = jsontree.loads(cursor, where="cursor")
                prompts.cursors = prompts.cursors.saying(place.session, place.rank, value, place.world_size)
                call = LedgerCall(self.name, CURSOR, [""], [0], WHOLE_KEY, [], now | {"cursor": cursor})
                self._calls.append(call)

    def _record(self, episode_id: str) -> EpisodeRecord:
        found = self._writer._record_of(episode_id)
        if found is None:
            raise UsageError(
                f"episode {episode_id!r:.80} was not added to this writer: add it first, then seal, so that both "
                "become visible together; nothing was changed"
            )
        return found

    def take_calls(self) -> list[LedgerCall]:
        """The calls since this was called last."""
        calls, self._calls = self._calls, []
        return calls


class Ledgers:
    """The ledgers of a writer, by name."""

    def __init__(
        self, writer: LedgerWriter, storage: Storage, log: CommitLog, place: Place, ids: Ids,
        holders: Callable[[], Mapping[str, int]],
    ) -> None:  # fmt: skip
        """holders: episode id -> the rank that has it live, as far as is known."""
        self.writer = writer
        self.place = place
        self.archived = Archived(storage, log.catch_up, (place.session, None), writer._settle_episodes)
        self._storage, self._log, self._ids, self._holders = storage, log, ids, holders
        self._by_name: dict[str, Ledger] = {}

    def of(self, name: str) -> Ledger:
        """The ledger of this name, the same for all who ask."""
        if name not in self._by_name:
            self._warn_of_left(name)
            self._by_name[name] = Ledger(self, name)
        return self._by_name[name]

    def load(self, name: str) -> Prompts:
        """The standing of prompts for the session, by what it goes on from."""
        found = LedgerView(self._storage, self._log.catch_up(), name, self.place.session, {})._prompts
        if not found.rounds:
            return replace(found, rank=self.place.rank)
        waiting, running, done = far_along(found)
        logger.info(
            "ledger %r: %d rollouts drawn and not started, %d started and not sealed; %d sealed kept%s",
            name, waiting, running, done,
            f"; {found.undone} trained after the checkpoint, to be trained again" if found.undone else "",
        )  # fmt: skip
        holders = self._holders() if done else {}
        return dealt(found, self.place.rank, self.place.world_size, holders.get)

    def _warn_of_left(self, name: str) -> None:
        """Whoever forgot resume= would skip these without a word."""
        run = self.place.run
        left = left_in_flight(self._storage, self._log.head, name, run) if self.place.rank == 0 else 0
        if left:
            logger.warning(
                "ledger %r: an earlier session of run %r left %d keys in flight, of which this one knows nothing, as "
                "its writer was opened without resume=: to go on with them, open it with arc.writer(resume=arc.recover("
                ")), or on other ranks with resume=resharding.plan(checkpoint, world_size=...).share(rank)",
                name, run, left,
            )  # fmt: skip

    def send(self) -> None:
        """Hand in what was said, after all that is ready for the store: so a sealed episode's rows come before."""
        calls = [call for ledger in self._by_name.values() for call in ledger.take_calls()]
        if calls:
            self.writer._changes.add(rows_alone("ledger", lambda: self._numbered(calls)))

    def _numbered(self, calls: Sequence[LedgerCall]) -> pa.Table:
        """The rows of these calls. On the thread that numbers segments, after those that were handed in before."""
        about = {"session": self.place.session, "rank": self.place.rank, "sequence": self._ids.sequence}
        self._ids.sequence += 1
        return tables.concat("ledger", [call.rows(about) for call in _that_count(calls)])


def _that_count(calls: Sequence[LedgerCall]) -> list[LedgerCall]:
    """The calls that a commit needs rows of: of a rollout's states and of a cursor the last."""
    sealed: set[tuple[str, int, Key, int]] = set()  # later on
    cursors: set[str] = set()
    out = []
    for one in reversed(calls):
        if one.state == CURSOR and one.ledger in cursors:
            continue
        if one.state == CURSOR:
            cursors.add(one.ledger)
        elif one.state == SEALED:
            sealed.update(one.rollouts)
        elif one.state == STARTED and sealed:
            one = one.without(sealed)
        out.append(one)
    return [one for one in reversed(out) if one.keys]
