"""Workers of a job: in this process, in processes of this machine, or actors of Ray. Batches go in, futures
come out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle

from archive.base import JobError, UsageError, package
from archive.jobs.receipts import Done, Items, Worker
from archive.store import Storage

ENGINES = ("local", "ray")
AHEAD = 2  # batches given to a worker at once, so that it need not wait for the next one
_AGAIN_S, _REFUSALS = 0.5, 20  # between questions whether an actor is there, and how many are answered by no
_INLINE_BYTES = 100_000  # of what actors are made with: Ray keeps more in its object store, and warns of restarts
_HEADER = 8  # bytes: the length of what follows
_SERVE = "from archive.jobs.workers import serve; serve()"


class DiedError(Exception):
    """Internal: a worker ended before it was through with a batch. waited: it had not begun with it."""

    def __init__(self, why: str, *, waited: bool = False) -> None:
        super().__init__(why)
        self.waited = waited


class Workers(ABC):
    """Some workers. Once closed, none of them works any more."""

    active = 0  # that can take batches
    pending = 0  # that are not there yet

    @property
    @abstractmethod
    def room(self) -> int:
        """The number of batches that can be given to them now."""

    @abstractmethod
    def submit(self, number: int, items: Items) -> Future[Done]:
        """Give a batch to one of them. The future fails with DiedError if its worker ends."""

    @property
    def coming(self) -> Sequence[Future[Any]]:
        """Futures of workers that are not there yet, to be waited for beside batches."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """End them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Crew:
    """The workers that a call asks for."""

    engine: str = "local"
    workers: int | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None

    @property
    def alone(self) -> bool:
        """True for a worker in this process."""
        return self.engine == "local" and self.workers in (None, 1)

    def check(self, storage: Storage, fn: Any) -> None:
        """UsageError, before anything is begun, for workers that cannot do this, or not with this function. Ray's
        cluster is reached, or begun here."""
        if self.engine not in ENGINES:
            raise UsageError(f"engine={self.engine!r}: give one of {', '.join(map(repr, ENGINES))}")
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers={self.workers}: give 1 or more")
        if self.engine == "local" and not (self.num_cpus is None and self.num_gpus is None):
            raise UsageError("num_cpus and num_gpus are what Ray gives to each worker: they go with engine='ray'")
        if self.alone:
            return
        storage.check_shared("use engine='local' without workers=, or another store")
        _pickled(fn)
        if self.engine == "ray":
            fitting(self.num_cpus, self.num_gpus)

    def of(self, worker: Worker) -> Workers:
        """The workers, as `check` permits them."""
        if self.alone:
            return Here(worker)
        payload = _pickled(worker)
        if self.engine == "local":
            return Processes(payload, self.workers or 1)
        return RayActors(payload, self.workers, self.num_cpus, self.num_gpus)


def _pickled(what: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(what))
    except Exception as e:
        raise UsageError(
            f"the function cannot be sent to other processes: {type(e).__name__}: {e}. Leave out what cannot be "
            "pickled, such as open files, locks and clients; a class makes its own in __init__, once a worker"
        ) from e


def _portable(done: Done) -> bytes:
    """The bytes of a Done for another process, whose error is one that unpickles there."""
    try:
        data: bytes = cloudpickle.dumps(done)
        if done.error is not None:
            cloudpickle.loads(data)
        return data
    except Exception:
        told = "".join(traceback.format_exception(done.error)) if done.error else "its result cannot be pickled"
        return bytes(cloudpickle.dumps(Done(done.number, error=JobError(f"batch {done.number}: {told}"))))


# -- in this process ---------------------------------------------------------------------------------------------------


class Here(Workers):
    """One worker, in the caller's thread."""

    active = 1

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def room(self) -> int:
        return 1

    def submit(self, number: int, items: Items) -> Future[Done]:
        done = Future[Done]()
        done.set_result(self._worker.run(number, items, self._worker.prepare(number, items)))
        return done

    def close(self) -> None:
        """Nothing is there to be ended."""


# -- processes ---------------------------------------------------------------------------------------------------------


class Processes(Workers):
    """Processes of this machine, led through pipes: one that dies is replaced, and all end with this process, however
    it ends."""

    def __init__(self, payload: bytes, count: int) -> None:
        self.active = count
        self._payload = payload
        self._children: list[_Child] = [_Child(payload) for _ in range(count)]

    @property
    def room(self) -> int:
        for at, child in enumerate(self._children):
            if child.ended:
                child.close()
                self._children[at] = _Child(self._payload)
        return sum(max(0, AHEAD - len(child.under_way)) for child in self._children)

    def submit(self, number: int, items: Items) -> Future[Done]:
        return min(self._children, key=lambda child: len(child.under_way)).submit(number, items)

    def close(self) -> None:
        for child in self._children:
            child.close()


