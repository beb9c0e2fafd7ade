"""The episodes that a ledger names, wherever they lie: also those that no buffer holds any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from archive.base import NotFoundError
from archive.ledger.keys import Places
from archive.manifest import Commit, EpisodeIndex, Sequences, Snapshot
from archive.read import Episodes, Reader
from archive.store import Storage

Settle = Callable[[Sequence[str], bool], bool]


class Archived:
    """Episodes by id, as a session sees them. It reads tables when it is first asked, and later what is new."""

    def __init__(
        self, storage: Storage, head: Callable[[], Commit], branch: tuple[str, Sequences | None],
        settle: Settle | None = None,
    ) -> None:  # fmt: skip
        """head: gives the newest commit that counts. settle(ids, whole): commits what of
        them is in no commit yet; whether it did. whole: they are there, and have ended."""
        self._storage, self._head, self._branch, self._settle = storage, head, branch, settle
        self._known: tuple[Episodes, Places] | None = None

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
        """Those of the newest commit; None if one is not there."""
        every, ids = self._known = self._as_of(self._head())
        places = ids.of(names)
        return None if None in places else every[np.array(places, np.int64)]

    def _as_of(self, head: Commit) -> tuple[Episodes, Places]:
        if self._known is not None and self._known[0].episode_index.snapshot.commit.number == head.number:
            return self._known
        if self._known is None:
            index = EpisodeIndex(Snapshot(self._storage, head), branch=self._branch)
        else:
            index = self._known[0].episode_index.as_of(head)
        every = Episodes(Reader(index.snapshot), index)
        return every, Places(every.table["episode_id"])

    def __getstate__(self) -> dict[str, Any]:
        return {"storage": self._storage, "head": self._head(), "branch": self._branch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["storage"], lambda: state["head"], state["branch"])  # type: ignore[misc]
