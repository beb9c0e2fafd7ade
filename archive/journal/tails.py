"""Does I/O: the tails of a run's newest session, which are the unflushed suffixes of its ranks' journals: the objects
beyond its newest checkpoint.

They are read by number, a few ahead, never by a listing: one request an object, and two or three more a rank or node,
or two of a hundred. A tail ends before the first tick that is missing or damaged, and with a complete one. A tick is an
object of its rank's, or lies in one of its node's; numbers tell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from archive.base import (
    CorruptCommitError,
    CorruptStateError,
    IntegrityError,
    MissingObjectError,
    NotFoundError,
    layout,
    one_line,
    size,
    tabulate,
)
from archive.log import Commit, Sighting, commits
from archive.saved import Delta, Named, NodeObject, TickIndex, TickObject, counted
from archive.store import Storage

MISSING, DAMAGED, ENDED = "missing", "damaged", "ended"  # why a tail ends
MAX_OBJECT_BYTES = 1 << 28
MAX_LOOKS = 4  # reads of a damaged object: one damaged answer ends no tail
RANKS_AT_ONCE = 32
MAX_AHEAD = 16  # objects of a rank that are fetched at once
_ONE_MORE_EVERY = 128  # objects found, for each request that may miss
_ROOM_BYTES = 256 * 1024 * 1024  # of objects in flight, by the sizes that are guessed
_LEAST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RankTail:
    """The tail of one rank: its objects from `start` to before `next`, and their content.

    ended: "missing", there is no object `next`; "damaged": that object cannot be used; "ended": a
    session that takes its place has ended the journal. why: a sentence. node: if some lie in objects of its node, which
    one, and the number of these below which nothing is of this rank from `next` on, nor may be in a damaged one.
    spoiled: the damaged object of its node at which it ends.
    """

    rank: int
    start: int
    next: int
    steps: int
    episodes: int
    bytes: int
    ended: str
    why: str
    held: Delta
    node: tuple[int, int] | None = None
    spoiled: str | None = None

    @property
    def objects(self) -> int:
        """The number of its objects."""
        return self.next - self.start

    @property
    def ledger(self) -> int:
        """The number of its rows of ledgers."""
        return int(self.held.table("ledger").num_rows)

    def to_json(self) -> dict[str, Any]:
        """The facts about it as JSON."""
        names = ("rank", "start", "next", "objects", "steps", "episodes", "ledger", "bytes", "ended", "why")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Total:
    """The counts of all ranks' tails together."""

    objects: int
    steps: int
    episodes: int
    ledger: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Tails:
    """The tails of the newest session of a run, rank by rank."""

    run: str
    session: str
    ranks: tuple[RankTail, ...]

    @property
    def total(self) -> Total:
        """The counts over all ranks; an episode of several ranks counts for each."""
        return Total(*(sum(getattr(one, name) for one in self.ranks) for name in Total.__slots__))

    @property
    def damaged(self) -> tuple[RankTail, ...]:
        """The tails that end at a damaged object."""
        return tuple(one for one in self.ranks if one.ended == DAMAGED)

    def __bool__(self) -> bool:
        return any(one.objects for one in self.ranks)

    def to_json(self) -> dict[str, Any]:
        """The tails as one JSON object."""
        ranks = [one.to_json() for one in self.ranks]
        return {"run": self.run, "session": self.session, "ranks": ranks, "total": asdict(self.total)}

    def __str__(self) -> str:
        names = ("objects", "steps", "episodes", "ledger", "bytes")
        columns = ("rank", "from", "next", *names, "ended")
        rows = [(one.rank, one.start, one.next, *_cells(one, names), one.why) for one in self.ranks]
        total = ("all", "", "", *_cells(self.total, names), "")
        head = f"run {self.run!r}, session {self.session!r}: journal beyond the newest checkpoint"
        return "\n".join([one_line(head), *tabulate(columns, [*rows, total], right=columns[:-1])])


def _cells(one: RankTail | Total, names: tuple[str, ...]) -> list[str]:
    return [size(getattr(one, name)) if name == "bytes" else f"{getattr(one, name):,}" for name in names]


def of_run(storage: Storage, head: Commit, run: str) -> Tails:
    """The tails of a run; none for a session without a journal. NotFoundError if there is no such run."""
    entry = head.runs.get(run)
    if entry is None:
        known = ", ".join(map(repr, head.runs)) or "none"
        raise NotFoundError(f"there is no run {run!r} at {storage.url}; its runs: {known}")
    return Tails(run, entry.session, tuple(read(storage, head, run).values()))