class _Child:
    """A process that runs batches; a thread takes its answers."""

    def __init__(self, payload: bytes) -> None:
        self.under_way: dict[int, Future[Done]] = {}
        self.ended = False
        self._lock = threading.Lock()
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109
        self._process = subprocess.Popen(  # noqa: S603 (this interpreter)
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._send(payload)
        self._listener = threading.Thread(target=self._listen, name="archive-job", daemon=True)
        self._listener.start()

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended: so it will be found
            _send(self._process.stdin, data)

    def submit(self, number: int, items: Items) -> Future[Done]:
        future = Future[Done]()
        with self._lock:
            if self.ended:
                future.set_exception(DiedError(self._why, waited=True))
                return future
            self.under_way[number] = future
        self._send(cloudpickle.dumps((number, items)))
        return future

    @property
    def _why(self) -> str:
        return f"its process ended with exit code {self._process.wait()}"

    def _listen(self) -> None:
        try:
            while True:
                done: Done = cloudpickle.loads(_receive(self._process.stdout))
                with self._lock:
                    future = self.under_way.pop(done.number)
                future.set_result(done)
        except (EOFError, OSError, ValueError):
            self._process.kill()
            with self._lock:
                self.ended, left = True, [*self.under_way.values()]
                self.under_way.clear()
            for at, future in enumerate(left):
                future.set_exception(DiedError(self._why, waited=at > 0))

    def close(self) -> None:
        self._process.kill()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()


class WorkerLane:
    """A worker in a process of its own, called by AHEAD threads: it runs one batch at a time, always in one thread, and
    prepares the next one meanwhile."""

    def __init__(self, payload: bytes) -> None:
        self._preparing = threading.Lock()
        self._running = ThreadPoolExecutor(1, "archive-job-run")
        self._worker: Worker | None = None
        try:
            self._worker = cloudpickle.loads(payload)
        except Exception as e:
            self._why = f"the function cannot be loaded in a worker ({type(e).__name__}: {e}): is its module there?"

    def run(self, number: int, items: Items) -> bytes:
        """The bytes of a batch's Done."""
        if self._worker is None:
            return _portable(Done(number, error=JobError(self._why)))
        with self._preparing:
            prepared = self._worker.prepare(number, items)
        return _portable(self._running.submit(self._worker.run, number, items, prepared).result())


def _send(pipe: Any, data: bytes) -> None:
    pipe.write(len(data).to_bytes(_HEADER, "little") + data)
    pipe.flush()


def _receive(pipe: Any) -> bytes:
    """The next message; EOFError if there is none."""
    size = pipe.read(_HEADER)
    data: bytes = pipe.read(int.from_bytes(size, "little")) if len(size) == _HEADER else b""
    if len(size) < _HEADER or len(data) < int.from_bytes(size, "little"):
        raise EOFError("the pipe is closed")
    return data


def serve() -> None:
    """Run batches from standard input, in a process of their own, until it is closed."""
    source, answers, sending = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), threading.Lock()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a function, or what it starts, does not read what is for this one,
    os.dup2(2, 1)  # and what it prints is no answer

    def answer(number: int, items: Items) -> None:
        try:
            data = lane.run(number, items)
            with sending:
                _send(answers, data)
        except BaseException:  # an answer that cannot be given ends the process: the driver gives the batch to another
            os._exit(1)

    try:
        lane = WorkerLane(_receive(source))
        threads = ThreadPoolExecutor(AHEAD, "archive-job")
        while True:
            threads.submit(answer, *cloudpickle.loads(_receive(source)))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # nobody waits for an answer


# -- actors of Ray -----------------------------------------------------------------------------------------------------


class _Actor:
    """A worker in an actor of Ray."""

    def __init__(self, payload: bytes) -> None:
        self._lane = WorkerLane(payload)

    def ready(self) -> bool:
        return True

    def run(self, number: int, items: Items) -> bytes:
        return self._lane.run(number, items)


