"""Engine: the archive that is shown, and the episodes that a browser means: as of a commit, of a run or a checkpoint,
that meet a condition, in an order. What was found once is kept, so that scrolling costs a slice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from archive.arrays import Ints
from archive.base import AccessDeniedError, ArchiveError, UsageError, cached_property
from archive.view.web import Query

if TYPE_CHECKING:
    import pyarrow as pa

    from archive import Archive, Checkpoint, Episode, Episodes

KEPT = 16  # lists of episodes, and orders of them
LATEST = "latest"
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What whoever started the viewer decided."""

    read_only: bool = False
    labels: tuple[dict[str, Any], ...] = ()  # what one may set; none: the labels that are there
    by: str | None = None  # who labels


class Shown:
    """An archive that people look at. Safe for several threads; follows new commits where it was opened to."""

    def __init__(self, arc: Archive, settings: Settings | None = None) -> None:
        """arc: as of the newest commit, or of the one that it was opened at."""
        self.arc, self.settings = arc, settings or Settings()
        self._lock = threading.RLock()
        self._found: OrderedDict[Hashable, Any] = OrderedDict()

    @cached_property
    def unwritable(self) -> str | None:
        """Why nothing can be labelled; None where it can be. Asked of the store once, by creating what is there."""
        if self.settings.read_only:
            return "opened with --read-only"
        try:
            self.arc.check_writable()
        except AccessDeniedError:
            return "these credentials may not write here"
        except ArchiveError as e:
            return str(e)
        return None

    def at(self, query: Query) -> Archive:
        """The archive as of `commit=`; the newest without one."""
        number = query.number("commit", 0)
        if not number or number == self.arc.head.number:
            return self.arc
        return self.kept(("commit", number), lambda: self.arc.at(number))

    def scope(self, query: Query) -> Scope:
        """The episodes that a request means: `commit=`, `run=`, `checkpoint=` (its commit's number), `buffer=`,
        `weights=` and `where=`."""
        arc = self.at(query)
        names = ("run", "checkpoint", "buffer", "weights", "where")
        key = (arc.head.number, *(query.text(name) for name in names))
        return self.kept(("scope", key), lambda: Scope(self, arc, _chosen(arc, query), key))

    def kept(self, key: Hashable, find: Callable[[], T]) -> T:
        """What was found for a key before, or now; of what nobody asked for lately nothing is kept."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]  # type: ignore[no-any-return]
        found = find()
        with self._lock:
            self._found[key] = found
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
        return found


class Scope:
    """Some episodes of an archive as of a commit."""

    def __init__(self, shown: Shown, arc: Archive, episodes: Episodes, key: tuple[Any, ...]) -> None:
        self._shown, self.arc, self.episodes, self.key = shown, arc, episodes, key
        self._columns: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.episodes)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of the table of all episodes of the scope; UsageError for one that there is none of."""
        if name not in self._columns:
            self._columns[name] = self.episodes._columns([name])[name]
        return self._columns[name]

    def order(self, name: str, *, descending: bool) -> Ints:
        """Places of the scope's episodes in the order of a column, missing values last; "" is as they were written."""
        key = ("order", self.key, name, descending)
        return self._shown.kept(key, lambda: _order(self, name, descending=descending))

    def episode(self, name: str) -> Episode:
        """One episode, by id; NotFoundError if it is not among these."""
        return self.episodes[name]


def _chosen(arc: Archive, query: Query) -> Episodes:
    number = query.number("checkpoint", 0)
    found = _checkpoint(arc, number).episodes if number else arc.episodes
    return found.filter(
        run=query.text("run") or None, buffer=query.text("buffer") or None,
        model_weights_uuid=query.text("weights") or None, where=query.text("where").strip() or None,
    )  # fmt: skip


def _checkpoint(arc: Archive, number: int) -> Checkpoint:
    for one in arc.checkpoints:
        if one.number == number:
            return one
    raise UsageError(f"commit {number} is no checkpoint of {arc.url}")


def _order(scope: Scope, name: str, *, descending: bool) -> Ints:
    import pyarrow as pa
    import pyarrow.compute as pc

    count = len(scope)
    if not name:
        return np.arange(count)[::-1] if descending else np.arange(count)
    column = scope.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.string())
    if pa.types.is_nested(column.type):
        raise UsageError(f"episodes have no order by {name}: it is a list")
    direction = "descending" if descending else "ascending"
    found: Ints = pc.array_sort_indices(column.combine_chunks(), order=direction).to_numpy().astype(np.int64)
    return found
