"""Requests of checkpoints, by signal or through the bucket, at the same step on every rank; and saving on a crash.

`requested()` is called once a step by every rank. It is true on all of them at the same step if any was asked. With a
process group the ranks agree by one small reduction a step, in the foreground. Without one they agree through the
bucket, in numbered rounds: a rank that was asked, or sees that another was, writes how many steps it has
seen, and one that gets as far as its own number waits until it is agreed on the greatest of them. Rank 0
reads the numbers, and says which is the greatest; where it died, the next in line does (see `Line`).
So no rank passes the step before it is known, and ranks that are all asked at once act once. `terminating()` is agreed
on by the same messages: a rank that is told to end asks for a checkpoint until all ranks know that it was told.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from logging import DEBUG, WARNING
from typing import TYPE_CHECKING, Any

from archive.base import (
    AlreadyExistsError,
    ClosedError,
    CorruptStateError,
    Line,
    MissingObjectError,
    RanksMissingError,
    Record,
    StorageError,
    UsageError,
    at_once,
    escape,
    in_child,
    layout,
    logger,
    process_group,
    ranks,
    shutdown,
    taken_in_order,
)
from archive.log import Place
from archive.store import Storage, smallfiles

if TYPE_CHECKING:
    from archive.checkpoint.pending import Pending

POLL_S = 10.0  # between looks at the requests in the bucket
ASKED_POLL_S = 2.5  # and at what another rank was asked: news of it is there in half of the time to agree, at an end
AGREE_TIMEOUT_S = 600.0
AGREE_POLL_S, MAX_POLL_S = 0.2, 1.0
STEP_IN_S = 1.0  # the wait before the next rank in line says what is agreed on, longer in a large world
AT_ONCE = 32
HASTE_STEP_S = 0.5  # where the process ends, the wait before the next rank in line
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
        self.watch: _Watch | None = None


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
    that have a writer open.
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
    elif _asked.watch is not None and _asked.watch.place.world_size > 1:
        return _asked.watch.agreed(asked, told)
    _asked.ending |= told
    if asked:
        _asked.flag.clear()
    return asked


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


@dataclass(frozen=True, slots=True)
class Answer(Record):
    """The call at which a rank is ready for the checkpoint of a round, and a flag if it was told to end after it.

    The other fields identify the answer.
    """

    ready: int
    session: str | None = None
    round: int | None = None
    rank: int | None = None
    told: bool = False
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Agreed(Record):
    """The agreement of a round: the call at which the ranks act, and a flag if they end after it."""

    at: int
    told: bool = False
    nonce: str = ""


class _Watch:
    """A watch for requests in the bucket, in the background, while its writer lives; it agrees with other ranks."""

    def __init__(self, storage: Storage, place: Place) -> None:
        self._storage = weakref.ref(storage)  # an unclosed writer may be collected, and its storage
        self.place = place
        self.known = set() if place.rank else set(storage.list("requests"))
        self.calls = 0
        self.round = 0
        self.ready: int | None = None  # the call at which this rank is ready to act, once it has joined the round
        self.agreed_on: Agreed | None = None  # once that is known
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="archive-requests", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        looks = count(1)
        while not self._stop.wait(min(POLL_S, ASKED_POLL_S)) and self._storage() is not None:
            self.look(lists=next(looks) * ASKED_POLL_S % POLL_S == 0 or POLL_S < ASKED_POLL_S)

    @property
    def storage(self) -> Storage:
        storage = self._storage()
        if storage is None:
            raise ClosedError("the writer that looked for requests is gone; open another with arc.writer()")
        return storage

    def look(self, *, lists: bool = True) -> None:
        """Look whether another rank was asked, and on rank 0 for new requests, if it `lists`; an unreachable store is
        no request. In a process group the ranks need not look for each other."""
        alone = self.place.world_size == 1 or process_group(least=2) is not None
        number, heard, names = self.round, False, set[str]()
        try:
            if not alone and self.ready is None:
                heard = self.storage.exists(layout.asked_key(self.place.session, number))
            if lists and self.place.rank == 0:
                names = set(self.storage.list("requests"))  # after the round, whose requests are then known
        except (StorageError, ClosedError):
            return
        fresh = names - self.known
        self.known |= names
        if fresh or (heard and (number, None) == (self.round, self.ready)):  # and not acted on meanwhile
            _asked.flag.set()

    def stop(self) -> None:
        self._stop.set()
        if _asked.watch is self:
            _asked.watch = None

    def agreed(self, asked: bool, told: bool) -> bool:
        """True if this is the step on which all ranks agreed, without a process group."""
        self.calls += 1
        if self.ready is None:
            if not asked:
                return False
            self.ready = self.calls + LEAD_STEPS
            answer = Answer(self.ready, self.place.session, self.round, self.place.rank, told)
            _put_once(self.storage, self._key(self.place.rank), answer)
            asked_key = layout.asked_key(self.place.session, self.round)
            if not self.storage.exists(asked_key):
                smallfiles.create_small(self.storage, asked_key, answer)
        if self.calls < self.ready:
            return False
        if self.agreed_on is None:
            self.agreed_on = self._await_agreement()
            self._take_part(self.agreed_on, self.ready)
        if self.calls < self.agreed_on.at:
            return False
        _asked.ending |= self.agreed_on.told
        self.round, self.ready, self.agreed_on = self.round + 1, None, None
        if self.place.rank == 0:
            with suppress(StorageError):  # the checkpoint that follows answers all requests until now
                self.known |= set(self.storage.list("requests"))
        _asked.flag.clear()
        return True

    def _take_part(self, said: Agreed, ready: int) -> None:
        """End without waiting for ranks that have saved and ended before this one answered."""
        if said.at >= ready:
            return
        shutdown.process.begin(shutdown.LAST_PART)
        logger.warning(
            "the other ranks agreed to save and end at call %d of archive.checkpointing.requested(), and rank %d heard "
            "of it at call %d: it saves what it has, as partial, and waits for none of them",
            said.at,
            self.place.rank,
            self.calls,
        )

    def _key(self, rank: int) -> str:
        return layout.agreement_key(self.place.session, self.round, rank)

    def _await_agreement(self) -> Agreed:
        """The agreement, once all ranks have answered. It waits for missing ones, but not long if this process
        ends."""
        line = Line(self.place.rank, self.place.world_size, STEP_IN_S)
        wait, found = line.wait(AGREE_TIMEOUT_S, AGREE_POLL_S, MAX_POLL_S), dict[int, Answer]()
        for look in count():
            if line.turn == 0 and look % 4 < 3:
                if self._all_answered(found):
                    return self._agree_on(found)
            elif (said := self._said()) is not None:
                return said
            if shutdown.process.passed(shutdown.AGREE_PART):
                return self._agree_in_haste(found)
            if wait.due() and line.looks_around:
                wait.pause()
                self._tell_absent(line, wait.waited_s)
            if wait.over:
                raise RanksMissingError(
                    f"ranks {self._absent()} did not answer the request for a checkpoint within {AGREE_TIMEOUT_S:.0f} "
                    "s; check that they run, and call archive.checkpointing.requested() at every step"
                )
            wait.pause()
            if line.is_due(wait.waited_s):
                if line.steps_in(wait.waited_s, not self._absent()) and self._all_answered(found, look_at_all=True):
                    return self._agree_on(found)
                wait.pause()
        raise AssertionError("the looks never end")

    def _agree_in_haste(self, found: dict[int, Answer]) -> Agreed:
        """The agreement of the ranks that have answered by now: this process ends, and waits for no others. The first
        in line of them say so, and those further back after seconds."""
        line, present = Line(self.place.rank, self.place.world_size, HASTE_STEP_S), self._present()
        wait, due_s = line.wait(None, AGREE_POLL_S, MAX_POLL_S), line.in_haste_s(line.before(present))
        while wait.waited_s < due_s:
            wait.pause()
            if (said := self._said()) is not None:
                return said
        if due_s:
            present = self._present()
        at_once(lambda rank: self._take(found, rank), sorted(present - found.keys()), AT_ONCE)
        return self._agree_on(found)

    def _agree_on(self, found: Mapping[int, Answer]) -> Agreed:
        """Say what these answers come to; another rank may have said so before."""
        told = any(answer.told for answer in found.values()) or len(found) < self.place.world_size
        said = Agreed(max((one.ready for one in found.values()), default=self.ready or 0), told, secrets.token_hex(8))
        if smallfiles.create_small(self.storage, self._agreed_key, said):
            return said
        return self._said() or said

    @property
    def _agreed_key(self) -> str:
        return layout.agreed_key(self.place.session, self.round)

    def _said(self) -> Agreed | None:
        """The agreement of this round, by whoever said so; None so far."""
        try:
            return smallfiles.read_small(self.storage, self._agreed_key, Agreed, CorruptStateError)
        except MissingObjectError:
            return None

    def _all_answered(self, found: dict[int, Answer], *, look_at_all: bool = False) -> bool:
        """Read answers that are not in `found` yet, in order, more at once each time, up to the first missing one; True
        if all are there now."""
        return taken_in_order(range(self.place.world_size), found, self._take, AT_ONCE, look_at_all=look_at_all)

    def _take(self, found: dict[int, Answer], rank: int) -> bool:
        try:
            found[rank] = self._answer(rank)
        except MissingObjectError:
            return False
        return True

    def _absent(self) -> list[int]:
        """The ranks that have not answered, by one listing: to tell people, and to see whom to ask."""
        names = set(self.storage.list(layout.agreement_folder(self.place.session, self.round)))
        return [rank for rank in range(self.place.world_size) if self._key(rank).rpartition("/")[2] not in names]

    def _present(self) -> set[int]:
        return {*range(self.place.world_size)}.difference(self._absent())

    def _tell_absent(self, line: Line, waited_s: float) -> None:
        """Log the ranks that have not answered, on the first of those that have."""
        absent = self._absent()
        speaks = line.leads({*range(self.place.world_size)}.difference(absent))
        if absent:
            logger.log(
                WARNING if speaks else DEBUG,
                "checkpoint request: waiting for %s of this job (%.0f s); check that it runs, and "
                "calls archive.checkpointing.requested() at every step",
                ranks(absent),
                waited_s,
            )

    def _answer(self, rank: int) -> Answer:
        """The answer of a rank; an answer of another rank in its place is an error."""
        key = self._key(rank)
        answer = smallfiles.read_small(self.storage, key, Answer, CorruptStateError)
        for name, meant in (("session", self.place.session), ("round", self.round), ("rank", rank)):
            if getattr(answer, name) not in (None, meant):
                raise CorruptStateError(
                    f"{self.storage.full_url(key)} is not the answer of rank {rank} to round {self.round}: somebody "
                    "else put it there"
                )
        return answer


def _put_once(storage: Storage, key: str, answer: Answer) -> None:
    try:
        storage.create_once(key, json.dumps(replace(answer, nonce=secrets.token_hex(8)).to_json()).encode())
    except AlreadyExistsError as e:
        raise UsageError(
            f"{storage.full_url(key)} is there already: two processes have this rank of the session"
        ) from e


def watch(storage: Storage, place: Place) -> Callable[[], None]:
    """Watch for requests in the bucket, until the function that this returns is called."""
    _asked.watch = _Watch(storage, place)
    return _asked.watch.stop


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
