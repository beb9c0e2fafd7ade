"""What is asked of a ledger: of that of a writer, and of what a commit says. The episodes that it names are read
wherever they are stored: also those that no buffer holds any more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from archive.base import NotFoundError, UsageError
from archive.index import EpisodeIndex, Snapshot
from archive.ledger.keys import Key, TextIndex, normalised, texts
from archive.ledger.prompts import ALL_RANKS, Prompts
from archive.ledger.rounds import NAMES, STATES, Round
from archive.log import Commit, Sequences
from archive.read import Episodes, Reader
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

Granularity = Literal["sibling", "group"]


class Rollout(NamedTuple):
    """One rollout of a prompt: of its siblings the one of this number."""

    key: Key
    sibling: int


class _KeyedEpisodes(NamedTuple):
    key: Key
    episodes: Sequence[str]


class Group(_KeyedEpisodes):
    """A prompt whose rollouts are all there: the ids of their episodes, by sibling."""

    _archived: Archived | None = None

    @classmethod
    def of(cls, key: Key, episodes: Sequence[str], archived: Archived) -> Group:
        """A group whose episodes `archived` finds."""
        made = cls(key, episodes)
        made._archived = archived
        return made

    def read(self, fields: Any = None, **how: Any) -> list[dict[str, Any]]:
        """The steps of its episodes, by sibling, wherever they lie: in a buffer, or only in the archive. What this
        writer has added since its last commit is committed first. Arguments are those of `Episodes.read`."""
        if self._archived is None:
            raise UsageError(f"the group of key {self.key!r:.80} is of no ledger: take it from to_train()")
        return self._archived(self.episodes).read(fields, **how)


class Archived:
    """Episodes by id, as a session sees them. It reads tables when it is first asked, and later what is new."""

    def __init__(
        self, storage: Storage, head: Callable[[], Commit], branch: tuple[str, Sequences | None],
        settle: Callable[[Sequence[str], bool], bool] | None = None,
    ) -> None:  # fmt: skip
        """head: gives the newest commit that counts. settle(ids, whole): commits what of
        them is in no commit yet; whether it did. whole: they are there, and have ended."""
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
            "forgotten by its id, and pruned; drop() the prompt, or reopen() the rollout to have it made again"
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
    """The questions that a ledger answers by how prompts stand."""

    _archived: Archived

    @property
    @abstractmethod
    def _prompts(self) -> Prompts: ...

    @property
    def cursors(self) -> Mapping[int, Any]:
        """The cursor that each rank said last, by rank, as far as is known; those of the newest session last."""
        return self._prompts.cursors.by_rank

    @property
    def cursor(self) -> Any:
        """Up to where the data set was read by all: the lowest of what the ranks of the newest session said last, part
        by part of lists and objects. A rank that has said nothing stands where the session before had come to. None: at
        the beginning. `undrawn()` says what is left beyond it. UsageError where cursors cannot be compared."""
        return self._prompts.cursors.joint

    def undrawn(self, keys: Key | Iterable[Key], rounds: int = 1) -> list[Key]:
        """The keys among these (a range, a list) that were drawn fewer than so many times, as far as is known, in their
        order: what a data set still has for its `rounds`-th epoch."""
        names = normalised(keys)
        drawn = self._prompts.newest(names)
        return [key for key in names if key not in drawn or drawn[key][0] + 1 < rounds]

    def to_reissue(self, granularity: Granularity = "sibling", *, all_ranks: bool = False) -> list[Any]:
        """What earlier sessions drew and did not seal, in the order in which it was drawn: this rank's part of it.

        granularity: "sibling": a `Rollout(key, sibling)` for each that is missing: sealed siblings are used again.
        "group": the keys of which one is missing, for those who do whole groups again: `drop` and `draw` them.
        What this session has drawn, started or sealed itself is not among it.
        """
        if granularity not in ("sibling", "group"):
            raise UsageError(f"granularity={granularity!r}: give 'sibling' or 'group'")
        left = ((key, siblings) for key, one in self._open(all_ranks) if (siblings := one.left))
        if granularity == "group":
            return list(dict.fromkeys(key for key, _ in left))
        return [Rollout(key, sibling) for key, siblings in left for sibling in siblings]

    def to_train(self, *, all_ranks: bool = False) -> list[Group]:
        """Keys of which all rollouts are sealed (or dropped) and that were not trained on, with their episodes, which
        `group.read()` reads; of those that earlier sessions left, this rank's part."""
        return [Group.of(key, one.episodes, self._archived) for key, one in self._open(all_ranks) if one.complete]

    def _open(self, all_ranks: bool) -> Iterator[tuple[Key, Round]]:
        found = self._prompts
        return found.open(ALL_RANKS if all_ranks else found.rank)

    def sealed(self, key: Key) -> dict[int, str]:
        """Sibling -> id of its episode, of a key's newest round that has not ended; empty if there is none."""
        rounds = self._prompts.rounds.get(normalised(key)[0], ())
        return dict(sorted(rounds[-1].sealed.items())) if rounds else {}

    def state(self, key: Key) -> str | None:
        """ "drawn", "started" (some rollout is, or is sealed), "sealed" (all are), "trained" or "dropped": of the key's
        newest round. None if it was never drawn."""
        (key,) = normalised(key)
        return self._prompts.newest([key]).get(key, (0, None))[1]

    @property
    def counts(self) -> dict[str, int]:
        """State -> how many keys are in it."""
        found = self._prompts
        rounds = dict(found.rounds)  # other threads may change it meanwhile
        out = Counter(one[-1].state for one in rounds.values())
        out.update(found.ended.counts())
        out.subtract(state for _, state in found.ended.last(list(rounds)).values())
        return {state: out[state] for state in STATES}

    @property
    def table(self) -> pa.Table:
        """The standing of all: key (JSON), round, sibling (null: all), state, episode_id. A row a rollout; of rounds
        that have ended one for all."""
        import pyarrow as pa

        found = self._prompts
        rounds = dict(found.rounds)  # other threads may change it meanwhile
        text, last, how = found.ended.columns(rounds)
        rows = [(key, *row) for key, each in rounds.items() for one in each for row in _rows(one)]
        keys, *columns = zip(*rows, strict=True) if rows else [()] * 5
        none: list[Any] = [None] * len(how)
        number, sibling, state, episode = (
            [*ended, *own] for ended, own in zip((last.tolist(), none, how, none), columns, strict=True)
        )
        return pa.table({
            "key": pa.concat_arrays([text, pa.array(texts(keys), pa.string())]),
            "round": pa.array(number, pa.int64()),
            "sibling": pa.array(sibling, pa.int64()),
            "state": pa.array(state, pa.string()),
            "episode_id": pa.array(episode, pa.string()),
        })  # fmt: skip


def _rows(one: Round) -> list[tuple[int, int | None, str, str | None]]:
    """Round, sibling, state and episode of each rollout; one for all, if the round has ended."""
    if one.ended:
        return [(one.number, None, one.ended, None)]
    return [(one.number, s, NAMES[far], one.sealed.get(s)) for s, far in enumerate(one.rollouts)]
