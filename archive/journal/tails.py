"""Does I/O: the tails of a run's newest session, which are the unflushed suffixes of its ranks' journals: the objects
beyond its newest checkpoint.

They are read by number, a few ahead, never by a listing: one request an object, and two or three more a rank, or two of
a hundred. A tail ends before the first object that is missing or damaged, and with a complete tick.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from archive.base import (
    AlreadyExistsError,
    CorruptCommitError,
    CorruptStateError,
    IntegrityError,
    Line,
    MissingObjectError,
    NotFoundError,
    at_once,
    layout,
    one_line,
    size,
    tabulate,
)
from archive.log import Commit, CommitLog, Place, Sighting, commits
from archive.saved import Delta, TickIndex, TickObject, counted, load, pack
from archive.shard import indexed
from archive.store import Storage

MISSING, DAMAGED, ENDED = "missing", "damaged", "ended"  # why a tail ends
MAX_OBJECT_BYTES = 1 << 28
MAX_LOOKS = 4  # reads of a damaged object: one damaged answer ends no tail
RANKS_AT_ONCE = 32
MAX_AHEAD = 16  # objects of a rank that are fetched at once
_ONE_MORE_EVERY = 128  # objects found, for each request that may miss
_ROOM_BYTES = 256 * 1024 * 1024  # of objects in flight, by the sizes that are guessed
_LEAST_BYTES = 1024 * 1024
OTHER_RANK_S, STEP_IN_S = 10.0, 1.0  # the wait for another rank, and more of it for each further back in line
_LOOK_S, _MOST_LOOK_S = 0.1, 1.0  # between looks


@dataclass(frozen=True, slots=True)
class RankTail:
    """The tail of one rank: its objects from `start` to before `next`, and their content.

    ended: "missing", there is no object `next`; "damaged": that object cannot be used; "ended": a
    session that takes its place has ended the journal. why: a sentence.
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
    room = _Room()
    count = min(RANKS_AT_ONCE, len(entry.journal))
    with (
        ThreadPoolExecutor(count, "archive-tails") as ranks,
        ThreadPoolExecutor(RANKS_AT_ONCE, "archive-ahead") as pool,
    ):
        readers = [_TailReader(storage, head, run, rank, room, pool) for rank in sorted(entry.journal)]
        return {one.rank: one for one in ranks.map(_TailReader.read, readers)}


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