def read(storage: Storage, head: Commit, run: str) -> dict[int, RankTail]:
    """Rank -> its tail, for a run's newest session. Adopts nothing. CorruptCommitError if an object names a commit that
    is gone."""
    entry = head.runs[run]
    if not entry.journal:
        return {}
    count = min(RANKS_AT_ONCE, len(entry.journal))
    with (
        ThreadPoolExecutor(count, "archive-tails") as ranks,
        ThreadPoolExecutor(RANKS_AT_ONCE, "archive-ahead") as pool,
    ):
        source = _Lookahead(storage, pool)
        readers = {rank: _TailReader(source, head, run, rank) for rank in sorted(entry.journal)}
        nodes = [_NodeReader(source, entry.session, *one, readers) for one in sorted((entry.nodes or {}).items())]
        damage = [found for some in ranks.map(_NodeReader.read, nodes) for found in some]
        return {one.rank: one for one in ranks.map(partial(_TailReader.read, damage=damage), readers.values())}


class _Room:
    """A bound on the bytes in flight, over all ranks."""

    def __init__(self) -> None:
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        """Wait until there is room for these bytes, or nothing is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= _ROOM_BYTES)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()


class _Lookahead:
    """Objects by number, a few ahead, in bounded memory over all who read; and a damaged one again."""

    def __init__(self, storage: Storage, pool: ThreadPoolExecutor) -> None:
        self.storage = storage
        self._pool = pool
        self._room = _Room()

    def objects(self, key_of: Callable[[int], str], number: int) -> Iterator[tuple[int, str, bytes | None]]:
        """Number, key and bytes of each object from a number on, without end; None for a missing one. A thread that
        has one in hand asks for some by `few`: it must not wait for room."""
        found, largest = 0, _LEAST_BYTES
        while True:
            ahead = min(1 + found // _ONE_MORE_EVERY, MAX_AHEAD, max(1, _ROOM_BYTES // 8 // largest))
            numbers = range(number + found, number + found + ahead)
            with self._room.of(ahead * largest):
                keys = [key_of(n) for n in numbers]
                datas = [self._get(keys[0])] if ahead == 1 else list(self._pool.map(self._get, keys))
                for n, key, data in zip(numbers, keys, datas, strict=True):
                    largest = max(largest, len(data or b""))
                    yield n, key, data
                del datas, data
            found += ahead

    def few(self, key_of: Callable[[int], str], number: int, stop: int) -> Iterator[tuple[int, str, bytes | None]]:
        """The same for the objects below `stop`."""
        for n in range(number, stop):
            yield n, (key := key_of(n)), self._get(key)

    def _get(self, key: str) -> bytes | None:
        try:
            return self.storage.get_head(key, MAX_OBJECT_BYTES + 1)
        except MissingObjectError:
            return None

    def taken(self, key: str, data: bytes, take: Callable[[bytes, str], object]) -> str | None:
        """Take in an object's bytes; if they are damaged, in the same way each time, a sentence why. CorruptStateError
        if they differ at each read, for then the answers are damaged. take: raises IntegrityError, given where it is.
        """
        where, found = self.storage.full_url(key), data
        for _ in range(MAX_LOOKS):
            try:
                if len(found) > MAX_OBJECT_BYTES:
                    raise CorruptStateError(f"{where} is larger than any object of a journal")
                take(found, where)
            except IntegrityError as e:
                why = str(e)
            else:
                return None
            before, again = found, self._get(key)
            if again is None or again == before:
                return why if again is not None else f"there is no {key}"
            found = again
        raise CorruptStateError(f"{why}; it differed at each read, so the store's answers cannot be trusted")


class _TailReader:
    """The reader of one rank's tail. `node`: whose objects had ticks of it."""

    def __init__(self, source: _Lookahead, head: Commit, run: str, rank: int) -> None:
        entry = head.runs[run]
        self._source = source
        self._head = head
        self._run = run
        self._session = entry.session
        self._rank = rank
        self._start = (entry.journal or {})[rank]
        self._held = Delta()
        self._tick: list[Delta] = []  # of the incomplete tick
        self._found = 0  # objects, also those of an incomplete tick
        self._after = 0  # rows of the next object are not below it
        self._ended: tuple[str, str] | None = None  # how and why
        self._looked_for = head.number  # commits up to this one are there
        self._using = threading.Lock()
        self.node: int | None = None
        self._until = 0  # objects of its node below this number were read,
        self._places: list[tuple[int, int]] = []  # with these ticks: number, and that of the object
        self._last_place = -1

    @property
    def _next(self) -> int:
        return self._start + self._found

    def read(self, damage: Sequence[_Damage]) -> RankTail:
        """The tail, read to its end. damage: objects of nodes that are damaged, with whichever ticks they had."""
        self._take_own(None)
        held, (ended, why) = self._held, self._ended or (MISSING, "")
        mine = [one for one in damage if self.node in (None, one.node) and one.number > self._last_place]
        spoiled = min(mine, key=lambda one: one.number) if ended == MISSING and mine else None
        ended, why = (ended, why) if spoiled is None else (DAMAGED, spoiled.why)
        following = self._start + held.objects
        if self._tick:
            why += f"; the tick that begins with number {following} is not complete"
        least = min((place for number, place in self._places if number >= following), default=self._until)
        node = None if self.node is None else (self.node, least)
        if spoiled is not None:  # what it had of this rank is not in the tail, and the rank may yet commit it
            node = spoiled.node, spoiled.number if node is None else min(spoiled.number, least)
        counts = counted(held.table("segments"))
        at = None if spoiled is None else spoiled.key
        return RankTail(self._rank, self._start, following, *counts, held.nbytes, ended, why, held, node, at)

    def _take_own(self, stop: int | None) -> None:
        """Add objects of its own to the tail: those below `stop`, or to its end."""
        if self._ended:
            return
        key_of, first = partial(layout.journal_key, self._session, self._rank), self._next
        source = self._source
        for _, key, data in source.objects(key_of, first) if stop is None else source.few(key_of, first, stop):
            if data is None:
                self._ended = MISSING, f"there is no {key}"
            else:
                self._take(key, data, partial(_own, key))
            if self._ended:
                return

    def take_member(self, name: Named, key: str, place: int, data: bytes) -> None:
        """Add a tick that lies in an object of its node, if it is the next one; ticks between are of its own."""
        with self._using:
            self._places += [(name[1], place)] if name[1] >= self._start else []
            self._take_own(name[1])
            if self._ended is None and name[1] == self._next:  # else it was there already, as after a lost answer
                why = self._take(key, data, partial(_member, key, name))
                if why is not None:
                    self._take_own_of(name[1], why)
                self._last_place = place if self._ended is None else self._last_place

    def _take_own_of(self, number: int, why: str) -> None:
        """Go on with the object of its own under the number of a damaged tick, if it has stored that by itself, too."""
        self._ended = None
        self._take_own(number + 1)
        if self._next == number:
            self._ended = DAMAGED, why

    def take_end(self, node: int, until: int) -> None:
        """Take note that all objects of its node below this number were read."""
        self._until = until if self.node == node else self._until

    def _take(self, key: str, data: bytes, parsed: Callable[[bytes, str], TickObject]) -> str | None:
        """Add an object to the tail, or take note why it ends it; that, if it is damaged."""
        found: list[tuple[TickObject, Delta | None]] = []

        def take(data: bytes, where: str) -> None:
            tick = parsed(data, where)
            found.append((tick, None if tick.index.ended_by else Delta.of(tick, self._run, self._after)))

        why = self._source.taken(key, data, take)
        if why is not None:
            self._ended = DAMAGED, why
            return why
        [(tick, delta)] = found
        if delta is None:
            self._ended = ENDED, f"session {tick.index.ended_by!r} took the place of this one"
            return None
        self._add(tick.index, delta)
        self._check_seen(tick.index.seen, tick.where)
        return None

    def _add(self, index: TickIndex, delta: Delta) -> None:
        """Add an object; those of a tick count once it is complete."""
        self._found += 1
        self._after = index.sequence
        self._tick.append(delta)
        if not index.goes_on:
            for one in self._tick:
                self._held.add(one)
            self._tick = []

    def _check_seen(self, seen: Sighting | None, where: str) -> None:
        """Refuse to go on if the rank had seen a commit that is gone; each commit is looked for once."""
        if seen is None or seen.commit <= self._looked_for:
            return
        if (why := commits.missing(self._source.storage, self._head, seen, where)) is not None:
            raise CorruptCommitError(why)
        self._looked_for = seen.commit


