"""Does I/O: the writing of objects: whole or not at all, at most once, and never in the place of another by chance."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from archive.base import (
    AlreadyExistsError,
    AmbiguousWriteError,
    DeadlineError,
    MissingObjectError,
    NotExclusiveError,
    StorageError,
    Task,
    Wait,
    in_order,
    tasks,
)
from archive.store.counts import count
from archive.store.drivers import LARGEST_PUT_BYTES, Buffer
from archive.store.proof import prove
from archive.store.reads import ObjectReader
from archive.store.root import check_key

T = TypeVar("T")

Data = Buffer | Sequence[Buffer]

LOOK_BYTES = 256 * 1024  # read of an object that may be another writer's
LOOK_AGAIN_S = 0.05
_NAMES_AT_MOST = 8  # of random ones: if all are taken, it is no chance


class ObjectWriter(ObjectReader):
    """A connection, and all that reads and makes objects over it."""

    def put(self, key: str, data: Data) -> None:
        """Make an object, whole or not at all; one of that name is replaced."""
        self._put(key, data, None)

    def _put(self, key: str, data: Data, cancelled: threading.Event | None) -> None:
        check_key(key)
        driver, parts = self.driver, _as_parts(data)

        def attempt(timeout_s: float) -> None:
            count(self.stats, self.root.protocol, bytes_out=sum(map(len, parts)))
            driver.put(key, parts, timeout_s)

        self.request("put", key, attempt, cancelled)

    def put_many(self, items: Iterable[tuple[str, Data]]) -> None:
        """Make objects, several at once, taking `items` on the way. After an error nothing more is written."""
        self._settle(tasks(lambda item, cancelled: self._put(*item, cancelled), items), max_ahead=self.concurrency)

    def put_fresh(self, key: str, data: Data) -> None:
        """Make an object under a name that nobody else gives, but for chance, whole or not at all, as `put` does.

        AlreadyExistsError if one of that name and other bytes was there, and the store tells so by the same request.
        """
        self._put_fresh(key, data, None)

    def _put_fresh(self, key: str, data: Data, cancelled: threading.Event | None) -> None:
        check_key(key)
        if self.known is not None:  # a commit is to name it, which could not be made
            self._check_creates(key)
        driver, parts = self.driver, _as_parts(data)

        def attempt(timeout_s: float) -> None:
            count(self.stats, self.root.protocol, bytes_out=sum(map(len, parts)))
            driver.put_fresh(key, parts, timeout_s)

        try:
            self.request("put", key, attempt, cancelled)
        except AlreadyExistsError:  # it may be this one, if an answer was lost here, or on the way
            if not self._holds(key, b"".join(parts)):
                raise

    def put_fresh_many(self, items: Iterable[tuple[str, Data]]) -> None:
        """Make objects as `put_fresh` does, several at once; after an error nothing more is written."""
        self._settle(tasks(lambda item, cancelled: self._put_fresh(*item, cancelled), items), self.concurrency)

    def create(self, key: str, data: Data) -> None:
        """Make an object only if there is none of that name; two callers never both succeed.

        AlreadyExistsError if there is one. AmbiguousWriteError if the answer was lost, so that it may be this one.
        NotExclusiveError if the store has no such put (but see `single_writer`), or has not shown that it heeds it by
        an object that is `known`; nothing is written then.
        """
        parts, driver = _as_parts(data), self.driver
        in_parts = sum(map(len, parts)) > LARGEST_PUT_BYTES and driver.can("create_in_parts")
        self._check_creates(check_key(key), in_parts=in_parts)
        self.create_unproven(key, parts, in_parts=in_parts)

    def _check_creates(self, key: str, *, in_parts: bool = False) -> None:
        if not self.driver.can("create"):
            raise NotExclusiveError(
                f"create {self.full_url(key)}: no create-only put is known for {self.root.protocol!r}, so two writers "
                "could overwrite each other; use a local folder, memory, s3, gs or az, or connect with "
                "single_writer=True if nobody else writes here"
            )
        prove(self, in_parts=in_parts)

    def create_unproven(self, key: str, data: Data, *, in_parts: bool = False) -> None:
        """Make an object as `create` does, as far as the store heeds the condition of this kind of request."""
        driver, parts = self.driver, _as_parts(data)
        send = driver.create_in_parts if in_parts else driver.create

        def attempt(timeout_s: float) -> None:
            count(self.stats, self.root.protocol, bytes_out=sum(map(len, parts)), head=int(self.single_writer))
            send(key, parts, timeout_s)

        self.request("create", key, attempt)

    def create_once(self, key: str, data: Data, *, unclear: Exception | None = None, look: bool = True) -> None:
        """Make an object as `create` does; if the answer is lost, find out.

        No other writer makes the same bytes (they have a nonce, or their writer does not matter): if they are there,
        this did it; if there are others, AlreadyExistsError; if there are none, they are sent again. Where the store
        does not answer by the deadline, `unclear` is raised (by default AmbiguousWriteError). Without `look`, a first
        answer that it is there is taken as it is: the caller finds its own by other means."""
        wait = Wait(2 * self.deadline_s, LOOK_AGAIN_S)  # once for sending, once for looking
        while True:
            try:
                return self.create(key, data)
            except (AlreadyExistsError, AmbiguousWriteError) as e:
                cause: StorageError | AlreadyExistsError = e
                if isinstance(e, AlreadyExistsError) and not look:
                    raise
                look = True
            try:
                if self._holds(key, b"".join(_as_parts(data))):
                    return None
                raise AlreadyExistsError(f"create {self.full_url(key)}: another is there already") from cause
            except MissingObjectError:
                if isinstance(cause, AlreadyExistsError):  # it was there
                    raise cause from None
            except StorageError as e:
                cause = e
            if wait.over or isinstance(cause, DeadlineError):
                text = f"create {self.full_url(key)}: no answer whether it is there ({cause}); repeat the same call"
                raise (unclear or AmbiguousWriteError(text)) from cause
            wait.pause()

    def create_all(self, items: Iterable[tuple[str, Data]]) -> None:
        """Make objects as `create_once` does, several at once; after an error nothing more is written."""
        self._settle(tasks(lambda item, cancelled: self.create_once(*item), items), self.concurrency)

    def _holds(self, key: str, data: bytes) -> bool:
        """True if these are an object's bytes; of a large one that differs, only the first bytes are read."""
        first = min(len(data) + 1, LOOK_BYTES)
        return self.get_head(key, first) == data[:first] and (
            len(data) < first or self.get_head(key, len(data) + 1) == data
        )

    def _settle(self, jobs: Iterable[Task[None]], max_ahead: int) -> None:
        """Run jobs at once; return or raise once none of them runs any more."""
        for _ in in_order(self.engine().pool, jobs, max_ahead=max_ahead, settle=True):
            pass


def under_fresh_name(name: Callable[[], str], put: Callable[[str], T]) -> tuple[str, T]:
    """Call `put` with a name, and with another one where an object has that already; the name, and the answer."""
    for _ in range(_NAMES_AT_MOST):
        key = name()
        with contextlib.suppress(AlreadyExistsError):
            return key, put(key)
    key = name()
    return key, put(key)


def _as_parts(data: Data) -> list[Buffer]:
    """`data` as a list of flat byte buffers; anything with the buffer protocol will do."""
    try:
        return [_flat(memoryview(data))]  # type: ignore[arg-type]
    except TypeError:
        return [_flat(memoryview(part)) for part in data]  # type: ignore[arg-type]


def _flat(view: memoryview) -> Buffer:
    if isinstance(view.obj, bytes):  # itself, so that it is sent without a copy
        return view.obj if view.nbytes == len(view.obj) else view
    return view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()
