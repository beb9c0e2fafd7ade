"""Each operation, with each request of it broken in each way, on a real server through both clients."""

from __future__ import annotations

import gc
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from archive.base import ArchiveError
from archive.store.counts import totals
from tests.support import servers
from tests.support.backends import BUCKET, Backend
from tests.support.operations import OPERATIONS, Operation
from tests.support.proxy import Fault, FaultProxy, Seen
from tests.support.said import Said

TRANSPORTS = ("obstore", "s3fs")
DEADLINE_S = 12.0  # of each request; clients wait a quarter of it for an answer that stalls
STALL_S = 4.0
MOST_RETRIES = 3  # of all requests, where one is broken: as many as there are after short answers


@dataclass(frozen=True)
class HttpFault:
    """One of them. passing: trying again gets over it, so that nobody may notice."""

    name: str
    settings: dict[str, Any]
    methods: tuple[str, ...] = ("GET", "PUT", "POST", "HEAD", "DELETE")
    ranged: bool = False
    passing: bool = True

    def __str__(self) -> str:
        return self.name

    def concerns(self, seen: Seen) -> bool:
        """Whether that request could have been broken so."""
        return seen.method in self.methods and (not self.ranged or seen.range is not None)

    def at(self, k: int) -> Fault:
        """The fault of the request number `k` of those that it concerns, from 0."""
        ranged = True if self.ranged else None
        method = self.methods[0] if len(self.methods) == 1 else ""
        return Fault(method=method, ranged=ranged, skip=k, **self.settings)


FAULTS = (
    HttpFault("SlowDown", {"action": "status", "status": 503, "code": "SlowDown"}),
    HttpFault("500", {"action": "status", "status": 500, "code": "InternalError"}),
    HttpFault("expired", {"action": "status", "status": 403, "code": "ExpiredToken"}),
    HttpFault("reset before", {"action": "reset"}),
    HttpFault("reset after", {"action": "reset_after"}),
    HttpFault("cut", {"action": "truncate", "keep": 10}, ("GET",)),
    HttpFault("short", {"action": "shorten", "keep": 10}, ("GET",)),
    HttpFault("empty", {"action": "shorten", "keep": 0}, ("GET",)),
    HttpFault("stall", {"action": "stall", "seconds": STALL_S}),
    HttpFault("cut upload", {"action": "cut_upload"}, ("PUT",)),
    HttpFault("flipped upload", {"action": "corrupt_upload"}, ("PUT",)),
    HttpFault("flipped", {"action": "corrupt"}, ("GET",), passing=False),
    HttpFault("ignored range", {"action": "ignore_range"}, ("GET",), ranged=True, passing=False),
)


@dataclass
class Scene:
    """A place for an archive, seen directly and through a proxy."""

    direct: Backend
    through: Backend
    proxy: FaultProxy
    said: Said

    def fresh(self, folder: Path) -> Scene:
        """Another place."""
        name = uuid.uuid4().hex[:12]
        url = f"s3://{BUCKET}/{name}"
        return replace(
            self, direct=replace(self.direct, url=url), through=replace(self.through, url=url), said=Said(folder / name)
        )


