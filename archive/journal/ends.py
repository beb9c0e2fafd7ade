"""Does I/O: the ends of journals, made by a session that replaces another one, whose ranks can then say of nothing more
that it is durable.

The next object of each of its ranks and nodes is there then, made by the successor. Nodes come first: from then on it
is known which ticks lie in their objects, and so which one each rank would create next.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from archive.base import AlreadyExistsError, IntegrityError, Line, MissingObjectError, at_once, layout
from archive.journal.tails import MAX_AHEAD, MAX_LOOKS, RANKS_AT_ONCE
from archive.log import CommitLog, Place
from archive.saved import Named, NodeIndex, TickIndex, load, pack
from archive.shard import indexed
from archive.store import Storage

I = TypeVar("I", TickIndex, NodeIndex)  # noqa: E741

OTHER_RANK_S, STEP_IN_S = 10.0, 1.0  # the wait for another rank, and more of it for each further back in line
_LOOK_S, _MOST_LOOK_S = 0.1, 1.0  # between looks
_NODE_HEAD_BYTES = 16 * 1024
Within = tuple[str, int, int]  # the object in which a tick lies, and its bytes there
Made = tuple[int, bool]  # the number of the object that ends a journal; False if another rank of the session made it
Begun = tuple[int, int]  # a rank or node, and the number of the first object of its that may be awaited


def end(log: CommitLog, who: Place, session: str) -> dict[int, int]:
    """End the journals of the session that a writer's session replaces: rank -> the number of objects beyond the newest
    checkpoint, of the ranks that have some. Journals of a newer session, or the writer's own, are not ended.

    From then on the next object of each rank is there already, so that it can report nothing more as durable.
    If another rank of the writer's session has begun to do it, this one waits for it; that rank may have died.
    """
    is_mine = False
    while (entry := log.head.runs[who.run]).session == session:
        assert entry.journal
        ending = _Successor(log, who, session)
        ranks, nodes = sorted(entry.journal.items()), sorted((entry.nodes or {}).items())
        first = ending.node(nodes[0]) if nodes else ending.rank(ranks[0])
        is_mine |= first[1]  # also objects that an earlier turn has made
        if not is_mine and _opened(log, who):
            return {}
        lying = ending.lying(nodes, [first, *at_once(ending.node, nodes[1:], RANKS_AT_ONCE)]) if nodes else {}
        made = ending.ranks(ranks, lying) if nodes else [first, *ending.ranks(ranks[1:], lying)]
        now = log.catch_up().runs[who.run]
        if now.session != entry.session or (now.journal, now.nodes) == (entry.journal, entry.nodes):
            return {rank: count for (rank, _), (count, _) in zip(ranks, made, strict=True) if count}
    return {}


def _opened(log: CommitLog, who: Place) -> bool:
    """True once another rank has opened the session; False if that takes too long."""
    line = Line(who.rank, who.world_size, STEP_IN_S)
    wait = line.wait(OTHER_RANK_S + line.turn * line.step_of(who.world_size), _LOOK_S, _MOST_LOOK_S)
    while not (opened := log.catch_up().runs[who.run].session == who.session) and not wait.over:
        wait.pause()
    return opened


class _Successor:
    """The ends of a session's journals, made by the writer of another."""

    def __init__(self, log: CommitLog, who: Place, session: str) -> None:
        self._storage = log.storage
        self._who = who
        self._session = session
        block = layout.with_feature(layout.format_block(layout.PART_VERSION), layout.ENDS)
        self._about: dict[str, Any] = {"seen": log.head.sighting, "ended_by": who.session, "format": block}

    def node(self, journal: Begun) -> Made:
        """End the journal of a node."""
        node, start = journal
        about = self._who.run, self._session, node
        return self._end(lambda n: NodeIndex(*about, n, secrets.token_hex(8), **self._about), start, {})

    def ranks(self, journals: Sequence[Begun], lying: Mapping[int, Mapping[int, Within]]) -> list[Made]:
        """The same for ranks. lying: rank -> as below."""
        return at_once(lambda one: self.rank(one, lying.get(one[0])), journals, RANKS_AT_ONCE)

    def rank(self, journal: Begun, lying: Mapping[int, Within] | None = None) -> Made:
        """End the journal of a rank; the number of objects that it has beyond the newest checkpoint. lying: of these
        the ones that lie in objects of its node, by number."""
        (rank, start), lying = journal, lying or {}
        about = self._who.run, self._session, rank
        stop, is_new = self._end(lambda n: TickIndex(*about, n, secrets.token_hex(8), 0, **self._about), start, lying)
        return self._whole(rank, start, stop, lying), is_new

    def _end(self, marker_of: Callable[[int], Any], number: int, lying: Mapping[int, Within]) -> Made:
        """Create the object that ends a journal, under the first number from this one on that is missing."""
        while True:
            while number in lying:
                number += 1
            marker = marker_of(number)
            try:
                self._storage.create_once(marker.key, pack(marker, {}, [])[0])
            except AlreadyExistsError:
                known = ended_by(self._storage, marker.key)
                if known is None:
                    number = last_there(lambda n: n in lying or self._storage.exists(marker_of(n).key), number)
                    known = ended_by(self._storage, marker_of(number).key)
                if known is not None:
                    return number, known != self._who.session
                number += 1
            else:
                return number, True

    def lying(self, nodes: Sequence[Begun], ends: Sequence[Made]) -> dict[int, dict[int, Within]]:
        """Rank -> its ticks in objects of nodes, by number. nodes, ends: their journals, and what ends these. The
        content of a damaged object is not known."""
        every = zip(nodes, ends, strict=True)
        keys = [layout.node_key(self._session, node, n) for (node, first), (end, _) in every for n in range(first, end)]
        out: dict[int, dict[int, Within]] = {}
        for key, found in zip(keys, at_once(self._members, keys, RANKS_AT_ONCE), strict=True):
            for (rank, number), (start, stop) in found.items():
                out.setdefault(rank, {}).setdefault(number, (key, start, stop))
        return out

    def _members(self, key: str) -> dict[Named, tuple[int, int]]:
        """The ticks in an object of a node's journal, and where they lie there."""
        for look in range(MAX_LOOKS):
            try:
                index, base = _index(self._storage, NodeIndex, key, self._storage.full_url(key), _NODE_HEAD_BYTES)
                break
            except IntegrityError:
                if look == MAX_LOOKS - 1:
                    return {}
            except MissingObjectError:
                return {}
        named = ((layout.tick_place(one.name), base + one.offset, one.size) for one in index.members)
        return {name: (start, start + size) for name, start, size in named if name is not None}

    def _whole(self, rank: int, start: int, stop: int, lying: Mapping[int, Within]) -> int:
        """The number of objects from `start` to `stop`, less the last ones, of a tick that is not complete."""
        while stop > start:
            key = layout.journal_key(self._session, rank, stop - 1)
            within = lying.get(stop - 1)
            try:
                if not _index(self._storage, TickIndex, key, self._storage.full_url(key), within=within)[0].goes_on:
                    break
            except (IntegrityError, MissingObjectError):
                break
            stop -= 1
        return stop - start


