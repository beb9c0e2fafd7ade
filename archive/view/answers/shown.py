"""The archive that is shown, and what was found out about it for those who look. What was found once is kept,
so that scrolling costs a slice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from archive.base import AccessDeniedError, ArchiveError, NotFoundError, cached_property
from archive.view.answers.listings import Listing, Scope
from archive.view.web import Query

if TYPE_CHECKING:
    from archive import Archive, Checkpoint

KEPT = 64  # things found: lists of episodes, what was counted of them, what reads an episode
KEPT_BYTES = 2**29  # of all of them
RECENT = 16  # of these so many stay however large the archive's tables are; what reads episodes does not
FIRST = ("episode_id", "return", "length", "update_count_max", "model_weights_uuids", "complete", "run", "created_at")
ORDERED = ("return", "length", "update_count_max", "created_at", "episode_id")  # what people sort by first
T = TypeVar("T")
_NOTHING = object()


@dataclass(frozen=True)
class Settings:
    """What whoever started the viewer decided."""

    read_only: bool = False
    labels: tuple[dict[str, Any], ...] = ()  # what one may set; none: the labels that are there
    by: str | None = None  # who labels
    tokenizer: Any = None  # what makes text of token ids: as of Episode.to_html


class Shown:
    """An archive that people look at. Safe for several threads."""

    def __init__(self, arc: Archive, settings: Settings | None = None) -> None:
        """arc: as of the newest commit, or of the one that it was opened at."""
        self.arc, self.settings = arc, settings or Settings()
        self.writing = threading.Lock()  # one batch of labels at a time
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

    def listing(self, query: Query) -> Listing:
        """All episodes of `commit=`, or those of the checkpoint whose commit's number `checkpoint=` is."""
        arc, number = self.at(query), query.number("checkpoint", 0)
        key = ("listing", arc.head.number, number)
        return self.kept(key, lambda: self._listed(arc, number, key))

    def _listed(self, arc: Archive, number: int, key: tuple[Hashable, ...]) -> Listing:
        made = Listing(checkpoint_at(arc, number).episodes if number else arc.episodes, key, arc.head)
        with self._lock:
            others = [one for one in reversed(self._found.values()) if isinstance(one, Listing)]
        for other in others:
            if other.key[-1] == number and arc.head.same_episodes(other.head):  # a label was set: all the rest stays
                made.inherit(other)
                break
        return made

    def scope(self, query: Query) -> Scope:
        """The episodes that a request means: those of its listing of `run=`, `buffer=`, `weights=` that meet `where=`.
        UsageError for what is no condition."""
        listing = self.listing(query)
        given = {name: query.text(name).strip() or None for name in ("run", "buffer", "weights", "where")}
        key = ("scope", listing.key, *given.values())
        return self.kept(key, lambda: listing.scope(given, key))

    def kept(self, key: Hashable, find: Callable[[], T]) -> T:
        """What was found for a key before, or now; what nobody has asked for lately is forgotten, so that all of it
        takes no more than KEPT_BYTES, with what the thing itself may yet take (`most_bytes`)."""
        with self._lock:
            found = self._found.get(key, _NOTHING)
        if found is _NOTHING:
            found = find()
        with self._lock:
            self._found[key] = found
            self._found.move_to_end(key)
            self._forget(getattr(found, "most_bytes", _bytes(found)))
        return found  # type: ignore[no-any-return]

    def _forget(self, most: int) -> None:
        """Let go of the oldest; `most`: what the newest may come to take."""
        names = list(self._found)[:-1]
        sizes = [_bytes(self._found[name]) for name in names]
        total, count = sum(sizes) + most, len(self._found)
        for i, (name, taken) in enumerate(zip(names, sizes, strict=True)):
            stays = i >= len(names) - RECENT and not hasattr(self._found[name], "most_bytes")
            if count > KEPT or (total > KEPT_BYTES and not stays):
                del self._found[name]
                total, count = total - taken, count - 1

    def warm(self) -> None:
        """Loads what the first rows show, and puts them in the orders that people ask for first."""
        listing = self.listing(Query({}))
        for name in FIRST:
            listing.column(name)
        for name in ORDERED:
            listing.order(name)


def _bytes(found: Any) -> int:
    return sum(map(_bytes, found)) if isinstance(found, tuple) else int(getattr(found, "nbytes", 0))


def checkpoint_at(arc: Archive, number: int) -> Checkpoint:
    """The checkpoint of a commit, by its number; NotFoundError if it is none. No other one is read."""
    saved = arc.checkpoints
    place = saved.table["commit"].index(number).as_py()
    if place < 0:
        raise NotFoundError(f"commit {number} is no checkpoint of {arc.url}")
    return saved[place]