def _own(key: str, data: bytes, where: str) -> TickObject:
    """The tick in an object of its rank's."""
    return TickObject(data, key, where)


def _member(key: str, name: Named, data: bytes, where: str) -> TickObject:
    """A tick in an object of its node."""
    return NodeObject(data, key, where).tick(name)


class _Damage(NamedTuple):
    """An object of a node's journal whose ticks are not known."""

    node: int
    number: int
    key: str
    why: str


class _NodeReader:
    """The reader of one node's journal: it gives each rank its ticks."""

    def __init__(
        self, source: _Lookahead, session: str, node: int, start: int, readers: Mapping[int, _TailReader]
    ) -> None:
        self._source = source
        self._session = session
        self._node = node
        self._start = start
        self._readers = readers

    def read(self) -> list[_Damage]:
        """Read to the first missing object, or that which ends the journal; the damaged objects on the way."""
        damage: list[_Damage] = []
        for number, key, data in self._source.objects(partial(layout.node_key, self._session, self._node), self._start):
            found: list[tuple[NodeObject, bytes]] = []

            def take(data: bytes, where: str, key: str = key, found: list[Any] = found) -> None:
                found.append((NodeObject(data, key, where), data))

            why = None if data is None else self._source.taken(key, data, take)
            if data is None or (found and found[-1][0].index.ended_by is not None):
                for reader in self._readers.values():
                    reader.take_end(self._node, number)
                break
            if why is not None:
                damage.append(_Damage(self._node, number, key, why))
            elif found:
                self._deal(number, *found[-1])
        return damage

    def _deal(self, number: int, found: NodeObject, data: bytes) -> None:
        for name in found.members:
            if (reader := self._readers.get(name[0])) is not None:
                reader.node = self._node
                reader.take_member(name, found.key, number, data)
