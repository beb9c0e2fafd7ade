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
from logging import DEBUG, WARNING
from typing import NamedTuple

from archive.base import AlreadyExistsError, SupersededError, layout, logger
from archive.journal.ends import index_at, last_there
from archive.journal.rendezvous import Link, Message
from archive.journal.ticker import uptime
from archive.log import CommitLog, Place
from archive.saved import Named, NodeIndex, pack_node

MOST_BYTES = 64 * 1024 * 1024  # of an object, if it has more than one tick
MAX_WAITING_BYTES = 2 * MOST_BYTES  # of ticks that wait for the object on its way; the ranks of more store them
SURE_S = 600.0  # what is younger is not pruned
PATIENCE_S = 60.0  # the wait for the store, beyond which a tick is stored by its rank as well
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
    APART = b"G"  # its rank is to share nothing more in this session
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
    """The rank that listens, of all ranks of a node. place: its run and session; within_s: the time of a tick; settled:
    gives the number of objects below which nobody looks for ticks, by the newest commit; following: the number of the
    next object, as far as its own rank knows; sure: the time at which it was known to be that, if it was."""

    def __init__(
        self,
        listening: socket.socket,
        log: CommitLog,
        place: Place,
        node: int,
        within_s: float,
        settled: Callable[[], int],
        following: int,
        sure: float | None,
    ) -> None:
        self._listening = listening
        self._log = log
        self._storage = log.storage
        self._place = place
        self._node = node
        self._settled = settled
        self._sure = sure
        self._window_s = min(WINDOW * within_s, MAX_WINDOW_S)
        self._changed = threading.Condition()
        self._links: dict[Link, int] = {}  # of ranks
        self._ticks: list[_Tick] = []
        self._awaited: set[Link] = set()  # those that were asked
        self._next = following  # the objects below are there: a rank may be the first to say hello, and know less
        self._has_stored = False
        self._failing = False
        self._gave_up = False
        self._began: float | None = None  # the time at which the object on its way was begun
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
            except OSError:  # it is closed; or there are too many open files
                time.sleep(0.0 if self._stopped else BEAT_S)
                continue
            try:
                self._begin(self._receive, Link(connected))
            except (OSError, RuntimeError):  # such as too many threads: the rank comes again
                connected.close()

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
        answer: Message | None = None
        with self._changed:
            if message.kind == MessageKind.HELLO:
                if message.number in self._links.values():
                    raise OSError(f"rank {message.number} is connected already")
                self._links[link] = message.number
                self._next = max(self._next, message.place)
                answer = Message(MessageKind.APART if self._gave_up else MessageKind.BEAT, place=self._next)
            elif message.kind == MessageKind.PASS:
                self._answered(link)
            elif message.kind == MessageKind.TICK and link in self._links:
                tick = _Tick(link, self._links[link], message.number, message.data, time.monotonic())
                if sum(len(one.data) for one in (*self._ticks, tick)) <= MAX_WAITING_BYTES:
                    self._ticks.append(tick)
                else:
                    answer = self._answer(tick, None)
                self._answered(link)
        if answer is not None:
            self._tell(link, answer)

    def _answered(self, link: Link) -> None:
        self._awaited.discard(link)
        self._changed.notify_all()

    def _tell(self, link: Link, message: Message) -> None:
        with suppress(OSError):  # it is gone, and its thread notes that
            link.send(message)

    def _beat(self) -> None:
        """Give signs of life: ranks store by themselves what a stopped process would have stored."""
        told = False
        while not self._stopped:
            for link in list(self._links):
                self._tell(link, Message(MessageKind.BEAT, place=self._next))
            if not told and (began := self._began) is not None and time.monotonic() - began > PATIENCE_S:
                told = True
                logger.warning(
                    "an object of the journal of node %d of session %r has been on its way for %.0f s: until the store "
                    "answers, each rank of this node makes its own",
                    self._node,
                    self._place.session,
                    PATIENCE_S,
                )
            time.sleep(BEAT_S)

    # -- objects -------------------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        while ticks := self._gathered():
            stored = self._tried(ticks)
            for tick in ticks:
                self._tell(tick.link, self._answer(tick, stored))
            if self._gave_up:
                for link in list(self._links):
                    self._tell(link, Message(MessageKind.APART))

    def _tried(self, ticks: list[_Tick]) -> _Object | None:
        """The object with these ticks; None if their ranks are to store them."""
        if self._ended_by is not None or self._gave_up:
            return None
        try:
            stored = self._stored(ticks)
            self._failing = False
        except SupersededError:
            return None  # each rank finds the end of its own journal
        except Exception:
            self._has_stored = False  # the object may still come to be there
            level, self._failing = DEBUG if self._failing else WARNING, True
            logger.log(level, "ticks of a node were not stored together; each rank tries it", exc_info=True)
            return None
        else:
            return stored
        finally:
            self._began = None

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
        began = self._began = time.monotonic()
        named = {(tick.rank, tick.number): tick.data for tick in ticks}
        for passed in range(_MOST_PASSED + 1):
            if self._stopped:  # another one may carry: it would find an object of this one's after its own
                return None
            nonce, seen, begun = secrets.token_hex(8), self._log.head.sighting, uptime()
            index = NodeIndex(self._place.run, self._place.session, self._node, self._next, nonce, seen)
            buffers, offsets = pack_node(index, named)
            try:
                self._storage.create_once(index.key, buffers)
            except AlreadyExistsError:
                last = last_there(lambda n: self._storage.exists(self._key(n)), index.number)
                self._ended_by = index_at(self._storage, self._key(last)).ended_by  # raises: it may end the journal
                if self._ended_by is not None:
                    return None
                self.know(last + 1)
                if self._has_stored or passed == _MOST_PASSED:
                    break
            else:
                self.know(index.number + 1)
                if self._is_next(index.number, begun):
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

    def _is_next(self, number: int, begun: float) -> bool:
        """True if an object that was begun then was the first one of its number. Another process may have made one that
        a checkpoint has, and that was pruned meanwhile, for which it must be old: nobody would look there again."""
        if (self._sure is None or uptime() - self._sure > SURE_S) and (settled := self._settled()) > number:
            self.know(settled)
            return False
        self._sure = begun
        return True

    def _key(self, number: int) -> str:
        return layout.node_key(self._place.session, self._node, number)

    def know(self, number: int) -> None:
        """Take note that the objects below this number are there."""
        with self._changed:
            self._next = max(self._next, number)
