"""An object store in memory below the library's drivers: each request is a point before and after it takes effect, and
may fail, lose its answer, or take effect after its caller has given up."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from archive.store.drivers import Driver, Listed, ObjectInfo, register
from tests.support.simulation.library import true_time
from tests.support.simulation.scheduler import Party, here

T = TypeVar("T")
PROTOCOL = "simulated"
URL = f"{PROTOCOL}://archive/a"
OTHER = f"{PROTOCOL}://archive/b"  # an archive that refers to shards of that one
LAG_S = 2.0  # a listing may lack what is younger, where it may lag
LATE_S = 30.0


class Observation(NamedTuple):
    """What happened, for the specification: a request that took effect, by its verb and the object's key, with a digest
    of the bytes and these; or what a party was told: "durable", objects of a journal below a number; "committed", a
    transaction and its number."""

    kind: str
    party: str
    what: str
    digest: str = ""
    data: bytes | None = None


class Stored(NamedTuple):
    data: bytes
    made_s: float


class Objects(dict[str, Stored]):
    """The objects below one root, by key."""

    def keep(self, key: str, data: bytes, *, only_new: bool) -> None:
        if only_new and key in self:
            raise FileExistsError(key)
        self[key] = Stored(data, true_time())

    def of(self, key: str) -> Stored:
        if key not in self:
            raise FileNotFoundError(key)
        return self[key]

    def below(self, folder: str) -> list[str]:
        stem = f"{folder}/" if folder else ""
        return [key for key in self if key.startswith(stem)]

    def names(self, folder: str, *, lags: bool) -> list[str]:
        """The names in a folder; those of young commits may lack where listings lag."""
        since = true_time() - LAG_S if lags and folder.startswith("commits/") else None
        stem = len(folder) + 1 if folder else 0
        found = dict.fromkeys(
            name + slash
            for key in self.below(folder)
            if since is None or self[key].made_s <= since
            for name, slash, _ in [key[stem:].partition("/")]
        )
        return list(found)


class ObjectStore:
    """Objects, and the requests so far. `faults`: (party, number of its request) -> what becomes of that one."""

    def __init__(self, latency_s: float, lags: bool, faults: Mapping[tuple[str, int], str]) -> None:
        self.objects = Objects()  # of the archive
        self.roots = {URL: self.objects}
        self.latency_s, self.lags, self.faults = latency_s, lags, faults
        self.asked: dict[str, int] = {}  # by party
        self.requests = 0
        self.lost: dict[str, int] = {}  # strand -> how often in a row its commit was not the first of that number
        self.seen: list[Observation] = []
        self.rivals: dict[str, Callable[[], None]] = {}  # party -> what somebody does before each commit of it

    def request(self, verb: str, key: str, effect: Callable[[], T], data: bytes | None = None) -> T:
        """Send a request of the party that runs."""
        s = here()
        party = s.running.party.launcher.name
        if verb == "create" and key.startswith("commits/"):
            self._precede(party)
        number = self.asked[party] = self.asked.get(party, 0) + 1
        fault = self.faults.get((party, number), "")
        self.requests += 1
        s.point(f"{verb} {key}{f' {crc32(data):08x}' if data is not None else ''}")
        if fault == "refused":
            raise ConnectionRefusedError(errno.ECONNREFUSED, "simulated: nobody listens")
        if fault == "late" and data is not None:
            s.spawn("late", Party("network"), lambda: self._later(verb, key, effect, data))
            raise TimeoutError("simulated: no answer in time")
        try:
            found = effect()
        except Exception as error:
            if verb == "create" and key.startswith("commits/") and data is not None:
                self.lost[s.running.name] = (self.lost.get(s.running.name, 0) + 1) * (b'"kind":"forget"' in data)
            self._note(s, party, verb, key, type(error).__name__)
            raise
        self._note(s, party, verb, key, f"{crc32(data):08x}" if data is not None else "", data)
        if fault in ("lost", "late"):
            raise ConnectionResetError(errno.ECONNRESET, "simulated: the answer was lost")
        return found

    def _precede(self, party: str) -> None:
        if (rival := self.rivals.pop(party, None)) is not None:
            rival()
            self.rivals[party] = rival

    @contextmanager
    def rival(self, party: str, acts: Callable[[], None]) -> Iterator[None]:
        """Somebody else acts before each commit of a party."""
        self.rivals[party] = acts
        try:
            yield
        finally:
            self.rivals.pop(party, None)

    def told(self, kind: str, what: str, number: int) -> None:
        """The party that runs was told something."""
        self.seen.append(Observation(kind, here().running.party.launcher.name, what, str(number)))

    def _note(self, s: Any, party: str, verb: str, key: str, digest: str, data: bytes | None = None) -> None:
        self.seen.append(Observation(verb, party, key, digest, data))
        s.advance(self.latency_s)
        s.point(f"answer {digest}")

    def _later(self, verb: str, key: str, effect: Callable[[], Any], data: bytes) -> None:
        here().block("its way", here().running.party.rng.uniform(0.0, LATE_S))
        try:
            effect()
        except OSError:
            return
        self.seen.append(Observation(verb, "network", key, f"{crc32(data):08x}", data))


class SimulatedDriver(Driver):
    """The verbs of the store of the history that runs, below one root."""

    remote = True
    exclusive = True

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._objects = store.roots.setdefault(url, Objects())
        self._folder = "" if url == URL else f"{url.rpartition('/')[2]}/"  # of its keys in what is observed
        self.lists_at_once = not store.lags

    def _request(self, verb: str, key: str, effect: Callable[[], T], data: bytes | None = None) -> T:
        return self._store.request(verb, self._folder + key, effect, data)

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        def effect() -> bytes:
            data = self._objects.of(key).data
            if start and start >= len(data):
                raise OSError(errno.EINVAL, "simulated: no such range")
            return data[start:stop]

        return self._request("get", key, effect)

    def put(self, key: str, parts: Sequence[Any], timeout_s: float) -> None:
        data = b"".join(parts)
        self._request("put", key, lambda: self._objects.keep(key, data, only_new=False), data)

    def create(self, key: str, parts: Sequence[Any], timeout_s: float) -> None:
        data = b"".join(parts)
        self._request("create", key, lambda: self._objects.keep(key, data, only_new=True), data)

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        def effect() -> ObjectInfo:
            found = self._objects.of(key)
            return ObjectInfo(len(found.data), "", datetime.fromtimestamp(found.made_s, UTC))

        return self._request("head", key, effect)

    def delete(self, key: str, timeout_s: float) -> None:
        self._request("delete", key, lambda: self._objects.pop(key, None))

    def delete_many(self, keys: Sequence[str], timeout_s: float) -> Mapping[str, Exception]:
        def effect() -> dict[str, Exception]:
            for key in keys:
                self._objects.pop(key, None)
            return {}

        return self._request("delete", ",".join(keys), effect)

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        return self._request("list", prefix, lambda: (self._objects.names(prefix, lags=self._store.lags), 1))

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        def effect() -> Sequence[Listed]:
            keys = sorted(key for key in self._objects.below(prefix) if key > after)
            held = [(key, self._objects[key]) for key in keys]
            return [Listed(key, len(one.data), datetime.fromtimestamp(one.made_s, UTC)) for key, one in held]

        yield self._request("list", prefix, effect)

    def now(self, folder: str, timeout_s: float) -> datetime:
        return self._request("list", folder, lambda: datetime.fromtimestamp(true_time(), UTC))


_stores: list[ObjectStore] = []


def serve(store: ObjectStore) -> str:
    """Let the URLs of the protocol lead to a store, from now on; that of its archive."""
    _stores[:] = [store]
    register(PROTOCOL, lambda place: SimulatedDriver(_stores[0], place.target))
    return URL
