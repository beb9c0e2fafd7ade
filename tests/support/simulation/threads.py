"""The library's view of `threading` and `concurrent.futures`: locks, events, threads and pools whose every step is a
point of the scheduler."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any

from tests.support.simulation.scheduler import Strand, here


class Lock:
    """A lock that is taken once, or by its owner again and again (RLock)."""

    again = False

    def __init__(self) -> None:
        self._owner: Strand | None = None
        self._depth = 0
        self._waiting: deque[Strand] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        s = here()
        s.point("lock")
        me = s.running
        if self._owner is me and self.again:
            self._depth += 1
            return True
        while self._owner is not None:
            if not blocking:
                return False
            self._waiting.append(me)
            if not s.block(f"a lock of {self._owner.name}", None if timeout < 0 else timeout):
                self._waiting.remove(me)
                return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                here().unblock(self._waiting.popleft())

    def locked(self) -> bool:
        return self._owner is not None

    def _is_owned(self) -> bool:
        return self._owner is here().running

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    again = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Strand] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        s, depth = here(), self._lock._depth
        self._waiting.append(s.running)
        self._lock._depth = 1
        self._lock.release()
        woken = s.block("a condition", timeout)
        if s.running in self._waiting:
            self._waiting.remove(s.running)
        self._lock.acquire()
        self._lock._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        stop = None if timeout is None else here().now + timeout
        while not (found := predicate()):
            if stop is not None and here().now >= stop:
                break
            self.wait(None if stop is None else stop - here().now)
        return found

    def notify(self, n: int = 1) -> None:
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for one in woken:
            here().unblock(one)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Strand] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        here().point("set")
        self._set = True
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            here().unblock(one)

    def clear(self) -> bool:
        self._set = False
        return False

    def wait(self, timeout: float | None = None) -> bool:
        s = here()
        s.point("wait")
        if self._set:
            return True
        me = s.running
        self._waiting.append(me)
        s.block("an event", timeout)
        if me in self._waiting:
            self._waiting.remove(me)
        return self._set


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._work = lambda: target and target(*args, **(kwargs or {}))
        self._strand: Strand | None = None

    def start(self) -> None:
        s = here()
        self._strand = s.spawn(self.name, s.running.party, self._work)
        s.point("start")

    def join(self, timeout: float | None = None) -> None:
        strand, s = self._strand, here()
        if strand is not None and not strand.done and strand is not s.running:
            strand.joining.append(s.running)
            if not s.block(f"the end of {strand.name}", timeout):
                strand.joining.remove(s.running)

    def is_alive(self) -> bool:
        return self._strand is not None and not self._strand.done


class Local:
    """Attributes of each strand's own."""

    def __init__(self) -> None:
        self.__dict__["_of"] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_of"][here().running.number, name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_of"][here().running.number, name] = value


class Future(futures.Future[Any]):
    """Python's own, on a condition of ours."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


def wait(fs: Iterable[Future], timeout: float | None = None, return_when: str = futures.ALL_COMPLETED) -> Any:
    """As `concurrent.futures.wait`; the futures are in their order, as that of a set would differ from run to run."""
    listed, s = [*dict.fromkeys(fs)], here()
    stop = None if timeout is None else s.now + timeout
    event = Event()
    for one in listed:
        one.add_done_callback(lambda _: event.set())

    def enough() -> bool:
        done = [one for one in listed if one.done()]
        if return_when == futures.FIRST_COMPLETED and done:
            return True
        failed = any(not one.cancelled() and one.exception() for one in done)
        return len(done) == len(listed) or (return_when == futures.FIRST_EXCEPTION and failed)

    while (stop is None or s.now < stop) and (event.clear() or not enough()):
        event.wait(None if stop is None else stop - s.now)
    done = dict.fromkeys(one for one in listed if one.done())
    return futures._base.DoneAndNotDoneFutures(done, dict.fromkeys(one for one in listed if one not in done))


class Pool(futures.Executor):
    """So many threads at most; each ends when there is nothing left to do."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool", *_: Any, **__: Any) -> None:
        self._most, self._name = max_workers or 4, thread_name_prefix
        self._todo: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._busy: list[Strand] = []
        self._numbers = itertools.count()
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        s, future = here(), Future()
        self._todo.append((future, lambda: fn(*args, **kwargs)))
        if len(self._busy) < self._most:
            self._busy.append(s.spawn(f"{self._name}-{next(self._numbers)}", s.running.party, self._work))
        s.point("submit")
        return future

    def _work(self) -> None:
        me = here().running
        while self._todo:
            future, work = self._todo.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
                del error
            else:
                future.set_result(result)
                del result
            del future, work
        self._busy.remove(me)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        while cancel_futures and self._todo:
            self._todo.popleft()[0].cancel()
        for one in [*self._busy] if wait else ():
            if one is not here().running and not one.done:
                one.joining.append(here().running)
                here().block(f"the end of {one.name}")
