"""The archive that is shown: its episodes as columns and orders, and what was found out about them for those who look.
What was found once is kept, so that scrolling costs a slice."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from archive.arrays import Ints
from archive.base import AccessDeniedError, ArchiveError, IntegrityError, NotFoundError, UsageError, cached_property
from archive.fields import Bools, Objects
from archive.index import METADATA_COLUMN
from archive.view.wire import Query, Reply, json_reply

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Commit, Episodes


def ascending(column: pa.ChunkedArray) -> tuple[Ints, int]:
    """Places of the values in ascending order, equal ones as they come, those without a value (or NaN) last; and how
    many have one. TypeError for lists, which have no order."""
    whole = column.combine_chunks()
    if pa.types.is_nested(whole.type):
        raise TypeError(f"a column of {whole.type} has no order")
    if pa.types.is_dictionary(whole.type):
        whole = _ranks(whole)
    if pa.types.is_floating(whole.type):
        whole = pc.if_else(pc.is_nan(whole), pa.scalar(None, whole.type), whole)
    if pa.types.is_floating(whole.type) and not whole.null_count:
        return _of_numbers(whole.to_numpy()), len(whole)
    return pc.array_sort_indices(whole).to_numpy().astype(np.int32), len(whole) - whole.null_count


def _ranks(column: pa.DictionaryArray) -> pa.Array:
    """Numbers that compare as the few distinct values do, which are put in order apart."""
    rank = pc.rank(column.dictionary.cast(pa.string()), tiebreaker="dense")
    return rank.cast(pa.int64()).take(column.indices)


def _of_numbers(values: np.ndarray[Any, Any]) -> Ints:
    """Sort as Arrow does, in a quarter of the time for a million random ones: two sorts that are not stable, the second
    of which puts equal values as they come."""
    order = np.argsort(values)
    ordered = values[order]
    run = np.zeros(len(values), np.int64)
    np.cumsum(ordered[1:] != ordered[:-1], out=run[1:])
    packed = run * max(len(values), 1) + order
    packed.sort()
    return (packed % max(len(values), 1)).astype(np.int32)


LOOKED_AT = 2000  # episodes whose metadata is looked into for its names
LONGEST = 500  # characters of such a name


class Listing:
    """The episodes of an archive, or of a checkpoint. Columns and orders are found when first asked for, and stay."""

    def __init__(self, episodes: Episodes, key: tuple[Hashable, ...], head: Commit) -> None:
        self.episodes, self.key, self.head = episodes, key, head
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._orders: dict[str, tuple[Ints, int]] = {}
        self._loading, self._busy = threading.Lock(), threading.Lock()

    def inherit(self, other: Listing) -> None:
        """Take over what was found of the same episodes before something was said of them."""
        self._columns.update({n: column for n, column in other._columns.items() if not n.startswith("label.")})
        self._orders.update({n: order for n, order in other._orders.items() if not n.startswith("label.")})

    @property
    def nbytes(self) -> int:
        """Bytes of what was found so far."""
        columns, found = list(self._columns.values()), list(self._orders.values())
        return sum(int(column.nbytes) for column in columns) + sum(places.nbytes for places, _ in found)

    def __len__(self) -> int:
        return len(self.episodes)

    @property
    def names(self) -> list[str]:
        """The columns: those of each table of episodes, and one a label."""
        return self.episodes.episode_index.names

    @cached_property
    def metadata_names(self) -> list[str]:
        """The columns of metadata, as the newest episodes have them; of many the most frequent."""
        texts = self.column("metadata")
        newest = Objects(texts.slice(max(len(texts) - LOOKED_AT, 0)), "metadata of an episode")
        try:
            return [METADATA_COLUMN + name for name in newest.names if len(name) <= LONGEST]
        except IntegrityError:
            return []  # who looks at the episode is told

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of the table; UsageError for one that there is none of."""
        with self._loading:  # who comes second waits, rather than decoding it beside the first
            if name not in self._columns:
                self._columns[name] = self.episodes.columns([name])[name]
            return self._columns[name]

    def values(self, name: str, places: pa.Array) -> pa.ChunkedArray | pa.Array:
        """A column at some places: of metadata only these are parsed, unless all are already."""
        if name.startswith(METADATA_COLUMN) and name not in self._columns:
            here = Objects(self.column("metadata").take(places), "metadata of an episode")
            return here.column(name.removeprefix(METADATA_COLUMN))
        return self.column(name).take(places)

    def place_of(self, name: str) -> int:
        """The place of an episode, by id; NotFoundError if there is none."""
        found = self.column("episode_id").index(name).as_py()
        if found < 0:
            raise NotFoundError(f"there is no episode {name!r:.80} here")
        return int(found)

    def order(self, name: str) -> tuple[Ints, int]:
        """Places in ascending order of a column, those without a value last; and how many have one."""
        with self._busy:  # who comes second waits, rather than sorting a million beside the first
            if name not in self._orders:
                try:
                    self._orders[name] = ascending(self.column(name))
                except TypeError as e:
                    raise UsageError(f"episodes have no order by {name}: {e}") from e
        return self._orders[name]

    def scope(self, given: Mapping[str, str | None], key: Hashable) -> Scope:
        """The episodes of a run, a buffer, weights, or that meet a condition; all where none of these is given."""
        if not any(given.values()):
            return Scope(self, None, key)
        found = self.episodes.filter(
            run=given["run"], buffer=given["buffer"], model_weights_uuid=given["weights"], where=given["where"]
        )
        return Scope(self, np.isin(self.episodes.numbers, found.numbers), key, found.notes)


