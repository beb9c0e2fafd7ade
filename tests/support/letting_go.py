"""What the tests of letting go share: rings that are checkpointed, and all that anybody reads of them, by value."""

from __future__ import annotations

from typing import Any

import numpy as np

import archive
from archive.maintain import retained_reach
from tests.support.checkpoints import steps
from tests.support.compactions import as_stored, everything


class Ring:
    """A writer whose buffer holds the newest `held` episodes of 10 steps; each checkpoint comes after one more."""

    def __init__(self, arc: archive.Archive, held: int = 3, begin: int = 0, **options: Any) -> None:
        self.arc = arc
        self.held = held
        self.made = begin
        self.w = arc.writer(**options)

    def turn(self, save: bool = True, **how: Any) -> Any:
        """One more episode and, if it is saved, its checkpoint."""
        k = self.made
        self.w.append(steps(range(10 * k, 10 * k + 10)), env_ids=0, last=[i == 9 for i in range(10)])
        ends = self._live("position") + self._live("length")
        self.w.evict(0, before=max(0, int(ends.max()) - 10 * self.held))
        self.made += 1
        if not save:
            return None
        how = {"metrics": {"return": float(k % 4)}} | how
        count = int(self._live("length").sum()) if how.get("save_replay", True) else 0
        columns = {"p": np.arange(count) * 0.5 + k} if count else None
        return self.w.checkpoint(k, columns=columns, state={"k": k}, **how).result()

    def _live(self, column: str) -> Any:
        return self.w.live[column].to_numpy()

    def turns(self, count: int) -> list[Any]:
        return [self.turn() for _ in range(count)]


def told(ck: Any) -> dict[str, Any]:
    """All that a checkpoint says."""
    return {
        "episodes": as_stored(ck.episodes), "steps": ck.episodes.read(), "live": ck.live.to_pylist(), "name": ck.name,
        "columns": [ck.staged(rank).index.columns.get("replay") and ck.column("p", rank) for rank in ck.ranks],
        "state": [ck.state(rank) for rank in ck.ranks],
    }  # fmt: skip


def all_told(arc: archive.Archive) -> tuple[dict[str, Any], dict[Any, Any]]:
    """All episodes, and all checkpoints by their numbers, as somebody else reads them."""
    other = archive.open(arc.url)
    return everything(other), {ck.number: told(ck) for ck in other.checkpoints}


def forgotten(arc: archive.Archive) -> set[str]:
    """The keys in the table of what was forgotten."""
    from archive.log import tablefiles

    head = archive.open(arc.url, storage_options=arc.storage.root.options).head
    return set(tablefiles.load(arc.storage, "forgotten", head.files("forgotten"))["key"].to_pylist())


def remove_forgotten(arc: archive.Archive) -> set[str]:
    """Do what a prune will: delete what retained commits no longer lead to; what was deleted."""
    head = archive.open(arc.url).head
    keys = forgotten(arc) - retained_reach(arc.storage, head).keys
    folders = [key for key in keys if key.endswith(".zarr")]
    inside = [one.key for folder in folders for one in arc.storage.scan(folder)]
    arc.storage.delete([*(keys - {*folders}), *inside])
    return keys
