"""Pure, no I/O: how prompts stand, looked at. Shared by the ledger of a writer and by what a commit says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from archive.base import UsageError
from archive.ledger.archived import Archived
from archive.ledger.cursors import Cursors
from archive.ledger.keys import Ended, normalised, texts
from archive.ledger.rounds import NAMES, Round, Rounds
from archive.ledger.terms import STATES, Granularity, Group, Key, Rollout

if TYPE_CHECKING:
    import pyarrow as pa


class Standing(ABC):
    """Rounds by key, in the order in which they were drawn, and keys that have ended."""

    @property
    @abstractmethod
    def _rounds(self) -> Mapping[Key, Rounds]: ...

    @property
    @abstractmethod
    def _ended(self) -> Ended: ...

    @property
    @abstractmethod
    def _rank(self) -> int | None:
        """Whose part is meant; None: all ranks'."""

    @property
    @abstractmethod
    def _archived(self) -> Archived:
        """Where episodes are read from."""

    @property
    @abstractmethod
    def _cursors(self) -> Cursors: ...

    @property
    def cursors(self) -> Mapping[int, Any]:
        """What each rank said last, by rank, as far as is known; those of the newest session last."""
        return self._cursors.by_rank

    @property
    def cursor(self) -> Any:
        """Up to where the data set was read by all: the lowest of what the ranks of the newest session said last, part
        by part of lists and objects. A rank that has said nothing stands where the session before had come to. None: at
        the beginning. `undrawn()` says what is left beyond it. UsageError where cursors cannot be compared."""
        return self._cursors.joint

    def undrawn(self, keys: Key | Iterable[Key], rounds: int = 1) -> list[Key]:
        """Those of these keys (a range, a list) that were drawn fewer than so many times, as far as is known, in their
        order: what a data set still has for its `rounds`-th epoch."""
        names = normalised(keys)
        ended = self._ended.last(names)
        known = self._rounds

        def drawn(key: Key) -> int:
            if key in known:
                return known[key][-1].number + 1
            return ended[key][0] + 1 if key in ended else 0

        return [key for key in names if drawn(key) < rounds]

    def to_reissue(self, granularity: Granularity = "sibling", *, all_ranks: bool = False) -> list[Any]:
        """What earlier sessions drew and did not seal, in the order in which it was drawn: this rank's part of it.

        granularity: "sibling": a `Rollout(key, sibling)` for each that is missing: sealed siblings are used again.
        "group": the keys of which one is missing, for those who do whole groups again: `drop` and `draw` them.
        What this session has drawn, started or sealed itself is not among it.
        """
        if granularity not in ("sibling", "group"):
            raise UsageError(f"granularity={granularity!r}: give 'sibling' or 'group'")
        kinds: dict[int, list[int]] = {}  # many share a round
        every = ((key, kinds.get(id(one)) or kinds.setdefault(id(one), one.left)) for key, one in self._open(all_ranks))
        left = ((key, siblings) for key, siblings in every if siblings)
        if granularity == "group":
            return list(dict.fromkeys(key for key, _ in left))
        return [Rollout(key, sibling) for key, siblings in left for sibling in siblings]

    def to_train(self, *, all_ranks: bool = False) -> list[Group]:
        """Keys of which all rollouts are sealed (or dropped) and that were not trained on, with their episodes, which
        `group.read()` reads; of those that earlier sessions left, this rank's part."""
        return [Group.of(key, one.episodes, self._archived) for key, one in self._open(all_ranks) if one.complete]

    def sealed(self, key: Key) -> dict[int, str]:
        """Sibling -> id of its episode, of a key's newest round that has not ended; empty if there is none."""
        rounds = self._rounds.get(normalised(key)[0], ())
        return dict(sorted(rounds[-1].sealed.items())) if rounds else {}

    def state(self, key: Key) -> str | None:
        """ "drawn", "started" (some rollout is, or is sealed), "sealed" (all are), "trained" or "dropped": of the key's
        newest round. None if it was never drawn."""
        (key,) = normalised(key)
        if rounds := self._rounds.get(key):
            return rounds[-1].state
        found = self._ended.last([key])
        return found[key][1] if key in found else None

    @property
    def counts(self) -> dict[str, int]:
        """State -> how many keys are in it."""
        out = dict.fromkeys(STATES, 0)
        by_id: dict[int, str] = {}  # many share a round
        for rounds in self._rounds.values():
            one = rounds[-1]
            state = by_id.get(id(one)) or by_id.setdefault(id(one), one.state)
            out[state] += 1
        again = self._ended.last(list(self._rounds))
        for state, count in self._ended.counts().items():
            out[state] += count - sum(how == state for _, how in again.values())
        return out

    @property
    def table(self) -> pa.Table:
        """How all stand: key (JSON), round, sibling (null: all), state, episode_id. A row a rollout; of rounds that
        have ended one for all."""
        import pyarrow as pa

        rows = [row for key, rounds in self._rounds.items() for one in rounds for row in _rows(key, one)]
        text, last, how = self._ended.columns(self._rounds)
        none: list[Any] = [None] * len(how)
        columns = {
            "key": pa.concat_arrays([text, pa.array(texts(row.key for row in rows), pa.string())]),
            "round": pa.array([*last, *(row.round for row in rows)], pa.int64()),
            "sibling": pa.array([*none, *(row.sibling for row in rows)], pa.int64()),
            "state": pa.array([*how, *(row.state for row in rows)], pa.string()),
            "episode_id": pa.array([*none, *(row.episode_id for row in rows)], pa.string()),
        }
        return pa.table(columns)

    def _open(self, all_ranks: bool) -> Iterator[tuple[Key, Round]]:
        rank = None if all_ranks else self._rank
        for key, rounds in self._rounds.items():
            for one in rounds:
                if not one.ended and (rank is None or one.owner == rank):
                    yield key, one


class _Row(NamedTuple):
    key: Key
    round: int
    sibling: int | None
    state: str
    episode_id: str | None


def _rows(key: Key, one: Round) -> Iterator[_Row]:
    if one.ended:
        yield _Row(key, one.number, None, one.ended, None)
    for sibling, far in enumerate(one.rollouts):
        yield _Row(key, one.number, sibling, NAMES[far], one.sealed.get(sibling))
