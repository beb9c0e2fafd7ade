"""The ledger of a writer: verbs that say what becomes of prompts, all or nothing, and what is to be done again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from archive.base import UsageError, check_text, jsontree, logger
from archive.ledger.archived import Archived
from archive.ledger.changing import Changed, Held
from archive.ledger.cursors import Cursors
from archive.ledger.folding import Seen, dealt, fold, release
from archive.ledger.keys import Ended, normalised
from archive.ledger.looking import Standing
from archive.ledger.rounds import DONE, LEFT_RUNNING, LEFT_WAITING, Rounds
from archive.ledger.rows import Said, rows
from archive.ledger.terms import CURSOR, DRAWN, DROPPED, SEALED, STARTED, TRAINED, Key
from archive.manifest import Place
from archive.tables import MOST_SIBLINGS
from archive.write import Changes, EpisodeRecord, Ids, ledger_rows

if TYPE_CHECKING:
    import threading

Load = Callable[[str], Seen]  # the rows of a ledger that the session takes over
Holders = Callable[[], Mapping[str, int]]  # episode id -> the rank that has it live, as far as is known


class Guard(Protocol):
    """A writer: its lock, what its calls change, and the episodes that it knows."""

    def _entered(self) -> threading.RLock: ...
    def _surface(self) -> None: ...
    @property
    def _changes(self) -> Changes: ...
    def _record_of(self, episode_id: str) -> EpisodeRecord | None: ...


class TakenOver(NamedTuple):
    """What a session finds of the ledgers of those that it goes on from: their rows, who holds which episodes, and
    these themselves."""

    load: Load
    holders: Holders
    archived: Archived
    left: Callable[[str], int] = lambda _: 0  # keys in flight of an earlier session that this one knows nothing of


class Ledger(Standing):
    """What becomes of prompts: `w.ledger("prompts")`. What is said is committed with the writer's episodes.

    Each verb takes a key or a list of keys (strings or integers), and is all or nothing. A key that was trained on or
    dropped may be drawn again: that is its next round.
    """

    def __init__(self, writer: Guard, name: str, place: Place, taken: TakenOver) -> None:
        self.name = name
        self._writer = writer
        self._place = place
        self._taken = taken
        self._book: _Book | None = None
        self._said: list[Said] = []

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
        names = normalised(keys)
        if not 1 <= index(siblings) <= MOST_SIBLINGS:
            bound = "one rollout of a key at least" if index(siblings) < 1 else f"at most {MOST_SIBLINGS} of them"
            raise UsageError(f"siblings={siblings}: there is {bound}; nothing was changed")
        text = None if cursor is None else jsontree.dumps(cursor, where="cursor")
        with self._writer._entered(), self._writer._changes(wait=True):
            changed = self._held.draw(names, index(siblings))
            self._keep(changed, DRAWN, siblings=index(siblings))
            if text is not None:
                self._keep_cursor(jsontree.loads(text), text)

    def start(self, keys: Key | Iterable[Key], sibling: int = 0) -> None:
        """A rollout of these prompts is under way: that one of its siblings."""
        names = normalised(keys)
        with self._writer._entered(), self._writer._changes(wait=True):
            self._keep(self._held.start(names, index(sibling)), STARTED, sibling=index(sibling))

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
        names = normalised(key)
        given = [episode_id] if isinstance(episode_id, str) else list(episode_id)
        if len(given) != len(names):
            raise UsageError(f"{len(names)} keys and {len(given)} episodes: give episode_id= one for each of the keys")
        uuid = None if model_weights_uuid is None else check_text(str(model_weights_uuid), "model_weights_uuid")
        update = None if update_count is None else index(update_count)
        with self._writer._entered(), self._writer._changes(wait=True):
            made = {name: (self._record(episode), episode) for name, episode in zip(names, given, strict=True)}
            changed = self._held.seal(names, index(sibling), given)
            records = [made[name][0] for name in changed.rounds]
            self._keep(
                changed, SEALED, sibling=index(sibling), made=records, model_weights_uuid=uuid, update_count=update
            )

    def reopen(self, keys: Key | Iterable[Key], sibling: int = 0) -> None:
        """A sealed rollout of these prompts is made again: it expired, or another episode takes its place. It is under
        way until it is sealed anew."""
        names = normalised(keys)
        with self._writer._entered(), self._writer._changes(wait=True):
            self._keep(self._held.reopen(names, index(sibling)), STARTED, sibling=index(sibling))

    def train(self, keys: Key | Iterable[Key], update_count: int | None = None) -> None:
        """These prompts were trained on: all of their rollouts are sealed, and none counts as new any more.

        update_count: of the update that did it."""
        names = normalised(keys)
        update = None if update_count is None else index(update_count)
        with self._writer._entered(), self._writer._changes(wait=True):
            self._keep(self._held.train(names), TRAINED, update_count=update)

    def drop(self, keys: Key | Iterable[Key], reason: str, *, sibling: int | None = None) -> None:
        """These prompts are given up; or, with `sibling`, one rollout of each, which the others don't wait for."""
        names, reason = normalised(keys), check_text(reason, "reason")
        with self._writer._entered(), self._writer._changes(wait=True):
            changed = self._held.drop(names, None if sibling is None else index(sibling))
            which = {} if sibling is None else {"sibling": index(sibling)}
            self._keep(changed, DROPPED, reason=reason, **which)

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def _cursors(self) -> Cursors:
        with self._writer._entered():
            book = self._loaded
            if not book.spoken:
                return book.cursors
            return book.cursors.saying(self._place.rank, book.spoken[0], self._place.world_size)

    @property
    def _rounds(self) -> Mapping[Key, Rounds]:
        with self._writer._entered():
            return self._loaded.rounds

    @property
    def _ended(self) -> Ended:
        return self._loaded.ended

    @property
    def _rank(self) -> int:
        return self._place.rank

    @property
    def _archived(self) -> Archived:
        return self._taken.archived

    def __repr__(self) -> str:
        return f"<Ledger {self.name!r} of rank {self._place.rank}>"

    # -- keeping ------------------------------------------------------------------------------------------------

    @property
    def _held(self) -> Held:
        book = self._loaded
        return Held(book.rounds, book.ended, self._place.rank)

    @property
    def _loaded(self) -> _Book:
        if self._book is None:
            self._book = self._load()
        return self._book

    def _load(self) -> _Book:
        found = fold(self._taken.load(self.name))
        if not found.open and not len(found.ended):
            return _Book({}, found.ended, found.cursors)
        release()
        kinds = Counter(map(id, found.open.values()))  # most share their rounds
        by_kind = {id(rounds): rounds for rounds in found.open.values()}
        holders = self._taken.holders() if any(one.sealed for r in by_kind.values() for one in r) else {}
        _log_left(self.name, [(by_kind[kind], count) for kind, count in kinds.items()], found.undone)
        rounds = dealt(found, self._place.world_size, holders.get)
        return _Book(rounds, found.ended, found.cursors)

    def _keep(self, changed: Changed, state: str, **more: Any) -> None:
        """Take over what becomes of keys, and note what is to be said of it."""
        if not changed.rounds:
            return
        book, undo = self._loaded, self._writer._changes.undo
        undo.keys(book.rounds, changed.rounds)
        if state == DRAWN:  # at the end of the order, also those that were there
            for key in book.rounds.keys() & changed.rounds.keys():
                del book.rounds[key]
        book.rounds.update(changed.rounds)
        self._say(Said(self.name, state, datetime.now(UTC), list(changed.rounds), changed.numbers, **more))

    def _keep_cursor(self, value: Any, text: str) -> None:
        book, undo = self._loaded, self._writer._changes.undo
        undo.attributes(book, "spoken")
        book.spoken = (value,)
        self._say(Said(self.name, CURSOR, datetime.now(UTC), ("",), (0,), cursor=text))

    def _say(self, said: Said) -> None:
        self._writer._changes.undo.length(self._said)
        self._said.append(said)

    def _record(self, episode_id: str) -> EpisodeRecord:
        found = self._writer._record_of(episode_id)
        if found is None:
            raise UsageError(
                f"episode {episode_id!r:.80} was not added to this writer: add it first, then seal, so that both "
                "become visible together; nothing was changed"
            )
        return found

    def take_said(self) -> list[Said]:
        """What was said since this was called last."""
        self._writer._changes.undo.attributes(self, "_said")
        said, self._said = self._said, []
        return said


