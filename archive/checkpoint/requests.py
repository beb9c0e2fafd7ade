"""Requests of checkpoints, by signal or through the bucket, at the same step on every rank; and saving on a crash.

`requested()` is called once a step by every rank. It is true on all of them at the same step if any was asked. With a
process group the ranks agree by one small reduction a step, in the foreground. Without one they agree through the
bucket, in numbered rounds (`rounds`): a rank that was asked, or sees that another was, writes how many steps it has
seen, and one that gets as far as its own number waits until it is agreed on the greatest of them.
So no rank passes the step before it is known, and ranks that are all asked at once act once. `terminating()` is agreed
on by the same messages: a rank that is told to end asks for a checkpoint until all ranks know that it was told.

Nobody has to be alive for a request in the bucket to be seen: each rank lists them for itself, rank 0 most often, and
knows which were there before it opened its writer. Ranks that see the same one at once answer the same round, and its
agreement says which requests it answers, so that a rank which lists them later asks for nothing again.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from archive.base import (
    ClosedError,
    CorruptStateError,
    Line,
    Recurrence,
    StorageError,
    escape,
    in_child,
    layout,
    logger,
    process_group,
    shutdown,
)
from archive.checkpoint.rounds import Agreed, Answer, RequestRound
from archive.log import Place
from archive.store import Storage

if TYPE_CHECKING:
    from archive.checkpoint.pending import Pending

POLL_S, MOST_POLL_S = 10.0, 300.0  # between looks at the requests in the bucket: of rank 0, and of ranks far behind it
ASKED_POLL_S = 2.5  # and at what another rank was asked: news of it is there in half of the time to agree, at an end
_DUE = 0.75  # of the time between two looks: so long after one another is due, as looks come at pauses of half of it
LEAD_STEPS = 2  # a rank is ready to act this many steps after it sees a request
SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR2", "SIGTERM") if hasattr(signal, name))


class _Asked:
    """The requests to this process: for a checkpoint since it last acted, and to end."""

    def __init__(self) -> None:
        self.flag = threading.Event()
        self.terminating = False  # this process was told to end
        self.ending = False  # the ranks have agreed that one of them was told to end
        self.called = False  # `requested()` was called
        self.kept = False  # agreed on by `terminating()`, and not yet returned by `requested()`
        self.previous: dict[int, Any] = {}
        self.watches: list[_Watch] = []  # of open writers

    @property
    def watch(self) -> _Watch | None:
        """The watch by which this process agrees with other ranks: that of the writer that was opened last."""
        return self.watches[-1] if self.watches else None


_asked = _Asked()


def _forget() -> None:
    """Restore signals in a forked child (a worker of a DataLoader, say), which is no rank of the job."""
    global _asked
    inherited, _asked = _asked, _Asked()
    for number, previous in inherited.previous.items():
        signal.signal(number, signal.SIG_DFL if previous is None else previous)


in_child(_forget)


def request() -> None:
    """Ask this process for a checkpoint."""
    _asked.flag.set()


def listen(signals: Sequence[int] = SIGNALS, *, shutdown_s: float | None = None) -> None:
    """Take these signals as requests (default SIGUSR2, and SIGTERM for preemption). In the main thread only.

    From SIGTERM on, waiting for other ranks ends within `shutdown_s` (default 30): the checkpoint that
    was under way, and the last one, are committed with the ranks that are there by then. A second SIGTERM acts as it
    did before `listen`.
    """
    if shutdown_s is not None:
        shutdown.set_within(shutdown_s)
    for number in signals:
        if number not in _asked.previous:
            previous = signal.signal(number, _on_signal)
            _asked.previous[number] = None if previous is _on_signal else previous


def _on_signal(number: int, frame: Any) -> None:
    previous = _asked.previous.get(number)
    if number == signal.SIGTERM and _asked.terminating:
        signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        _asked.previous.pop(number, None)
        os.kill(os.getpid(), number)
        return
    if number == signal.SIGTERM:
        _asked.terminating = True
        shutdown.process.begin()
    _asked.flag.set()
    if callable(previous):
        previous(number, frame)


def terminating() -> bool:
    """True if the loop must end after the checkpoint, as a rank was told to end (SIGTERM); the same on every rank.

    It becomes true with a call of `requested()` that is true on all ranks, and has the value that the newest such call
    agreed on. In a loop without `requested()` every rank calls this one once a step instead.
    """
    if not _asked.called:
        _asked.kept |= _agree()
    return _asked.ending


def requested() -> bool:
    """True if this is a step to checkpoint at. Every rank calls it once a step, and all get the same answer.

    Installs the signal handlers when first called, if in the main thread. Requests in the bucket are seen by the ranks
    that have a writer open, whichever of them are dead.
    """
    agreed = _agree() or _asked.kept
    _asked.called, _asked.kept = True, False
    return agreed


def _agree() -> bool:
    """True if this is a step to checkpoint at, by agreement of all ranks."""
    if not _asked.previous and threading.current_thread() is threading.main_thread():
        listen()
    told = _asked.terminating
    asked = _asked.flag.is_set() or (told and not _asked.ending)
    group = process_group(least=2)
    if group is not None:
        asked, told = _any_rank(group, asked, told)
    else:
        for earlier in _asked.watches[:-1]:
            earlier.calls += 1  # in step with the ranks of its session, once it is the newest again
        if _asked.watch is not None and _asked.watch.place.world_size > 1:
            return _asked.watch.agreed(asked, told)
    if told and not _asked.ending:
        _end()
    if asked:
        _asked.flag.clear()
    return asked


def _end() -> None:
    """Take it that the job ends: the ranks wait for one that was told to until its time is over, and no longer."""
    _asked.ending = True
    shutdown.process.begin(shutdown.ANOTHER_TOLD)


def _any_rank(group: Any, *here: bool) -> list[bool]:
    """For each flag, true if a rank has it."""
    import importlib

    torch = importlib.import_module("torch")
    device = "cuda" if group.get_backend() == "nccl" else "cpu"
    flags = torch.tensor(here, dtype=torch.int64, device=device)
    group.all_reduce(flags, op=group.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


# -- requests in the bucket --------------------------------------------------------------------------------------------


def post(storage: Storage) -> str:
    """Ask the writers of this archive for a checkpoint, by an object in the bucket; its key."""
    key = layout.request_key(f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}")
    storage.create_once(key, json.dumps({"created_at": datetime.now(UTC).isoformat()}).encode())
    return key


class _Watch:
    """A watch for requests in the bucket, in the background, while its writer lives; it agrees with other ranks."""

    def __init__(self, storage: Storage, place: Place) -> None:
        self._storage = weakref.ref(storage)  # an unclosed writer may be collected, and its storage
        self.place = place
        self.calls = 0
        self.round = 0
        self.answer: Answer | None = None  # of this rank, once it has joined the round
        self.agreed_on: Agreed | None = None  # once that is known
        self._heard = -1  # the newest round in which another rank was asked
        self._awaits = False  # the agreement, in the foreground
        self._nonce = secrets.token_hex(8)
        self._asks, self._lists, self._lent = Recurrence(), Recurrence(), Recurrence(begun=False)
        self._list_s = list_s(Line(place.rank, place.world_size, 1.0).turn)
        self._answered: Set[str] = frozenset()  # requests in the bucket, by rounds so far
        self.known = set(storage.list(layout.REQUESTS)) if self._may_list else None  # those that it has seen
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="archive-requests", daemon=True)
        self._thread.start()

    @property
    def storage(self) -> Storage:
        storage = self._storage()
        if storage is None:
            raise ClosedError("the writer that looked for requests is gone; open another with arc.writer()")
        return storage

    @property
    def _here(self) -> RequestRound:
        return RequestRound(self.storage, self.place, self.round, self._answered)

    @property
    def _is_alone(self) -> bool:
        """True if no rank has to look for another: in a process group they tell each other."""
        return self.place.world_size == 1 or process_group(least=2) is not None

    @property
    def _may_list(self) -> bool:
        """True on rank 0, and on ranks that hear which requests a round has answered: those of another writer's ranks
        do not, and each of them would ask again."""
        return self.place.rank == 0 or not (self._is_alone or self._is_earlier)

    @property
    def _is_earlier(self) -> bool:
        """True if another writer of this process was opened since: its ranks agree, and not those of this one."""
        return self in _asked.watches[:-1]

    # -- looks ---------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        while not self._stop.wait(_look_s() / 2) and self._storage() is not None:
            if not self._lent.within(_DUE * _look_s()):
                self.look()

    def look_between(self) -> bool:
        """Look on behalf of the background, for a thread that asks for something else about once a second; True if that
        sent a request, in place of which the thread sends none."""
        self._lent.take(0.0)
        return self.look()

    def look(self) -> bool:
        """Look at one thing, if it is time: what another rank was asked, or new requests; True if that sent a request.
        An unreachable store is no request."""
        try:
            if not self._is_alone and self._asks.take(_DUE * _look_s()):
                return self._look_at_round()
            if self._may_list and self.answer is None and self._lists.take(self._list_s - _look_s() / 2):
                return self._look_for_requests()
        except (StorageError, ClosedError, CorruptStateError):  # what is damaged is told in the foreground
            return True
        return False

    def _look_at_round(self) -> bool:
        """Look whether another rank was asked; once this is so, whether they agreed in haste: then nothing that this
        process does meanwhile waits for other ranks as if all of them went on."""
        if self._awaits or self.agreed_on is not None or self._is_earlier:
            return False
        here = self._here
        if self.answer is None and self._heard < here.number:
            if here.was_asked:
                self._heard = here.number
                if (self.round, self.answer) == (here.number, None):  # not acted on meanwhile
                    _asked.flag.set()
        elif (said := here.agreed) is not None and said.haste:
            shutdown.process.begin(shutdown.AGREE_PART)
        return True

    def _look_for_requests(self) -> bool:
        names, known = set(self.storage.list(layout.REQUESTS)), self.known
        self.known = names | (known or set())  # a list may lag
        if known is not None and not names <= known | self._answered:
            _asked.flag.set()
        return True

    def stop(self) -> None:
        self._stop.set()
        _asked.watches = self._others()

    def _others(self) -> list[_Watch]:
        """The other watches of this process, but for those of unclosed writers that are gone."""
        return [one for one in _asked.watches if one is not self and one._storage() is not None]

    # -- agreement -----------------------------------------------------------------------------------------------------

    def agreed(self, asked: bool, told: bool) -> bool:
        """True if this is the step on which all ranks agreed, without a process group."""
        self.calls += 1
        if self.answer is None:
            if not asked:
                return False
            self.answer = self._here.answer(self.calls + LEAD_STEPS, told, self._nonce)
        if self.calls < self.answer.ready:
            return False
        if self.agreed_on is None:
            if told and not _asked.ending:
                shutdown.process.begin()  # the first time may be forgotten by now, where steps take long
            self._awaits = True
            try:
                self.agreed_on = self._here.await_agreement(self.answer)
            finally:
                self._awaits = False
            self._heed(self.agreed_on)
        if self.calls < self.agreed_on.at:
            return False
        self._act(self.agreed_on)
        return True

    def _heed(self, said: Agreed) -> None:
        """Wait no longer for ranks that have saved and ended before this one answered, or may never come. Where nobody
        was told to end, an error has ended the call at which this one was to act."""
        if said.at >= self.calls:
            if said.haste:
                shutdown.process.begin(shutdown.AGREE_PART)
            return
        then = "its checkpoint is not that of the others, as an earlier call ended with an error"
        if said.told:
            shutdown.process.begin(shutdown.LAST_PART)
            then = "it saves what it has, as partial, and waits for none of them"
        logger.warning(
            "the other ranks agreed to save%s at call %d of archive.checkpointing.requested(), and rank %d heard of it "
            "at call %d: %s",
            " and end" if said.told else "",
            said.at,
            self.place.rank,
            self.calls,
            then,
        )

    def _act(self, said: Agreed) -> None:
        """Go on to the next round. The checkpoint that follows answers the requests that were there at the agreement,
        whether this rank has seen them or not."""
        if said.told:
            _end()
        self._answered |= set(said.requests)
        self.round, self.answer, self.agreed_on = self.round + 1, None, None
        _asked.flag.clear()


def _look_s() -> float:
    return min(POLL_S, ASKED_POLL_S)


def list_s(turn: int) -> float:
    """The seconds between the lists of requests by the rank of this turn in line. The first one lists most often; the
    others do so for the case that those before them are dead or hang, which nobody has to find out."""
    return min((1 + turn) * POLL_S, max(POLL_S, MOST_POLL_S))


def look_between(place: Place) -> bool:
    """Look for requests, if it is time, on behalf of the watch of this rank; True if that sent a request."""
    watch = _asked.watch
    return watch is not None and watch.place == place and watch.look_between()


def watch(storage: Storage, place: Place) -> Callable[[], None]:
    """Watch for requests in the bucket, until the function that this returns is called."""
    made = _Watch(storage, place)
    _asked.watches = [*made._others(), made]
    return made.stop


# -- crashes -----------------------------------------------------------------------------------------------------------


@contextmanager
def save_on_crash(save: Callable[[str], Pending | None], *, timeout_s: float = 120.0) -> Iterator[None]:
    """Save the state of this rank if the body raises, then let the error go on.

    `save(name)` calls `writer.checkpoint(step, name, partial=True, ...)`. An error of the save itself is added to the
    error as a note, and hides nothing.
    """
    try:
        yield
    except BaseException as error:
        try:
            pending = save(f"crash-{escape(type(error).__name__)}-{datetime.now(UTC):%Y%m%dT%H%M%S}")
            if pending is not None:
                pending.result(timeout_s)
        except Exception as failed:
            error.add_note(f"the checkpoint on crash failed too: {failed}")
        raise


def install_excepthook(save: Callable[[str], Pending | None], *, timeout_s: float = 120.0) -> None:
    """Do what `save_on_crash` does for uncaught errors."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        try:
            with save_on_crash(save, timeout_s=timeout_s):
                raise error
        except BaseException as same:
            before(kind, same, trace)

    sys.excepthook = hook