@contextmanager
def scene(endpoint: str, transport: str, patch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """The server behind a proxy; credentials come from the environment, so that they can be renewed."""
    patch.setattr("archive.store.connection.DEADLINE_S", DEADLINE_S)
    with FaultProxy(endpoint) as proxy:
        direct = Backend("s3://", _options(endpoint, "obstore"), "seaweedfs", endpoint)
        through = replace(direct, storage_options=_options(proxy.endpoint, transport))
        yield Scene(direct, through, proxy, Said(Path()))


def _options(endpoint: str, transport: str) -> dict[str, Any]:
    return {"endpoint_url": endpoint, "client_kwargs": {"region_name": servers.REGION}, "transport": transport}


def requests_of(operation: Operation, made: Scene) -> list[Seen]:
    """All requests of an operation that nothing happens to."""
    operation.prepare(made.direct)
    made.proxy.reset()
    operation.act(made.through, made.said)
    assert set(made.said.words) >= operation.done
    return list(made.proxy.log)


def broken_at(operation: Operation, fault: HttpFault, k: int, made: Scene) -> str:
    """Break request `k` of those that the fault concerns; what came of it: "unhurt", "missed", or an error's name."""
    operation.prepare(made.direct)
    made.proxy.reset()
    injected = fault.at(k)
    made.proxy.faults.append(injected)
    before, retries, started = _threads(), _retries(), time.monotonic()
    came = _act(operation, made)
    took_s = time.monotonic() - started
    hit = injected.times == 0
    _check_tries(made.proxy.log)
    _check_refused(made.proxy.log)
    assert _retries() - retries <= MOST_RETRIES
    assert came == "unhurt" or not fault.passing, came
    made.proxy.faults.clear()
    operation.check(made.direct, made.said)
    if came != "unhurt":
        operation.act(made.through, made.said)
        operation.check(made.direct, made.said)
    assert took_s <= DEADLINE_S or took_s <= DEADLINE_S + _usual_s(operation, made), f"{took_s:.1f} s"
    assert set(made.said.words) >= operation.done
    _nothing_left(made, before)
    return came if hit else "missed"


def _check_tries(log: Sequence[Seen]) -> None:
    """The request that was broken is not begun anew after its deadline."""
    for number, broken in enumerate(log):
        if broken.action != "pass":
            again = next((seen for seen in log[number + 1 :] if seen.same_as(broken)), broken)
            assert again.at_s - broken.at_s <= DEADLINE_S


def _check_refused(log: Sequence[Seen]) -> None:
    """Bytes that were changed on their way were not taken, also where nobody ever reads them."""
    assert all(seen.status >= 400 for seen in log if seen.action == "corrupt_upload" and seen.bytes_in)


def _usual_s(operation: Operation, made: Scene) -> float:
    """How long an operation takes now that nothing happens to."""
    other = made.fresh(made.said.folder)
    operation.prepare(other.direct)
    started = time.monotonic()
    operation.act(other.through, other.said)
    return time.monotonic() - started


def _act(operation: Operation, made: Scene) -> str:
    try:
        operation.act(made.through, made.said)
    except ArchiveError as error:
        _check_told(error, made)
        return type(error).__name__
    return "unhurt"


def _check_told(error: ArchiveError, made: Scene) -> None:
    """It says where, keeps its cause, and holds no credential."""
    said = str(error)
    assert servers.SECRET not in said
    if error.__cause__ is None:  # the library's own finding, which names the object
        assert made.direct.url in said or "shards/" in said, repr(error)


def _retries() -> int:
    return sum(stats.retries for stats in totals().values())


def _threads() -> Counter[str]:
    return Counter(thread.name.rpartition("_")[0] for thread in threading.enumerate())


def _nothing_left(made: Scene, before: Counter[str]) -> None:
    """No thread of the library's."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("archive") and before[thread.name.rpartition("_")[0]] == 0:
            thread.join(5)
            assert not thread.is_alive(), thread.name


SAMPLE = (
    ("create", "500", 1),
    ("append and commit", "expired", 5),
    ("append and commit", "flipped upload", 1),
    ("append and commit", "flipped", 2),
    ("label", "reset after", 6),
)  # an operation, a fault, and the number of the request


SOME = 8  # descriptors of threads and connections that are about to end


@pytest.fixture(params=TRANSPORTS)
def made(request: pytest.FixtureRequest, seaweedfs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with scene(seaweedfs_endpoint, request.param, monkeypatch) as found:
        yield found


@pytest.mark.parametrize(("operation", "fault", "k"), SAMPLE)
def test_a_request_broken(operation: str, fault: str, k: int, made: Scene, tmp_path: Path) -> None:
    (what,) = (one for one in OPERATIONS if one.name == operation)
    (wrong,) = (one for one in FAULTS if one.name == fault)
    assert broken_at(what, wrong, k, made.fresh(tmp_path)) == ("unhurt" if wrong.passing else "CorruptCommitError")


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_every_request_broken(operation: Operation, fault: HttpFault, made: Scene, tmp_path: Path) -> None:
    usual = requests_of(operation, made.fresh(tmp_path))
    concerned = sum(fault.concerns(seen) for seen in usual)
    open_before = _descriptors()
    came = Counter(broken_at(operation, fault, k, made.fresh(tmp_path)) for k in range(concerned))
    assert _descriptors() <= open_before + SOME  # no connection stays that a request was broken on
    print(f"{operation}, {fault}: {dict(came)}")


def _descriptors() -> int:
    """How many files and connections this process has open, where that can be told."""
    gc.collect()
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0