class _Book:
    """How prompts stand for a writer: `rounds` changes in place. cursors: of the sessions before; spoken: what this
    rank has said since, or nothing."""

    def __init__(self, rounds: dict[Key, Rounds], ended: Ended, cursors: Cursors) -> None:
        self.rounds = rounds
        self.ended = ended
        self.cursors = cursors
        self.spoken: tuple[Any, ...] = ()


class Ledgers:
    """The ledgers of a writer, by name."""

    def __init__(self, writer: Guard, place: Place, ids: Ids, taken: TakenOver) -> None:
        self._writer = writer
        self._place = place
        self._ids = ids
        self._taken = taken
        self._by_name: dict[str, Ledger] = {}

    def of(self, name: str) -> Ledger:
        """The one of this name, the same for all who ask."""
        if name not in self._by_name:
            self._warn_of_left(name)
            self._by_name[name] = Ledger(self._writer, name, self._place, self._taken)
        return self._by_name[name]

    def _warn_of_left(self, name: str) -> None:
        """Whoever forgot resume= would skip these without a word."""
        left = self._taken.left(name) if self._place.rank == 0 else 0
        if left:
            logger.warning(
                "ledger %r: an earlier session of run %r left %d keys in flight, of which this one knows nothing, as "
                "its writer was opened without resume=: to go on with them, open it with arc.writer(resume=arc.recover("
                ")), or on other ranks with resume=resharding.plan(checkpoint, world_size=...).share(rank)",
                name, self._place.run, left,
            )  # fmt: skip

    def send(self) -> None:
        """What was said goes after all that is ready for the store: so a sealed episode's rows come before."""
        said = [one for ledger in self._by_name.values() for one in ledger.take_said()]
        if said:
            self._writer._changes.add(ledger_rows(lambda: self._numbered(said)))

    def _numbered(self, said: Sequence[Said]) -> Any:
        """On the thread that numbers segments, after those that were handed in before."""
        sequence = self._ids.sequence
        self._ids.sequence += 1
        return rows(said, self._place, sequence)


def _log_left(name: str, left: Iterable[tuple[Rounds, int]], undone: int) -> None:
    """Log what is to be done again, by cause. left: rounds, and of how many keys these are."""
    far = b"".join(one.rollouts * count for rounds, count in left for one in rounds)
    again = f"; {undone} trained after the checkpoint, to be trained again" if undone else ""
    logger.info(
        "ledger %r: %d rollouts drawn and not started, %d started and not sealed; %d sealed kept%s",
        name, far.count(LEFT_WAITING), far.count(LEFT_RUNNING), far.count(DONE), again,
    )  # fmt: skip
