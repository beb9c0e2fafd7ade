"""A store in memory for jobs of a thousand ranks: it counts requests, keeps only the sizes of shards, and may have a
clock of its own, by which an object is there only once it was made.

`counted://name` is a root of it, within `counted_stores()`.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from archive.store.drivers import Buffer, Driver, Listed, Location, ObjectInfo, register, registry

FORGOTTEN = "shards/"  # of objects below it the store keeps the size alone
_PAGE = 1000
_MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it began and ended, and what it moved."""

    verb: str
    key: str
    began: float
    ended: float
    bytes_in: int
    bytes_out: int

    @property
    def prefix(self) -> str:
        """The first folder of its key."""
        return self.key.partition("/")[0] + "/" * ("/" in self.key or self.verb == "list")


class Requests(list[Asked]):
    """What was asked, in the order in which the answers came."""

    def of(self, prefix: str = "", *verbs: str) -> Requests:
        """Those of keys that begin so, and of these verbs."""
        return Requests(one for one in self if one.key.startswith(prefix) and (not verbs or one.verb in verbs))

    @property
    def counts(self) -> dict[str, Counter[str]]:
        """Prefix -> verb -> the number of requests."""
        out: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self:
            out[one.prefix][one.verb] += 1
        return dict(sorted(out.items()))

    @property
    def bytes_in(self) -> int:
        return sum(one.bytes_in for one in self)

    @property
    def bytes_out(self) -> int:
        return sum(one.bytes_out for one in self)

    @property
    def round_trips(self) -> int:
        """The longest chain of requests of which each began after the one before had its answer."""
        ends: list[float] = []  # of the requests that ended so far, with the longest chain up to each
        longest: list[int] = [0]
        begins: dict[int, int] = {}
        events = sorted(
            [(one.began, 1, i) for i, one in enumerate(self)] + [(o.ended, 0, i) for i, o in enumerate(self)]
        )
        for at, is_begin, i in events:
            if is_begin:
                begins[i] = longest[bisect_right(ends, at)]
            else:
                ends.append(at)
                longest.append(max(longest[-1], begins.get(i, 0) + 1))
        return longest[-1]

    def per_second(self) -> Counter[int]:
        """Second -> requests that began in it, by the store's clock."""
        return Counter(int(one.began) for one in self)


@dataclass
class CountedStore:
    """The objects of one root, in folders; `asked` grows with each request.

    latency_s: how long each answer takes.  clock: of requests, and of when an object was made.
    """

    latency_s: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    is_virtual: bool = False
    asked: Requests = field(default_factory=Requests)
    held: dict[str, Buffer | int] = field(default_factory=dict)
    made: dict[str, float] = field(default_factory=dict)
    folders: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def sized(self, key: str) -> int:
        held = self.found(key)
        return held if isinstance(held, int) else len(held)

    def found(self, key: str) -> Buffer | int:
        if key not in self.held or (self.is_virtual and self.made[key] > self.clock()):
            raise FileNotFoundError(key)
        return self.held[key]

    def keep(self, key: str, value: Buffer | int) -> None:
        with self.lock:
            self.held[key] = value
            self.made[key] = self.clock()
            folder, _, name = key.rpartition("/")
            while name not in self.folders[folder]:
                self.folders[folder][name] = None
                if not folder:
                    break
                folder, _, name = folder.rpartition("/")
                name += "/"

    def drop(self, key: str) -> None:
        with self.lock:
            self.held.pop(key, None)
            self.made.pop(key, None)
            folder, _, name = key.rpartition("/")
            self.folders[folder].pop(name, None)

    def names(self, folder: str) -> list[str]:
        stem = f"{folder}/" if folder else ""
        with self.lock:
            found = sorted(self.folders.get(folder, ()))
        if not self.is_virtual:
            return found
        now = self.clock()
        return [name for name in found if name.endswith("/") or self.made[stem + name] <= now]

    @contextmanager
    def counting(self) -> Iterator[Requests]:
        """The requests of the block."""
        start, out = len(self.asked), Requests()
        try:
            yield out
        finally:
            out.extend(self.asked[start:])


_stores: dict[str, CountedStore] = {}


def store_of(url: str) -> CountedStore:
    """The store of a root."""
    return _stores.setdefault(url.removeprefix("counted://"), CountedStore())


class CountedDriver(Driver):
    """The verbs over a CountedStore."""

    remote = False
    lists_at_once = True
    exclusive = True

    def __init__(self, place: Location) -> None:
        self.store = store_of(place.target)

    @contextmanager
    def _asked(self, verb: str, key: str, out: int = 0) -> Iterator[list[int]]:
        began, came = self.store.clock(), [0]
        try:
            if self.store.latency_s:
                time.sleep(self.store.latency_s)
            yield came
        finally:
            self.store.asked.append(Asked(verb, key, began, self.store.clock(), came[0], out))

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> Buffer:
        with self._asked("get", key) as came:
            held = self.store.found(key)
            assert not isinstance(held, int), f"{key} was forgotten: only its size is kept"
            data = bytes(memoryview(held)[start:stop])
            came[0] = len(data)
            return data

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self._put("put", key, parts)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        with self.store.lock:
            there = key in self.store.held
            if not there:
                self.store.held[key] = 0
        if there:
            with self._asked("create", key, sum(map(len, parts))):
                raise FileExistsError(key)
        self._put("create", key, parts)

    def _put(self, verb: str, key: str, parts: Sequence[Buffer]) -> None:
        size = sum(map(len, parts))
        with self._asked(verb, key, size):
            self.store.keep(key, size if key.startswith(FORGOTTEN) else b"".join(parts))

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        with self._asked("head", key):
            return ObjectInfo(self.store.sized(key), "", _MOMENT)

    def delete(self, key: str, timeout_s: float) -> None:
        with self._asked("delete", key):
            self.store.drop(key)

    def delete_many(self, keys: Sequence[str], timeout_s: float) -> Mapping[str, Exception]:
        with self._asked("delete", keys[0]):
            for key in keys:
                self.store.drop(key)
        return {}

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        with self._asked("list", prefix):
            names = self.store.names(prefix)
        pages = max(1, -(-len(names) // _PAGE))
        for _ in range(pages - 1):
            with self._asked("list", prefix):
                pass
        return names, pages

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        stem = f"{prefix}/" if prefix else ""
        with self.store.lock:
            keys = sorted(key for key in self.store.held if key.startswith(stem) and key > after)
        for at in range(0, len(keys), _PAGE):
            with self._asked("list", prefix):
                page = [Listed(key, self.store.sized(key), _MOMENT) for key in keys[at : at + _PAGE]]
            yield page


@contextmanager
def counted_stores() -> Iterator[None]:
    """Within the block URLs `counted://...` are served; afterwards nothing of them is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_DRIVERS", dict(registry._DRIVERS))
        register("counted", CountedDriver)
        try:
            yield
        finally:
            _stores.clear()
