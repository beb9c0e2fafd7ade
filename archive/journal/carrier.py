"""Threads: the rank that makes the objects of its node's journal, for itself and the others. It asks all of them for
their ticks once one of them has one, and stores all in one object; a rank is told where its tick lies, or that it has
to store it by itself.

An object is there before the next one is begun, so that their numbers have no gaps. They are created: what is there
already was made by who did this before, or ends the journal.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

from archive.base import AlreadyExistsError, layout, logger
from archive.journal.ends import index_at, last_there
from archive.journal.rendezvous import Link, Message
from archive.log import Place, Sighting
from archive.saved import Named, NodeIndex, pack_node
from archive.store import Storage

MOST_BYTES = 64 * 1024 * 1024  # of an object, if it has more than one tick
WINDOW = 0.25  # part of a tick's time in which the others are waited for,
MAX_WINDOW_S = 1.0  # or this long
BEAT_S = 1.0  # between signs of life
_MOST_PASSED = 4  # times that others were there first, before the first object of its own


class MessageKind(bytes, Enum):
    """The kinds of messages between a rank and who carries its ticks."""

    HELLO = b"H"  # from a rank; number: its own, place: the objects below are there, as far as it knows
    TICK = b"T"  # from a rank; number: of the tick
    PASS = b"P"  # from a rank that was asked, and has nothing to journal
    ASK = b"A"  # place: the objects below are there
    STORED = b"S"  # number: of a tick, place: the object that it lies in, offset: where, seconds: that it waited
    ALONE = b"L"  # number: of a tick that its rank is to store by itself
    ENDED = b"E"  # data: the session that ended the journal
    BEAT = b"B"


class _Tick(NamedTuple):
    link: Link
    rank: int
    number: int
    data: bytes
    came: float


class _Object(NamedTuple):
    """An object that is there: its number, the offsets of its ticks, and when it was begun."""

    number: int
    offsets: Mapping[Named, int]
    began: float


class Carrier:
    """The rank that listens, of all ranks of a node. place: its run and session; seen: gives the newest commit that it
    knows; within_s: the time of a tick."""

    def __init__(
        self,
        listening: socket.socket,
        storage: Storage,
        place: Place,
        node: int,
        within_s: float,
        seen: Callable[[], Sighting | None],
    ) -> None:
        self._listening = listening
        self._storage = storage
        self._place = place
        self._node = node
        self._seen = seen
        self._window_s = min(WINDOW * within_s, MAX_WINDOW_S)
        self._changed = threading.Condition()
        self._links: dict[Link, int] = {}  # of ranks
        self._ticks: list[_Tick] = []
        self._awaited: set[Link] = set()  # those that were asked
        self._next = 0  # the objects below are there
        self._has_stored = False
        self._gave_up = False
        self._ended_by: str | None = None
        self._stopped = False
        self._carrying = self._begin(self._carry)
        for work in (self._accept, self._beat):
            self._begin(work)

    def _begin(self, work: Callable[..., None], *given: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=given, name="archive-node", daemon=True)
        thread.start()
        return thread

    def close(self, timeout_s: float) -> None:
        """Listen no more, and end all connections once the object that is on its way is there."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._carrying.join(timeout_s)
        for link in list(self._links):
            link.close()

    def forget(self) -> None:
        """Drop a forked child's copies of its sockets."""
        self._listening.close()
        for link in list(self._links):
            link.forget()

    def _accept(self) -> None:
        while not self._stopped:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            self._begin(self._receive, Link(connected))

    def _receive(self, link: Link) -> None:
        """Take in what a rank sends, until it is gone."""
        try:
            while (message := link.receive()) is not None:
                self._take(link, message)
        except OSError:
            pass  # it died, or is being closed
        finally:
            with self._changed:
                self._links.pop(link, None)
                self._answered(link)
            link.close()

    def _take(self, link: Link, message: Message) -> None:
        """Take in a message. OSError for a second connection of a rank: equal numbers would name different ticks."""
        with self._changed:
            if message.kind == MessageKind.HELLO:
                if message.number in self._links.values():
                    raise OSError(f"rank {message.number} is connected already")
                self._links[link] = message.number
                self._next = max(self._next, message.place)
                welcome = Message(MessageKind.BEAT, place=self._next)
            elif message.kind == MessageKind.PASS:
                self._answered(link)
            elif message.kind == MessageKind.TICK and link in self._links:
                tick = _Tick(link, self._links[link], message.number, message.data, time.monotonic())
                self._ticks.append(tick)
                self._answered(link)
        if message.kind == MessageKind.HELLO:
            self._tell(link, welcome)

    def _answered(self, link: Link) -> None:
        self._awaited.discard(link)
        self._changed.notify_all()

    def _tell(self, link: Link, message: Message) -> None:
        with suppress(OSError):  # it is gone, and its thread notes that
            link.send(message)

    def _beat(self) -> None:
        """Give signs of life: ranks store by themselves what a stopped process would have stored."""
        while not self._stopped:
            for link in list(self._links):
                self._tell(link, Message(MessageKind.BEAT, place=self._next))
            time.sleep(BEAT_S)

    # -- objects -------------------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        while ticks := self._gathered():
            stored = None
            if self._ended_by is None and not self._gave_up:
                try:
                    stored = self._stored(ticks)
                except Exception:
                    self._has_stored = False  # the object may still come to be there
                    logger.warning("ticks of a node were not stored together; each rank tries it", exc_info=True)
            for tick in ticks:
                self._tell(tick.link, self._answer(tick, stored))

    def _answer(self, tick: _Tick, stored: _Object | None) -> Message:
        if stored is not None:
            offset, waited_s = stored.offsets[tick.rank, tick.number], stored.began - tick.came
            return Message(MessageKind.STORED, tick.number, stored.number, offset, max(0.0, waited_s))
        if self._ended_by is not None:
            return Message(MessageKind.ENDED, data=self._ended_by.encode("utf-8", "replace"))
        return Message(MessageKind.ALONE, tick.number)

    def _gathered(self) -> list[_Tick]:
        """The ticks of the next object, once there is one, and all ranks were asked; none when it is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ticks or self._stopped)
            self._awaited = set(self._links) - {tick.link for tick in self._ticks}
            asked, message = list(self._awaited), Message(MessageKind.ASK, place=self._next)
            if self._gave_up or self._ended_by is not None or self._stopped:
                asked = []
        for link in asked:
            self._tell(link, message)
        with self._changed:
            if asked:
                self._changed.wait_for(lambda: not self._awaited or self._stopped, self._window_s)
            out, nbytes = list[_Tick](), 0
            while self._ticks and (not out or nbytes + len(self._ticks[0].data) <= MOST_BYTES):
                out.append(self._ticks.pop(0))
                nbytes += len(out[-1].data)
            return out

    def _stored(self, ticks: list[_Tick]) -> _Object | None:
        """Store ticks in one object; None if their ranks are to do it, or the journal is ended. Who finds another's
        object after its own is not alone: the ranks of its node do not all meet, and it gives up."""
        began = time.monotonic()
        named = {(tick.rank, tick.number): tick.data for tick in ticks}
        for passed in range(_MOST_PASSED + 1):
            nonce = secrets.token_hex(8)
            index = NodeIndex(self._place.run, self._place.session, self._node, self._next, nonce, self._seen())
            buffers, offsets = pack_node(index, named)
            try:
                self._storage.create_once(index.key, buffers)
            except AlreadyExistsError:
                last = last_there(lambda n: self._storage.exists(self._key(n)), index.number)
                self._ended_by = index_at(self._storage, self._key(last)).ended_by  # raises: it may end the journal
                if self._ended_by is not None:
                    return None
                self._know(last + 1)
                if self._has_stored or passed == _MOST_PASSED:
                    break
            else:
                self._know(index.number + 1)
                self._has_stored = True
                return _Object(index.number, offsets, began)
        self._gave_up = True
        logger.warning(
            "another process makes objects of the journal of node %d of session %r, too: its ranks do not meet, as in "
            "containers of their own, or nodes have the same number; from now on each rank here makes its own (a "
            "common TMPDIR lets them meet)",
            self._node,
            self._place.session,
        )
        return None

    def _key(self, number: int) -> str:
        return layout.node_key(self._place.session, self._node, number)

    def _know(self, number: int) -> None:
        """Take note that the objects below this number are there."""
        with self._changed:
            self._next = max(self._next, number)