class Scope:
    """Some episodes of a listing."""

    def __init__(self, listing: Listing, member: Bools | None, key: Hashable, notes: Sequence[str] = ()) -> None:
        """member: which of the listing's episodes; None for all.  notes: what the condition leaves out."""
        self.listing, self.key, self.notes = listing, key, notes
        self._member = member
        self._count = len(listing) if member is None else int(member.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the mask of these episodes."""
        return 0 if self._member is None else int(self._member.nbytes)

    def __len__(self) -> int:
        return self._count

    @property
    def places(self) -> Ints:
        """Their places in the listing."""
        return np.arange(len(self.listing)) if self._member is None else np.flatnonzero(self._member)

    def order(self, name: str, *, descending: bool) -> Ints:
        """Their places in the listing, by a column, those without a value last; "" is as they were written."""
        if not name:
            return self.places[::-1] if descending else self.places
        places, known = self.listing.order(name)
        if self._member is not None:
            there = self._member[places]
            places, known = places[there], int(there[:known].sum())
        return np.concatenate([places[:known][::-1], places[known:]]) if descending else places

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of theirs, as they were written."""
        column = self.listing.column(name)
        return column if self._member is None else column.filter(pa.array(self._member))

    def place_of(self, name: str) -> int:
        """The place of an episode in the listing; NotFoundError where it is not among these."""
        found = self.listing.place_of(name)
        if self._member is not None and not self._member[found]:
            raise NotFoundError(f"episode {name!r} is not among those that meet the condition")
        return found


KEPT = 64  # things found: lists of episodes, what was counted of them, what reads an episode
KEPT_BYTES = 2**29  # of all of them
RECENT = 16  # of these so many stay however large the archive's tables are; what reads episodes does not
FIRST = ("episode_id", "return", "length", "update_count_max", "model_weights_uuids", "complete", "run", "created_at")
ORDERED = ("return", "length", "update_count_max", "created_at", "episode_id")  # what people sort by first
T = TypeVar("T")
_NOTHING = object()


@dataclass(frozen=True)
class Settings:
    """Choices of the person who started the viewer."""

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
        """The episodes of `commit=`, or those of the checkpoint whose commit's number `checkpoint=` is."""
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
        """Return what was found for a key, or find it; what nobody has asked for lately is forgotten, so that all of it
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


LEAST_S = 1.0  # between two questions to the store


class Following:
    """The moment at which the store was asked last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0.0

    def ask(self, shown: Shown) -> None:
        """Show the newest commit, unless somebody asked just now."""
        with self._lock:
            if time.monotonic() - self._asked < LEAST_S:
                return
            with shown.writing:
                shown.arc.refresh()
            self._asked = time.monotonic()


def news(shown: Shown, query: Query) -> Reply:
    """The newest commit, asked of the store: {commit, episodes, pinned}. An archive that was opened at a commit has no
    news."""
    if not shown.arc.pinned:
        shown.kept("following", Following).ask(shown)
    head = shown.arc.head
    return json_reply({"commit": head.number, "created_at": head.created_at, "pinned": shown.arc.pinned})
