"""Pure, no I/O: the words of a ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from archive.base import UsageError

if TYPE_CHECKING:
    from archive.read import Episodes

DRAWN, STARTED, SEALED, TRAINED, DROPPED, CURSOR = "drawn", "started", "sealed", "trained", "dropped", "cursor"
STATES = (DRAWN, STARTED, SEALED, TRAINED, DROPPED)  # of keys, in the order in which they come
WHOLE_KEY = -1  # in place of a sibling: all of them

Key = str | int
Granularity = Literal["sibling", "group"]


class Rollout(NamedTuple):
    """One rollout of a prompt: of its siblings the one of this number."""

    key: Key
    sibling: int


class _Group(NamedTuple):
    key: Key
    episodes: Sequence[str]


class Group(_Group):
    """A prompt whose rollouts are all there: the ids of their episodes, by sibling."""

    _archived: Callable[[Sequence[str]], Episodes] | None = None

    @classmethod
    def of(cls, key: Key, episodes: Sequence[str], archived: Callable[[Sequence[str]], Episodes]) -> Group:
        """One whose episodes `archived` finds."""
        made = cls(key, episodes)
        made._archived = archived
        return made

    def read(self, fields: Any = None, **how: Any) -> list[dict[str, Any]]:
        """The steps of its episodes, by sibling, wherever they lie: in a buffer, or only in the archive. What this
        writer has added since its last commit is committed first. Arguments are those of `Episodes.read`."""
        if self._archived is None:
            raise UsageError(f"the group of key {self.key!r:.80} is of no ledger: take it from to_train()")
        return self._archived(self.episodes).read(fields, **how)