def last_there(is_there: Callable[[int], bool], number: int) -> int:
    """The number before the first missing object from here on; object `number` is there."""
    while True:
        numbers = range(number + 1, number + 1 + MAX_AHEAD)
        there = at_once(is_there, numbers, MAX_AHEAD)
        if not all(there):
            return number + there.index(False)
        number = numbers[-1]


def index_at(storage: Storage, key: str) -> TickIndex | NodeIndex:
    """The index of the journal object at `key`, a rank's or a node's; its other bytes are not read."""
    place, where = layout.journal_place(key), storage.full_url(key)
    if place is not None and place[1].startswith("node-"):
        return _index(storage, NodeIndex, key, where)[0]
    return _index(storage, TickIndex, key, where)[0]


def ended_by(storage: Storage, key: str) -> str | None:
    """The session that ended a journal by this object; None for an object of a tick, or a damaged one."""
    try:
        return index_at(storage, key).ended_by
    except (IntegrityError, MissingObjectError):
        return None


def _index(
    storage: Storage,
    kind: type[I],
    key: str,
    where: str,
    head_bytes: int = indexed.HEAD_BYTES,
    within: Within | None = None,
) -> tuple[I, int]:
    """The index of an object, and where its bytes end. within: where it lies in another one."""
    if within is None:
        head = storage.get_head(key, head_bytes)
    else:
        head = storage.get(within[0], within[1], min(within[2], within[1] + head_bytes))
    start, stop = indexed.index_span(head, where)
    if stop > len(head):
        head = storage.get(key, 0, stop) if within is None else storage.get(within[0], within[1], within[1] + stop)
    return load(kind, head[start:stop], key, where), stop
