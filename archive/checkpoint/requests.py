"""Requests of checkpoints, by signal or through the bucket, at the same step on every rank; and saving on a crash.

`requested()` is called once a step by every rank. It is true on all of them at the same step if any was asked. With a
process group the ranks agree by one small reduction a step, in the foreground. Without one they agree through the
bucket, in numbered rounds: a rank that was asked, or sees that another is in the round, writes how many steps it has
seen; all act at the greatest of these numbers, and a rank that gets as far as its own number waits for the others'.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from archive.base import (
    AlreadyExistsError,
    ClosedError,
    CorruptStateError,
    MissingObjectError,
    RanksMissingError,
    Record,
    StorageError,
    UsageError,
    Wait,
    escape,
    in_child,
    layout,
    logger,
    process_group,
    ranks,
    shutdown,
)
from archive.log import Place
from archive.store import Storage, smallfiles

if TYPE_CHECKING:
    from archive.checkpoint.pending import Pending

POLL_S = 10.0
AGREE_TIMEOUT_S = 600.0
AGREE_POLL_S = 0.2
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


class _Watch:
    """A watch for requests in the bucket, in the background, while its writer lives; it agrees with other ranks."""

    def __init__(self, storage: Storage, place: Place) -> None:
        self._storage = weakref.ref(storage)  # an unclosed writer may be collected, and its storage
        self.place = place
        self.known = set(storage.list("requests"))
        self.calls = 0
        self.round = 0
        self.ready: int | None = None  # the call at which this rank is ready to act, once it has joined the round
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="archive-requests", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S) and self._storage() is not None:
            self.look()

    @property
    def storage(self) -> Storage:
        storage = self._storage()
        if storage is None:
            raise ClosedError("the writer that looked for requests is gone; open another with arc.writer()")
        return storage

    def look(self) -> None:
        """Look for new requests, and for ranks in the round; an unreachable store is no request.

        In a process group one rank looks, so that each request is seen once.
        """
        group = process_group(least=2) is not None
        if group and self.place.rank != 0:
            return
        try:
            alone = group or self.place.world_size == 1
            joined = not alone and self.storage.list(layout.agreement_folder(self.place.session, self.round))
            names = set(self.storage.list("requests"))  # after the round, so that the requests of its ranks are known
        except (StorageError, ClosedError):
            return
        fresh = names - self.known
        self.known |= names
        if fresh or joined:
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
        if self.calls < self.ready:
            return False
        answers = self._answers()
        if self.calls < max(self.ready, *(answer.ready for answer in answers)):
            return False
        _asked.ending |= any(answer.told for answer in answers) or len(answers) < self.place.world_size
        self.round, self.ready = self.round + 1, None
        with suppress(StorageError):  # the checkpoint that follows answers all requests until now
            self.known |= set(self.storage.list("requests"))
        _asked.flag.clear()
        return True

    def _key(self, rank: int) -> str:
        return layout.agreement_key(self.place.session, self.round, rank)

    def _answers(self) -> list[Answer]:
        """The answer of each rank. It waits for missing ones, but not long if this process ends."""
        wait = Wait(AGREE_TIMEOUT_S, AGREE_POLL_S)
        found: dict[int, Answer] = {}
        while True:
            ends = shutdown.process.passed(shutdown.AGREE_PART)
            look_at_all = ends or wait.due()
            for rank in sorted(set(range(self.place.world_size)) - set(found)):
                try:
                    found[rank] = self._answer(rank)
                except MissingObjectError:
                    if not look_at_all:
                        break
            absent = sorted(set(range(self.place.world_size)) - set(found))
            if absent and look_at_all:
                logger.warning(
                    "checkpoint request: waiting for %s of this job (%.0f s); check that it runs, and "
                    "calls archive.checkpointing.requested() at every step",
                    ranks(absent),
                    wait.waited_s,
                )
            if ends or not absent:
                return list(found.values())
            if wait.over:
                raise RanksMissingError(
                    f"ranks {absent} did not answer the request for a checkpoint within {AGREE_TIMEOUT_S:.0f} s; check "
                    "that they run, and call archive.checkpointing.requested() at every step"
                )
            wait.pause()

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
