"""The standard library as the library's modules see it while histories run: threads, time and chance are ours."""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import logging
import os
import pkgutil
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from functools import lru_cache
from types import ModuleType
from typing import Any
from unittest import mock

from archive.base import ArchiveError
from archive.tables import parquet
from tests.support.simulation.scheduler import BEGAN_S, here
from tests.support.simulation.threads import Condition, Event, Future, Local, Lock, Pool, RLock, Thread, wait

_MOST_GARBAGE = 100_000  # objects
_POLL_S = 120.0  # no rule asks a job for a checkpoint, so it seldom looks
ROOMS = (
    "base",
    "store",
    "log",
    "index",
    "read",
    "write",
    "ledger",
    "saved",
    "checkpoint",
    "journal",
    "maintain",
    "observe",
    "shard",
    "arrays",
    "tables",
    "fields",
)
EPOCH_S = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC).timestamp() - BEGAN_S


def true_time() -> float:
    """The time that the store's clock tells."""
    return EPOCH_S + here().now


def wall_time() -> float:
    """The time that the clock of the party tells that runs."""
    return true_time() + here().running.party.launcher.clock_s


def chance() -> random.Random:
    return here().running.party.rng


class _Datetime(type):
    """`datetime` with another `now`. All others, and what is made, are Python's own."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(datetime.datetime, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return datetime.datetime(*args, **kwargs)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, datetime.datetime)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is datetime.datetime

    def __hash__(cls) -> int:
        return hash(datetime.datetime)

    def now(cls, tz: Any = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(wall_time(), tz)


class Datetime(metaclass=_Datetime):
    pass


class Chance:
    """`random.SystemRandom()` of the party that runs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(chance(), name)


def _in_place_of(real: ModuleType, **ours: Any) -> ModuleType:
    """A module with some names of ours, and the others of the real one."""
    made = ModuleType(real.__name__)
    made.__dict__.update(ours)
    made.__getattr__ = lambda name: getattr(real, name)  # type: ignore[method-assign]
    return made


def _now(*_: object) -> float:
    return here().now


def _token(size: int = 16) -> bytes:
    return chance().randbytes(size)


_decode = parquet.loads


@lru_cache(4_096)
def _decoded(data: bytes, kind: str, **how: Any) -> Any:
    return _decode(data, kind, where="", **how)


def _loads(data: Any, kind: str, *, where: str, **how: Any) -> Any:
    """As `tables.loads`, which is pure: what many parties read is decoded once."""
    how = {name: tuple(value) if isinstance(value, Sequence) else value for name, value in how.items()}
    try:
        return _decoded(bytes(data), kind, **how)
    except ArchiveError:
        return _decode(data, kind, where=where, **how)


_THREADS = {
    "Lock": Lock,
    "RLock": RLock,
    "Condition": Condition,
    "Event": Event,
    "Thread": Thread,
    "local": Local,
    "current_thread": lambda: here().running,
}
_TIME: dict[str, Callable[..., Any]] = {
    "monotonic": _now,
    "perf_counter": _now,
    "time": wall_time,
    "clock_gettime": _now,
    "sleep": lambda seconds: here().block("a moment", seconds) and None,
}
_CHANCE = {
    "token_bytes": _token,
    "token_hex": lambda size=16: _token(size).hex(),
    "randbits": lambda bits: chance().getrandbits(bits),
    "choice": lambda some: chance().choice(some),
}
_INSTEAD: list[tuple[Any, Any]] = [
    (threading, _in_place_of(threading, **_THREADS)),
    (time, _in_place_of(time, **_TIME)),
    (secrets, _in_place_of(secrets, **_CHANCE)),
    (uuid, _in_place_of(uuid, uuid4=lambda: uuid.UUID(bytes=_token(16), version=4))),
    (os, _in_place_of(os, getpid=lambda: here().running.party.pid, urandom=_token)),
    (datetime.datetime, Datetime),
    (futures.Future, Future),
    (futures.ThreadPoolExecutor, Pool),
    (futures.wait, wait),
    (time.perf_counter, _now),
    (time.monotonic, _now),
    (_decode, _loads),
]


def _places() -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """The names of the library's modules that mean something of ours: the module's, the real one, ours."""
    instead = {id(real): ours for real, ours in _INSTEAD}
    for name in sorted(sys.modules):
        if name.partition(".")[0] not in ("archive", "resharding") or sys.modules[name] is None:
            continue
        of = sys.modules[name].__dict__
        for word, value in list(of.items()):
            if type(value) is random.SystemRandom:
                yield of, word, value, Chance()
            elif id(value) in instead:
                yield of, word, value, instead[id(value)]


def _caches() -> Iterator[Any]:
    """Caches of the library's modules, which may hold threads and locks of the history before."""
    for name in sorted(sys.modules):
        if name.partition(".")[0] in ("archive", "resharding") and sys.modules[name] is not None:
            found = vars(sys.modules[name]).values()
            yield from (one for one in found if hasattr(one, "cache_clear") and one.__module__ == name)


_known: list[Any] = []


def forget_the_last() -> None:
    """Drop what a history has left in this process. Cycles are never collected during one, as what they end would
    depend on those before."""
    for cache in _known:
        cache.cache_clear()
    if gc.get_count()[0] > _MOST_GARBAGE:
        gc.collect()


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Let the library see our threads, time and chance until the block ends; histories run within."""
    import archive
    import resharding

    for package in (archive, resharding):
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if package is resharding or found.name.split(".")[1] in (*ROOMS, "facade", "opening", "writer"):
                _import_all(found.name)
    from archive.base import parallel
    from archive.checkpoint import requests
    from archive.write import imports

    imports.start()
    imports.wait()
    places = list(_places())
    _known[:] = [one for one in _caches() if one.__wrapped__.__name__ in ("_helpers", "_memory")]
    settings = [
        (parallel, "usable_cores", lambda: 1),
        (requests, "POLL_S", _POLL_S),
        (requests, "ASKED_POLL_S", _POLL_S),
    ]
    logger, collects = logging.getLogger("archive"), gc.isenabled()
    quiet, logger.disabled = logger.disabled, True
    gc.collect()
    gc.disable()
    gc.freeze()
    for of, word, _, ours in places:
        of[word] = ours
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, value in settings:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield
    finally:
        for of, word, real, _ in places:
            of[word] = real
        logger.disabled = quiet
        forget_the_last()
        gc.unfreeze()
        if collects:
            gc.enable()


def _import_all(name: str) -> None:
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}."):
        with contextlib.suppress(ImportError):
            _import_all(found.name)