class RayActors(Workers):
    """Actors of Ray, as many as are asked for, or have room. Ray begins one that died again, where there is room."""

    def __init__(self, payload: bytes, count: int | None, num_cpus: float | None, num_gpus: float | None) -> None:
        self._ray, needs, fits = fitting(num_cpus, num_gpus)
        how = {"num_cpus": needs["CPU"], "num_gpus": needs["GPU"], "max_restarts": -1, "max_concurrency": AHEAD}
        actor = self._ray.remote(**how)(_Actor)
        small = len(payload) < _INLINE_BYTES
        self._payload = payload if small else self._ray.put(payload)  # held: an actor that begins again needs it
        self._actors = [actor.remote(self._payload) for _ in range(count or fits)]
        self._under_way: dict[Future[Done], int] = {}
        self._ready: set[int] = set()
        self._asked: dict[Future[bool], int] = {}
        self._refused = Counter[int]()  # times in a row that an actor was not there
        self._later: list[tuple[float, int]] = []
        for at in range(len(self._actors)):
            self._ask(at)

    def _ask(self, at: int) -> None:
        """Ask an actor whether it is there."""
        self._asked[self._send(at, "ready")] = at

    def _send(self, at: int, method: str, *args: Any) -> Future[Any]:
        """A call of an actor. JobError if this process has left the cluster: Ray would begin another one by itself."""
        self._check_connected()
        future: Future[Any] = getattr(self._actors[at], method).remote(*args).future()
        return future

    def _check_connected(self) -> None:
        if not self._ray.is_initialized():
            raise JobError(
                "this process is no longer connected to a cluster of Ray; what is finished stays: connect to one by "
                "ray.init(), and the same call goes on"
            )

    def _sweep(self) -> None:
        """Take note of what was answered."""
        self._check_connected()  # else there might be no answer, ever
        for future in [one for one in self._under_way if one.done()]:
            at = self._under_way.pop(future)
            if isinstance(future.exception(), DiedError) and at in self._ready:
                self._ready.remove(at)
                self._ask(at)
        for asked in [one for one in self._asked if one.done()]:
            at, error = self._asked.pop(asked), asked.exception()
            if error is None:
                self._ready.add(at)
                self._refused.pop(at, None)
                continue
            self._refused[at] += 1
            if (self._refused[at] > _REFUSALS and not self._ready) or not self._is_gone(error):
                raise JobError(
                    f"a worker of Ray could not begin: {error}. What is finished stays: connect to a cluster with room "
                    "for it, and the same call goes on"
                ) from error
            self._later.append((time.monotonic() + _AGAIN_S, at))
        due = [at for when, at in self._later if when <= time.monotonic()]
        self._later = [one for one in self._later if one[1] not in due]
        for at in due:
            self._ask(at)
        self.active, self.pending = len(self._ready), len(self._actors) - len(self._ready)

    def _is_gone(self, error: BaseException | None) -> bool:
        known = self._ray.exceptions
        return isinstance(error, known.RayError) and not isinstance(error, known.RayTaskError)

    @property
    def coming(self) -> Sequence[Future[Any]]:
        return tuple(self._asked)

    @property
    def room(self) -> int:
        self._sweep()
        return AHEAD * len(self._ready) - sum(at in self._ready for at in self._under_way.values())

    def submit(self, number: int, items: Items) -> Future[Done]:
        load = Counter(self._under_way.values())
        at = min(self._ready, key=lambda one: load[one])
        before = [one for one, actor in self._under_way.items() if actor == at]
        out = Future[Done]()
        self._under_way[out] = at
        self._send(at, "run", number, items).add_done_callback(lambda answer: self._answered(answer, out, before))
        return out

    def _answered(self, answer: Future[bytes], out: Future[Done], before: Sequence[Future[Done]]) -> None:
        """Pass an answer on, in a thread of Ray's. before: what its actor was given before, and had not answered."""
        try:
            out.set_result(cloudpickle.loads(answer.result()))
        except BaseException as error:  # nobody would see it here, and the batch would never end
            waited = any(not one.done() or isinstance(one.exception(), DiedError) for one in before)
            why = str(error).partition("\n")[0]
            out.set_exception(DiedError(why, waited=waited) if self._is_gone(error) else error)

    def close(self) -> None:
        for actor in self._actors if self._ray.is_initialized() else ():
            with contextlib.suppress(Exception):  # a cluster that is gone has no actors
                self._ray.kill(actor)


def fitting(num_cpus: float | None, num_gpus: float | None) -> tuple[Any, dict[str, float], int]:
    """Ray, what each worker needs of it, and the number of those for which the cluster has room."""
    ray = package("ray", "engine='ray'", "'trajectory-archive[ray]'")
    needs = {"CPU": 1.0 if num_cpus is None else num_cpus, "GPU": num_gpus or 0.0}
    try:
        if not ray.is_initialized():
            ray.init()
        has = ray.cluster_resources()
    except Exception as e:
        raise JobError(f"no cluster of Ray answers ({type(e).__name__}: {e}); nothing was done") from e
    fits = min((int(has.get(name, 0) / need) for name, need in needs.items() if need), default=1)
    if not fits:
        wanted = " and ".join(f"{need:g} {name}" for name, need in needs.items() if need)
        raise UsageError(
            f"no worker fits into the cluster of Ray: each needs {wanted}, and there are {has.get('CPU', 0):g} CPU "
            f"and {has.get('GPU', 0):g} GPU. Add a node first, or give other num_cpus= and num_gpus="
        )
    return ray, needs, fits