class _TailReader:
    """The reader of one rank's tail."""

    def __init__(
        self, storage: Storage, head: Commit, run: str, rank: int, room: _Room, pool: ThreadPoolExecutor
    ) -> None:
        entry = head.runs[run]
        self._storage = storage
        self._head = head
        self._run = run
        self._session = entry.session
        self._rank = rank
        self._start = (entry.journal or {})[rank]
        self._room = room
        self._pool = pool
        self._largest = _LEAST_BYTES
        self._held = Delta()
        self._tick: list[Delta] = []  # of the incomplete tick
        self._found = 0  # objects, also those of an incomplete tick
        self._after = 0  # rows of the next object are not below it
        self._ended_by: str | None = None  # the session that ended the journal, once that was found
        self._looked_for = head.number  # commits up to this one are there

    def read(self) -> RankTail:
        """The tail, read to its end."""
        while True:
            number = self._start + self._found
            ahead = min(1 + self._found // _ONE_MORE_EVERY, MAX_AHEAD, max(1, _ROOM_BYTES // 8 // self._largest))
            with self._room.of(ahead * self._largest):
                keys = [layout.journal_key(self._session, self._rank, n) for n in range(number, number + ahead)]
                found = [self._get(keys[0])] if ahead == 1 else list(self._pool.map(self._get, keys))
                for key, data in zip(keys, found, strict=True):
                    if (why := self._take(key, data)) is not None:
                        found_damage = ENDED if self._ended_by else DAMAGED
                        return self._ended(MISSING if data is None else found_damage, why)
                del found, data

    def _get(self, key: str) -> bytes | None:
        try:
            return self._storage.get_head(key, MAX_OBJECT_BYTES + 1)
        except MissingObjectError:
            return None

    def _take(self, key: str, data: bytes | None) -> str | None:
        """Add an object to the tail. If it ends the tail, a sentence why: it is missing, or damaged in the same way
        each time. CorruptStateError if it differs at each read, for then the answers are damaged."""
        why = self._added(key, data)
        for _ in range(MAX_LOOKS):
            if why is None or data is None or self._ended_by:
                return why
            before, data = data, self._get(key)
            if data == before:
                return why
            why = self._added(key, data)
        raise CorruptStateError(f"{why}; it differed at each read, so the store's answers cannot be trusted")

    def _added(self, key: str, data: bytes | None) -> str | None:
        """Add an object with these bytes to the tail; a sentence why not, if it cannot be added."""
        where = self._storage.full_url(key)
        if data is None:
            return f"there is no {key}"
        self._largest = max(self._largest, len(data))
        try:
            if len(data) > MAX_OBJECT_BYTES:
                raise CorruptStateError(f"{where} is larger than any object of a journal")
            tick = TickObject(data, key, where)
            if tick.index.ended_by is not None:
                self._ended_by = tick.index.ended_by
                return f"session {tick.index.ended_by!r} took the place of this one"
            self._add(tick.index, Delta.of(tick, self._run, self._after))
        except IntegrityError as e:
            return str(e)
        self._check_seen(tick.index.seen, where)
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
        if (why := commits.missing(self._storage, self._head, seen, where)) is not None:
            raise CorruptCommitError(why)
        self._looked_for = seen.commit

    def _ended(self, ended: str, why: str) -> RankTail:
        held = self._held
        if self._tick:
            why += f"; the tick that begins with number {self._start + held.objects} is not complete"
        counts = counted(held.table("segments"))
        return RankTail(self._rank, self._start, self._start + held.objects, *counts, held.nbytes, ended, why, held)


def index_at(storage: Storage, key: str) -> TickIndex:
    """The index of the journal object at `key`; its other bytes are not read."""
    where = storage.full_url(key)
    head = storage.get_head(key, indexed.HEAD_BYTES)
    start, stop = indexed.index_span(head, where)
    head = head if stop <= len(head) else storage.get(key, 0, stop)
    return load(TickIndex, head[start:stop], key, where)


def end(log: CommitLog, who: Place, session: str) -> dict[int, int]:
    """End the journals of the session that a writer's session replaces: rank -> the number of objects beyond the newest
    checkpoint, of the ranks that have some. Journals of a newer session, or the writer's own, are not ended.

    From then on the next object of each rank is there already, so that it can report nothing more as durable.
    If another rank of the writer's session has begun to do it, this one waits for it; that rank may have died.
    """
    is_mine = False
    while (entry := log.head.runs[who.run]).session == session:
        assert entry.journal
        first, *others = sorted(entry.journal.items())
        ended = partial(_end_rank, log, who, entry.session)
        count, is_new = ended(first)
        is_mine |= is_new  # also objects that an earlier turn has made
        if not is_mine and _opened(log, who):
            return {}
        counts = [count, *(count for count, _ in at_once(ended, others, RANKS_AT_ONCE))]
        now = log.catch_up().runs[who.run]
        if now.session != entry.session or now.journal == entry.journal:  # else the next objects are others
            return {rank: count for (rank, _), count in zip([first, *others], counts, strict=True) if count}
    return {}


def _opened(log: CommitLog, who: Place) -> bool:
    """True once another rank has opened the session; False if that takes too long."""
    line = Line(who.rank, who.world_size, STEP_IN_S)
    wait = line.wait(OTHER_RANK_S + line.turn * line.step_of(who.world_size), _LOOK_S, _MOST_LOOK_S)
    while not (opened := log.catch_up().runs[who.run].session == who.session) and not wait.over:
        wait.pause()
    return opened


def _end_rank(log: CommitLog, who: Place, session: str, journal: tuple[int, int]) -> tuple[int, bool]:
    """The number of objects that a rank has from its next one on, and False if another rank of the writer's session had
    ended its journal. journal: the rank, and the number of its next object as of the newest checkpoint."""
    rank, start = journal
    storage, number = log.storage, start
    block = layout.with_feature(layout.format_block(layout.PART_VERSION), layout.ENDS)
    while True:
        marker = TickIndex(
            who.run,
            session,
            rank,
            number,
            secrets.token_hex(8),
            0,
            seen=log.head.sighting,
            ended_by=who.session,
            format=block,
        )
        try:
            storage.create_once(marker.key, pack(marker, {}, [])[0])
        except AlreadyExistsError:
            known = ended_by(storage, marker.key)
            if known is None:
                number = _last_there(storage, session, rank, number)
                known = ended_by(storage, layout.journal_key(session, rank, number))
            if known is not None:
                return _whole(storage, session, rank, start, number), known != who.session
            number += 1
        else:
            return _whole(storage, session, rank, start, number), True


def _whole(storage: Storage, session: str, rank: int, start: int, stop: int) -> int:
    """The number of objects from `start` to `stop`, less the last ones, of a tick that is not complete."""
    while stop > start:
        try:
            if not index_at(storage, layout.journal_key(session, rank, stop - 1)).goes_on:
                break
        except (IntegrityError, MissingObjectError):
            break
        stop -= 1
    return stop - start


def _last_there(storage: Storage, session: str, rank: int, number: int) -> int:
    """The number before the first missing object from here on; object `number` is there."""
    while True:
        numbers = range(number + 1, number + 1 + MAX_AHEAD)
        there = at_once(lambda n: storage.exists(layout.journal_key(session, rank, n)), numbers, MAX_AHEAD)
        if not all(there):
            return number + there.index(False)
        number = numbers[-1]


def ended_by(storage: Storage, key: str) -> str | None:
    """The session that ended a journal by this object; None for an object of a tick, or a damaged one."""
    try:
        return index_at(storage, key).ended_by
    except (IntegrityError, MissingObjectError):
        return None
