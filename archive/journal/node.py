"""Threads: one rank's way to share objects of a journal with the other ranks of its node. One of them carries the ticks
of all to the store; when that one dies, another does. A rank that cannot reach it stores its ticks by itself, under
their own keys, and waits for nobody longer than `PATIENCE_S`: once, until there is an answer to what it waited for.

With each checkpoint a rank says below which number no object of its node has a tick beyond it. Only a rank that shares
nothing more in its session says nothing: from then on all its ticks are its own objects.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from logging import WARNING
from typing import Any, NamedTuple, Self

from archive.base import SupersededError, UsageError, in_child, layout, level_of, logger
from archive.journal.carrier import PATIENCE_S, Carrier, MessageKind
from archive.journal.ends import last_there
from archive.journal.rendezvous import MAX_DATA_BYTES, Link, Message, Rendezvous
from archive.journal.ticker import LOOK_S, uptime
from archive.log import CommitLog, Place, commits

JOURNALS = ("rank", "node")  # of journals
MAX_SHARED_BYTES = min(32 * 1024 * 1024, MAX_DATA_BYTES)  # of a tick: a larger one is an object of its own
SILENT_S = 10.0  # who gives no sign of life for so long is stopped
_MEET_S = 2.0  # the wait for who carries, before the first tick and after a death
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 1.0  # between looks for who carries
_TOLD_AFTER_S = 10.0
_NAMES = (("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK"), ("SLURM_NODEID", "SLURM_NNODES", "SLURM_LOCALID"))


@dataclass(frozen=True)
class Node:
    """A machine, by its number among those of a job. local: the number of a rank among those of its machine; the first
    one logs what each of them could."""

    number: int
    count: int
    local: int = 0


class Shared(NamedTuple):
    """The place of a tick in an object of its node: its name as a shard, the offset, and how long it waited there for
    those of others."""

    shard: str
    offset: int
    waited_s: float


def node_of(journal: str, journal_s: float | None, place: Place) -> Node | None:
    """The node of a rank whose journal is its node's; None if it is the rank's own, or if nobody says which node it is.
    torchrun and Slurm do."""
    if journal not in JOURNALS:
        raise UsageError(f"journal={journal!r}: give 'rank' (an object a rank and tick) or 'node' (an object a node)")
    if journal == "rank":
        return None
    if journal_s is None:
        raise UsageError("journal='node' needs journal_s=, the seconds after which additions are durable")
    for number, count, local in _NAMES:
        given = os.environ.get(number), os.environ.get(count)
        if None in given:
            continue
        node, nodes = (int(one) if one is not None and one.isdecimal() else -1 for one in given)
        if not 0 <= node < nodes <= place.world_size:
            raise UsageError(
                f"{number}={given[0]!r} and {count}={given[1]!r} name no node of a world of {place.world_size} ranks: "
                "nodes count from 0, and there are at most as many as ranks"
            )
        first = os.environ.get(local) or "0"
        if not first.isdecimal():
            raise UsageError(f"{local}={first!r} is no number of a rank among those of its node: these count from 0")
        return Node(node, nodes, int(first))
    if place.world_size > 1:
        logger.log(
            level_of(place.rank, WARNING),
            "journal='node': nothing says which node this is, so each rank makes objects of its own; torchrun and "
            "Slurm set GROUP_RANK and GROUP_WORLD_SIZE, or SLURM_NODEID and SLURM_NNODES: set two of these",
        )
        return None
    return Node(0, 1)


class NodeJournal:
    """One rank's part in the journal of its node. asked: has the rank flush what is pending, soon; False if nothing
    is. opening: the nonce of the commit that opened the session, which is another one in a copy of the archive; one
    that was made since lies at another URL. It belongs to the process that made it, and ends by `close`."""

    def __init__(self, log: CommitLog, place: Place, opening: str, node: Node, within_s: float) -> None:
        self.node = node.number
        self._level = level_of(node.local, WARNING)
        self.asked: Callable[[], bool] = lambda: False
        self._log = log
        self._place = place
        self._about = log, place, node.number, within_s, self._settled
        self._names = log.storage.url, opening, place.run, place.session, node.number
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Shared | None]] = {}  # number of a tick that was handed over -> the answer
        self._handed = -1  # the newest tick that was handed over: earlier ones come by themselves
        self._apart = False  # nothing is handed over any more
        self.known = 0  # the node's objects below this number are there, or were
        self._heard = uptime()  # the time at which it was the number of the next one, by who carries or by the store
        self._link: Link | None = None
        self._meeting: Rendezvous | None = None
        self._carrier: Carrier | None = None
        self._met = threading.Event()  # there is a link, or there will be none
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="archive-node", daemon=True)
        _open.add(self)
        self._thread.start()

    @classmethod
    def of(cls, log: CommitLog, place: Place, node: Node, within_s: float) -> Self | None:
        """The part of a rank in its node's journal; None, and a warning, if its session was opened without one."""
        entry = log.head.runs[place.run]
        nodes = entry.nodes
        if nodes is not None and node.number in nodes:
            opened = next(commits.read_all(log.storage, [entry.opened or 0], log.head))
            return cls(log, place, opened.nonce, node, within_s)
        logger.log(
            level_of(node.local, WARNING),
            "session %r was opened by a rank with %s, so rank %d, of node %d, makes objects of its own: give all ranks "
            "the same journal=",
            place.session,
            "journals of the ranks" if nodes is None else f"journals of {len(nodes)} nodes",
            place.rank,
            node.number,
        )
        return None

    @property
    def mark(self) -> tuple[int, int] | None:
        """The node, and the number of its objects below which there is no tick that this rank has yet to complete; None
        if there will be none in any of them."""
        return None if self._apart else (self.node, self.known)

    def _settled(self) -> int:
        """The number of the node's objects below which nobody looks for ticks, by the newest commit. SupersededError if
        another session was opened."""
        head = commits.newest_after(self._log.storage, self._log.head)
        self._place.newest(head)
        return (head.runs[self._place.run].nodes or {}).get(self.node, 0)

    def store(self, number: int, data: list[Any]) -> Shared | None:
        """Store a tick in an object of the node; None if it is to be stored by itself. SupersededError if a newer
        session has ended the journal. While there is no answer to an earlier one for long, none is handed over."""
        if sum(memoryview(part).nbytes for part in data) > MAX_SHARED_BYTES:
            return None
        if not self._met.wait(_MEET_S):
            self._met.set()  # the next tick does not wait again
        waiting: Future[Shared | None] = Future()
        with self._lock:
            link = self._link
            if link is None or number <= self._handed or any(one.done() for one in self._waiting.values()):
                return None
            self._handed, self._waiting[number] = number, waiting
            try:
                link.send(Message(MessageKind.TICK, number, data=b"".join(map(bytes, data))))
            except OSError:
                self._waiting.pop(number, None)
                return None
        try:
            return waiting.result(PATIENCE_S)
        except FutureTimeoutError:
            with self._lock:
                for one in self._waiting.values():
                    _resolve(one, None)
            return waiting.result()

    def close(self, timeout_s: float = 1.0) -> None:
        """End it: others of the node go on."""
        _open.discard(self)
        self._stopped.set()
        self._met.set()
        if (link := self._link) is not None:
            link.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)  # it begins nothing more
        if (carrier := self._carrier) is not None:
            carrier.close(timeout_s)
        if (meeting := self._meeting) is not None:
            meeting.leave()

    def forget(self) -> None:
        """Drop a forked child's copies of sockets and locks, so that it does not keep the place of its parent."""
        for one in (self._link, self._carrier, self._meeting):
            if one is not None:
                one.forget()

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._meeting = meeting = Rendezvous(*self._names)
            self._meet(meeting)
        except (OSError, ImportError) as error:
            told = "the ranks of this node cannot share objects of a journal, so each makes its own: %s"
            logger.log(self._level, told, error)
        finally:
            with self._lock:
                self._apart = True
            self._met.set()

    def _meet(self, meeting: Rendezvous) -> None:
        """Carry, if nobody else does, and be connected to who carries, again and again, until it is told that this is
        of no use."""
        pause_s, since, told = _FIRST_LOOK_S, time.monotonic(), False
        while not self._stopped.is_set():
            if self._carrier is None and (listening := meeting.listen()) is not None:
                sure = self._look()
                if self._stopped.is_set():  # who ended it may have waited no longer, and let another one listen
                    listening.close()
                    return
                self._carrier = Carrier(listening, *self._about, self.known, sure)
            link = meeting.connect(SILENT_S)
            if link is not None and self._served(link):
                pause_s, since = _FIRST_LOOK_S, time.monotonic()
            if self._apart:
                return
            if not told and time.monotonic() - since > _TOLD_AFTER_S:
                told = True
                logger.warning("rank %d does not reach who stores for its node: it stores by itself", self._place.rank)
                self._met.set()
            self._follow()
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)

    def _follow(self) -> None:
        """Look for the number of the node's next object if nobody told it for long. Who carries tells itself only of
        what it stores: while that is nothing, others may store for the node, as in containers of their own."""
        if uptime() - self._heard > LOOK_S:
            self._heard = uptime()
            self._look()
            if self._carrier is not None:
                self._carrier.know(self.known)

    def _look(self) -> float | None:
        """Look for the number of the node's next object, which is known as of the time that this gives; None if it
        could not be found. Of those below a mark some were pruned: that one is missing says nothing there.

        Who begins to carry needs it, and whom nobody tells it: its mark would stay, and with it all objects of the node
        be awaited."""
        began = uptime()
        try:
            while not self._stopped.is_set():
                found = self._is_there(self.known)
                if (settled := self._settled()) > self.known:  # after that look: what was there may be pruned now
                    self.known = settled
                elif found:
                    self.known = 1 + last_there(self._is_there, self.known)
                else:
                    return began
        except SupersededError:
            pass  # the rank's own journal ends, and says so
        except Exception:
            logger.warning("objects of node %d were not looked for; this is tried again", self.node, exc_info=True)
        return None

    def _is_there(self, number: int) -> bool:
        return self._log.storage.exists(layout.node_key(self._place.session, self.node, number))

    def _served(self, link: Link) -> bool:
        """Take in answers until the connection ends; False if there was none."""
        try:
            link.send(Message(MessageKind.HELLO, self._place.rank, self.known))
            while not (self._stopped.is_set() or self._apart) and (message := link.receive()) is not None:
                if self._link is None:  # it is alive
                    self._link = link
                    self._met.set()
                known = self.known
                self._take(link, message)
                if self._carrier is None or self.known > known:
                    self._heard = uptime()
                self._follow()
        except OSError:
            pass  # it died, or is stopped
        finally:
            with self._lock:
                was_alive, self._link = self._link is not None, None
                if was_alive and not self._stopped.is_set():
                    self._met.clear()
                self._answer_all(None)
            link.close()
        return was_alive

    def _take(self, link: Link, message: Message) -> None:
        self.known = max(self.known, message.place + (message.kind == MessageKind.STORED))
        if message.kind == MessageKind.ASK:
            if not self.asked():
                link.send(Message(MessageKind.PASS))
        elif message.kind == MessageKind.STORED:
            shard = layout.shard_in_node(
                self._place.session, self.node, message.place, self._place.rank, message.number
            )
            self._answer(message.number, Shared(shard, message.offset, message.seconds))
        elif message.kind == MessageKind.ALONE:
            self._answer(message.number, None)
        elif message.kind == MessageKind.ENDED:
            with self._lock:
                self._answer_all(self._place.superseded(message.data.decode("utf-8", "replace")))
        elif message.kind == MessageKind.APART:
            with self._lock:
                self._apart = True

    def _answer(self, number: int, found: Shared | None) -> None:
        with self._lock:
            if (waiting := self._waiting.pop(number, None)) is not None:
                _resolve(waiting, found)

    def _answer_all(self, found: SupersededError | None) -> None:
        while self._waiting:
            _resolve(self._waiting.popitem()[1], found)


def _resolve(waiting: Future[Shared | None], found: Shared | SupersededError | None) -> None:
    """Say what became of a tick, unless it waits no more."""
    if waiting.done():
        return
    if isinstance(found, SupersededError):
        waiting.set_exception(found)
    else:
        waiting.set_result(found)


_open: weakref.WeakSet[NodeJournal] = weakref.WeakSet()


def _forget_all() -> None:
    for one in list(_open):
        one.forget()
    _open.clear()


in_child(_forget_all)
